"""Validation: the loss of every domain, and which experts each domain selects.

Shape legend: D domains, L layers, E experts, B sequences, S positions.
"""

from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_moe_lb.data.batches import validation_batches
from ds_moe_lb.data.corpus import Corpus
from ds_moe_lb.training.trainable import LanguageModel, language_model_loss


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Result of one validation, the same on all ranks.

    Attributes:
        loss_D: nats per byte of each domain, fp64.
        tokens_per_expert_LDE: global int64 selections, before dropping; L = 0 in a dense model.
    """

    loss_D: Tensor
    tokens_per_expert_LDE: Tensor

    @property
    def loss(self) -> float:
        """Mean over domains, each weighted equally; nats per byte."""
        return float(self.loss_D.mean())

    def record(self, *, step: int, domain_names: list[str]) -> dict[str, Any]:
        """The line of validation.jsonl."""
        return {
            "step": step,
            "loss": self.loss,
            "loss_per_domain": dict(zip(domain_names, self.loss_D.tolist(), strict=True)),
            "tokens_per_expert_LDE": self.tokens_per_expert_LDE.tolist(),
        }


@torch.no_grad()
def evaluate(
    engine: Any,
    model: LanguageModel,
    corpus: Corpus,
    *,
    sequence_length: int,
    batch_size: int,
    max_batches: int,
) -> Validation:
    """Run the model over held-out text; every rank takes its rows of each batch.

    At most two collectives at the end. All ranks run equally many forwards, as expert parallelism
    needs.

    Args:
        engine: the DeepSpeed engine of the model; left in training mode.
        model: makes its forwards.
        corpus: its held-out bytes are used.
        sequence_length: S.
        batch_size: sequences per rank and batch.
        max_batches: batches per domain at most.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    engine.eval()
    sums_D2 = torch.zeros(len(corpus.domains), 2, dtype=torch.float64, device=engine.device)
    counts_per_domain: list[Tensor] = []
    for index, domain in enumerate(corpus.domains):
        counts_LE = torch.zeros((), dtype=torch.int64, device=engine.device)
        for rows in validation_batches(
            domain,
            sequence_length=sequence_length,
            batch_size=batch_size * world_size,
            max_batches=max_batches,
        ):
            tokens = rows[rank * batch_size : (rank + 1) * batch_size].to(engine.device)
            output = model.forward(engine, tokens[:, :-1])
            sums_D2[index, 0] += language_model_loss(output.logits_BSV, tokens[:, 1:]).double()
            sums_D2[index, 1] += 1
            counts_LE = counts_LE + output.tokens_per_expert_LE
        counts_per_domain.append(counts_LE)
    counts_LDE = torch.stack(counts_per_domain, dim=1).contiguous()
    if world_size > 1:
        dist.all_reduce(sums_D2, group=dist.get_world_group())
        if counts_LDE.numel():
            dist.all_reduce(counts_LDE, group=dist.get_world_group())
    engine.train()
    return Validation(
        loss_D=(sums_D2[:, 0] / sums_D2[:, 1]).cpu(), tokens_per_expert_LDE=counts_LDE.cpu()
    )
