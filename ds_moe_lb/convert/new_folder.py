"""A folder that appears complete or not at all, and the files that are copied into it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Tokenizer, generation and licence; not the weights, their config or the model card.
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A hidden sibling of `path` that is renamed to it when the block ends without an exception.

    After an exception, Ctrl-C too, it is removed; a killed process leaves it behind under the
    hidden name, and `path` does not exist.

    Raises:
        ValueError: when `path` exists.
    """
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        refuse_existing(path)  # somebody else's may have appeared meanwhile
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial)
        raise


def refuse_existing(path: Path) -> None:
    """Raises ValueError when there is anything at `path`."""
    if path.exists() or path.is_symlink():
        raise ValueError(f"{path} exists already: remove it or give another output folder")


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, generation config and licence files."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy(file, target / file.name)
            elif file.is_dir():
                shutil.copytree(file, target / file.name, dirs_exist_ok=True)
