"""What balancing must amount to: one process, fp64, from the mathematics alone.

Nothing of the plugin is imported. One call looks at one MoE layer over one accumulation window of
G micro-steps on R ranks. Selections are an input (the recorded ones): near ties may fall either
way. Per token the router is ``p = softmax(W x)``. A rank's micro-batch supplies to its backward

    share = w * E * sum_e f_e * (sum over its valid tokens t of p_te)

and the engine averages over micro-steps and ranks. f carries no gradient, and
``d p_te / d logit_ta = p_te ([e = a] - p_ta)``, hence, for valid tokens,

    d share / d logit_ta = w * E * p_ta * (f_a - sum_e f_e p_te)
    d share / d W_ai     = sum_t d share / d logit_ta * x_ti

Shape legend: T tokens of one rank's micro-batch, E experts, K choices per token, M width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one rank's router saw in one micro-step; local, on the CPU.

    Attributes:
        x_TM: its input, fp64.
        selections_TK: the experts of each token before capacity dropped any, int64.
        valid_T: bool, True = the token counts.
    """

    x_TM: Tensor
    selections_TK: Tensor
    valid_T: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerWindow:
    """One layer in one window.

    Attributes:
        weight_EM: the router's weight, fp64; the same on all ranks.
        calls: ``[micro-step][rank]``.
    """

    weight_EM: Tensor
    calls: Sequence[Sequence[Call]]

    @property
    def num_ranks(self) -> int:
        return len(self.calls[0])

    @cached_property
    def selections_per_call(self) -> Tensor:
        """Selections by valid tokens of each micro-step and rank, ``(G, R, E)`` int64."""
        rows = [
            torch.bincount(
                call.selections_TK[call.valid_T].reshape(-1), minlength=len(self.weight_EM)
            )
            for calls in self.calls
            for call in calls
        ]
        return torch.stack(rows).view(len(self.calls), self.num_ranks, -1)

    def counts_of(self, ranks: Sequence[int], micro_steps: Sequence[int]) -> Tensor:
        """The same summed over these ranks and micro-steps, ``(E,)``."""
        return self.selections_per_call[list(micro_steps)][:, list(ranks)].sum(dim=(0, 1))

    def probs(self, call: Call) -> Tensor:
        """Router probabilities of a call's valid tokens, ``(valid T, E)`` fp64."""
        return (call.x_TM[call.valid_T] @ self.weight_EM.T).softmax(dim=1)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The reference's answer for one layer and one window.

    Attributes:
        counts: for each rank its selections over the window, ``(E,)`` int64.
        shares: ``[micro-step][rank]``, the balancing term that a rank supplies, no coefficient.
        grad_EM: gradient of the router's weight as the engine leaves it, no coefficient.
        magnitude_EM: the same with the absolute values of the ranks' contributions summed, which
            is what rounding errors are in proportion to.
        loss_used: mean of the shares.
        loss_global_batch: ``E sum_i f_i P_i`` over the whole window of all ranks.
        num_valid_tokens: of the whole window of all ranks.
    """

    counts: list[Tensor]
    shares: list[list[float]]
    grad_EM: Tensor
    magnitude_EM: Tensor
    loss_used: float
    loss_global_batch: float
    num_valid_tokens: int


def balance(
    window: LayerWindow,
    *,
    estimate: str,
    previous: LayerWindow | None,
    groups: Sequence[Sequence[int]],
    top_k: int,
    micro_batch_weight: float = 0.0,
) -> Expected:
    """Counts, loss and gradient of one layer over one window.

    Args:
        window: the window.
        estimate: where f is taken from: 'running' (micro-steps 1..m of this window), 'boundary'
            (``previous``; None yet: 'running'), 'carry' (both, G and G - m times; likewise),
            'exact' (this whole window), 'micro_batch' (the rank's own micro-batch) or 'none' (no
            loss).
        previous: the last complete window.
        groups: the ranks that share counts, a partition of all ranks.
        top_k: K.
        micro_batch_weight: of the same loss with the micro-batch's own f, added to it.
    """
    num_ranks, num_steps, num_experts = window.num_ranks, len(window.calls), len(window.weight_EM)
    everyone, all_steps = range(num_ranks), range(num_steps)
    grad_EM, magnitude_EM = torch.zeros_like(window.weight_EM), torch.zeros_like(window.weight_EM)
    shares: list[list[float]] = []
    for m in all_steps:
        shares.append([])
        for rank in everyone:
            group = next(members for members in groups if rank in members)
            counts_E, weight = _balance_batch(
                window, m, rank, group, estimate=estimate, previous=previous, top_k=top_k
            )
            # w f, the factor of a token's probabilities in the loss
            wf_E = weight * counts_E.double() / max(int(counts_E.sum()), 1)
            if micro_batch_weight:
                own_E = window.counts_of([rank], [m])
                own = micro_batch_weight * _per_token(1, own_E, top_k)
                wf_E = wf_E + own * own_E.double() / max(int(own_E.sum()), 1)
            call = window.calls[m][rank]
            probs_TE = window.probs(call)
            mean_T1 = probs_TE @ wf_E.unsqueeze(1)
            shares[m].append(float(num_experts * mean_T1.sum()))
            slope_TE = num_experts * probs_TE * (wf_E - mean_T1)
            part_EM = slope_TE.T @ call.x_TM[call.valid_T] / (num_ranks * num_steps)
            grad_EM += part_EM
            magnitude_EM += part_EM.abs()
    total_E = window.counts_of(everyone, all_steps)
    fraction_E = total_E.double() / max(int(total_E.sum()), 1)
    num_tokens = int(total_E.sum()) // top_k
    prob_sum_E = sum(window.probs(call).sum(dim=0) for step in window.calls for call in step)
    mean_prob_E = prob_sum_E / max(num_tokens, 1)
    return Expected(
        counts=[window.counts_of([rank], all_steps) for rank in everyone],
        shares=shares,
        grad_EM=grad_EM,
        magnitude_EM=magnitude_EM,
        loss_used=sum(map(sum, shares)) / (num_ranks * num_steps),
        loss_global_batch=float(num_experts * fraction_E @ mean_prob_E),
        num_valid_tokens=num_tokens,
    )


def _balance_batch(
    window: LayerWindow,
    m: int,
    rank: int,
    group: Sequence[int],
    *,
    estimate: str,
    previous: LayerWindow | None,
    top_k: int,
) -> tuple[Tensor, float]:
    """The counts that define f, ``(E,)``, and the weight w of one token's probabilities."""
    num_steps = len(window.calls)
    so_far_E = window.counts_of(group, range(m + 1))
    step_E = window.counts_of(group, [m])
    if estimate == "none":
        return step_E, 0.0
    if estimate == "micro_batch":
        own_E = window.counts_of([rank], [m])
        return own_E, _per_token(1, own_E, top_k)
    if estimate == "exact":
        whole_E = window.counts_of(group, range(num_steps))
        return whole_E, _per_token(len(group) * num_steps, whole_E, top_k)
    if estimate not in ("running", "boundary", "carry"):
        raise ValueError(f"the reference does not know estimate {estimate!r}")
    if estimate == "running" or previous is None:
        return so_far_E, _per_token(len(group), step_E, top_k)
    before_E = previous.counts_of(group, range(len(previous.calls)))
    if estimate == "boundary":
        return before_E, _per_token(len(group) * num_steps, before_E, top_k)
    carried_E = num_steps * so_far_E + (num_steps - 1 - m) * before_E
    return carried_E, _per_token(len(group), step_E, top_k)


def _per_token(numerator: int, counts_E: Tensor, top_k: int) -> float:
    num_tokens = int(counts_E.sum()) / top_k
    return numerator / num_tokens if num_tokens else 0.0
