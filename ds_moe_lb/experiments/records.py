"""runs.jsonl: one line per finished run, found again by its key."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RECORDS_FILE = "runs.jsonl"
_LOCK_FILE = ".lock"  # stays; what counts is whether a living process holds it


class Records:
    """The finished runs in a folder. Several processes may read, one appends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORDS_FILE

    def read(self) -> dict[str, dict[str, Any]]:
        """All complete lines by key; of a run that was recorded twice the later one.

        Raises:
            ValueError: a line is no record; names file and line.
        """
        records: dict[str, dict[str, Any]] = {}
        if not self.path.is_file():
            return records
        # A crash may have cut the last line short; it has no newline then.
        for number, line in enumerate(self.path.read_text().split("\n")[:-1], start=1):
            try:
                record = json.loads(line)
                records[record["key"]] = record
            except (json.JSONDecodeError, KeyError, TypeError):
                raise ValueError(
                    f"{self.path}, line {number}: expected the record of a run, got {line[:60]!r}; "
                    f"remove the line, and its run is done again"
                ) from None
        return records

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Keep the folder for one command, which would else do the runs of another once more.

        Raises:
            ValueError: another process has it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with (self.path.parent / _LOCK_FILE).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"--output {self.path.parent}: another experiment is being run there; wait for "
                    f"it, or give another folder"
                ) from None
            yield

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a run in one write that has reached the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, _end_of_last_line(descriptor))
            os.lseek(descriptor, 0, os.SEEK_END)
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def corpus_hashes(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Hashes of the texts that the records are about, the latest last."""
    return list(dict.fromkeys(record["corpus"] for record in records))


def _end_of_last_line(descriptor: int) -> int:
    """Where the next record begins: behind the last newline."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return content.rfind(b"\n") + 1
