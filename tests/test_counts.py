"""The window in one process: the flat layout, the positions, and w E f against numbers by hand."""

from fractions import Fraction

import pytest
import torch

from ds_moe_lb.counts import CountLayout, RouterLayer, count_selections, describe_position, position
from ds_moe_lb.sync import CountGroup, PositionCheck, check_positions
from ds_moe_lb.window import Carried, CompleteWindow, Window

LAYERS = (RouterLayer(0, "a", 2, 1), RouterLayer(1, "b", 3, 2))


@pytest.fixture
def layout():
    return CountLayout(LAYERS, torch.device("cpu"))


def test_selections_are_counted_per_sequence():
    selected = torch.tensor([[0, 1], [0, 2], [1, 2], [2, 0]])
    valid = torch.tensor([True, True, False, True])
    assert count_selections(selected, num_experts=3).tolist() == [3, 2, 3]
    assert count_selections(selected, num_experts=3, valid_mask_T=valid).tolist() == [3, 1, 2]
    rows = count_selections(selected, num_experts=3, valid_mask_T=valid, num_rows=2)
    assert rows.tolist() == [[2, 1, 1], [1, 0, 1]]
    empty = count_selections(selected[:0], num_experts=3, num_rows=2)
    assert empty.tolist() == [[0, 0, 0], [0, 0, 0]]
    no_sequence = count_selections(selected[:0], num_experts=3, num_rows=0)
    assert no_sequence.shape == (0, 3)


def test_sums_and_maxima_per_layer(layout):
    flat = torch.tensor([1, 2, 3, 4, 5])
    assert layout.per_layer_sum(flat).tolist() == [3, 12]
    assert layout.per_layer_max(flat).tolist() == [2, 5]
    assert layout.num_tokens(flat).tolist() == [3.0, 6.0]


@pytest.mark.parametrize("calls", [[1, 1, 1], [2, 1, 1], [1, 0, 1]])
def test_message_carries_counts_and_positions(calls):
    """A layer left out in the middle once travelled as if it had been called."""
    layout = CountLayout((*LAYERS, RouterLayer(2, "c", 2, 1)), torch.device("cpu"))
    counts = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    where = layout.positions(micro_step=3, calls=calls)
    message = layout.pack(counts, where, rank=2)
    unpacked, headers = layout.unpack(message)
    assert unpacked.tolist() == counts.tolist()
    assert headers.tolist() == [[x, x * x, 2 * x] for x in where]
    one_layer = layout.pack_layer(counts[:2], where[0], rank=2)
    assert one_layer.tolist() == message[:5].tolist()


def test_positions_differ_for_any_other_call():
    seen = {
        position(micro_step=m, call=call, layer=layer, num_layers=3)
        for m in range(1, 5)
        for call in range(1, 4)
        for layer in range(3)
    }
    assert len(seen) == 4 * 3 * 3
    x = position(micro_step=4, call=2, layer=1, num_layers=2)
    assert describe_position(x, LAYERS) == "micro-step 4, call 2 of layer 'b'"


def test_running_slopes_by_hand(layout):
    """D = 2; layer a: k = 1, counts (3, 1) then (0, 4); layer b: k = 2, counts (2, 2, 4)."""
    window, num_ranks = Window(layout), torch.tensor([2, 2])
    first = window.begin_micro_step()
    first.calls = [1, 1]
    slopes = window.running_slopes(first, torch.tensor([3, 1, 2, 2, 4]), num_ranks_L=num_ranks)
    # w E f: a: 2/4 * 2 * (3/4, 1/4); b: N = 8/2 = 4, 2/4 * 3 * (1/4, 1/4, 1/2)
    assert slopes.tolist() == [0.75, 0.25, 0.375, 0.375, 0.75]
    second = window.begin_micro_step()
    second.calls = [1, 0]
    slopes = window.running_slopes(second, torch.tensor([0, 4, 0, 0, 0]), num_ranks_L=num_ranks)
    # a: f of both micro-steps (3/8, 5/8), N of the second alone; b: no token, so nothing
    assert slopes.tolist() == [0.375, 0.625, 0.0, 0.0, 0.0]


def test_f_is_divided_by_all_the_selections_it_counts_not_by_those_of_this_micro_step(layout):
    """6 tokens, then 2, in shares of 3/4 and 1/4: the divisor of another framework gave 1.5 and 0.5
    at the second, and another gradient for every other split of the same tokens.
    """
    window, num_ranks = Window(layout), torch.tensor([1, 1])
    for counts, num_tokens in ([6, 0], 6), ([0, 2], 2):
        micro_step = window.begin_micro_step()
        micro_step.calls = [1, 0]
        slopes = window.running_slopes(
            micro_step, torch.tensor([*counts, 0, 0, 0]), num_ranks_L=num_ranks
        )
        f = slopes[:2] * num_tokens / 2  # w E f with w = 1 / N_m, E = 2
        assert f.sum().item() == 1.0
    assert f.tolist() == [0.75, 0.25]


def test_carry_slopes_by_hand(layout):
    """D = 2, G = 2; before: 4 micro-steps, a (0, 8). Now a: (3, 1), then (0, 4) twice."""
    before = CompleteWindow(torch.tensor([0, 8, 0, 0, 0]), [2.0, 2.0], 4)
    window, num_ranks, carried = Window(layout), torch.tensor([2, 2]), Carried(before, 2)
    # m = 1: 4 (3, 1) + 1 (0, 8) = (12, 12); m = 2: (3, 5); m = 3, beyond G: (3, 9); w = 2/4, E = 2
    for counts, expected in (
        ([3, 1, 2, 2, 4], [0.5, 0.5, 0.375, 0.375, 0.75]),
        ([0, 4, 0, 0, 0], [0.375, 0.625, 0.0, 0.0, 0.0]),
        ([0, 4, 2, 2, 4], [0.25, 0.75, 0.375, 0.375, 0.75]),
    ):
        micro_step = window.begin_micro_step()
        micro_step.calls = [1, 1]
        slope = Window.running_slope(
            _copy_of(window),
            window.begin_micro_step(),
            layer=0,
            global_counts_E=torch.tensor(counts[:2]),
            num_ranks=2,
            carried=carried,
        )
        slopes = window.running_slopes(
            micro_step, torch.tensor(counts), num_ranks_L=num_ranks, carried=carried
        )
        window.end_micro_step(micro_step)
        assert slopes.tolist() == expected
        assert slope.tolist() == expected[:2]


def _copy_of(window):
    copy = Window(window.layout)
    copy.global_F = window.global_F.clone()
    return copy


def test_one_layer_alone_gives_the_same_slope(layout):
    together, alone = Window(layout), Window(layout)
    num_ranks = torch.tensor([2, 2])
    for counts in ([3, 1, 2, 2, 4], [0, 4, 6, 0, 0]):
        micro_step = together.begin_micro_step()
        micro_step.calls = [1, 1]
        flat = together.running_slopes(micro_step, torch.tensor(counts), num_ranks_L=num_ranks)
        by_layer = alone.begin_micro_step()
        for layer, where in enumerate(layout.count_slices):
            slope = alone.running_slope(
                by_layer, layer=layer, global_counts_E=torch.tensor(counts)[where], num_ranks=2
            )
            torch.testing.assert_close(slope, flat[where], rtol=1e-6, atol=0)
        alone.end_micro_step(by_layer)


def test_boundary_slopes_by_hand(layout):
    """w = D G / N_prev with D = 2, G = 4; f over the previous window."""
    previous = CompleteWindow(torch.tensor([6, 2, 0, 0, 0]), [1.0, 1.0], 4)
    slopes = previous.slopes(layout, num_ranks_L=torch.tensor([2, 2]), gas=4)
    # a: N = 8, w = 1, E f = 2 * (3/4, 1/4); b: an empty window balances nothing
    assert slopes.tolist() == [1.5, 0.5, 0.0, 0.0, 0.0]


def test_a_short_window_stands_for_a_full_one(layout):
    """Half a window of N = 8 tokens: a full one would have had 16, so w = 2 * 4 / 16."""
    previous = CompleteWindow(torch.tensor([6, 2, 0, 0, 0]), [0.5, 0.5], 4)
    slopes = previous.slopes(layout, num_ranks_L=torch.tensor([2, 2]), gas=4)
    assert slopes.tolist() == [0.75, 0.25, 0.0, 0.0, 0.0]


def test_counts_stay_exact_beyond_fp32(layout):
    window = Window(layout)
    big = 2**24 + 1
    for _ in range(3):
        micro_step = window.begin_micro_step()
        window.add(micro_step, layer=0, counts_E=torch.tensor([big, 1]))
        window.end_micro_step(micro_step)
    assert window.local_F.tolist() == [3 * big, 3, 0, 0, 0]
    assert window.local_F.dtype == torch.int64


@pytest.mark.parametrize("how", ["together", "by layer"])
def test_the_sum_of_running_is_exact_beyond_fp32_and_its_f_is_rounded_once(layout, how):
    """2^24 selections, then one of each expert at a time: an fp32 sum would stand still.

    f of every micro-step is the exact fraction, rounded to fp32 a single time.
    """
    window = Window(layout)
    counts = torch.tensor([2**24, 1, 0, 0, 0])
    for m in range(60):
        micro_step = window.begin_micro_step()
        micro_step.calls = [1, 0]
        if how == "together":
            slopes = window.running_slopes(micro_step, counts, num_ranks_L=torch.tensor([2, 2]))[:2]
        else:
            slopes = window.running_slope(
                micro_step, layer=0, global_counts_E=counts[:2], num_ranks=2
            )
        window.end_micro_step(micro_step)
        so_far = [2**24 + m, 1 + m]
        assert window.global_F.tolist() == [*so_far, 0, 0, 0]
        # w E f with w = D / N_m, D = 2, E = 2
        exact = [Fraction(2 * 2 * n, int(counts.sum()) * sum(so_far)) for n in so_far]
        assert slopes.tolist() == torch.tensor([float(x) for x in exact]).tolist()
        counts = torch.tensor([1, 1, 0, 0, 0])


def summed(positions: list[int], ranks: list[int]) -> torch.Tensor:
    rows = torch.tensor([[x, x * x, rank * x] for x, rank in zip(positions, ranks, strict=True)])
    return rows.sum(dim=0, keepdim=True)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [4, 6, 9], [0, 1]])
def test_agreeing_ranks_pass(ranks):
    x = position(micro_step=2, call=1, layer=0, num_layers=2)
    check = PositionCheck(summed([x] * len(ranks), ranks), [x], [0])
    groups = [CountGroup(tuple(ranks), None, len(ranks))] * 2
    check_positions([check], rank=ranks[0], groups=groups, layers=LAYERS)


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("steps", [-1, 1])
def test_the_rank_that_is_elsewhere_is_named_on_every_rank(odd, steps):
    ranks = [0, 1, 2, 3]
    here = position(micro_step=2, call=1, layer=0, num_layers=2)
    there = position(micro_step=2 + steps, call=1, layer=0, num_layers=2)
    positions = [there if rank == odd else here for rank in ranks]
    groups = [CountGroup(tuple(ranks), None, 4)] * 2
    for rank in ranks:
        check = PositionCheck(summed(positions, ranks), [positions[rank]], [0])
        with pytest.raises(RuntimeError, match="disagree at layer 'a'") as caught:
            check_positions([check], rank=rank, groups=groups, layers=LAYERS)
        if rank == odd:
            assert f"rank {odd} was at micro-step {2 + steps}" in str(caught.value)
        else:
            assert f"rank {odd} was at micro-step {2 + steps}, call 1" in str(caught.value)
            assert f"rank {rank} at micro-step 2" in str(caught.value)
