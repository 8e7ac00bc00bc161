"""One MoE layer's side of the balancing: its calls are counted, or recognised as recomputes.

Shape legend: T tokens of this micro-batch on this rank, E experts of the layer.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_moe_lb import _compat, loss
from ds_moe_lb.counts import RouterLayer, count_selections
from ds_moe_lb.router_call import CallRecord, Masks, RouterCall, num_rows_of
from ds_moe_lb.selection_bias import SelectionBias
from ds_moe_lb.sites import RouterSite
from ds_moe_lb.window import MicroStep

if TYPE_CHECKING:
    from ds_moe_lb.balancer import LoadBalancer


# Forwards whose backward is still to come: one as a rule, a few in pipelines. A forward that is
# never followed by a backward stays until the window ends, so the number is bounded.
_MAX_RECORDS = 256
_MAX_UNCOUNTED = 16


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

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model is nobody's: its gates find None and are their parents."""

    @property
    def is_trainable(self) -> bool:
        """Whether the router takes a gradient at all."""
        return self._site.is_trainable

    @property
    def bias(self) -> SelectionBias | None:
        """The bias of its selection; None where it takes none."""
        return self._site.bias

    @property
    def wants_logits(self) -> bool:
        """Whether a z-loss will be added to the call that begins."""
        policy = self.balancer.policy
        if not policy.config.z_loss_coeff or self.is_idle or not torch.is_grad_enabled():
            return False
        return self.is_trainable

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
        select: Callable[[], Tensor],
        lse_T: Tensor | None = None,
    ) -> RouterCall:
        """Take in one pass through the router: count it, or recognise it as a recompute.

        Args:
            probs_TE: ``(T, E)`` router probabilities with their graph.
            routed_counts_E: ``(E,)`` int64 pre-drop counts as the host reports them.
            used_token: the host's mask, ``(T,)``, non-zero = counts.
            select: gives the ``(T, K)`` int64 experts of each token in this pass, before drops.
            lse_T: ``(T,)`` logsumexp of the clean logits with its graph, if :attr:`wants_logits`.
        """
        balancer, num_tokens = self.balancer, probs_TE.shape[0]
        in_backward = _compat.in_backward()
        # In both passes alike: selective checkpointing pairs their operations.
        prob_sum_E = loss.prob_sum(probs_TE.detach())
        record = self._recognise(prob_sum_E, num_tokens) if in_backward else None
        masks = record.masks if record else balancer.current_masks
        own_mask: Masks = () if used_token is None else (("used_token", used_token),)
        valid_mask_T = self._valid_mask(probs_TE, masks=own_mask + masks)
        num_rows = self._num_sequences(num_tokens)
        # With valid_tokens "all" the host's own counts leave the masked ones out.
        if valid_mask_T is not None or used_token is not None or num_rows is not None:
            counts = count_selections(
                select(),
                num_experts=self.layer.num_experts,
                valid_mask_T=valid_mask_T,
                num_rows=num_rows,
            )
        else:
            counts = routed_counts_E
        if balancer.counting is not None and balancer.micro_step is not None:
            balancer.counting.add(balancer.micro_step, layer=self.layer.index, counts_E=counts)
        elif not in_backward:
            record = CallRecord(prob_sum_E, num_tokens, masks, **self._gradient_scales())
            if balancer.micro_step is not None:
                self._count(record, balancer.micro_step, probs_TE, valid_mask_T, counts)
            elif balancer.may_recompute:
                self._uncounted.append(record)
        is_counted = record is not None and record.counts is not None
        return RouterCall(
            self, record if is_counted else None, probs_TE, valid_mask_T, counts, lse_T
        )

    def _num_sequences(self, num_tokens: int) -> int | None:
        """B of the layer's ``(B, S, M)`` input where each sequence is balanced, else None."""
        if self.balancer.policy.config.scope != "sequence":
            return None
        sequences = self._site.sequences
        if sequences is None or sequences[0] * sequences[1] != num_tokens:
            raise ValueError(
                f"moe_load_balancing.scope: 'sequence' needs the (B, S, M) input of layer "
                f"{self.layer.name!r}, but its router got {num_tokens} tokens and the input "
                + ("was of another form" if sequences is None else f"had (B, S) = {sequences}")
                + "; hand the layer whole sequences, or use scope 'micro_batch'"
            )
        return sequences[0]

    def _gradient_scales(self) -> dict[str, Any]:
        balancer, policy = self.balancer, self.balancer.policy
        if not policy.injects or policy.coefficients is None:
            return {"scale": 0.0}
        scale = balancer.gradient_scale
        z_loss_coeff = policy.config.z_loss_coeff
        return {
            "scale": scale * policy.coefficients[self.layer.index],
            "z_scale": scale * z_loss_coeff if z_loss_coeff else None,
        }

    def _count(
        self,
        record: CallRecord,
        micro_step: MicroStep,
        probs_TE: Tensor,
        valid_mask_T: Tensor | None,
        counts: Tensor,
    ) -> None:
        layer, balancer = self.layer.index, self.balancer
        record.counts = balancer.balance.add_call(micro_step, counts, layer=layer)
        self._counted.append(record)
        if micro_step.prob_sum_F is None or micro_step.used_L is None:
            return
        with torch.no_grad():
            where = balancer.layout.count_slices[layer]
            prob_sum = loss.prob_sum(
                probs_TE, valid_mask_T=valid_mask_T, num_rows=num_rows_of(counts)
            )
            micro_step.prob_sum_F[where] += prob_sum if prob_sum.dim() == 1 else prob_sum.sum(dim=0)
            if balancer.policy.adds_local_loss:
                slope = balancer.balance.local_slope(record.counts)
                micro_step.used_L[layer] += (slope * prob_sum).sum()

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
