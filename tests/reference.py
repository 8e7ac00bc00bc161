"""The reference of the balancing gradient: one process, fp64, python loops, nothing clever.

Written from the mathematics alone; imports neither torch nor the package under test. One call
looks at one MoE layer over one accumulation window. The selections are an *input* (the recorded
ones), so near ties cannot make the reference disagree.

Indices: m micro-step, r rank, t token, c choice, e expert, i feature. ``x[m][r]`` is a list of
token rows. Per token the router is ``logits_e = sum_i W_ei x_ti + b_e`` and ``p_e = s_e / Z`` with
the score ``s`` of a logit and ``Z = sum_e s_e``; with ``s = exp`` that is the softmax.

What a rank's micro-batch supplies to its backward is

    share = coeff * w * E * sum_e f_e * (sum over valid t of p_te)

and the engine divides the sum over micro-steps by G and, for a replicated weight, the sum over
ranks by D. f carries no gradient, and ``d p_te / d logit_ta = ([e = a] - p_te) s'_ta / Z_t``, hence

    d share / d logit_ta = coeff * w * E * s'_ta / Z_t * (f_a - sum_e f_e p_te)  for valid t, else 0
    d share / d W_ai     = sum_t d share / d logit_ta * x_ti
    d share / d x_ti     = sum_a d share / d logit_ta * W_ai

A hybrid adds ``micro_batch_weight`` times the same with the micro-batch's own f and 1 / N. A z-loss
adds ``z_coeff * w * lse_t^2`` for each valid token, lse the log of the sum of exp(logit), whose
derivative by logit_ta is ``2 z_coeff w lse_t softmax_ta``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Row = Sequence[float]


@dataclass(frozen=True)
class Window:
    """What one layer's router saw in one window; every list is ``[micro-step][rank]``."""

    weight: Sequence[Row]  # (E, M)
    inputs: Sequence[Sequence[Sequence[Row]]]  # then [token][feature]
    selections: Sequence[Sequence[Sequence[Sequence[int]]]]  # then [token][choice] -> expert
    valid: Sequence[Sequence[Sequence[bool]]]  # then [token]
    top_k: int
    bias: Row | None = None  # (E,)
    score_function: str = "softmax"  # or "sigmoid"

    @property
    def num_experts(self) -> int:
        return len(self.weight)

    @property
    def num_micro_steps(self) -> int:
        return len(self.inputs)

    @property
    def num_ranks(self) -> int:
        return len(self.inputs[0])


@dataclass(frozen=True)
class Result:
    """The reference's answer for one layer and one window."""

    counts: list[list[list[int]]]  # [m][r][e]: selections by valid tokens
    expert_fraction: list[list[list[float]]]  # [m][r][e]: the f that rank r used
    shares: list[list[float]]  # [m][r]: what native l_aux shows, no coefficient
    losses: list[float]  # [m]: mean of the shares over ranks
    weight_grad: list[list[float]]  # (E, M): as the engine leaves it
    bias_grad: list[float]  # (E,): likewise
    input_grads: list[list[list[list[float]]]]  # [m][r][t][i]: of share / G, not averaged over D


def softmax(logits: Row) -> list[float]:
    """The probabilities of one token."""
    return probabilities(logits, "softmax")[0]


def probabilities(logits: Row, score_function: str) -> tuple[list[float], list[float]]:
    """``p_e`` and ``s'_e / Z`` of one token."""
    if score_function == "softmax":
        top = max(logits)
        scores = [math.exp(value - top) for value in logits]
        slopes = scores
    else:
        assert score_function == "sigmoid"
        scores = [1.0 / (1.0 + math.exp(-value)) for value in logits]
        slopes = [s * (1.0 - s) for s in scores]
    total = math.fsum(scores)
    return [s / total for s in scores], [s / total for s in slopes]


def count(
    selections: Sequence[Sequence[int]], valid: Sequence[bool], num_experts: int
) -> list[int]:
    """How often each expert was selected by the valid tokens."""
    counts = [0] * num_experts
    for experts, counts_at_all in zip(selections, valid, strict=True):
        if counts_at_all:
            for expert in experts:
                counts[expert] += 1
    return counts


def fraction(counts: Sequence[int]) -> list[float]:
    """f: the counts divided by their sum; zeros when nothing was counted."""
    total = sum(counts)
    return [n / total if total else 0.0 for n in counts]


def add(*all_counts: Sequence[int]) -> list[int]:
    """Elementwise sum."""
    return [sum(column) for column in zip(*all_counts, strict=True)]


def window_counts(window: Window) -> list[list[int]]:
    """Per rank the selections of the whole window: ``[r][e]``."""
    per_rank = []
    for r in range(window.num_ranks):
        total = [0] * window.num_experts
        for m in range(window.num_micro_steps):
            selections, valid = window.selections[m][r], window.valid[m][r]
            total = add(total, count(selections, valid, window.num_experts))
        per_rank.append(total)
    return per_rank


def balance(
    window: Window,
    *,
    estimate: str,
    previous: Window | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    coeff: float = 1.0,
    gas: int | None = None,
    micro_batch_weight: float = 0.0,
    z_coeff: float = 0.0,
    num_sequences: int = 1,
) -> Result:
    """Loss, counts and gradients of one layer over one window.

    Args:
        estimate: 'running' (counts of micro-steps 1..m), 'boundary' (counts of ``previous``, the
            last complete window; None yet: as 'running'), 'carry' (G times micro-steps 1..m and
            G - m times ``previous``; likewise), 'exact' (counts of this whole window),
            'micro_batch' (own counts and mean) or 'sequence' (own counts and mean of each of
            ``num_sequences`` equal parts of the tokens, mean over those with a valid token).
        groups: the ranks that share counts, a partition; None = all ranks are one group.
        coeff: factor on the loss, applied to the gradients and not to ``shares`` and ``losses``.
        gas: G where the window is shorter or longer; matters to 'carry' only.
    """
    num_ranks, num_steps, num_experts = window.num_ranks, window.num_micro_steps, window.num_experts
    gas = gas or num_steps
    if groups is None:
        groups = [list(range(num_ranks))]
    if estimate in ("boundary", "carry") and previous is None:
        estimate = "running"

    counts = [
        [count(window.selections[m][r], window.valid[m][r], num_experts) for r in range(num_ranks)]
        for m in range(num_steps)
    ]
    weight_grad = [[0.0] * len(row) for row in window.weight]
    bias_grad = [0.0] * num_experts
    bias = window.bias or [0.0] * num_experts
    all_fractions, shares, input_grads = [], [], []

    for m in range(num_steps):
        fractions_m, shares_m, input_grads_m = [], [], []
        for r in range(num_ranks):
            group = next(g for g in groups if r in g)
            # f and the weight w of one token.
            if estimate == "running":
                seen = add(*[counts[step][rank] for step in range(m + 1) for rank in group])
                tokens = sum(sum(counts[m][rank]) for rank in group) / window.top_k
                numerator = float(len(group))
            elif estimate == "carry":
                assert previous is not None
                before = window_counts(previous)
                rest = max(gas - (m + 1), 0)
                seen = [
                    sum(counts[step][rank][e] for step in range(m + 1) for rank in group)
                    * previous.num_micro_steps
                    + rest * sum(before[rank][e] for rank in group)
                    for e in range(num_experts)
                ]
                tokens = sum(sum(counts[m][rank]) for rank in group) / window.top_k
                numerator = float(len(group))
            elif estimate in ("boundary", "exact"):
                whole = window if estimate == "exact" else previous
                assert whole is not None
                before = window_counts(whole)
                seen = add(*[before[rank] for rank in group])
                tokens = sum(seen) / window.top_k
                numerator = float(len(group) * num_steps)
            elif estimate in ("micro_batch", "sequence"):
                seen = counts[m][r]
                tokens = sum(seen) / window.top_k
                numerator = 1.0
            else:
                raise ValueError(f"unknown estimate {estimate!r}")
            f = fraction(seen)
            w = numerator / tokens if tokens else 0.0

            num_tokens = len(window.inputs[m][r])
            terms = [[(f, w)] for _ in range(num_tokens)]  # for each token
            if estimate == "sequence":
                terms = _sequence_terms(window, m, r, num_sequences)
            z_weights = [of_token[0][1] for of_token in terms]
            own = sum(counts[m][r]) / window.top_k
            if micro_batch_weight and own:
                for of_token in terms:
                    of_token.append((fraction(counts[m][r]), micro_batch_weight / own))

            share = 0.0
            input_grads_mr: list[list[float]] = []
            for t, x in enumerate(window.inputs[m][r]):
                if not window.valid[m][r][t]:
                    input_grads_mr.append([0.0] * len(x))
                    continue
                logits = [_dot(row, x) + b for row, b in zip(window.weight, bias, strict=True)]
                p, p_slope = probabilities(logits, window.score_function)
                slope = [0.0] * num_experts
                for f_t, w_t in terms[t]:
                    mean_f = _dot(f_t, p)
                    share += w_t * num_experts * mean_f
                    for e in range(num_experts):
                        slope[e] += coeff * w_t * num_experts * p_slope[e] * (f_t[e] - mean_f)
                if z_coeff:
                    top = max(logits)
                    lse = top + math.log(math.fsum(math.exp(value - top) for value in logits))
                    for e in range(num_experts):
                        slope[e] += z_coeff * z_weights[t] * 2.0 * lse * math.exp(logits[e] - lse)
                for e in range(num_experts):
                    bias_grad[e] += slope[e] / (num_ranks * num_steps)
                    for i in range(len(x)):
                        weight_grad[e][i] += slope[e] * x[i] / (num_ranks * num_steps)
                input_grads_mr.append(
                    [
                        _dot(slope, [window.weight[e][i] for e in range(num_experts)]) / num_steps
                        for i in range(len(x))
                    ]
                )
            fractions_m.append(f)
            shares_m.append(share)
            input_grads_m.append(input_grads_mr)
        all_fractions.append(fractions_m)
        shares.append(shares_m)
        input_grads.append(input_grads_m)

    return Result(
        counts=counts,
        expert_fraction=all_fractions,
        shares=shares,
        losses=[sum(shares_m) / num_ranks for shares_m in shares],
        weight_grad=weight_grad,
        bias_grad=bias_grad,
        input_grads=input_grads,
    )


def _sequence_terms(
    window: Window, m: int, r: int, num_sequences: int
) -> list[list[tuple[list[float], float]]]:
    """For each token f and w of its sequence."""
    selections, valid = window.selections[m][r], window.valid[m][r]
    length = len(valid) // num_sequences
    pieces = [range(b * length, (b + 1) * length) for b in range(num_sequences)]
    number = sum(any(valid[t] for t in piece) for piece in pieces)
    terms = []
    for piece in pieces:
        counts = count(
            [selections[t] for t in piece], [valid[t] for t in piece], window.num_experts
        )
        tokens = sum(valid[t] for t in piece)
        w = 1.0 / (number * tokens) if tokens else 0.0
        terms += [[(fraction(counts), w)] for _ in piece]
    return terms


def _dot(a: Row, b: Row) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
