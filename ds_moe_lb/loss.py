"""The load-balancing mathematics: pure functions, no process group, no state, no DeepSpeed.

Shape legend: T tokens of one micro-batch on this rank, E experts of one MoE layer.

For one layer with top-k routing::

    f_i = tokens_per_expert_i / sum_j tokens_per_expert_j     (sums to 1, no gradient)
    P_i = mean over valid tokens of probs_ti                  (carries the gradient)
    LBL = E * sum_i f_i P_i

which is 1 when balanced and E/k when every token selects the same k experts. The micro-batch form
is that of Switch Transformers (arXiv 2101.03961, eq. 4-6); taking f over the *global batch*
instead is "Demons in the Detail" (arXiv 2501.11873). f divides by the number of selections, so the
balanced value is 1 for every k.
"""

import torch
from torch import Tensor


def expert_fraction(tokens_per_expert_E: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The share f of all selections that each expert received.

    Args:
        tokens_per_expert_E: ``(E,)`` int64 counts of (token, choice) pairs over whatever batch f is
            meant for: local or already summed over ranks and micro-steps.
        dtype: floating dtype of the result; the division itself is done in fp64.

    Returns:
        ``(E,)``; sums to 1, or all zeros when nothing was counted.
    """
    total = tokens_per_expert_E.sum().clamp(min=1)
    return (tokens_per_expert_E.double() / total.double()).to(dtype)


def prob_sum(
    probs_TE: Tensor, *, valid_mask_T: Tensor | None = None, num_rows: int | None = None
) -> Tensor:
    """Sum of router probabilities over this rank's valid tokens.

    Args:
        probs_TE: ``(T, E)`` router probabilities over all experts, local.
        valid_mask_T: ``(T,)`` bool, True = the token counts; None = all do.
        num_rows: B, to sum over each of B sequences of equal length.

    Returns:
        ``(E,)``, or ``(B, E)`` with rows; fp32, or fp64 for fp64 input. What is masked gets an
        exactly zero gradient.
    """
    if valid_mask_T is not None:
        probs_TE = torch.where(valid_mask_T.unsqueeze(1), probs_TE, 0.0)
    dtype = torch.promote_types(probs_TE.dtype, torch.float32)
    if num_rows is None:
        return probs_TE.sum(dim=0, dtype=dtype)
    per_row = (num_rows, probs_TE.shape[0] // max(num_rows, 1), probs_TE.shape[1])
    return probs_TE.reshape(per_row).sum(dim=1, dtype=dtype)


def mean_prob(probs_TE: Tensor, *, valid_mask_T: Tensor | None = None) -> Tensor:
    """The mean router probability P over this rank's valid tokens.

    Args:
        probs_TE: ``(T, E)`` router probabilities over all experts, local.
        valid_mask_T: ``(T,)`` bool, True = the token counts; None = all do.

    Returns:
        ``(E,)``; zeros when no token is valid.
    """
    total_E = prob_sum(probs_TE, valid_mask_T=valid_mask_T)
    if valid_mask_T is None:
        return total_E / max(probs_TE.shape[0], 1)
    return total_E / valid_mask_T.sum().clamp(min=1)


def load_balancing_loss(*, expert_fraction_E: Tensor, mean_prob_E: Tensor) -> Tensor:
    """``E * sum_i f_i P_i``: 1 when balanced, E/k when collapsed; 1 is no lower bound.

    Args:
        expert_fraction_E: f, ``(E,)``, from :func:`expert_fraction` over the batch that is
            balanced.
        mean_prob_E: P, ``(E,)``, from :func:`mean_prob`.

    Returns:
        Scalar. The gradient flows through P only.
    """
    return expert_fraction_E.numel() * torch.dot(
        expert_fraction_E.detach().to(mean_prob_E.dtype), mean_prob_E
    )


def balance_slope(tokens_per_expert_E: Tensor, *, token_weight: Tensor) -> Tensor:
    """The finished vector ``w * E * f``: slope of a rank's balancing term in its sum of
    probabilities.

    A micro-batch supplies ``sum_i slope_i * prob_sum_i``; the engine then divides by D and G.
    Keeping the slope, and nothing else, is what lets a recomputed forward repeat its first pass
    exactly.

    Args:
        tokens_per_expert_E: ``(E,)`` int64 counts that define f, summed over the balance batch.
        token_weight: scalar w, for instance ``D / N_m``; 0 where no token was valid.

    Returns:
        ``(E,)`` fp32, no gradient.
    """
    slope_E = tokens_per_expert_E.numel() * expert_fraction(
        tokens_per_expert_E, dtype=torch.float64
    )
    return (token_weight.double() * slope_E).float()


def local_slope(counts_E: Tensor, *, top_k: int) -> Tensor:
    """``E f / N`` of this rank's micro-batch alone: the slope of the micro-batch loss, ``(E,)``
    fp32; with rows that of the sequences' own losses.

    Args:
        counts_E: ``(E,)`` int64 local counts over valid tokens; or ``(B, E)``.
        top_k: selections per token.
    """
    if counts_E.dim() == 2:
        return sequence_slopes(counts_E, top_k=top_k)
    num_tokens = counts_E.sum().double() / top_k
    return balance_slope(counts_E, token_weight=token_weight(num_tokens, numerator=1))


def sequence_slopes(counts_BE: Tensor, *, top_k: int) -> Tensor:
    """``E f / (R N)`` of each sequence alone, ``(B, E)`` fp32: the slopes of the mean loss of those
    R sequences that have a valid token.

    Args:
        counts_BE: ``(B, E)`` int64 local counts over valid tokens.
        top_k: selections per token.
    """
    selections_B1 = counts_BE.sum(dim=1, keepdim=True).double()
    num_rows = (selections_B1 > 0).sum().clamp(min=1)
    weight_B1 = token_weight(selections_B1 / top_k * num_rows, numerator=1)
    fraction_BE = counts_BE.double() / selections_B1.clamp(min=1)
    return (counts_BE.shape[1] * weight_B1 * fraction_BE).float()


def token_weight(num_tokens: Tensor, *, numerator: float | Tensor) -> Tensor:
    """The weight w of one token's probabilities, in fp64; 0 where there are no tokens.

    Args:
        num_tokens: integer or fp64 tensor N of any shape, summed over the balance group.
        numerator: D, or D * G where N spans the whole window; broadcast against ``num_tokens``.
    """
    num_tokens = num_tokens.double()
    return torch.where(num_tokens > 0, numerator / num_tokens.clamp(min=1.0), 0.0)


def router_probs(logits_TE: Tensor, *, score_function: str) -> Tensor:
    """The probabilities P is made of: softmax, or another score over its sum over all experts.

    Args:
        logits_TE: ``(T, E)`` router logits, local; probabilities already for "probabilities".
        score_function: "softmax", "sigmoid" (DeepSeek-V3), "sqrt_softplus" (DeepSeek-V4) or
            "probabilities".

    Returns:
        ``(T, E)`` fp32 (fp64 for fp64 input), rows sum to 1, with the graph of the logits.
    """
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if score_function == "softmax":
        return torch.softmax(logits_TE, dim=-1)
    if score_function == "sigmoid":
        scores_TE = torch.sigmoid(logits_TE)
    elif score_function == "sqrt_softplus":
        scores_TE = torch.nn.functional.softplus(logits_TE).sqrt()
    else:
        assert score_function == "probabilities"
        scores_TE = logits_TE
    # Scores that all underflow would be a token without probabilities; no expert is preferred then.
    return scores_TE / scores_TE.sum(dim=-1, keepdim=True).clamp(min=1e-20)


def router_z_loss(logits_TE: Tensor, *, valid_mask_T: Tensor | None = None) -> Tensor:
    """Mean over valid tokens of ``logsumexp(logits)^2`` (ST-MoE, arXiv 2202.08906, eq. 5).

    Args:
        logits_TE: ``(T, E)`` router logits, local.
        valid_mask_T: ``(T,)`` bool, True = the token counts; None = all do.

    Returns:
        Scalar; 0 when no token is valid.
    """
    dtype = torch.promote_types(logits_TE.dtype, torch.float32)
    squared_T = torch.logsumexp(logits_TE.to(dtype), dim=1).square()
    if valid_mask_T is None:
        return squared_T.sum() / max(squared_T.numel(), 1)
    return torch.where(valid_mask_T, squared_T, 0.0).sum() / valid_mask_T.sum().clamp(min=1)
