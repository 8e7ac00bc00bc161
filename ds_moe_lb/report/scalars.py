"""Scalars read from TensorBoard's event files and from DeepSpeed's csv_monitor, by our names.

Both are appended to by a run that is resumed; what an earlier start logged from the step on that a
later one went on from is dropped, as TensorBoard does.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_moe_lb.metrics import TAG
from ds_moe_lb.report.run_log import SAMPLES, STEPS, TRAIN_LOSS, Key, Series

EVENT_FILES = "*tfevents*"
_PLACE = r"(?:{0}layer_(?P<layer>\d+))?(?:{0}expert_(?P<expert>\d+))?"
# By which tags a run is known, and what these count: DeepSpeed's monitor, then Trainer's callback.
_DEEPSPEED = (re.compile(rf"{TAG}/(?P<name>\w+?){_PLACE.format('/')}"), "Train/Samples/train_loss")
_TRAINER = (re.compile(rf"train/moe/(?P<name>\w+?){_PLACE.format('/')}"), "train/loss")
_CSV_PREFIX = TAG.replace("/", "_") + "_"
_CSV_NAME = re.compile(rf"{_CSV_PREFIX}(?P<name>\w+?){_PLACE.format('_')}")
_CSV_LOSS = "Train_Samples_train_loss"


@dataclass(frozen=True, kw_only=True, eq=False)
class Scalars:
    """What one folder holds of ours.

    Attributes:
        source: the kind of log, in words.
        unit: what the series go over.
        series: ours and the training loss; empty if none is ours.
        others: tags or files that are not ours, for messages.
    """

    source: str
    unit: str
    series: Mapping[Key, Series]
    others: tuple[str, ...]


def holds_events(folder: Path) -> bool:
    return any(path.is_file() for path in folder.glob(EVENT_FILES))


def holds_csv(folder: Path) -> bool:
    """Whether csv_monitor wrote here: its files are named after tags, which begin with Train."""
    return any(folder.glob("Train_Samples_*.csv"))


def read_tensorboard(path: Path) -> Scalars:
    """Read an event file, or all event files of one folder as one run.

    Raises:
        ValueError: when TensorBoard is not installed.
    """
    try:
        from tensorboard.backend.event_processing import event_accumulator as events
    except ModuleNotFoundError:
        raise ValueError(
            f"{path}: TensorBoard's files are read with its own package, which is not installed: "
            f"pip install 'ds_moe_lb[monitor]'"
        ) from None
    # 0 = all of them; pictures and histograms only by their number.
    sizes = {**dict.fromkeys(events.DEFAULT_SIZE_GUIDANCE, 1), events.SCALARS: 0}
    log = events.EventAccumulator(str(path), size_guidance=sizes, purge_orphaned_data=False)
    log.Reload()
    tags = log.Tags()[events.SCALARS]
    pattern, loss = _DEEPSPEED if any(map(_DEEPSPEED[0].fullmatch, tags)) else _TRAINER
    series, others = {}, []
    for tag in tags:
        match = pattern.fullmatch(tag)
        if match or tag == loss:
            points = log.Scalars(tag)
            one = series_of([point.step for point in points], [point.value for point in points])
            series[_key(match) if match else Key(TRAIN_LOSS)] = one
        else:
            others.append(tag)
    return Scalars(
        source="TensorBoard",
        unit=SAMPLES if pattern is _DEEPSPEED[0] else STEPS,
        series=_if_ours(series),
        others=tuple(others),
    )


def read_csv_folder(folder: Path) -> Scalars:
    """Read the files of one csv_monitor.

    Raises:
        ValueError: when one of our files holds something else than steps and numbers.
    """
    series, others = {}, []
    for path in sorted(folder.glob("*.csv")):
        match = _CSV_NAME.fullmatch(path.stem)
        if match or path.stem == _CSV_LOSS:
            one = _read_csv(path)
            if one is not None:
                series[_key(match) if match else Key(TRAIN_LOSS)] = one
        else:
            others.append(path.name)
    return Scalars(
        source="csv_monitor", unit=SAMPLES, series=_if_ours(series), others=tuple(others)
    )


def series_of(at: Iterable[int], values: Iterable[float]) -> Series:
    """Points in the order in which they were logged; of overlapping starts, the later one's."""
    steps = np.fromiter(at, dtype=np.int64)
    numbers = np.fromiter(values, dtype=np.float64)
    first_of_rest = np.minimum.accumulate(steps[::-1])[::-1]
    kept = np.ones(len(steps), dtype=bool)
    kept[:-1] = steps[:-1] < first_of_rest[1:]
    return Series(at=steps[kept], values=numbers[kept])


def _read_csv(path: Path) -> Series | None:
    """The rows below each header, one header per start; None if there are only headers."""
    at: list[int] = []
    values: list[float] = []
    with path.open(newline="") as file:
        lines = file.read()
    # The run may be writing the last row right now.
    complete = lines[: lines.rfind("\n") + 1].splitlines()
    for number, row in enumerate(csv.reader(complete), start=1):
        if not row or row[0] == "step":
            continue
        try:
            step, value = row
            at.append(int(step))
            values.append(float(value))
        except ValueError:
            raise ValueError(
                f"{path}:{number}: expected a step and a number as csv_monitor writes them, got "
                f"{','.join(row)[:60]!r}"
            ) from None
    return series_of(at, values) if at else None


def _key(match: "re.Match[str]") -> Key:
    layer, expert = match["layer"], match["expert"]
    return Key(
        match["name"],
        None if layer is None else int(layer),
        None if expert is None else int(expert),
    )


def _if_ours(series: dict[Key, Series]) -> dict[Key, Series]:
    """Nothing, if the training loss is all there is."""
    return series if any(key.name != TRAIN_LOSS for key in series) else {}
