"""One run of an experiment on all ranks: train, measure, and what is recorded of it."""

import gc
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_moe_lb.data.corpus import Corpus
from ds_moe_lb.experiments.scores import top_k_scores
from ds_moe_lb.experiments.setting import RunSpec
from ds_moe_lb.experiments.shuffle import Shuffle
from ds_moe_lb.metrics import max_violation, mutual_information
from ds_moe_lb.training.model import ByteMoEModel
from ds_moe_lb.training.progress import Progress, Silent
from ds_moe_lb.training.run_folder import RunFolder, versions
from ds_moe_lb.training.stop_request import StopRequest
from ds_moe_lb.training.trainer import Task, Trainer

LAST_STEPS = 50  # optimizer steps that the balance at the end of training is the mean of
_CURVE = ("step", "lm_loss", "lbl_global_batch", "max_violation_global_batch")
_BALANCE = (
    "lbl_micro_batch",
    "lbl_global_batch",
    "max_violation_micro_batch",
    "max_violation_global_batch",
)


class _InMemory(RunFolder):
    """What a run folder would get, kept until the record is made; nothing is written."""

    def __init__(self) -> None:
        super().__init__(Path(), writes=False)
        self.history: list[Mapping[str, Any]] = []
        self.validations: list[Mapping[str, Any]] = []

    def append_history(self, record: Mapping[str, Any]) -> None:
        self.history.append(record)

    def append_validation(self, record: Mapping[str, Any]) -> None:
        self.validations.append(record)


class _ExperimentTrainer(Trainer):
    """The training loop of `ds-moe-lb train`, without checkpoints and with the shuffle control."""

    def __init__(self, task: Task, folder: RunFolder, *, shuffled: bool) -> None:
        super().__init__(task, folder)
        self.gates = gates_of(self.engine.module)
        self._shuffle = Shuffle(self.engine, self.gates) if shuffled else None

    def _save(self) -> None:
        """A run of a minute is done again rather than resumed."""

    def _window(self, micro_batches: Iterable[Tensor]) -> Iterable[Tensor]:
        if self._shuffle is None:
            return super()._window(micro_batches)
        batches = list(micro_batches)
        seed = 1_000_003 * self.task.options.seed + self.step
        self._shuffle.prepare(batches, lambda tokens: self.engine(tokens[:, :-1]), seed=seed)
        return batches


class _Quiet(Silent):
    """Hands the training loop's steps on, and keeps its notes to itself."""

    def __init__(self, on_step: Callable[[int, Mapping[str, Any]], None]) -> None:
        self._on_step = on_step

    def update(self, step: int, record: Mapping[str, Any]) -> None:
        self._on_step(step, record)


def gates_of(model: ByteMoEModel) -> list[nn.Module]:
    """The gates of the MoE layers, in order."""
    blocks: Any = model.blocks
    return [block.moe.deepspeed_moe.gate for block in blocks]


def run_one(
    spec: RunSpec,
    corpus: Corpus,
    *,
    stop: StopRequest,
    on_step: Callable[[int, Mapping[str, Any]], None],
) -> dict[str, Any] | None:
    """Train and measure one run. Collective: all ranks call it with the same run.

    Args:
        spec: the run.
        corpus: its text.
        stop: asked at the end of every step.
        on_step: gets number and record of each step, on every rank.

    Returns:
        The record, the same on all ranks but for the seconds; None when it was stopped.
    """
    started = time.perf_counter()
    folder = _InMemory()
    task = Task(
        options=spec.options(), model=spec.model_config(), ds_config=spec.ds_config, corpus=corpus
    )
    trainer = _ExperimentTrainer(task, folder, shuffled=spec.shuffled)
    progress: Progress = _Quiet(on_step)
    try:
        if not trainer.run(progress, stop):
            return None
        scores_LD = top_k_scores(
            trainer.engine,
            trainer.gates,
            corpus,
            sequence_length=task.model.sequence_length,
            batch_size=task.options.eval_batch_size,
        )
    finally:
        trainer.engine.destroy()
        del trainer
        gc.collect()  # engines are full of cycles, and dozens follow each other
    counts_LDE = torch.tensor(folder.validations[-1]["tokens_per_expert_LDE"])
    reports = [record for record in folder.history if record["step"] % _interval(spec) == 0]
    return {
        "key": spec.key(corpus.sha256),
        "seed": spec.seed,
        "corpus": corpus.sha256,
        "config": spec.config,
        "validation_loss": folder.validations[-1]["loss"],
        "loss_per_domain": folder.validations[-1]["loss_per_domain"],
        "mutual_information_L": [mutual_information(counts_DE) for counts_DE in counts_LDE],
        "validation_max_violation": float(max_violation(counts_LDE.sum(dim=1)).mean()),
        **_balance_at_the_end(reports, steps=spec.steps),
        "tokens_per_expert_LDE": counts_LDE.tolist(),
        "top_k_score_LD": _rounded(scores_LD.tolist()),
        "curve": {name: _rounded([r.get(name) for r in reports]) for name in _CURVE},
        "seconds": round(time.perf_counter() - started, 1),
        "versions": versions(),
        "machine": machine(),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def machine() -> dict[str, Any]:
    """How large the machine is, and its processor."""
    return {"cores": len(os.sched_getaffinity(0)), "processor": _processor()}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _interval(spec: RunSpec) -> int:
    interval: int = spec.ds_config["moe_load_balancing"]["monitor"]["interval"]
    return interval


def _balance_at_the_end(reports: list[Mapping[str, Any]], *, steps: int) -> dict[str, float]:
    """Means over the reports of the last steps; a metric that is not reported is left out."""
    last = [report for report in reports if report["step"] > steps - LAST_STEPS]
    return {
        name: sum(report[name] for report in last) / len(last)
        for name in _BALANCE
        if last and all(name in report for report in last)
    }


def _rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return round(values, 5) if isinstance(values, float) else values
