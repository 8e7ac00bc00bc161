"""How a conversion is planned, split, scored and scaled, on tensors alone."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ds_moe_lb.convert.clustering import balanced_k_means, swap_until_no_gain
from ds_moe_lb.convert.gates import make_gate
from ds_moe_lb.convert.importance import ImportanceRecorder
from ds_moe_lb.convert.plan import ConversionOptions
from ds_moe_lb.convert.splits import (
    LayerSplit,
    disjoint_neurons,
    residual_neurons,
    split_layer,
    top_neurons,
)

NEURONS, WIDTH, EXPERTS = 48, 6, 4


def _split(seed: int = 1, **options: object) -> LayerSplit:
    """A split of random weights and scores."""
    generator = torch.Generator().manual_seed(3)
    return split_layer(
        ConversionOptions(num_experts=EXPERTS, top_k=2, seed=seed, **options),  # type: ignore
        layer=0,
        num_neurons=NEURONS,
        rows_HD=torch.randn(NEURONS, WIDTH, generator=generator),
        scores_EH=torch.rand(EXPERTS, NEURONS, generator=generator),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"split": "random"},
        {"split": "random", "num_shared_experts": 2},
        {"split": "cluster"},
        {"split": "importance"},
        {"split": "importance", "num_shared_experts": 2},
    ],
)
def test_every_split_without_overlaps_is_a_partition(options: dict[str, object]) -> None:
    split = _split(**options)
    shared = int(options.get("num_shared_experts", 0))  # type: ignore[call-overload]
    size = NEURONS // (EXPERTS + shared)
    assert split.experts_EM.shape == (EXPERTS, size)
    assert len(split.shared) == shared * size
    together = torch.cat([split.experts_EM.flatten(), split.shared])
    assert sorted(together.tolist()) == list(range(NEURONS))


@pytest.mark.parametrize("num_shared_experts", [0, 2])
def test_sum_of_experts_is_the_dense_ffn(num_shared_experts: int) -> None:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    gate, up, down, x = (
        draw(NEURONS, WIDTH),
        draw(NEURONS, WIDTH),
        draw(WIDTH, NEURONS),
        draw(7, WIDTH),
    )

    def ffn(neurons: torch.Tensor) -> torch.Tensor:
        hidden = functional.silu(x @ gate[neurons].T) * (x @ up[neurons].T)
        return hidden @ down[:, neurons].T

    split = _split(num_shared_experts=num_shared_experts)
    total = ffn(split.shared) + sum(ffn(neurons) for neurons in split.experts_EM)
    torch.testing.assert_close(total, ffn(torch.arange(NEURONS)), rtol=0, atol=1e-12)


def test_random_split_depends_on_seed_and_layer_only() -> None:
    assert torch.equal(_split(seed=1).experts_EM, _split(seed=1).experts_EM)
    assert not torch.equal(_split(seed=1).experts_EM, _split(seed=2).experts_EM)
    options = ConversionOptions(num_experts=EXPERTS, top_k=2)
    layers = [split_layer(options, layer=layer, num_neurons=NEURONS) for layer in (0, 1)]
    assert not torch.equal(layers[0].experts_EM, layers[1].experts_EM)


def test_clusters_are_balanced_and_found() -> None:
    """Four tight groups of twelve directions, in mixed order and with lengths from 1 to 100."""
    generator = torch.Generator().manual_seed(7)
    group = torch.arange(EXPERTS).repeat_interleave(12)[torch.randperm(48, generator=generator)]
    directions = torch.eye(EXPERTS, WIDTH)[group] + 0.05 * torch.randn(48, WIDTH)
    rows = directions * (1 + 99 * torch.rand(48, 1, generator=generator))
    labels = balanced_k_means(rows, num_clusters=EXPERTS, random=np.random.default_rng(0))
    assert torch.bincount(labels).tolist() == [12] * EXPERTS
    for cluster in range(EXPERTS):
        assert len(set(group[labels == cluster].tolist())) == 1


def test_uneven_groups_still_give_equal_clusters() -> None:
    rows = torch.cat(
        [torch.tensor([1.0, 0.0]).repeat(40, 1), torch.tensor([0.0, 1.0]).repeat(8, 1)]
    )
    labels = balanced_k_means(rows, num_clusters=4, random=np.random.default_rng(0))
    assert torch.bincount(labels).tolist() == [12, 12, 12, 12]


def test_swaps_between_two_clusters_end_at_the_cheapest_assignment() -> None:
    generator = torch.Generator().manual_seed(11)
    for _ in range(20):
        costs = torch.rand(8, 2, generator=generator)
        cheapest = min(
            sum(costs[row, int(row in ones)].item() for row in range(8))
            for ones in itertools.combinations(range(8), 4)
        )
        labels = swap_until_no_gain(costs, torch.tensor([0, 1] * 4))
        assert torch.bincount(labels).tolist() == [4, 4]
        cost = costs.gather(1, labels[:, None]).sum().item()
        assert cost == pytest.approx(cheapest, abs=1e-6)


def test_inner_sharing_takes_the_highest_scores_and_may_overlap() -> None:
    scores = torch.tensor([[9.0, 1.0, 8.0, 2.0], [9.0, 8.0, 1.0, 2.0]])
    assert top_neurons(scores, size=2).tolist() == [[0, 2], [0, 1]]


def test_disjoint_neurons_go_to_the_highest_score_first() -> None:
    """By hand: 9 gives neuron 0 to expert 1; 8 neuron 1 to expert 0; 7 has lost neuron 0; 6 gives
    neuron 2 to expert 0, which is full; neuron 3 remains for expert 1 (score 1)."""
    scores = torch.tensor([[7.0, 8.0, 6.0, 5.0], [9.0, 3.0, 2.0, 1.0]])
    assert disjoint_neurons(scores, size=2).tolist() == [[1, 2], [0, 3]]


def test_residual_neurons_are_those_that_most_experts_want() -> None:
    """By hand: the experts name {0,1}, {0,2} and {0,1}; neuron 0 has three votes. Of the rest they
    name {1,2}, {2,1} and {1,3}: neuron 1 has three."""
    scores = torch.tensor(
        [[9.0, 8.0, 3.0, 1.0, 0.0], [9.0, 6.0, 7.0, 1.0, 0.0], [9.0, 8.0, 1.0, 2.0, 0.0]]
    )
    assert residual_neurons(scores, size=2, num_shared=1).tolist() == [0]
    assert residual_neurons(scores, size=2, num_shared=2).tolist() == [0, 1]
    # Both neurons of one vote each: the higher sum of scores (4 against 3) comes first.
    apart = torch.tensor([[4.0, 0.0], [0.0, 3.0]])
    assert residual_neurons(apart, size=1, num_shared=1).tolist() == [0]


def test_residual_and_routed_neurons_are_disjoint_under_inner_sharing() -> None:
    split = _split(split="importance", sharing="inner", num_shared_experts=2, expert_size=10)
    assert split.experts_EM.shape == (EXPERTS, 10) and len(split.shared) == 20
    assert not set(split.shared.tolist()) & set(split.experts_EM.flatten().tolist())
    assert all(len(set(neurons)) == 10 for neurons in split.experts_EM.tolist())


def test_importance_against_a_gradient_by_hand() -> None:
    """Two neurons, two tokens, L = sum over tokens of y^2 / 2 with y = 3 h_0 - h_1.

    Token h = (1, 2): y = 1, dL/dh = y (3, -1) = (3, -1), |h dL/dh| = (3, 2).
    Token h = (2, 0): y = 6, dL/dh = (18, -6), |h dL/dh| = (36, 0).
    """
    down_proj = nn.Linear(2, 1, bias=False)
    down_proj.weight = nn.Parameter(torch.tensor([[3.0, -1.0]]), requires_grad=False)
    tokens = torch.tensor([[1.0, 2.0], [2.0, 0.0]])
    with ImportanceRecorder([down_proj]) as recorder:
        (down_proj(tokens).square().sum() / 2).backward()
    assert recorder.scores().tolist() == [[19.5, 1.0]]
    # The same as two batches, with the weights trainable: the mean over tokens stays.
    down_proj.requires_grad_(True)
    with ImportanceRecorder([down_proj]) as recorder:
        for token in tokens:
            (down_proj(token[None, None]).square().sum() / 2).backward()
    assert recorder.scores().tolist() == [[19.5, 1.0]]
    down_proj(tokens).sum().backward()  # outside: no hook is left
    assert recorder.scores().tolist() == [[19.5, 1.0]]


def test_gates() -> None:
    gate_proj = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    experts = torch.tensor([[0, 1], [2, 3]])

    def gate(**options: object) -> torch.Tensor:
        plan = ConversionOptions(num_experts=2, top_k=1, **options)  # type: ignore[arg-type]
        return make_gate(plan, layer=0, gate_proj_HD=gate_proj, experts_EM=experts)

    assert gate(gate_init="zero").tolist() == [[0.0, 0.0], [0.0, 0.0]]
    # By hand: means (3, 0) and (0, 2), centred (1.5, -1) and (-1.5, 1), and then a factor.
    mean = gate(gate_init="expert_mean", gate_std=0.5)
    torch.testing.assert_close(mean / mean[0, 0] * 1.5, torch.tensor([[1.5, -1.0], [-1.5, 1.0]]))
    assert mean.std().item() == pytest.approx(0.5) and mean[0, 0] > 0
    wide = ConversionOptions(num_experts=64, top_k=1, gate_std=0.1, seed=3)
    drawn = make_gate(
        wide, layer=0, gate_proj_HD=torch.zeros(64, 256).bfloat16(), experts_EM=experts
    )
    assert drawn.shape == (64, 256) and drawn.dtype == torch.bfloat16
    # 16,384 draws: the standard error of their standard deviation is 0.6 %.
    assert drawn.float().std().item() == pytest.approx(0.1, rel=0.03)


@pytest.mark.parametrize(("scale", "factor"), [("paper", 8 / 2), ("exact", 8.0), ("unit", 1.0)])
def test_scales(scale: str, factor: float) -> None:
    options = ConversionOptions(num_experts=8, top_k=2, scale=scale)  # type: ignore[arg-type]
    assert options.routed_factor == factor


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 1}, r"--num-experts: got 1, expected a number >= 2"),
        ({"top_k": 5}, r"--top-k: got 5, expected 1 to 4"),
        ({"split": "best"}, r"--split: got 'best', expected one of random, cluster, importance"),
        ({"sharing": "inner"}, r"--sharing: got 'inner', .* --split importance"),
        ({"num_shared_experts": -1}, r"--num-shared-experts: got -1"),
        ({"split": "cluster", "num_shared_experts": 1}, r"use --split random or importance"),
        ({"expert_size": 12}, r"--expert-size: got 12, .*--sharing inner"),
        ({"gate_std": 0.0}, r"--gate-std: got 0\.0, expected a number > 0"),
        ({"seed": -1}, r"--seed: got -1"),
    ],
)
def test_refused_options_say_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConversionOptions(**{"num_experts": 4, "top_k": 2, **options})  # type: ignore[arg-type]


def test_sizes_that_do_not_divide_name_numbers_that_do() -> None:
    options = ConversionOptions(num_experts=4, top_k=2, num_shared_experts=1)
    assert options.neurons_per_expert(50) == 10
    with pytest.raises(ValueError, match=r"48 neurons .* 5 does not divide; .* 2, 3, 4, 6, 8, 12"):
        options.neurons_per_expert(48)
    shared = {"split": "importance", "sharing": "inner", "num_shared_experts": 2}
    for size, expected in ((16, 16), (17, None)):
        plan = ConversionOptions(num_experts=4, top_k=2, expert_size=size, **shared)  # type: ignore
        if expected is None:
            with pytest.raises(ValueError, match=r"--expert-size: got 17, expected 1 to 16"):
                plan.neurons_per_expert(48)
        else:
            assert plan.neurons_per_expert(48) == expected
