"""What every adapter does with a call of a router whose logits and selections it can see.

Shape legend: T tokens of this micro-batch on this rank, E experts, K choices per token.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_moe_lb import loss
from ds_moe_lb.counts import count_selections

if TYPE_CHECKING:
    from ds_moe_lb.router import Router


def observe(
    router: "Router",
    scores: Tensor,
    *,
    logits_TE: Tensor,
    selected_TK: Tensor,
    score_function: str,
) -> Tensor:
    """Count a call and give its scores back, with the balancing gradient attached.

    Args:
        router: of the layer that was called.
        scores: what routing goes on with; must be on the way to the model's loss.
        logits_TE: ``(T, E)`` clean logits with their graph.
        selected_TK: ``(T, K)`` int64, the experts that were really chosen, before any is dropped.
        score_function: see :func:`ds_moe_lb.loss.router_probs`.

    Raises:
        RuntimeError: the shapes are not those the layer was installed with.
    """
    if router.is_idle:
        return scores
    layer = router.layer
    if logits_TE.shape[1] != layer.num_experts or selected_TK.shape[1] != layer.top_k:
        raise RuntimeError(
            f"moe_load_balancing: the router of layer {layer.name!r} has {logits_TE.shape[1]} "
            f"experts and chooses {selected_TK.shape[1]}, but had E={layer.num_experts} "
            f"k={layer.top_k} when the plugin was installed; install it after changing the model"
        )

    with torch.no_grad():
        routed_E = count_selections(selected_TK, num_experts=layer.num_experts)
    with torch.autocast(logits_TE.device.type, enabled=False):
        probs_TE = loss.router_probs(logits_TE, score_function=score_function)
        lse_T = None
        if router.wants_logits:
            lse_T = torch.logsumexp(logits_TE.to(probs_TE.dtype), dim=1)
        call = router.open_call(
            probs_TE,
            routed_counts_E=routed_E,
            used_token=None,
            select=lambda: selected_TK,
            lse_T=lse_T,
        )
        return call.inject_into(scores)
