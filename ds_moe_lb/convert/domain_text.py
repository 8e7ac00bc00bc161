"""Text of a domain as token ids of the dense model, for gradient importance."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_moe_lb.data.corpus import Domain

# A token of a usual tokenizer covers about four bytes of text; the rest is cut off again.
_BYTES_PER_TOKEN = 8
_NUM_BYTE_VALUES = 256

Tokenize = Callable[[bytes], list[int]]


def text_tokenizer(checkpoint: Path, *, vocab_size: int) -> tuple[Tokenize, int]:
    """How the model reads text, and how many bytes of text a token takes at most.

    The tokenizer of the checkpoint, or, without one, a token per byte if the model has 256 tokens.

    Raises:
        ValueError: when the checkpoint has neither.
    """
    if any(checkpoint.glob("tokenizer*")):
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)

        def tokenize(text: bytes) -> list[int]:
            words = text.decode("utf-8", errors="ignore")
            return list(tokenizer(words, add_special_tokens=False)["input_ids"])

        return tokenize, _BYTES_PER_TOKEN
    if vocab_size == _NUM_BYTE_VALUES:
        return list, 1
    raise ValueError(
        f"{checkpoint}: expected a tokenizer (tokenizer.json), or a byte-level model with a "
        f"vocabulary of {_NUM_BYTE_VALUES}; got neither and a vocabulary of {vocab_size}"
    )


def domain_batches(
    domain: Domain,
    tokenize: Tokenize,
    *,
    bytes_per_token: int,
    num_sequences: int,
    sequence_length: int,
) -> Iterator[Tensor]:
    """Evenly spaced pieces of a domain's training text, one per batch.

    Yields:
        ``(1, S)`` int64; pieces with fewer than `sequence_length` tokens are left out.

    Raises:
        ValueError: when no piece is long enough.
    """
    num_bytes = sequence_length * bytes_per_token
    starts = np.linspace(0, max(0, len(domain.train) - num_bytes), num_sequences).astype(int)
    found = False
    for start in np.unique(starts):
        tokens = tokenize(domain.train[start : start + num_bytes].tobytes())[:sequence_length]
        if len(tokens) == sequence_length:
            found = True
            yield torch.tensor([tokens])
    if not found:
        raise ValueError(
            f"domain {domain.name!r}: {len(domain.train)} training bytes hold no piece of "
            f"{sequence_length} tokens; give more text or a smaller --sequence-length"
        )
