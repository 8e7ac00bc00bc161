"""The open search for the toy setting of `ds-moe-lb experiment`: candidates, two seeds each.

    python launch/experiments/search.py                 # all candidates
    python launch/experiments/search.py --only demo small

Every candidate is trained with the micro-batch loss and with that of the global batch (`running`),
seeds 1 and 2. What was run stays in runs.jsonl and is not run again; the table is made from it.
The setting that the experiments use was chosen from this table for a clear difference in little
time, so the shipped intervals come from seeds and sizes that were looked at before: what they show
is that the difference is no accident of the seed, not how often such a setting is found.
"""

import argparse
import sys
from pathlib import Path

from ds_moe_lb.cli.experiment import read_corpus, train_pending
from ds_moe_lb.experiments.catalogue import micro, over_global_batch
from ds_moe_lb.experiments.records import Records
from ds_moe_lb.experiments.results import INFORMATION, LOSS, VIOLATION, metric_of
from ds_moe_lb.experiments.setting import RunSpec, Setting
from ds_moe_lb.experiments.tables import markdown

SEEDS = (1, 2)
CANDIDATES: dict[str, Setting] = {}
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
