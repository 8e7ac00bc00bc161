"""The open search for the toy setting of `ds-moe-lb experiment`: candidates, two seeds each.

    python launch/experiments/search.py                 # all candidates
    python launch/experiments/search.py --only experiments "8 experts"

Every candidate is trained with the micro-batch loss and with that of the global batch (`exact`),
seeds 1 and 2. What was run stays in runs.jsonl and is not run again; the table is made from it.

How the setting was found: the demo (three layers, sequences of 128, 300 steps) takes too long for
dozens of runs. Two layers and sequences of 64 bytes were the first thing tried for cheaper steps;
with 200 steps one seed showed a clear difference, and 150 steps kept it. The other candidates,
each of which differs from the chosen one in a single thing, were run afterwards, to show how far
the difference depends on that choice.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from ds_moe_lb.cli.experiment import read_corpus, train_pending
from ds_moe_lb.experiments.catalogue import micro, over_global_batch
from ds_moe_lb.experiments.records import Records
from ds_moe_lb.experiments.results import INFORMATION, LOSS, VIOLATION, metric_of
from ds_moe_lb.experiments.setting import RunSpec, Setting
from ds_moe_lb.experiments.tables import markdown

SEEDS = (1, 2)
CHOSEN = Setting()
CANDIDATES: dict[str, Setting] = {
    "experiments": CHOSEN,
    "200 steps": replace(CHOSEN, steps=200),
    "micro-batch 4": replace(CHOSEN, micro_batch_size=4),
    "16 sequences": replace(CHOSEN, global_batch_size=16),
    "learning rate 0.001": replace(CHOSEN, learning_rate=1e-3),
    "8 experts": replace(CHOSEN, model={**CHOSEN.model, "num_experts": 8}),
    "3 layers": replace(CHOSEN, model={**CHOSEN.model, "num_layers": 3}),
    "sequences of 128": replace(CHOSEN, model={**CHOSEN.model, "sequence_length": 128}),
}
METHODS = {"micro": micro, "global": over_global_batch}


def runs(setting: Setting) -> dict[tuple[str, int], RunSpec]:
    """By method and seed."""
    return {
        (method, seed): setting.run(seed=seed, section=section(setting))
        for method, section in METHODS.items()
        for seed in SEEDS
    }


def row(name: str, setting: Setting, records: dict[str, dict], corpus: str) -> list[str] | None:
    """What a candidate has shown; None until all its runs are there."""
    keys = {which: spec.key(corpus) for which, spec in runs(setting).items()}
    if any(key not in records for key in keys.values()):
        return None
    found = {which: records[key] for which, key in keys.items()}
    differences = [
        metric_of(found["global", seed], LOSS) - metric_of(found["micro", seed], LOSS)
        for seed in SEEDS
    ]
    cells = [name, f"{sum(record['seconds'] for record in found.values()) / len(found):.0f}"]
    cells.append(", ".join(f"{difference:+.4f}" for difference in differences))
    for metric, digits in ((INFORMATION, 3), (VIOLATION, 2)):
        for method in METHODS:
            values = [metric_of(found[method, seed], metric) for seed in SEEDS]
            cells.append(", ".join(f"{value:.{digits}f}" for value in values))
    return cells


def main() -> int:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--output", type=Path, default=Path("launch/experiments/results/search"))
    options = parser.parse_args()
    corpus = read_corpus(None).sha256
    records = Records(options.output)
    with records.reserved():
        recorded = records.read()
        pending = [
            (f"{name}: {method}, seed {seed}", spec)
            for name in options.only
            for (method, seed), spec in runs(CANDIDATES[name]).items()
            if spec.key(corpus) not in recorded
        ]
        status = train_pending(pending, records, None, corpus) if pending else 0
    header = ["candidate", "s per run", "validation loss, global - micro"]
    header += [f"{what}, {method}" for what in ("specialisation", "MaxVio") for method in METHODS]
    rows = [row(name, setting, records.read(), corpus) for name, setting in CANDIDATES.items()]
    print(markdown(header, [cells for cells in rows if cells is not None]))
    return status


if __name__ == "__main__":
    sys.exit(main())
