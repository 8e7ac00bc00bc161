"""Which sequences are in which micro-batch: a pure function of seed and step, so resuming is exact.

Shape legend: B sequences of one micro-batch, S bytes that are predicted (a sequence has S + 1).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_moe_lb.data.corpus import Corpus, Domain


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How one global batch is cut.

    Attributes:
        sequence_length: bytes that are predicted per sequence.
        micro_batch_size: sequences in one forward of one rank.
        gradient_accumulation_steps: micro-batches per optimizer step.
        dp_world_size: ranks that see different sequences.
        seed: the data order.
    """

    sequence_length: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_world_size: int
    seed: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_world_size


def training_micro_batches(
    corpus: Corpus,
    plan: BatchPlan,
    *,
    step: int,
    dp_rank: int,
    weights_D: NDArray[np.float64] | None = None,
) -> Iterator[Tensor]:
    """The micro-batches of one rank for one optimizer step.

    The global batch depends on seed, step and weights alone; ranks and micro-steps take slices of
    it. Each sequence comes from one domain.

    Args:
        corpus: text to draw from.
        plan: the cut.
        step: optimizer steps done before this one.
        dp_rank: this rank among `plan.dp_world_size`.
        weights_D: probability of each domain of the corpus; None = all equal.

    Yields:
        ``(B, S + 1)`` int64.
    """
    random = np.random.default_rng([plan.seed, step])
    num_domains = len(corpus.domains)
    if weights_D is None:
        domains = random.integers(num_domains, size=plan.global_batch_size)
    else:
        domains = random.choice(num_domains, size=plan.global_batch_size, p=weights_D)
    positions = random.random(plan.global_batch_size)
    for micro_step in range(plan.gradient_accumulation_steps):
        first = (micro_step * plan.dp_world_size + dp_rank) * plan.micro_batch_size
        rows = range(first, first + plan.micro_batch_size)
        yield torch.stack(
            [
                _cut(corpus.domains[domains[row]].train, positions[row], plan.sequence_length)
                for row in rows
            ]
        )


def validation_batches(
    domain: Domain, *, sequence_length: int, batch_size: int, max_batches: int
) -> Iterator[Tensor]:
    """Evenly spaced sequences of a domain's held-out bytes, the same in every run.

    Args:
        domain: the domain.
        sequence_length: bytes that are predicted per sequence.
        batch_size: sequences in one batch.
        max_batches: upper bound; a small domain has fewer, at least one.

    Yields:
        ``(B, S + 1)`` int64, always `batch_size` rows.
    """
    distinct = max(1, len(domain.validation) // (sequence_length + 1))
    num_batches = min(max_batches, max(1, distinct // batch_size))
    positions = np.linspace(0.0, 1.0, num_batches * batch_size)
    for batch in positions.reshape(num_batches, batch_size):
        yield torch.stack(
            [_cut(domain.validation, position, sequence_length) for position in batch]
        )


def check_sequence_length(corpus: Corpus, sequence_length: int) -> None:
    """Refuse a corpus with a domain shorter than one sequence.

    Raises:
        ValueError: naming the domain, its bytes and what is needed.
    """
    for domain in corpus.domains:
        for part, text in (("training", domain.train), ("held-out", domain.validation)):
            if len(text) < sequence_length + 1:
                raise ValueError(
                    f"domain {domain.name!r}: {len(text)} {part} bytes, expected at least "
                    f"{sequence_length + 1} (--sequence-length {sequence_length} plus one)"
                )


def _cut(text: np.ndarray, position: float, sequence_length: int) -> Tensor:
    start = int(position * (len(text) - sequence_length - 1))
    return torch.from_numpy(text[start : start + sequence_length + 1].astype(np.int64))
