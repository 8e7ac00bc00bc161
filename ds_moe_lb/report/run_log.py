"""What a run logged, whatever it was logged to: series by metric, layer and expert.

Shape legend: N reports, L layers, E experts of one layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_moe_lb.training.run_folder import Run

TRAIN_LOSS = "train_loss"
VALIDATION_LOSS = "validation_loss"
EXPERT_LOAD = "load"
STEPS, SAMPLES = "optimizer step", "sample"
LAST_REPORTS = 50  # that "at the end" averages over; of a short run its last quarter


class Key(NamedTuple):
    """Which series: a metric of the whole model, of one layer, or of one expert."""

    name: str
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """Values over the run.

    Attributes:
        at: ``(N,)`` int64, strictly increasing: optimizer steps or samples.
        values: ``(N,)`` fp64; NaN and inf as they were logged.
    """

    at: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunLog:
    """One run as the report sees it.

    Attributes:
        label: name in tables and figures.
        path: what it was read from.
        source: the kind of log, in words.
        unit: what the series go over, `STEPS` or `SAMPLES`.
        series: every series that was found.
        run: the files of our own trainer, where the run is one of its.
        samples_per_step: where it is known.
    """

    label: str
    path: Path
    source: str
    unit: str
    series: Mapping[Key, Series]
    run: Run | None = None
    samples_per_step: int | None = None

    def get(self, name: str, layer: int | None = None, expert: int | None = None) -> Series | None:
        return self.series.get(Key(name, layer, expert))

    def layers(self, name: str) -> list[int]:
        """Layers for which `name` was logged on its own or for its experts."""
        found = {key.layer for key in self.series if key.name == name and key.layer is not None}
        return sorted(found)

    def experts(self, layer: int) -> list[int]:
        """Experts of `layer` whose load was logged."""
        return sorted(
            key.expert
            for key in self.series
            if key.name == EXPERT_LOAD and key.layer == layer and key.expert is not None
        )

    def layer_table(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """``(N,)`` and ``(L, N)``: a metric of every layer in `layers(name)`, NaN where missing."""
        return _aligned([self.series[Key(name, layer)] for layer in self.layers(name)])

    def expert_table(self, layer: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """``(N,)`` and ``(E, N)``: the load of every expert in `experts(layer)`."""
        return _aligned(
            [self.series[Key(EXPERT_LOAD, layer, expert)] for expert in self.experts(layer)]
        )

    @property
    def last_at(self) -> int:
        """Where the last report of balance was made."""
        return max(
            int(series.at[-1])
            for key, series in self.series.items()
            if key.name not in (TRAIN_LOSS, VALIDATION_LOSS)
        )

    @property
    def num_experts(self) -> int | None:
        """Experts of one layer, where that is known and the same in every layer."""
        if self.run is not None:
            return self.run.info["model"].get("num_experts")
        numbers = {len(self.experts(layer)) for layer in self.layers(EXPERT_LOAD)}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def top_k(self) -> int | None:
        return None if self.run is None else self.run.info["model"].get("top_k")


def tail(series: Series) -> NDArray[np.float64]:
    """The finite values of the last reports, see `LAST_REPORTS`; empty if none is finite."""
    values = series.values[-min(LAST_REPORTS, max(1, len(series.values) // 4)) :]
    return values[np.isfinite(values)]


def mean_at_end(series: Series | None) -> float | None:
    """Mean over the last reports; None where there is nothing to average."""
    if series is None or not len(values := tail(series)):
        return None
    return float(values.mean())


def in_one_unit(logs: list[RunLog]) -> list[RunLog]:
    """The runs over the same unit, so that they can share an axis.

    Raises:
        ValueError: when some were logged over steps, others over samples, and the number of samples
            in a step is not known.
    """
    if len({log.unit for log in logs}) == 1:
        return logs
    fixed = [log for log in logs if log.unit == STEPS and log.samples_per_step is None]
    if fixed:
        others = ", ".join(log.label for log in logs if log.unit == SAMPLES)
        raise ValueError(
            f"{', '.join(log.label for log in fixed)}: logged over optimizer steps, but {others} "
            f"over samples; they cannot share an axis: report them one after the other"
        )
    return [_over_samples(log) if log.unit == STEPS else log for log in logs]


def _over_samples(log: RunLog) -> RunLog:
    assert log.samples_per_step is not None
    series = {
        key: Series(at=one.at * log.samples_per_step, values=one.values)
        for key, one in log.series.items()
    }
    return replace(log, unit=SAMPLES, series=series)


def _aligned(rows: list[Series]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    at = np.unique(np.concatenate([row.at for row in rows]))
    table = np.full((len(rows), len(at)), np.nan)
    for index, row in enumerate(rows):
        table[index, np.searchsorted(at, row.at)] = row.values
    return at, table
