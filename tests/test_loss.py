"""The pure mathematics of ``ds_moe_lb.loss``: hand-worked numbers, oracles, the fp64 reference."""

import math

import pytest
import torch
from torch import Tensor

import reference
from ds_moe_lb.loss import (
    expert_fraction,
    load_balancing_loss,
    local_slope,
    mean_prob,
    router_z_loss,
)


def _loss(counts: list[int], probs_TE: Tensor, valid_mask_T: Tensor | None = None) -> Tensor:
    """LBL of given counts and probabilities in the dtype of the probabilities."""
    return load_balancing_loss(
        expert_fraction_E=expert_fraction(torch.tensor(counts), dtype=probs_TE.dtype),
        mean_prob_E=mean_prob(probs_TE, valid_mask_T=valid_mask_T),
    )


def _case(seed: int, num_tokens: int = 9, num_experts: int = 5, width: int = 3, top_k: int = 2):
    """Random fp64 logits = x W^T with the selections of the largest k, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_experts, width, generator=generator, dtype=torch.float64)
    x = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    selections = (x @ weight.T).topk(top_k, dim=1).indices
    valid = torch.rand(num_tokens, generator=generator) < 0.7
    return weight, x, selections, valid


# ---- expert_fraction


def test_expert_fraction_by_hand():
    # Counts 6 and 2 of 8: 3/4 and 1/4. A divisor of one micro-batch (2 x 2) would give 1.5 and 0.5.
    assert expert_fraction(torch.tensor([6, 2])).tolist() == [0.75, 0.25]
    assert expert_fraction(torch.tensor([0, 3, 1, 0])).tolist() == [0.0, 0.75, 0.25, 0.0]


def test_expert_fraction_dtype_and_sum():
    counts = torch.tensor([3, 1, 7, 2, 0, 11])
    assert expert_fraction(counts).dtype == torch.float32
    fraction = expert_fraction(counts, dtype=torch.float64)
    assert fraction.dtype == torch.float64
    assert fraction.sum().item() == pytest.approx(1.0, abs=1e-15)
    assert fraction.tolist() == pytest.approx(reference.fraction(counts.tolist()), abs=1e-15)


def test_expert_fraction_of_nothing_is_zero():
    assert expert_fraction(torch.zeros(3, dtype=torch.int64)).tolist() == [0.0, 0.0, 0.0]


def test_counts_above_2_to_the_24_stay_exact():
    # float32 cannot tell 2^24 from 2^24 + 1: float32 counts would give equal shares.
    n = 2**24
    fraction = expert_fraction(torch.tensor([n, n + 1]), dtype=torch.float64)
    assert fraction[0].item() == pytest.approx(n / (2 * n + 1), rel=1e-15)
    assert fraction[1].item() == pytest.approx((n + 1) / (2 * n + 1), rel=1e-15)
    # A sum that int32 cannot hold, and that float32 would round.
    big = torch.tensor([2**31 + 1, 2**31 + 3, 2**31 + 5, 2**31 + 7])
    expected = reference.fraction(big.tolist())
    assert expert_fraction(big, dtype=torch.float64).tolist() == pytest.approx(expected, rel=1e-15)
    assert expert_fraction(torch.tensor([n + 1, 0])).tolist() == [1.0, 0.0]


# ---- mean_prob


def test_mean_prob_by_hand():
    probs = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]])
    # All: (1.375, 1.625) / 3. First and last only: (0.875, 1.125) / 2.
    assert mean_prob(probs).tolist() == pytest.approx([1.375 / 3, 1.625 / 3], rel=1e-6)
    mask = torch.tensor([True, False, True])
    assert mean_prob(probs, valid_mask_T=mask).tolist() == [0.4375, 0.5625]


def test_mean_prob_keeps_fp64():
    weight, x, _, valid = _case(0)
    probs = (x @ weight.T).softmax(dim=1)
    mean = mean_prob(probs, valid_mask_T=valid)
    assert mean.dtype == torch.float64
    torch.testing.assert_close(mean, mean_prob(probs[valid]), rtol=0, atol=1e-15)
    assert mean.sum().item() == pytest.approx(1.0, abs=1e-14)


def test_mean_prob_sums_half_precision_in_fp32():
    # bf16 has 8 bits: a bf16 running sum of 1000 halves stops growing at 128 or 256.
    mean = mean_prob(torch.full((1000, 2), 0.5, dtype=torch.bfloat16))
    assert mean.tolist() == pytest.approx([0.5, 0.5], abs=1e-6)


# ---- load_balancing_loss


def test_loss_by_hand():
    # E = 2, f = (3/4, 1/4), P = (5/8, 3/8): 2 * (15/32 + 3/32) = 9/8.
    loss = load_balancing_loss(
        expert_fraction_E=torch.tensor([0.75, 0.25]), mean_prob_E=torch.tensor([0.625, 0.375])
    )
    assert loss.shape == ()
    assert loss.item() == 1.125


def test_one_is_no_lower_bound():
    # Many select expert 0 by a hair, the rest is sure of expert 1: f = (3/4, 1/4), P = (.4, .6).
    loss = load_balancing_loss(
        expert_fraction_E=torch.tensor([0.75, 0.25]), mean_prob_E=torch.tensor([0.4, 0.6])
    )
    assert loss.item() == pytest.approx(2 * (0.3 + 0.15))


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_uniform_is_one_for_any_k(top_k):
    # Oracle (j): E = 8, k = 2 gives 1.0, where losses that do not divide by k give 2.0.
    num_experts, tokens_per_expert = 8, 3 * top_k
    probs = torch.full((24, num_experts), 1 / num_experts, dtype=torch.float64)
    assert _loss([tokens_per_expert] * num_experts, probs).item() == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_collapse_is_experts_over_k(top_k):
    # All 10 tokens select the same k of 8 experts, with all probability on them.
    chosen = torch.zeros(8, dtype=torch.float64)
    chosen[:top_k] = 1 / top_k
    counts = [10] * top_k + [0] * (8 - top_k)
    assert _loss(counts, chosen.expand(10, 8)).item() == pytest.approx(8 / top_k, abs=1e-14)


def test_oracle_specialised_micro_batches():
    # Four micro-batches, each all on its own expert with p = (.97, .01, .01, .01), E = 4, k = 1:
    # micro 4 * .97 = 3.88 each; global f is uniform, so 1.00.
    num_tokens = 5
    micro, over_all = [], []
    for expert in range(4):
        p = torch.full((4,), 0.01, dtype=torch.float64)
        p[expert] = 0.97
        probs = p.expand(num_tokens, 4)
        micro.append(_loss([num_tokens if e == expert else 0 for e in range(4)], probs).item())
        over_all.append(_loss([num_tokens] * 4, probs).item())
    assert sum(micro) / 4 == pytest.approx(3.88, abs=1e-12)
    assert sum(over_all) / 4 == pytest.approx(1.00, abs=1e-12)


def test_oracle_layers_are_not_pooled():
    # Two layers collapsed on opposite experts, p = (.99, .01): per layer 2 * .99 = 1.98; pooled 1.
    first = torch.tensor([[0.99, 0.01]], dtype=torch.float64).expand(6, 2)
    second = first.flip(1)
    per_layer = (_loss([6, 0], first) + _loss([0, 6], second)) / 2
    assert per_layer.item() == pytest.approx(1.98, abs=1e-12)
    assert _loss([6, 6], torch.cat([first, second])).item() == pytest.approx(1.00, abs=1e-12)


def test_oracle_padding():
    # 8 real tokens balanced over 4 experts, 8 padding tokens on expert 0 with p_0 = .97.
    # Unmasked: f = (10, 2, 2, 2) / 16, P_0 = (.25 + .97) / 2 = .61, and
    # 4 (.625 * .61 + .125 * .39) = 1.72.
    real = torch.full((8, 4), 0.25, dtype=torch.float64)
    padding = torch.tensor([[0.97, 0.01, 0.01, 0.01]], dtype=torch.float64).expand(8, 4)
    probs = torch.cat([real, padding])
    mask = torch.arange(16) < 8
    assert _loss([2, 2, 2, 2], probs, mask).item() == pytest.approx(1.00, abs=1e-12)
    assert _loss([10, 2, 2, 2], probs).item() == pytest.approx(1.72, abs=1e-12)


def test_oracle_softmax_is_applied_once():
    # Logits (8, 0, 0, 0): 4 e^8 / (e^8 + 3) = 3.996; a second softmax on top would give 1.90.
    probs = torch.tensor([[8.0, 0, 0, 0]]).expand(7, 4).softmax(dim=1)
    assert _loss([7, 0, 0, 0], probs).item() == pytest.approx(4.00, abs=5e-3)
    assert _loss([7, 0, 0, 0], probs.softmax(dim=1)).item() == pytest.approx(1.90, abs=5e-3)


def test_gradient_flows_through_p_only():
    fraction = torch.tensor([0.75, 0.25], requires_grad=True)
    mean = torch.tensor([0.6, 0.4], requires_grad=True)
    load_balancing_loss(expert_fraction_E=fraction, mean_prob_E=mean).backward()
    assert fraction.grad is None
    assert mean.grad.tolist() == pytest.approx([1.5, 0.5])  # E f


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_loss_and_gradient_equal_the_reference_in_fp64(seed, top_k):
    weight, x, selections, valid = _case(seed, top_k=top_k)
    window = reference.Window(
        weight=weight.tolist(),
        inputs=[[x.tolist()]],
        selections=[[selections.tolist()]],
        valid=[[valid.tolist()]],
        top_k=top_k,
    )
    expected = reference.balance(window, estimate="micro_batch")

    weight.requires_grad_()
    x.requires_grad_()
    probs = (x @ weight.T).softmax(dim=1)
    loss = _loss(expected.counts[0][0], probs, valid)
    loss.backward()
    assert loss.item() == pytest.approx(expected.losses[0], abs=1e-12)
    _assert_close(weight.grad, expected.weight_grad)
    _assert_close(x.grad, expected.input_grads[0][0])


def _assert_close(actual: Tensor, expected: list[list[float]]) -> None:
    assert (actual - torch.tensor(expected, dtype=torch.float64)).abs().max().item() <= 1e-12


def test_gradcheck():
    weight, x, selections, valid = _case(11)
    counts = torch.bincount(selections[valid].flatten(), minlength=weight.shape[0])

    def loss(logits: Tensor) -> Tensor:
        probs = logits.softmax(dim=1)
        return load_balancing_loss(
            expert_fraction_E=expert_fraction(counts, dtype=torch.float64),
            mean_prob_E=mean_prob(probs, valid_mask_T=valid),
        )

    logits = (x @ weight.T).requires_grad_()
    assert torch.autograd.gradcheck(loss, (logits,))


# ---- router_z_loss


def test_z_loss_by_hand():
    # logsumexp(ln 1, ln 3) = ln 4 and logsumexp(0, 0) = ln 2.
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]], dtype=torch.float64)
    first, second = math.log(4.0) ** 2, math.log(2.0) ** 2
    assert router_z_loss(logits).item() == pytest.approx((first + second) / 2, abs=1e-14)
    mask = torch.tensor([True, False])
    assert router_z_loss(logits, valid_mask_T=mask).item() == pytest.approx(first, abs=1e-14)


def test_z_loss_gradient():
    # d/d logit_a of lse^2 / T is 2 lse p_a / T; a masked token gets exactly nothing.
    weight, x, _, valid = _case(5)
    logits = (x @ weight.T).requires_grad_()
    router_z_loss(logits, valid_mask_T=valid).backward()
    rows = logits.detach().tolist()
    for t, row in enumerate(rows):
        lse = math.log(math.fsum(math.exp(value) for value in row))
        for p, slope in zip(reference.softmax(row), logits.grad[t].tolist(), strict=True):
            expected = 2 * lse * p / int(valid.sum()) if valid[t] else 0.0
            assert slope == pytest.approx(expected, abs=1e-14)
    assert torch.autograd.gradcheck(
        lambda z: router_z_loss(z, valid_mask_T=valid), (logits.detach().requires_grad_(),)
    )


# ---- nothing to balance


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_no_valid_token_is_zero_attached_and_not_nan(num_tokens):
    logits = torch.randn(num_tokens, 3, requires_grad=True)
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    balancing = _loss([0, 0, 0], logits.softmax(dim=1), mask)
    z = router_z_loss(logits, valid_mask_T=mask)
    assert balancing.item() == 0.0
    assert z.item() == 0.0
    (balancing + z).backward()  # it must still be part of a graph
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_no_token_and_no_mask_is_zero():
    logits = torch.randn(0, 3, requires_grad=True)
    assert _loss([0, 0, 0], logits.softmax(dim=1)).item() == 0.0
    assert router_z_loss(logits).item() == 0.0
    assert mean_prob(logits.softmax(dim=1)).tolist() == [0.0, 0.0, 0.0]


def test_sequence_slopes_by_hand():
    """E = 2, k = 1; three sequences of 4, 2 and no valid tokens: R = 2."""
    counts = torch.tensor([[3, 1], [0, 2], [0, 0]])
    # E f / (R N): 2 (3/4, 1/4) / 8; 2 (0, 1) / 4; nothing
    expected = [[0.1875, 0.0625], [0.0, 0.5], [0.0, 0.0]]
    assert local_slope(counts, top_k=1).tolist() == expected
    # One sequence is the micro-batch.
    one = torch.tensor([[5, 1]])
    assert local_slope(one, top_k=2).tolist() == [local_slope(one[0], top_k=2).tolist()]
