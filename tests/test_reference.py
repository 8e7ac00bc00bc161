"""The reference itself, against numbers worked by hand and against finite differences.

Most cases use one feature and two experts with W = (ln 3, 0): a token x = 1 has p = (3/4, 1/4) and
a token x = 0 has p = (1/2, 1/2).
"""

import math
import random

import pytest

import reference

LN3 = math.log(3.0)
ONE, ZERO = [1.0], [0.0]  # the two tokens


def _window(inputs, selections, valid=None, *, weight=((LN3,), (0.0,)), top_k=1):
    if valid is None:
        valid = [[[True] * len(tokens) for tokens in ranks] for ranks in inputs]
    return reference.Window(
        weight=[list(row) for row in weight],
        inputs=inputs,
        selections=selections,
        valid=valid,
        top_k=top_k,
    )


def test_softmax_of_ln3_is_three_quarters():
    assert reference.softmax([LN3, 0.0]) == pytest.approx([0.75, 0.25], abs=1e-15)


def test_one_rank_one_step():
    # Tokens 1, 0 both select expert 0: f = (1, 0); sum of p_0 = 3/4 + 1/2; w = 1/2.
    # share = 1/2 * 2 * 5/4 = 5/4.
    # Slope of logit 0: w E p_0 (1 - p_0): token 1 gives 3/16, and it alone has x != 0.
    result = reference.balance(_window([[[ONE, ZERO]]], [[[[0], [0]]]]), estimate="running")
    assert result.counts == [[[2, 0]]]
    assert result.expert_fraction == [[[1.0, 0.0]]]
    assert result.shares[0][0] == pytest.approx(1.25, abs=1e-15)
    assert result.losses[0] == pytest.approx(1.25, abs=1e-15)
    assert result.weight_grad[0][0] == pytest.approx(3 / 16, abs=1e-15)
    assert result.weight_grad[1][0] == pytest.approx(-3 / 16, abs=1e-15)
    # d/dx = slope_0 * ln 3 + slope_1 * 0; token 0 has slope 1/4.
    assert result.input_grads[0][0][0][0] == pytest.approx(3 / 16 * LN3, abs=1e-15)
    assert result.input_grads[0][0][1][0] == pytest.approx(1 / 4 * LN3, abs=1e-15)


def test_opposite_ranks_balance_each_other():
    # Rank 0: token 1 selects expert 0. Rank 1: token 0 selects expert 1. Global f = (1/2, 1/2), so
    # the loss is 1 and nothing pulls; each rank alone is collapsed: (3/4 + 1/2) * 2 / 2 = 5/4.
    window = _window([[[ONE], [ZERO]]], [[[[0]], [[1]]]])
    together = reference.balance(window, estimate="running")
    assert together.losses == pytest.approx([1.0], abs=1e-15)
    assert together.weight_grad[0][0] == pytest.approx(0.0, abs=1e-16)
    alone = reference.balance(window, estimate="micro_batch")
    # Shares: rank 0: 1 * 2 * 3/4; rank 1: 1 * 2 * 1/2.
    assert alone.shares == [pytest.approx([1.5, 1.0], abs=1e-15)]
    # Rank 0: 2 * 3/16, averaged over two ranks; rank 1 has x = 0.
    assert alone.weight_grad[0][0] == pytest.approx(3 / 16, abs=1e-15)
    # Groups of one rank are the same as micro_batch when G is 1.
    groups = reference.balance(window, estimate="running", groups=[[0], [1]])
    assert groups == alone


def test_running_sees_the_steps_so_far():
    # Step 1: token 1 selects expert 0, f = (1, 0): share 2 * 3/4 = 3/2.
    # Step 2: token 1 selects expert 1, f = (1/2, 1/2): share 1, no slope.
    # Gradient: (2 * 3/16 + 0) / G = 3/16.
    result = reference.balance(_window([[[ONE]], [[ONE]]], [[[[0]]], [[[1]]]]), estimate="running")
    assert result.expert_fraction == [[[1.0, 0.0]], [[0.5, 0.5]]]
    assert result.losses == pytest.approx([1.5, 1.0], abs=1e-15)
    assert result.weight_grad[0][0] == pytest.approx(3 / 16, abs=1e-15)


def test_boundary_sees_the_previous_window():
    # Previous: 2 steps x 1 token, all on expert 1: f = (0, 1), N_prev = 2, w = D G / N_prev = 1.
    # Each step: share 2 * 1/4; slope of logit 0 is 2 * 3/4 * (0 - 1/4) = -3/8; mean over G: -3/8.
    previous = _window([[[ONE]], [[ONE]]], [[[[1]]], [[[1]]]])
    window = _window([[[ONE]], [[ONE]]], [[[[0]]], [[[0]]]])
    result = reference.balance(window, estimate="boundary", previous=previous)
    assert result.losses == pytest.approx([0.5, 0.5], abs=1e-15)
    assert result.weight_grad[0][0] == pytest.approx(-3 / 8, abs=1e-15)
    first = reference.balance(window, estimate="boundary")
    assert first == reference.balance(window, estimate="running")


def test_carry_fills_up_with_the_previous_window():
    # Previous: 2 steps x 1 token, all on expert 1. Step 1: 2 (1, 0) + 1 (0, 2) = (2, 2), f = 1/2
    # each: share 1, no slope. Step 2: nothing is carried over, f = (1, 0): share 2 * 3/4.
    previous = _window([[[ONE]], [[ONE]]], [[[[1]]], [[[1]]]])
    window = _window([[[ONE]], [[ONE]]], [[[[0]]], [[[0]]]])
    result = reference.balance(window, estimate="carry", previous=previous)
    assert result.expert_fraction == [[[0.5, 0.5]], [[1.0, 0.0]]]
    assert result.losses == pytest.approx([1.0, 1.5], abs=1e-15)
    assert result.weight_grad[0][0] == pytest.approx(3 / 16, abs=1e-15)
    # A previous window of one step stands for one of its kind: 1 (1, 0) + 1 (0, 1).
    short = _window([[[ONE]]], [[[[1]]]])
    result = reference.balance(window, estimate="carry", previous=short)
    assert result.expert_fraction[0] == [[0.5, 0.5]]
    assert reference.balance(window, estimate="carry") == reference.balance(
        window, estimate="running"
    )


def test_hybrid_adds_the_micro_batch_loss():
    # running over both ranks: f = (1/2, 1/2): shares 1, no slope. Alone, f = (1, 0) and (0, 1):
    # 2 * 3/4 for the token x = 1 of rank 0, and 1 for x = 0.
    window = _window([[[ONE], [ZERO]]], [[[[0]], [[1]]]])
    result = reference.balance(window, estimate="running", micro_batch_weight=0.5)
    assert result.shares == [pytest.approx([1 + 0.75, 1 + 0.5], abs=1e-15)]
    assert result.weight_grad[0][0] == pytest.approx(0.5 * 3 / 16, abs=1e-15)


def test_z_loss_by_hand():
    # One token with logits (ln 3, 0): lse = ln 4, d lse^2 / d logit_0 = 2 ln 4 * 3/4.
    window = _window([[[ONE]]], [[[[0]]]])
    result = reference.balance(window, estimate="micro_batch", coeff=0.0, z_coeff=0.1)
    assert result.weight_grad[0][0] == pytest.approx(0.1 * 2 * math.log(4) * 3 / 4, abs=1e-15)


def test_sequences_are_balanced_each():
    # Three sequences of two tokens (the first with one valid, the last with none), all x = 1:
    # f = (1, 0) and (0, 1): mean of 2 * 3/4 and 2 * 1/4.
    selections = [[[[0], [1], [1], [1], [0], [0]]]]
    valid = [[[True, False, True, True, False, False]]]
    window = _window([[[ONE] * 6]], selections, valid)
    result = reference.balance(window, estimate="sequence", num_sequences=3)
    assert result.losses == pytest.approx([1.0], abs=1e-15)


def test_boundary_weighs_by_the_tokens_of_the_previous_window():
    # Previous window: 4 tokens over 2 ranks x 1 step, N_prev = 4, w = D G / N_prev = 1/2.
    # This window: one token on rank 0 and two on rank 1 (all x = 1, expert 0 before): shares
    # 1/2 * 2 * 3/4 * (1, 2), whatever N of this window is.
    previous = _window([[[ONE], [ONE] * 3]], [[[[0]], [[0]] * 3]])
    window = _window([[[ONE], [ONE] * 2]], [[[[1]], [[1]] * 2]])
    result = reference.balance(window, estimate="boundary", previous=previous)
    assert result.shares == [pytest.approx([0.75, 1.5], abs=1e-15)]


def test_uneven_ranks_weigh_tokens_equally():
    # Rank 0 has one token, rank 1 three; all x = 1 on expert 0. D / N = 2/4: shares
    # 1/2 * 2 * 3/4 * T. The mean over ranks is the loss of all tokens on one process: 2 * 3/4.
    window = _window([[[ONE], [ONE] * 3]], [[[[0]], [[0]] * 3]])
    result = reference.balance(window, estimate="running")
    assert result.shares == [pytest.approx([0.75, 2.25], abs=1e-15)]
    one_process = _window([[[ONE] * 4]], [[[[0]] * 4]])
    whole = reference.balance(one_process, estimate="running")
    assert result.losses == pytest.approx(whole.losses, abs=1e-15)
    assert result.weight_grad[0] == pytest.approx(whole.weight_grad[0], abs=1e-15)


def test_masked_tokens_are_as_if_absent():
    mask = [[[True, False, True]]]
    masked = reference.balance(
        _window([[[ONE, ONE, ZERO]]], [[[[0], [1], [0]]]], mask), estimate="running"
    )
    absent = reference.balance(_window([[[ONE, ZERO]]], [[[[0], [0]]]]), estimate="running")
    assert masked.counts == absent.counts
    assert masked.shares == absent.shares
    assert masked.weight_grad == absent.weight_grad
    assert masked.input_grads[0][0][1] == [0.0]


def test_no_valid_token_gives_zero():
    window = _window([[[ONE], [ONE]]], [[[[0]], [[0]]]], [[[False], [False]]])
    for estimate in ("running", "micro_batch", "boundary"):
        result = reference.balance(window, estimate=estimate, previous=window)
        assert result.shares == [[0.0, 0.0]]
        assert result.weight_grad == [[0.0], [0.0]]


def test_uniform_is_one_and_collapse_is_experts_over_k():
    # W = 0: p uniform whatever x. Any f gives 1. For collapse make p follow the two chosen experts.
    flat = _window([[[ONE] * 4]], [[[[0, 1], [2, 3], [0, 1], [2, 3]]]], weight=[[0.0]] * 4, top_k=2)
    assert reference.balance(flat, estimate="running").losses == pytest.approx([1.0], abs=1e-15)
    collapsed = _window(
        [[[ONE] * 4]], [[[[0, 1]] * 4]], weight=[[50.0], [50.0], [0.0], [0.0]], top_k=2
    )
    losses = reference.balance(collapsed, estimate="running").losses
    assert losses == pytest.approx([4 / 2], abs=1e-12)


def test_groups_weigh_equally():
    # Group A = rank 0 with 3 tokens, group B = rank 1 with 1 token: f = (1, 0) in both, losses 3/2
    # each, and the mean over ranks is 3/2 whatever the token numbers.
    window = _window([[[ONE] * 3, [ONE]]], [[[[0]] * 3, [[0]]]])
    result = reference.balance(window, estimate="running", groups=[[0], [1]])
    assert result.shares == [pytest.approx([1.5, 1.5], abs=1e-15)]
    # Four ranks in two groups of two: D = 2 inside a group, N = 4 in the first, 2 in the second.
    window = _window([[[ONE] * 3, [ONE], [ONE], [ONE]]], [[[[0]] * 3, [[0]], [[0]], [[0]]]])
    result = reference.balance(window, estimate="running", groups=[[0, 1], [2, 3]])
    assert result.shares == [pytest.approx([2.25, 0.75, 1.5, 1.5], abs=1e-15)]
    assert result.losses == pytest.approx([1.5], abs=1e-15)


@pytest.mark.parametrize("estimate", ["running", "boundary", "micro_batch"])
def test_gradients_against_finite_differences(estimate):
    # f does not depend on W when the selections are given, so the loss itself can be differenced.
    rng = random.Random(7)
    num_ranks, num_steps, num_experts, width, top_k = 2, 3, 4, 3, 2

    def draw():
        sizes = [[rng.randint(1, 4) for _ in range(num_ranks)] for _ in range(num_steps)]
        inputs = [[[[rng.gauss(0, 1) for _ in range(width)] for _ in range(n)] for n in row]
                  for row in sizes]  # fmt: skip
        selections = [[[rng.sample(range(num_experts), top_k) for _ in range(n)] for n in row]
                      for row in sizes]  # fmt: skip
        valid = [[[rng.random() < 0.8 for _ in range(n)] for n in row] for row in sizes]
        return inputs, selections, valid

    weight = [[rng.gauss(0, 1) for _ in range(width)] for _ in range(num_experts)]
    previous = _window(*draw(), weight=weight, top_k=top_k)
    inputs, selections, valid = draw()

    def total(weight, inputs):
        window = _window(inputs, selections, valid, weight=weight, top_k=top_k)
        result = reference.balance(window, estimate=estimate, previous=previous)
        return sum(result.losses) / num_steps

    window = _window(inputs, selections, valid, weight=weight, top_k=top_k)
    result = reference.balance(window, estimate=estimate, previous=previous, coeff=3.0)
    step = 1e-6
    for e in range(num_experts):
        for i in range(width):
            up, down = [row[:] for row in weight], [row[:] for row in weight]
            up[e][i] += step
            down[e][i] -= step
            slope = 3.0 * (total(up, inputs) - total(down, inputs)) / (2 * step)
            assert result.weight_grad[e][i] == pytest.approx(slope, abs=2e-9)
    for m in range(num_steps):
        for r in range(num_ranks):
            for t in range(len(inputs[m][r])):
                for i in range(width):
                    value = inputs[m][r][t][i]
                    inputs[m][r][t][i] = value + step
                    above = total(weight, inputs)
                    inputs[m][r][t][i] = value - step
                    below = total(weight, inputs)
                    inputs[m][r][t][i] = value
                    # An input's gradient is not averaged over ranks, the total is.
                    slope = 3.0 * num_ranks * (above - below) / (2 * step)
                    assert result.input_grads[m][r][t][i] == pytest.approx(slope, abs=2e-9)
