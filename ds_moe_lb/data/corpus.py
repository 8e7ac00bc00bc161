"""What a corpus is: named domains, each with training bytes and bytes of held-out documents.

A document is one file or one JSONL record. Documents are held out whole, so that no part of a
validation document was ever trained on.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HELD_OUT_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class Document:
    """One unit of text that is either trained on or held out.

    Attributes:
        name: path or record number, unique in its domain and the same on every machine.
        text: the bytes.
        held_out: True where the reader has already decided that this is validation text.
    """

    name: str
    text: bytes
    held_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One kind of text.

    Attributes:
        name: shown in tables and figures.
        train: ``(num_bytes,)`` uint8, all training documents one after the other.
        validation: ``(num_bytes,)`` uint8, all held-out documents.
        num_documents: (training, held out).
    """

    name: str
    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    num_documents: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Domains in a fixed order and the sha256 over their names and contents."""

    domains: tuple[Domain, ...]
    sha256: str

    @property
    def domain_names(self) -> list[str]:
        return [domain.name for domain in self.domains]


def build_domain(name: str, documents: Sequence[Document]) -> Domain:
    """Order the documents, hold some out and join the rest.

    Documents are ordered by the hash of their name: stable on every machine, and a directory whose
    files are alike does not end up wholly on one side. They are held out from the front until a
    tenth of the bytes is reached; documents already marked `held_out` come first.

    Args:
        name: name of the domain.
        documents: at least two documents with text.

    Raises:
        ValueError: when nothing could be held out or nothing would be left to train on.
    """
    documents = [document for document in documents if document.text]
    if len(documents) < 2:
        raise ValueError(
            f"domain {name!r}: got {len(documents)} document(s) with text, expected at least 2, "
            f"because whole documents are held out for validation"
        )
    ordered = sorted(
        documents, key=lambda document: (not document.held_out, _name_hash(document.name))
    )
    wanted = HELD_OUT_FRACTION * sum(len(document.text) for document in ordered)
    held_out: list[Document] = []
    while len(held_out) < len(ordered) - 1:
        candidate = ordered[len(held_out)]
        if sum(len(d.text) for d in held_out) >= wanted and not candidate.held_out:
            break
        held_out.append(candidate)
    training = ordered[len(held_out) :]
    return Domain(
        name=name,
        train=_join(training),
        validation=_join(held_out),
        num_documents=(len(training), len(held_out)),
    )


def build_corpus(domains: Sequence[Domain]) -> Corpus:
    """Fix the order of the domains (by name) and hash what is really used."""
    ordered = tuple(sorted(domains, key=lambda domain: domain.name))
    digest = hashlib.sha256()
    for domain in ordered:
        for part in (domain.name.encode(), domain.train.tobytes(), domain.validation.tobytes()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return Corpus(domains=ordered, sha256=digest.hexdigest())


def _name_hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _join(documents: Sequence[Document]) -> NDArray[np.uint8]:
    return np.frombuffer(b"\n".join(document.text for document in documents), dtype=np.uint8)
