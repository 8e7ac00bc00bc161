"""`ds-moe-lb experiment`: runs that are not recorded yet, then tables and figures from records."""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_moe_lb.cli import EXIT_INTERRUPTED
from ds_moe_lb.cli.arguments import UsageError, make_output_folder, usage_errors
from ds_moe_lb.cli.launch import launch
from ds_moe_lb.cli.report import require_report_packages
from ds_moe_lb.experiments.catalogue import EXPERIMENTS, runs_of
from ds_moe_lb.experiments.experiment import Experiment
from ds_moe_lb.experiments.records import Records, corpus_hashes
from ds_moe_lb.experiments.setting import NUM_RANKS, RunSpec, Setting

if TYPE_CHECKING:
    from ds_moe_lb.data.corpus import Corpus

PENDING_FILE = "pending.json"


def run(options: argparse.Namespace) -> int:
    """Do what is pending, then draw; the ranks' exit status where they did not finish."""
    require_report_packages()
    wanted = list(EXPERIMENTS) if "all" in options.names else options.names
    experiments = [EXPERIMENTS[name] for name in dict.fromkeys(wanted)]
    records = Records(options.output)
    with usage_errors():
        setting = _setting(options)
        runs = {
            spec.key(""): (f"{variant.name}, seed {spec.seed}", spec)
            for experiment in experiments
            for variant, spec in runs_of(experiment, setting, num_seeds=options.seeds)
        }
        if options.draw:
            return _draw(experiments, setting, records, options, corpus_sha256=None)
        corpus = read_corpus(options.data)
        make_output_folder(options.output)
        with records.reserved():
            status = _do_pending(list(runs.values()), records, options.data, corpus.sha256)
        if status != 0:
            return status
        return _draw(experiments, setting, records, options, corpus_sha256=corpus.sha256)


def _do_pending(
    runs: list[tuple[str, RunSpec]], records: Records, data: Path | None, corpus_sha256: str
) -> int:
    """Train what is not recorded; 0 when everything is."""
    pending = _pending(runs, records, corpus_sha256)
    if pending:
        print(
            f"{len(runs)} runs, {len(runs) - len(pending)} recorded in {records.path}; training "
            f"{len(pending)}, each {pending[0][1].steps} steps on {NUM_RANKS} ranks",
            flush=True,
        )
        started = time.perf_counter()
        status = train_pending(pending, records, data, corpus_sha256)
        left = _pending(runs, records, corpus_sha256)
        if left:
            verb = "interrupted" if status == EXIT_INTERRUPTED else f"failed (status {status})"
            print(
                f"ds-moe-lb experiment: {verb} in the run {left[0][0]!r}; {len(left)} of "
                f"{len(runs)} are left, and the same command goes on with them",
                file=sys.stderr,
            )
            return status or 1
        print(f"trained in {(time.perf_counter() - started) / 60:.1f} minutes")
    return 0


def read_corpus(data: Path | None) -> "Corpus":
    """The user's text, or the built-in one."""
    from ds_moe_lb.data.builtin import builtin_corpus
    from ds_moe_lb.data.folder import folder_corpus

    return folder_corpus(data) if data else builtin_corpus()


def _setting(options: argparse.Namespace) -> Setting:
    for flag in ("seeds", "steps"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag}: got {value}, expected a number >= 1")
    setting = Setting()
    return setting if options.steps is None else dataclasses.replace(setting, steps=options.steps)


def _pending(
    runs: list[tuple[str, RunSpec]], records: Records, corpus_sha256: str
) -> list[tuple[str, RunSpec]]:
    recorded = records.read()
    return [(label, spec) for label, spec in runs if spec.key(corpus_sha256) not in recorded]


def train_pending(
    pending: list[tuple[str, RunSpec]], records: Records, data: Path | None, corpus_sha256: str
) -> int:
    """Hand the runs to ranks and wait."""
    file = records.path.parent / PENDING_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "records": str(records.path.parent.resolve()),
        "data": str(data.resolve()) if data else None,
        "corpus": corpus_sha256,
        "runs": [{"label": label, "spec": dataclasses.asdict(spec)} for label, spec in pending],
    }
    file.write_text(json.dumps(content) + "\n")
    try:
        return launch(["experiment_ranks", str(file.resolve())], num_ranks=NUM_RANKS)
    finally:
        file.unlink()


def _draw(
    experiments: list[Experiment],
    setting: Setting,
    records: Records,
    options: argparse.Namespace,
    *,
    corpus_sha256: str | None,
) -> int:
    """Tables and figures of what is recorded about this text; None = the text of the last run."""
    from ds_moe_lb.experiments.figures import save_figures
    from ds_moe_lb.experiments.results import collect
    from ds_moe_lb.experiments.tables import write_table

    recorded = records.read()
    if not recorded:
        raise UsageError(f"{records.path}: no run is recorded there; train first, without --draw")
    sha256 = corpus_sha256 or corpus_hashes(recorded.values())[-1]
    for experiment in experiments:
        results = collect(
            experiment, setting, recorded, corpus_sha256=sha256, num_seeds=options.seeds
        )
        if results is None:
            print(f"{experiment.name}: nothing recorded yet")
            continue
        print(write_table(results, options.output))
        for path in save_figures(results, options.output):
            print(f"figure  {path}")
    return 0
