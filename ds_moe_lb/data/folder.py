"""A user's own text: one sub-folder, or one .txt or .jsonl file, per domain."""

import json
from pathlib import Path

from ds_moe_lb.data.corpus import (
    HELD_OUT_FRACTION,
    Corpus,
    Document,
    Domain,
    build_corpus,
    build_domain,
)

_EXPECTED = (
    "expected one entry per domain: a sub-folder with at least two files, a .txt file, or a .jsonl "
    'file with one object per line that has the key "text"'
)


def folder_corpus(folder: Path) -> Corpus:
    """Read a corpus from a folder. Hidden entries are ignored.

    A sub-folder's files (at any depth) and a .jsonl file's records are documents of one domain,
    held out whole. A .txt file is split once: its last tenth is held out.

    Args:
        folder: what the user gave as ``--data``.

    Raises:
        ValueError: saying what was found and what is expected.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing"
        raise ValueError(f"--data {folder}: found {what} there, expected a folder; {_EXPECTED}")
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    if not entries:
        raise ValueError(f"--data {folder}: the folder is empty; {_EXPECTED}")
    domains: dict[str, Domain] = {}
    for entry in entries:
        name = entry.name if entry.is_dir() else entry.stem
        if name in domains:
            raise ValueError(
                f"--data {folder}: two entries for the domain {name!r}; rename one of them"
            )
        domains[name] = build_domain(name, _documents(entry))
    return build_corpus(list(domains.values()))


def _documents(entry: Path) -> list[Document]:
    if entry.is_dir():
        documents: list[Document] = []
        for path in sorted(entry.rglob("*")):
            relative = path.relative_to(entry)
            if path.is_file() and not any(part.startswith(".") for part in relative.parts):
                documents += _file_documents(path, name=relative.as_posix())
        return documents
    if entry.suffix == ".txt":
        return _first_and_last(entry)
    if entry.suffix == ".jsonl":
        return _records(entry, name=entry.name)
    raise ValueError(f"--data: found the file {entry}; {_EXPECTED}")


def _file_documents(path: Path, *, name: str) -> list[Document]:
    if path.suffix == ".jsonl":
        return _records(path, name=name)
    return [Document(name=name, text=path.read_bytes())]


def _first_and_last(path: Path) -> list[Document]:
    """The first nine tenths and the last tenth of one text, cut at a line end if there is one."""
    text = path.read_bytes()
    cut = int(len(text) * (1 - HELD_OUT_FRACTION))
    cut = text.find(b"\n", cut) + 1 or cut
    if cut >= len(text):  # the last line is longer than the held-out part
        cut = int(len(text) * (1 - HELD_OUT_FRACTION))
    return [
        Document(name="first", text=text[:cut]),
        Document(name="last", text=text[cut:], held_out=True),
    ]


def _records(path: Path, *, name: str) -> list[Document]:
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"--data: {path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error}); {_EXPECTED}") from None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            found = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(
                f'{where}: found {found}, expected an object with a string under "text"'
            )
        documents.append(Document(name=f"{name}:{number}", text=record["text"].encode()))
    return documents
