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
from ds_moe_lb.sites import RouterSite
from ds_moe_lb.window import MicroStep

if TYPE_CHECKING:
    from ds_moe_lb.balancer import LoadBalancer

Masks = tuple[tuple[str, Tensor], ...]

# Forwards whose backward is still to come: one as a rule, a few in pipelines. A forward that is
# never followed by a backward stays until the window ends, so the number is bounded.
_MAX_RECORDS = 256
_MAX_UNCOUNTED = 16


@dataclass(eq=False)
class CallRecord:
    """What a call leaves for its backward and for its recompute; of the size of E.

    Attributes:
        prob_sum_E: sum of the probabilities of all tokens, fp32, no graph; recognises the
            recompute.
        num_tokens: T.
        masks: masks of the forward, by name, kept because a recompute runs outside of it.
        scale: from slope to gradient: coefficient, 1/G and loss scale.
        counts: the counts it made, from which its slope follows; None if it was not counted.
        seen_backward: backward has reached this call.
        is_injected: its gradient was added.
    """

    prob_sum_E: Tensor
    num_tokens: int
    masks: Masks
    scale: Tensor | float
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
        record, balancer = self.record, self.router.balancer
        if record is None or not balancer.policy.injects or not self.router.is_trainable:
            return scores
        if not torch.is_grad_enabled():
            return scores

        def gradient() -> Tensor | None:
            # A forward with several outputs may see several backward passes, each through here.
            if record.is_injected or record.counts is None:
                return None
            record.is_injected = record.seen_backward = True
            return balancer.balance.slope(record.counts) * record.scale

        return inject(scores, self.probs_TE, gradient_E=gradient, valid_mask_T=self.valid_mask_T)

    def loss_at_gate(self, parent_l_aux: Tensor) -> Tensor:
        """What the gate returns as ``l_aux``: final, or a placeholder until :meth:`finish`."""
        if not self.router.balancer.policy.replaces_l_aux:
            return parent_l_aux
        if self.router.balancer.policy.coefficients is not None:
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
        counts = self.record.counts if self.record is not None else None
        if counts is None or self.prob_sum_E is None:
            return l_aux
        l_aux = torch.dot(self.router.balancer.balance.slope(counts), self.prob_sum_E)
        self.router.balancer.complaints.watch_gradient(l_aux)
        if counts.micro_step.used_L is not None and not _compat.in_backward():
            counts.micro_step.used_L[counts.layer] += l_aux.detach()
        return l_aux


class Router:
    """Link between one MoE layer and its LoadBalancer.

    Args:
        layer: what the layer is.
        balancer: the handle it belongs to.
        site: the router that is balanced.
    """

    def __init__(self, layer: RouterLayer, balancer: "LoadBalancer", site: RouterSite) -> None:
        self.layer = layer
        self.balancer = balancer
        self._site = site
        self._counted: deque[CallRecord] = deque(maxlen=_MAX_RECORDS)
        self._uncounted: deque[CallRecord] = deque(maxlen=_MAX_UNCOUNTED)

    @property
    def is_trainable(self) -> bool:
        """Whether the router takes a gradient at all."""
        return self._site.is_trainable

    @property
    def is_native(self) -> bool:
        """Whether the layer hands an `l_aux` to the script."""
        return self._site.has_l_aux

    @property
    def is_idle(self) -> bool:
        """Nothing is counted now, and no backward can follow: evaluation."""
        balancer = self.balancer
        return (
            balancer.micro_step is None and not balancer.may_recompute and not _compat.in_backward()
        )

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
        balancer, num_tokens = self.balancer, probs_TE.shape[0]
        in_backward = _compat.in_backward()
        # In both passes alike: selective checkpointing pairs their operations.
        prob_sum_E = loss.prob_sum(probs_TE.detach())
        record = self._recognise(prob_sum_E, num_tokens) if in_backward else None
        masks = record.masks if record else balancer.current_masks
        own_mask: Masks = () if used_token is None else (("used_token", used_token),)
        valid_mask_T = self._valid_mask(probs_TE, masks=own_mask + masks)
        if valid_mask_T is not None:
            counts_E = count(valid_mask_T)
        elif used_token is not None:  # valid_tokens "all": the host has left the masked ones out
            counts_E = count(torch.ones(num_tokens, dtype=torch.bool, device=probs_TE.device))
        else:
            counts_E = routed_counts_E
        if balancer.counting is not None and balancer.micro_step is not None:
            balancer.counting.add(balancer.micro_step, layer=self.layer.index, counts_E=counts_E)
        elif not in_backward:
            record = CallRecord(prob_sum_E, num_tokens, masks, scale=self._gradient_scale())
            if balancer.micro_step is not None:
                self._count(record, balancer.micro_step, probs_TE, valid_mask_T, counts_E)
            elif balancer.may_recompute:
                self._uncounted.append(record)
        is_counted = record is not None and record.counts is not None
        return RouterCall(self, record if is_counted else None, probs_TE, valid_mask_T, counts_E)

    def _gradient_scale(self) -> Tensor | float:
        policy = self.balancer.policy
        if not policy.injects or policy.coefficients is None:
            return 0.0
        return self.balancer.gradient_scale * policy.coefficients[self.layer.index]

    def _count(
        self,
        record: CallRecord,
        micro_step: MicroStep,
        probs_TE: Tensor,
        valid_mask_T: Tensor | None,
        counts_E: Tensor,
    ) -> None:
        layer = self.layer.index
        record.counts = self.balancer.balance.add_call(micro_step, counts_E, layer=layer)
        self._counted.append(record)
        if micro_step.prob_sum_F is not None:
            with torch.no_grad():
                where = self.balancer.layout.count_slices[layer]
                micro_step.prob_sum_F[where] += loss.prob_sum(probs_TE, valid_mask_T=valid_mask_T)

    def retire(self) -> None:
        """Forget the calls whose backward has run, and those of a forward that raised."""
        if any(not record.is_waiting for record in self._counted):
            waiting = [record for record in self._counted if record.is_waiting]
            self._counted = deque(waiting, maxlen=_MAX_RECORDS)

    def forget_all(self) -> None:
        """The window is over, and with it every backward that could follow."""
        self._counted.clear()
        self._uncounted.clear()

    def _recognise(self, prob_sum_E: Tensor, num_tokens: int) -> CallRecord | None:
        """The first pass of what is being recomputed: the nearest probabilities where several wait.

        They tell forwards apart whatever a near tie selects, unless two had the same tokens; then
        the one that was reached least so far is taken, which leaves the sum of their gradients
        as it is. Nested checkpoints ask for one call several times.
        """
        records = [r for r in (*self._counted, *self._uncounted) if r.num_tokens == num_tokens]
        if not records:
            return None
        records.sort(key=lambda record: (record.is_injected, record.seen_backward))
        nearest = 0
        if len(records) > 1:
            # NaN is as far from any number as can be, and next to itself.
            first_NE = torch.stack([record.prob_sum_E for record in records])
            distance_NE = first_NE.nan_to_num(nan=-1e9) - prob_sum_E.nan_to_num(nan=-1e9)
            nearest = int(distance_NE.abs().sum(dim=1).argmin())
        records[nearest].seen_backward = True
        return records[nearest]

    def _valid_mask(self, probs_TE: Tensor, *, masks: Masks) -> Tensor | None:
        if self.balancer.config.valid_tokens == "all":
            return None
        valid_mask_T: Tensor | None = None
        for name, mask in masks:
            if mask.numel() != probs_TE.shape[0]:
                raise ValueError(
                    f"moe_load_balancing: {name} has {mask.numel()} entries (shape "
                    f"{tuple(mask.shape)}), but the router of layer {self.layer.name!r} got "
                    f"{probs_TE.shape[0]} tokens on this rank; it needs one entry per token"
                )
            flat_T = mask.reshape(-1).to(probs_TE.device) != 0
            valid_mask_T = flat_T if valid_mask_T is None else valid_mask_T & flat_T
        return valid_mask_T
