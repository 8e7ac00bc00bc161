"""From a file to the bytes that count as its text: plain, English prose, translation catalogues."""

import ast
import email
import struct
from pathlib import Path

MAX_DOCUMENT_BYTES = 64 * 1024  # one huge file must not become its domain
_MO_MAGIC = 0x950412DE


def read_plain(path: Path) -> bytes:
    """The file as it is, cut at the size limit."""
    with path.open("rb") as file:
        return file.read(MAX_DOCUMENT_BYTES)


def read_english(path: Path) -> bytes:
    """Prose: the README inside a package's METADATA, or the docstrings of a Python file."""
    text = _description(path) if path.name == "METADATA" else _docstrings(path)
    return text.encode(errors="replace")[:MAX_DOCUMENT_BYTES]


def read_catalogue(path: Path) -> bytes:
    """The translations (not the English originals) of a compiled gettext catalogue, one a line.

    Layout of a .mo file: magic, revision, number of strings, offset of the table of originals,
    offset of the table of translations; each table row is (length, offset).
    """
    data = path.read_bytes()
    if len(data) < 20:
        return b""
    order = "<" if struct.unpack_from("<I", data)[0] == _MO_MAGIC else ">"
    magic, _, count, originals, translations = struct.unpack_from(f"{order}5I", data)
    if magic != _MO_MAGIC:
        return b""
    lines = []
    for row in range(count):
        original_length, _ = struct.unpack_from(f"{order}2I", data, originals + 8 * row)
        length, offset = struct.unpack_from(f"{order}2I", data, translations + 8 * row)
        if original_length:  # the empty original carries the catalogue's header
            lines.append(data[offset : offset + length].replace(b"\0", b"\n"))
    return b"\n".join(lines)[:MAX_DOCUMENT_BYTES]


def _description(path: Path) -> str:
    return str(email.message_from_bytes(path.read_bytes()).get_payload())


def _docstrings(path: Path) -> str:
    """All docstrings of more than one word; a file that does not parse has none."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners)]
    return "\n\n".join(docstring for docstring in docstrings if docstring and " " in docstring)
