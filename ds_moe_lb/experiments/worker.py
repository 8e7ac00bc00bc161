"""All pending runs one after the other on the ranks of one launch; rank 0 records each."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from ds_moe_lb.data.corpus import Corpus
from ds_moe_lb.experiments.records import Records
from ds_moe_lb.experiments.run import run_one
from ds_moe_lb.experiments.setting import RunSpec
from ds_moe_lb.training.progress import make_progress
from ds_moe_lb.training.stop_request import StopRequest


@dataclass(frozen=True, kw_only=True)
class PendingRun:
    """A run that is to be done, and what it is called where it is asked for.

    Attributes:
        label: for the person at the terminal, such as "micro, seed 1".
        spec: the run.
    """

    label: str
    spec: RunSpec

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PendingRun":
        """From the file that the command leaves for its ranks."""
        return cls(label=data["label"], spec=RunSpec(**data["spec"]))


def run_all(
    pending: Sequence[PendingRun], corpus: Corpus, records: Records, *, rank: int, out: TextIO
) -> bool:
    """Do the runs in order. Collective: all ranks call it with the same runs.

    Args:
        pending: the runs.
        corpus: their text.
        records: where rank 0 records each.
        rank: this one.
        out: where rank 0 shows how far it is.

    Returns:
        True when all are done, False when stopped; a run that was stopped leaves no record.
    """
    total = sum(item.spec.steps for item in pending)
    watch = _Watch(total)
    progress = make_progress(
        label=f"{len(pending)} runs",
        first_step=0,
        steps=total,
        shown=rank == 0,
        describe=watch.describe,
        out=out,
    )

    def on_step(step: int, record: Mapping[str, Any]) -> None:
        watch.done += 1
        progress.update(watch.done, record)

    try:
        with StopRequest() as stop:
            for number, item in enumerate(pending, start=1):
                watch.label = f"{number}/{len(pending)} {item.label}"
                record = run_one(item.spec, corpus, stop=stop, on_step=on_step)
                if record is None:
                    return False
                if rank == 0:
                    records.append({**record, "label": item.label})
                    progress.note(
                        f"{watch.label}: validation loss {record['validation_loss']:.4f}, "
                        f"{record['seconds']:.0f} s"
                    )
    finally:
        progress.close()
    return True


class _Watch:
    """Which run is under way, and when all will be done."""

    def __init__(self, total: int) -> None:
        self.done = 0
        self.label = ""
        self._total = total
        self._started = time.monotonic()

    def describe(self, record: Mapping[str, Any]) -> str:
        """The run, its loss, and the minutes left at the speed so far."""
        seconds = (time.monotonic() - self._started) / max(self.done, 1) * (self._total - self.done)
        return f"{self.label}  loss {record['lm_loss']:.3f}  {seconds / 60:.0f} min left"
