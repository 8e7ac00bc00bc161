"""The autograd identity that adds the balancing gradient to the router's probabilities in backward.

f carries no gradient, so it is needed in backward only. A forward that cannot wait for its counts
(they are reduced when the whole model's forward has ended) passes its scores through
:func:`inject`; backward asks for the finished slope ``w E f`` then, and adds ``scale * slope`` to
the gradient of every valid token's probabilities. The softmax (or sigmoid) in front turns that
into the gradient of the logits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        probs_TE: Tensor,
        gradient_E: Callable[[], Tensor | None],
        valid_mask_T: Tensor | None,
    ) -> Tensor:
        ctx.gradient_E = gradient_E
        ctx.shape, ctx.dtype = probs_TE.shape, probs_TE.dtype
        ctx.valid_mask_T = valid_mask_T
        # A clone, never a view: autograd would turn a view of an input into that input itself.
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        gradient_E = ctx.gradient_E()
        if gradient_E is None:
            return grad_outputs[0], None, None, None
        grad_TE = gradient_E.to(ctx.dtype).expand(ctx.shape)
        if ctx.valid_mask_T is not None:
            grad_TE = torch.where(ctx.valid_mask_T.unsqueeze(1), grad_TE, 0.0)
        return grad_outputs[0], grad_TE, None, None


def inject(
    scores: Tensor,
    probs_TE: Tensor,
    *,
    gradient_E: Callable[[], Tensor | None],
    valid_mask_T: Tensor | None,
) -> Tensor:
    """Return the scores unchanged; in backward add a gradient to the probabilities.

    Args:
        scores: what routing goes on with, of any shape; must be on the way to the model's loss.
        probs_TE: ``(T, E)`` local router probabilities, with the graph that made them.
        gradient_E: called in each backward pass for the ``(E,)`` gradient of each valid row of
            ``probs_TE``, at the absolute scale of the parameter gradients, loss scale included;
            None = nothing (more) to add.
        valid_mask_T: ``(T,)`` bool, True = the token counts; None = all do.
    """
    return _Inject.apply(scores, probs_TE, gradient_E, valid_mask_T)
