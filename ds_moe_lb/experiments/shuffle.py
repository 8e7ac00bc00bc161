"""The paper's control: f of a micro-step from a random sample of the whole global batch.

A micro-batch of the global-batch loss differs from the usual one in two ways: more tokens, so less
noise, and tokens of other texts. The control has the texts without the tokens: as many tokens as
one micro-batch has, drawn without replacement from all of them. It is no key of the JSON.

Shape legend: L MoE layers, E experts, K choices per token, N tokens of the global batch, G
micro-steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_moe_lb import loss
from ds_moe_lb.call_counts import CallCounts
from ds_moe_lb.counting_pass import random_state_restored
from ds_moe_lb.counts import count_selections
from ds_moe_lb.estimates import BalanceCounts

_SELECTED_AT = 3  # in what DeepSpeed's gate returns: (K, T) experts, -1 = dropped


def draw_counts(
    selected_LNK: Tensor, *, num_experts: int, num_tokens: int, num_draws: int, seed: int
) -> Tensor:
    """Counts of random samples of tokens; in every layer those of the same tokens.

    Args:
        selected_LNK: ``(L, N, K)`` int64 experts of all tokens of the global batch.
        num_experts: E.
        num_tokens: of one sample, drawn without replacement.
        num_draws: samples, independent of each other.
        seed: the same on all ranks.

    Returns:
        ``(num_draws, L, E)`` int64.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = []
    for _ in range(num_draws):
        drawn = torch.randperm(selected_LNK.shape[1], generator=generator)[:num_tokens]
        draws.append(
            torch.stack(
                [
                    count_selections(selected_NK[drawn], num_experts=num_experts)
                    for selected_NK in selected_LNK
                ]
            )
        )
    return torch.stack(draws)


class ShuffledCounts(BalanceCounts):
    """Counts of scope `micro_batch` whose f is that of a sample of the global batch.

    Attributes:
        drawn_GLE: the samples of this window, one for each micro-step.
    """

    drawn_GLE: Tensor

    def local_slope(self, call: CallCounts) -> Tensor:
        """The slope of the micro-batch loss with the sample's counts in place of its own."""
        drawn_E = self.drawn_GLE[call.micro_step.index - 1, call.layer]
        return loss.local_slope(drawn_E, top_k=self.layout.layers[call.layer].top_k)


class Shuffle:
    """The control on one engine, whose policy is scope `micro_batch` and whose gates drop nothing.

    Args:
        engine: has the plugin installed.
        gates: of its MoE layers, in the model's order.
    """

    def __init__(self, engine: Any, gates: Sequence[torch.nn.Module]) -> None:
        self._counts: ShuffledCounts = engine.load_balancer.balance
        self._counts.__class__ = ShuffledCounts
        self._gates = gates
        self._num_experts = self._counts.layout.layers[0].num_experts

    def prepare(
        self, batches: Sequence[Tensor], forward: Callable[[Tensor], Any], *, seed: int
    ) -> None:
        """Forward the micro-batches of a window without grad and draw its samples. Collective.

        Args:
            batches: the G micro-batches of this rank, of equal size.
            forward: runs the engine's forward on one.
            seed: of the draws, the same on all ranks.
        """
        seen: list[list[Tensor]] = [[] for _ in self._gates]
        hooks = [
            gate.register_forward_hook(_note_selections(seen[layer]))
            for layer, gate in enumerate(self._gates)
        ]
        try:
            with torch.no_grad(), random_state_restored():
                for batch in batches:
                    forward(batch)
        finally:
            for hook in hooks:
                hook.remove()
        own_LNK = torch.stack([torch.cat(selected) for selected in seen])
        everyone = [torch.empty_like(own_LNK) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own_LNK, group=dist.get_world_group())
        self._counts.drawn_GLE = draw_counts(
            torch.cat(everyone, dim=1),
            num_experts=self._num_experts,
            num_tokens=own_LNK.shape[1] // len(batches),
            num_draws=len(batches),
            seed=seed,
        )


def _note_selections(seen: list[Tensor]) -> Callable[[torch.nn.Module, Any, Any], None]:
    def hook(gate: torch.nn.Module, args: Any, outputs: Any) -> None:
        seen.append(outputs[_SELECTED_AT].T.long().contiguous())

    return hook
