"""What a run leaves on disk, and how to read it back.

run.json            arguments, DeepSpeed config, model, corpus hash, versions, status
history.jsonl       one line per optimizer step
validation.jsonl    one line per validation, with the domain x expert counts of every layer
tensorboard/        DeepSpeed's monitor
checkpoints/        DeepSpeed's checkpoints
model/              a finished run's transformers model, for from_pretrained
figures/            written by `ds-moe-lb report` and `compare`
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

import ds_moe_lb

RUN_FILE = "run.json"
HISTORY_FILE = "history.jsonl"
VALIDATION_FILE = "validation.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_INFO_KEYS = {"label", "status", "world_size", "options", "model", "ds_config", "versions"}
_PACKAGES = ("deepspeed", "torch", "numpy", "transformers")


class RunFolder:
    """Writes a run's files. Only rank 0 holds one that writes."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self._writes = writes

    @property
    def tensorboard(self) -> Path:
        return self.path / TENSORBOARD_FOLDER

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def write_info(self, info: Mapping[str, Any]) -> None:
        if self._writes:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / RUN_FILE).write_text(json.dumps(info, indent=2) + "\n")

    def set_status(self, status: str) -> None:
        """One of running, interrupted, finished."""
        if self._writes:
            info = json.loads((self.path / RUN_FILE).read_text())
            self.write_info({**info, "status": status})

    def append_history(self, record: Mapping[str, Any]) -> None:
        self._append(HISTORY_FILE, record)

    def append_validation(self, record: Mapping[str, Any]) -> None:
        self._append(VALIDATION_FILE, record)

    def forget_after(self, step: int) -> None:
        """Drop lines later than the checkpoint that training goes on from."""
        if self._writes:
            for name in (HISTORY_FILE, VALIDATION_FILE):
                kept = [
                    record for record in _read_lines(self.path / name) if record["step"] <= step
                ]
                text = "".join(json.dumps(record) + "\n" for record in kept)
                (self.path / name).write_text(text)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if self._writes:
            with (self.path / name).open("a") as file:
                file.write(json.dumps(record) + "\n")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as read back: the content of its three files."""

    path: Path
    info: dict[str, Any]
    history: list[dict[str, Any]]
    validations: list[dict[str, Any]]

    @property
    def label(self) -> str:
        return str(self.info["label"])

    @property
    def counts_experts(self) -> bool:
        """Whether it was validated and its model has experts."""
        return bool(self.validations) and bool(self.validations[-1]["tokens_per_expert_LDE"])


def read_info(path: Path) -> dict[str, Any]:
    """The content of run.json.

    Raises:
        ValueError: when the folder is not a run.
    """
    file = path / RUN_FILE
    if not file.is_file():
        raise ValueError(f"{path}: expected the folder of a run, but it has no {RUN_FILE}")
    try:
        info: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not readable as JSON: {error}") from None
    return info


def is_run_folder(path: Path) -> bool:
    """Whether a run of ours is there; other programs write a run.json too.

    Raises:
        ValueError: when the run.json is no JSON.
    """
    if not (path / RUN_FILE).is_file():
        return False
    info = read_info(path)
    return isinstance(info, dict) and info.keys() >= _INFO_KEYS


def read_run(path: Path) -> Run:
    """Read a run's files; raises ValueError when the folder is not a run."""
    return Run(
        path=path,
        info=read_info(path),
        history=_read_lines(path / HISTORY_FILE),
        validations=_read_lines(path / VALIDATION_FILE),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"python": python_version(), "ds_moe_lb": ds_moe_lb.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; a line that a crash cut short is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]
