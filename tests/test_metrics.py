"""Known counts to known numbers."""

import math

import pytest
import torch

from ds_moe_lb import max_violation
from ds_moe_lb.metrics import (
    dead_experts,
    load_entropy,
    max_selection_frequency,
    mutual_information,
)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 5, 5, 5], 0.0),
        ([8, 4, 4, 0], 1.0),  # mean 4, max 8
        ([16, 0, 0, 0], 3.0),  # E/k - 1 for k = 1
        ([0, 0, 0, 0], 0.0),
        ([2**40 + 2, 2**40 - 2], 2 / 2**40),  # beyond fp32
    ],
)
def test_max_violation(counts, expected):
    assert float(max_violation(torch.tensor(counts))) == pytest.approx(expected, rel=1e-12)


def test_load_entropy_is_one_when_even_and_zero_when_collapsed():
    assert float(load_entropy(torch.tensor([3, 3, 3]))) == pytest.approx(1.0, abs=1e-12)
    assert float(load_entropy(torch.tensor([9, 0, 0]))) == 0.0
    # two of four experts share the load: log 2 / log 4
    assert float(load_entropy(torch.tensor([4, 0, 4, 0]))) == pytest.approx(0.5, abs=1e-12)
    assert float(load_entropy(torch.tensor([7]))) == 1.0


def test_dead_experts():
    assert int(dead_experts(torch.tensor([3, 0, 1, 0]))) == 2
    assert int(dead_experts(torch.tensor([0, 0]))) == 0  # nothing was counted: nothing is known
    assert dead_experts(torch.tensor([[1, 0], [0, 0], [1, 1]])).tolist() == [1, 0, 0]


def test_mutual_information_of_disjoint_and_of_equal_domains():
    disjoint = torch.tensor([[10, 0, 0, 0], [0, 40, 0, 0], [0, 0, 7, 7]])
    assert mutual_information(disjoint) == pytest.approx(math.log(3), abs=1e-12)
    assert mutual_information(torch.tensor([[1, 3], [10, 30]])) == pytest.approx(0.0, abs=1e-12)


def test_mutual_information_by_hand_weighs_domains_equally():
    # p(e|a) = (1/2, 1/2), p(e|b) = (1, 0), p(e) = (3/4, 1/4)
    by_hand = 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2)) + 0.5 * math.log(4 / 3)
    assert mutual_information(torch.tensor([[50, 50], [3, 0]])) == pytest.approx(by_hand, abs=1e-12)


def test_mutual_information_leaves_out_domains_without_counts():
    assert mutual_information(torch.zeros(2, 3, dtype=torch.int64)) == 0.0
    assert mutual_information(torch.tensor([[4, 0], [0, 0], [0, 4]])) == pytest.approx(math.log(2))


def test_max_selection_frequency():
    assert max_selection_frequency(torch.tensor([[1, 3], [5, 5], [0, 0]])).tolist() == [
        0.75,
        0.5,
        0,
    ]
