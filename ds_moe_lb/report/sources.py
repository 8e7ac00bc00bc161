"""From a path that the user names to the runs that were logged there."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ds_moe_lb.metrics import TAG
from ds_moe_lb.report.run_log import (
    STEPS,
    TRAIN_LOSS,
    VALIDATION_LOSS,
    Key,
    RunLog,
    Series,
    in_one_unit,
)
from ds_moe_lb.report.scalars import (
    EVENT_FILES,
    Scalars,
    holds_csv,
    holds_events,
    read_csv_folder,
    read_tensorboard,
)
from ds_moe_lb.training.run_folder import (
    RUN_FILE,
    TENSORBOARD_FOLDER,
    Run,
    is_run_folder,
    read_run,
)

# Names that say what a folder is for, not which run it belongs to.
_KIND_NAMES = ("tensorboard", "csv_monitor", "tb", "csv", "logs", "DeepSpeedJobName", "runs")
_NOT_METRICS = ("step", "l_aux", "tokens_per_second", "seconds", "lm_loss")
_NO_TAGS_SHOWN = 4
_EVENT_TIME = re.compile(r"tfevents\.(\d+)\.")


def find_logs(paths: list[Path]) -> list[RunLog]:
    """The runs under the given paths, in the given order, over one unit, with distinct labels.

    Args:
        paths: each the folder of a run, a folder or file of TensorBoard, a folder of csv_monitor,
            or a folder that holds several of these, which then come in the order in which they
            began (CSVs, which do not tell, behind the others and by name).

    Raises:
        ValueError: when one of them holds no run with the plugin.
    """
    logs = [log for path in paths for log in _logs_at(path)]
    return in_one_unit(_with_distinct_labels(logs))


def _logs_at(path: Path) -> list[RunLog]:
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.is_file():
        if path.suffix == ".csv" or path.name == RUN_FILE:
            path = path.parent
        elif "tfevents" not in path.name:
            raise ValueError(f"{path}: neither a TensorBoard event file nor a CSV of csv_monitor")
    passed: list[Scalars] = []
    found: list[RunLog] = []
    not_begun: list[RunLog] = []
    for candidate in [path] if path.is_file() else _candidates(path):
        if is_run_folder(candidate):
            log = _of_our_trainer(candidate)
            if not log.series:
                not_begun.append(log)
        else:
            scalars = _scalars_at(candidate)
            passed.append(scalars)
            log = _as_log(candidate, scalars)
        if log.series:
            found.append(log)
    if not found:
        raise ValueError(_nothing_found(path, passed, not_begun))
    return sorted(found, key=_began)


def _began(log: RunLog) -> float:
    """Seconds since the epoch, which TensorBoard puts into the names of its files; else inf."""
    folder = log.path if log.run is None else log.path / TENSORBOARD_FOLDER
    files = [folder] if folder.is_file() else folder.glob(EVENT_FILES)
    times = [match[1] for file in files if (match := _EVENT_TIME.search(file.name))]
    return min(map(float, times), default=math.inf)


def _candidates(folder: Path) -> Iterator[Path]:
    """Folders with a run or with logs; what lies inside a run of ours belongs to it."""
    for name, folders, _ in os.walk(folder):
        folders.sort()
        here = Path(name)
        if is_run_folder(here):
            folders.clear()
            yield here
        elif holds_events(here) or holds_csv(here):
            yield here


def _scalars_at(path: Path) -> Scalars:
    """TensorBoard's files if they have something of ours, else csv_monitor's."""
    if path.is_file() or holds_events(path):
        scalars = read_tensorboard(path)
        if scalars.series or not (path.is_dir() and holds_csv(path)):
            return scalars
    return read_csv_folder(path)


def _as_log(path: Path, scalars: Scalars) -> RunLog:
    folder = (path.parent if path.is_file() else path).resolve()
    named = next((p for p in (folder, *folder.parents) if p.name not in _KIND_NAMES), folder)
    return RunLog(
        label=named.name or folder.name,
        path=path,
        source=scalars.source,
        unit=scalars.unit,
        series=scalars.series,
    )


def _of_our_trainer(folder: Path) -> RunLog:
    """The run's own files over optimizer steps, and every layer from its TensorBoard logs."""
    run = read_run(folder)
    per_step = _samples_per_step(run)
    series: dict[Key, Series] = {}
    logs = folder / TENSORBOARD_FOLDER
    if per_step and logs.is_dir() and holds_events(logs):
        series |= {
            key: Series(at=one.at // per_step, values=one.values)
            for key, one in read_tensorboard(logs).series.items()
        }
    names = dict.fromkeys(name for record in run.history for name in record)
    for name in [*(name for name in names if name not in _NOT_METRICS), "lm_loss"]:
        key = Key(TRAIN_LOSS if name == "lm_loss" else name)
        series |= _from_records(key, run.history, name)
    series |= _from_records(Key(VALIDATION_LOSS), run.validations, "loss")
    if run.history:
        # A run that was stopped hard may have logged steps that its checkpoint does not have.
        last = run.history[-1]["step"]
        series = {key: cut for key, one in series.items() if len((cut := _until(one, last)).at)}
    return RunLog(
        label=run.label,
        path=folder,
        source="run of ds-moe-lb train",
        unit=STEPS,
        series=series,
        run=run,
        samples_per_step=per_step,
    )


def _from_records(key: Key, records: list[dict[str, float]], name: str) -> dict[Key, Series]:
    points = [(record["step"], record[name]) for record in records if name in record]
    if not points:
        return {}
    at, values = zip(*points, strict=True)
    return {key: Series(at=np.array(at, dtype=np.int64), values=np.array(values, dtype=float))}


def _until(series: Series, last: int) -> Series:
    kept = series.at <= last
    return Series(at=series.at[kept], values=series.values[kept])


def _samples_per_step(run: Run) -> int | None:
    config = run.info["ds_config"]
    if (whole := config.get("train_batch_size")) is not None:
        return int(whole)
    micro = config.get("train_micro_batch_size_per_gpu")
    if micro is None:
        return None
    return int(micro * config.get("gradient_accumulation_steps", 1) * run.info["world_size"])


def _with_distinct_labels(logs: list[RunLog]) -> list[RunLog]:
    """Labels that occur twice become paths below the folder that those runs share."""
    labels = [log.label for log in logs]
    paths = [log.path.resolve() for log in logs]
    for label in {label for label in labels if labels.count(label) > 1}:
        places = [index for index, other in enumerate(labels) if other == label]
        shared = Path(os.path.commonpath([paths[index] for index in places]))
        for number, index in enumerate(places, start=1):
            below = paths[index].relative_to(shared).as_posix()
            labels[index] = f"{label} ({number})" if below == "." else below
    return [replace(log, label=label) for log, label in zip(logs, labels, strict=True)]


def _nothing_found(path: Path, passed: list[Scalars], not_begun: list[RunLog]) -> str:
    if not_begun:
        folders = ", ".join(str(log.path) for log in not_begun)
        return f"{folders}: the run has not finished its first optimizer step yet"
    found = "no TensorBoard event files, no csv_monitor files and no run of ds-moe-lb train"
    if passed:
        others = [name for scalars in passed for name in scalars.others]
        shown = ", ".join(others[:_NO_TAGS_SHOWN]) + (", ..." * (len(others) > _NO_TAGS_SHOWN))
        kinds = " and ".join(sorted({scalars.source for scalars in passed}))
        found = f"{kinds} logs without our scalars (but {shown or 'none at all'})"
    return (
        f"{path}: found {found}; expected scalars {TAG}/..., which the plugin writes. Put "
        f'"tensorboard": {{"enabled": true, "output_path": "logs", "job_name": "run"}} (or '
        f'"csv_monitor") beside "moe_load_balancing" in the DeepSpeed JSON, train for at least '
        f"monitor.interval steps, and give the folder logs/run"
    )
