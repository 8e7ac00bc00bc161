"""The autograd identity that adds the balancing gradients to a router's graph in backward.

f carries no gradient, so it is needed in backward only. A forward that cannot wait for its counts
(they are reduced when the whole model's forward has ended) passes its scores through
:func:`inject`; backward asks for the finished gradients then, and adds them to those of every valid
token's probabilities and, with a z-loss, of its ``logsumexp(logits)``. The softmax (or sigmoid) and
the logsumexp in front turn that into the gradient of the logits.

Shape legend: T tokens of this micro-batch on this rank, B sequences among them, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gradients:
    """What is added, at the absolute scale of the parameter gradients, loss scale included.

    Attributes:
        probs: of each valid token's probabilities: ``(E,)``, or ``(B, E)`` for its sequence's.
        z_weight: of each valid token's squared logsumexp: a scalar, or ``(B,)``; None without a
            z-loss.
    """

    probs: Tensor
    z_weight: Tensor | None = None


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        probs_TE: Tensor,
        lse_T: Tensor | None,
        gradients: Callable[[], Gradients | None],
        valid_mask_T: Tensor | None,
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.shape, ctx.dtype = probs_TE.shape, probs_TE.dtype
        ctx.valid_mask_T = valid_mask_T
        if lse_T is not None:
            ctx.save_for_backward(lse_T)
        # A clone, never a view: autograd would turn a view of an input into that input itself.
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        gradients = ctx.gradients()
        if gradients is None:
            return grad_outputs[0], None, None, None, None
        num_tokens = ctx.shape[0]
        grad_TE = gradients.probs.to(ctx.dtype)
        if grad_TE.dim() == 2:
            grad_TE = _of_tokens(grad_TE, num_tokens)
        grad_TE, grad_T = grad_TE.expand(ctx.shape), None
        if gradients.z_weight is not None:
            (lse_T,) = ctx.saved_tensors
            weight = gradients.z_weight.to(lse_T.dtype)
            if weight.dim() == 1:
                weight = _of_tokens(weight, num_tokens)
            grad_T = 2.0 * weight * lse_T
        if ctx.valid_mask_T is not None:
            grad_TE = torch.where(ctx.valid_mask_T.unsqueeze(1), grad_TE, 0.0)
            grad_T = None if grad_T is None else torch.where(ctx.valid_mask_T, grad_T, 0.0)
        return grad_outputs[0], grad_TE, grad_T, None, None


def _of_tokens(rows: Tensor, num_tokens: int) -> Tensor:
    """What belongs to a sequence, for each of its tokens."""
    length = num_tokens // max(rows.shape[0], 1)
    return rows.repeat_interleave(length, dim=0, output_size=num_tokens)


def inject(
    scores: Tensor,
    probs_TE: Tensor,
    *,
    gradients: Callable[[], Gradients | None],
    valid_mask_T: Tensor | None,
    lse_T: Tensor | None = None,
) -> Tensor:
    """Return the scores unchanged; in backward add gradients to probabilities and logits.

    Args:
        scores: what routing goes on with, of any shape; must be on the way to the model's loss.
        probs_TE: ``(T, E)`` local router probabilities, with the graph that made them.
        gradients: called in each backward pass for what to add; None = nothing (more).
        valid_mask_T: ``(T,)`` bool, True = the token counts; None = all do.
        lse_T: ``(T,)`` logsumexp of the clean logits with its graph; None without a z-loss.
    """
    return _Inject.apply(scores, probs_TE, lse_T, gradients, valid_mask_T)
