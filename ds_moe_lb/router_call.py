"""A single call of a router: what it owes to its backward, and what it leaves for its recompute.

Shape legend: T tokens of this micro-batch on this rank, E experts of the layer, B sequences.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_moe_lb import _compat, loss
from ds_moe_lb.call_counts import CallCounts
from ds_moe_lb.inject import Gradients, inject

if TYPE_CHECKING:
    from ds_moe_lb.router import Router

Masks = tuple[tuple[str, Tensor], ...]


def num_rows_of(counts: Tensor) -> int | None:
    """B of counts ``(B, E)``; None of counts ``(E,)``."""
    return counts.shape[0] if counts.dim() == 2 else None


@dataclass(eq=False)
class CallRecord:
    """What a call leaves for its backward and for its recompute; of the size of E.

    Attributes:
        prob_sum_E: sum of the probabilities of all tokens, fp32, no graph; recognises the
            recompute.
        num_tokens: T.
        masks: masks of the forward, by name, kept because a recompute runs outside of it.
        scale: from slope to gradient: coefficient, 1/G and loss scale.
        z_scale: the same of the z-loss; None without one.
        counts: the counts it made, from which its slope follows; None if it was not counted.
        seen_backward: backward has reached this call.
        is_injected: its gradient was added.
    """

    prob_sum_E: Tensor
    num_tokens: int
    masks: Masks
    scale: Tensor | float
    z_scale: Tensor | float | None = None
    counts: CallCounts | None = None
    seen_backward: bool = False
    is_injected: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether a backward may still come, for all that is known."""
        has_ended = self.counts is None or self.counts.micro_step.has_ended
        return has_ended and not self.seen_backward


@dataclass(eq=False)
class RouterCall:
    """A call that is under way; lives until the MoE layer is done.

    Attributes:
        router: the layer's router.
        record: None where nothing is counted: evaluation, no grad, outside the model's forward.
        probs_TE: ``(T, E)`` router probabilities with their graph.
        valid_mask_T: ``(T,)`` bool, None = all tokens count.
        counts: counts of this very pass over valid tokens, ``(E,)``, or ``(B, E)`` with scope
            `sequence`.
        lse_T: ``(T,)`` logsumexp of the clean logits with its graph; None without a z-loss.
        prob_sum: sums of the valid probabilities, of the shape of the counts.
    """

    router: "Router"
    record: CallRecord | None
    probs_TE: Tensor
    valid_mask_T: Tensor | None
    counts: Tensor
    lse_T: Tensor | None = None
    prob_sum: Tensor | None = None

    def inject_into(self, scores: Tensor) -> Tensor:
        """Attach the balancing gradient to the scores where the plugin itself adds the loss."""
        record, balancer = self.record, self.router.balancer
        if record is None or not balancer.policy.injects or not self.router.is_trainable:
            return scores
        if not torch.is_grad_enabled():
            return scores

        def gradients() -> Gradients | None:
            # A forward with several outputs may see several backward passes, each through here.
            if record.is_injected or record.counts is None:
                return None
            record.is_injected = record.seen_backward = True
            slope = balancer.balance.slope(record.counts)
            if record.z_scale is None or record.counts.token_weight is None:
                return Gradients(slope * record.scale)
            return Gradients(slope * record.scale, record.counts.token_weight * record.z_scale)

        return inject(
            scores,
            self.probs_TE,
            gradients=gradients,
            valid_mask_T=self.valid_mask_T,
            lse_T=self.lse_T,
        )

    def loss_at_gate(self, parent_l_aux: Tensor) -> Tensor:
        """What the gate returns as ``l_aux``: final, or a placeholder until :meth:`finish`."""
        if not self.router.balancer.policy.replaces_l_aux:
            return parent_l_aux
        if self.router.balancer.policy.coefficients is not None:
            return self.probs_TE.new_zeros((), dtype=torch.float32)
        self.prob_sum = loss.prob_sum(
            self.probs_TE, valid_mask_T=self.valid_mask_T, num_rows=num_rows_of(self.counts)
        )
        if self.record is None:
            slope = loss.local_slope(self.counts, top_k=self.router.layer.top_k)
            return (slope * self.prob_sum).sum()
        # The value needs the other ranks' counts, which arrive while dispatch and experts run.
        # Made in the same place when recomputed: checkpointing matches saved tensors by their
        # order.
        return self.prob_sum.detach().new_zeros(())

    def finish(self, l_aux: Tensor) -> Tensor:
        """Await the counts and return this rank's balancing term ``sum_i w E f_i prob_sum_i``."""
        counts = self.record.counts if self.record is not None else None
        if counts is None or self.prob_sum is None:
            return l_aux
        l_aux = (self.router.balancer.balance.slope(counts) * self.prob_sum).sum()
        self.router.balancer.complaints.watch_gradient(l_aux)
        if counts.micro_step.used_L is not None and not _compat.in_backward():
            counts.micro_step.used_L[counts.layer] += l_aux.detach()
        return l_aux
