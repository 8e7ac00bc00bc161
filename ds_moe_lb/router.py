"""One MoE layer's side of the balancing: what a single call of its router counts, owes and
remembers.

Shape legend: T tokens of this micro-batch on this rank, E experts of the layer.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_moe_lb import _compat, loss
from ds_moe_lb.counts import RouterLayer
from ds_moe_lb.estimates import CallCounts
from ds_moe_lb.inject import inject

if TYPE_CHECKING:
    from ds_moe_lb.balancer import LoadBalancer

# Forwards whose backward is still to come: one as a rule, a few in pipelines. A forward that is
# never followed by a backward stays until the window ends, so the number is bounded.
_MAX_RECORDS = 256


@dataclass(eq=False)
class CallRecord:
    """What a counted call leaves for its backward and for its recompute; of the size of E.

    Attributes:
        counts: the counts it made, from which its slope follows.
        routed_counts_E: counts over all tokens, as the parent reported them; recognises the
            recompute.
        token_mask_T: mask of `LoadBalancer.token_mask`, kept because a recompute runs outside of
            it.
        gradient_scale: from slope to gradient: coefficient, 1/G and loss scale.
        seen_backward: backward has reached this call.
        is_injected: its gradient was added.
    """

    counts: CallCounts
    routed_counts_E: Tensor
    token_mask_T: Tensor | None
    gradient_scale: Tensor | float
    seen_backward: bool = False
    is_injected: bool = False


@dataclass(eq=False)
class RouterCall:
    """A call that is under way; lives until the MoE layer is done.

    Attributes:
        router: the layer's router.
        record: None where nothing is counted: evaluation, no grad, outside the model's forward.
        probs_TE: ``(T, E)`` router probabilities with their graph.
        valid_mask_T: ``(T,)`` bool, None = all tokens count.
        counts_E: counts of this very pass over valid tokens.
    """

    router: "Router"
    record: CallRecord | None
    probs_TE: Tensor
    valid_mask_T: Tensor | None
    counts_E: Tensor
    prob_sum_E: Tensor | None = None

    def inject_into(self, scores: Tensor) -> Tensor:
        """Attach the balancing gradient to the scores where the plugin itself adds the loss."""
        record, balance = self.record, self.router.balancer.balance
        if record is None or not self.router.injects or not torch.is_grad_enabled():
            return scores

        def gradient() -> Tensor | None:
            # A forward with several outputs may see several backward passes, each through here.
            if record.is_injected:
                return None
            record.is_injected = record.seen_backward = True
            return balance.slope(record.counts) * record.gradient_scale

        return inject(scores, self.probs_TE, gradient_E=gradient, valid_mask_T=self.valid_mask_T)

    def loss_at_gate(self, parent_l_aux: Tensor) -> Tensor:
        """What the gate returns as ``l_aux``: final, or a placeholder until :meth:`finish`."""
        if not self.router.balancer.replaces_l_aux:
            return parent_l_aux
        if self.router.balancer.config.aux_loss_coeff is not None:
            return self.probs_TE.new_zeros((), dtype=torch.float32)
        self.prob_sum_E = loss.prob_sum(self.probs_TE, valid_mask_T=self.valid_mask_T)
        if self.record is None:
            return torch.dot(
                loss.local_slope(self.counts_E, top_k=self.router.layer.top_k), self.prob_sum_E
            )
        # The value needs the other ranks' counts, which arrive while dispatch and experts run.
        # Made in the same place when recomputed: checkpointing matches saved tensors by their
        # order.
        return self.prob_sum_E.detach().new_zeros(())

    def finish(self, l_aux: Tensor) -> Tensor:
        """Await the counts and return this rank's balancing term ``sum_i w E f_i prob_sum_i``."""
        if self.record is None or self.prob_sum_E is None:
            return l_aux
        counts = self.record.counts
        l_aux = torch.dot(self.router.balancer.balance.slope(counts), self.prob_sum_E)
        self.router.balancer.watch_gradient(l_aux)
        if counts.micro_step.used_L is not None and not _compat.in_backward():
            counts.micro_step.used_L[counts.layer] += l_aux.detach()
        return l_aux


class Router:
    """Link between one MoE layer and its LoadBalancer.

    Args:
        layer: what the layer is.
        balancer: the handle it belongs to.
        frozen: the router's weight takes no gradient, so nothing is injected.
    """

    def __init__(self, layer: RouterLayer, balancer: "LoadBalancer", *, frozen: bool) -> None:
        self.layer = layer
        self.balancer = balancer
        self.injects = bool(balancer.config.aux_loss_coeff) and not frozen
        self._records: deque[CallRecord] = deque(maxlen=_MAX_RECORDS)

    def open_call(
        self,
        probs_TE: Tensor,
        *,
        routed_counts_E: Tensor,
        used_token: Tensor | None,
        count: Callable[[Tensor], Tensor],
    ) -> RouterCall:
        """Take in one pass through the router: count it, or recognise it as a recompute.

        Args:
            probs_TE: ``(T, E)`` router probabilities with their graph.
            routed_counts_E: ``(E,)`` int64 pre-drop counts as the host reports them.
            used_token: the host's mask, ``(T,)``, non-zero = counts.
            count: from a ``(T,)`` valid mask to ``(E,)`` int64 counts of this pass.
        """
        recomputed = self._recognise(routed_counts_E) if _compat.in_backward() else None
        token_mask = recomputed.token_mask_T if recomputed else self.balancer.current_token_mask
        valid_mask_T = self._valid_mask(probs_TE, used_token=used_token, token_mask=token_mask)
        if valid_mask_T is not None:
            counts_E = count(valid_mask_T)
        elif used_token is not None:  # valid_tokens "all": the host has left the masked ones out
            counts_E = count(
                torch.ones(probs_TE.shape[0], dtype=torch.bool, device=probs_TE.device)
            )
        else:
            counts_E = routed_counts_E
        micro_step = None if _compat.in_backward() else self.balancer.micro_step
        if micro_step is None:
            return RouterCall(self, recomputed, probs_TE, valid_mask_T, counts_E)
        call_counts = self.balancer.balance.add_call(micro_step, counts_E, layer=self.layer.index)
        record = CallRecord(call_counts, routed_counts_E, token_mask, self.balancer.gradient_scale)
        self._records.append(record)
        if micro_step.prob_sum_F is not None:
            with torch.no_grad():
                where = self.balancer.layout.count_slices[self.layer.index]
                micro_step.prob_sum_F[where] += loss.prob_sum(probs_TE, valid_mask_T=valid_mask_T)
        return RouterCall(self, record, probs_TE, valid_mask_T, counts_E)

    def retire(self, *, everything: bool = False) -> None:
        """Forget the calls whose backward has run (or all of them, at the end of a window)."""
        if everything:
            self._records.clear()
        elif any(record.seen_backward for record in self._records):
            waiting = [record for record in self._records if not record.seen_backward]
            self._records = deque(waiting, maxlen=_MAX_RECORDS)

    def _recognise(self, routed_counts_E: Tensor) -> CallRecord | None:
        """The first pass of what is being recomputed: the nearest counts where several wait."""
        if not self._records:
            return None
        # Calls that were recomputed before come last: nested checkpoints do ask for them again.
        waiting = sorted(self._records, key=lambda record: record.seen_backward)
        nearest = 0
        if len(waiting) > 1:
            first_EN = torch.stack([record.routed_counts_E for record in waiting])
            nearest = int((first_EN - routed_counts_E).abs().sum(dim=1).argmin())
        waiting[nearest].seen_backward = True
        return waiting[nearest]

    def _valid_mask(
        self, probs_TE: Tensor, *, used_token: Tensor | None, token_mask: Tensor | None
    ) -> Tensor | None:
        if self.balancer.config.valid_tokens == "all":
            return None
        valid_mask_T: Tensor | None = None
        for name, mask in (("used_token", used_token), ("token_mask", token_mask)):
            if mask is None:
                continue
            if mask.numel() != probs_TE.shape[0]:
                raise ValueError(
                    f"moe_load_balancing: {name} has {mask.numel()} entries (shape "
                    f"{tuple(mask.shape)}), but the router of layer {self.layer.name!r} got "
                    f"{probs_TE.shape[0]} tokens on this rank; it needs one entry per token"
                )
            flat_T = mask.reshape(-1).to(probs_TE.device) != 0
            valid_mask_T = flat_T if valid_mask_T is None else valid_mask_T & flat_T
        return valid_mask_T
