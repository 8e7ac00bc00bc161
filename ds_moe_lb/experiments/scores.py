"""How sure the router is: the summed probability of the experts that a token goes to, by domain.

Shape legend: D domains, L MoE layers, T tokens, E experts, K choices per token, S positions.
"""

from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor, nn

from ds_moe_lb.data.batches import validation_batches
from ds_moe_lb.data.corpus import Corpus
from ds_moe_lb.gate import probabilities_of

_SELECTED_AT = 3  # in what DeepSpeed's gate returns: (K, T) experts, -1 = dropped


@torch.no_grad()
def top_k_scores(
    engine: Any, gates: list[nn.Module], corpus: Corpus, *, sequence_length: int, batch_size: int
) -> Tensor:
    """Mean over held-out tokens of the sum of the K selected probabilities; fp64 ``(L, D)``.

    One batch per domain; collective, the same on all ranks. The engine stays in training mode.

    Args:
        engine: has the plugin installed.
        gates: of its MoE layers, which drop nothing.
        corpus: its held-out bytes are used.
        sequence_length: S.
        batch_size: sequences per rank.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    sums_LD = torch.zeros(len(gates), len(corpus.domains), dtype=torch.float64)

    def note(layer: int, domain: int) -> Any:
        def hook(gate: nn.Module, args: Any, outputs: Any) -> None:
            selected_TK = outputs[_SELECTED_AT].T.long()
            score_T = probabilities_of(gate).gather(1, selected_TK).sum(dim=1)
            sums_LD[layer, domain] = score_T.double().mean()

        return hook

    engine.eval()
    for index, domain in enumerate(corpus.domains):
        hooks = [gate.register_forward_hook(note(layer, index)) for layer, gate in enumerate(gates)]
        rows = next(
            validation_batches(
                domain,
                sequence_length=sequence_length,
                batch_size=batch_size * world_size,
                max_batches=1,
            )
        )
        engine(rows[rank * batch_size : (rank + 1) * batch_size, :-1].to(engine.device))
        for hook in hooks:
            hook.remove()
    engine.train()
    dist.all_reduce(sums_LD, group=dist.get_world_group())
    return sums_LD / world_size
