"""Recomputed forwards, and arithmetic that is not plain fp32: engines against the reference."""

from dataclasses import replace

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from engine_grid import Batch
from models import TinyMoE
from ranks import run_ranks
from window_runs import BASE, Script, batches, of_run, ways, wrong

pytestmark = pytest.mark.ranks


def _train(script: Script, num_windows: int = 2) -> list:
    num = script.cell.gradient_accumulation_steps
    records = [
        script.window(batches(script.cell, window=window, num=num)) for window in range(num_windows)
    ]
    script.finish()
    return records


# ------------------------------------------------------------------------------------------------
# Recompute


class Recomputed(TinyMoE):
    """Checkpoints its blocks by DeepSpeed's own function, or in checkpoints of checkpoints."""

    how = "deepspeed"

    def forward(self, x, used_token=None):
        h = self.project(x)
        if self.how == "deepspeed":
            losses = []
            for block in self.blocks:
                h, l_aux = deepspeed.checkpointing.checkpoint(block, h, used_token)
                losses.append(l_aux)
        else:
            outer, inner = (how == "reentrant" for how in self.how.split("/"))
            h, *losses = checkpoint(self._both, h, used_token, inner, use_reentrant=outer)
        return self.head(h).squeeze(-1), losses

    def _both(self, h, used_token, inner):
        losses = []
        for block in self.blocks:
            h, l_aux = checkpoint(block, h, used_token, use_reentrant=inner)
            losses.append(l_aux)
        return h, *losses


HOW = (
    "deepspeed",
    "reentrant/reentrant",
    "reentrant/non_reentrant",
    "non_reentrant/reentrant",
    "non_reentrant/non_reentrant",
)


def _check_recompute(runs):
    deepspeed.checkpointing.configure(None, deepspeed_config=None)
    return [_train_recomputed(*run) for run in runs]


def _train_recomputed(cell, how):
    torch.manual_seed(42)
    script = Script(cell, model=Recomputed(k=cell.top_k))
    script.model.how = how
    return _train(script)


@pytest.mark.parametrize("how", HOW)
def test_recompute_does_not_count_twice_in_deepspeeds_own_and_nested_checkpoints(how):
    cells = ways(tokens="masked", zero_stage=2)
    cells[0] = replace(cells[0], zero_stage=0)
    runs = [(cell, how) for cell in cells]
    results = run_ranks(_check_recompute, 2, runs, timeout_s=120)
    for index, (cell, _) in enumerate(runs):
        assert wrong(cell, of_run(results, index)) == [], str(cell)


# The near tie: experts 0 and 1 differ by one weight only, whose feature is tiny and changes its
# sign between the pass and its recompute. Their logits then differ by +1e-6 and -1e-6, a few
# roundings, and the gradients of everything but that feature by less than the tolerance.
TIE = 1e-3


def _plant_near_tie(model, seen):
    def shifted(gate, args):
        x, *others = args
        is_recompute = torch._C._current_graph_task_id() != -1
        shift = torch.zeros_like(x)
        shift[:, 0] = (-TIE if is_recompute else TIE) - x.detach()[:, 0]
        return x + shift, *others

    def count(gate, args, outputs):
        seen[torch._C._current_graph_task_id() != -1].append(outputs[-1].tolist())

    with torch.no_grad():
        for gate in model.gates():
            weight = gate.wg.weight
            weight[1] = weight[0]
            weight[:, 0] = 0.0
            weight[1, 0] = TIE
            gate.register_forward_pre_hook(shifted)
            gate.register_forward_hook(count)


def _check_near_ties(cells):
    return [_train_near_ties(cell) for cell in cells]


def _train_near_ties(cell):
    seen = {False: [], True: []}
    torch.manual_seed(42)
    model = TinyMoE(k=cell.top_k, checkpointing=cell.checkpointing)
    script = Script(cell, model=model, prepare=lambda model: _plant_near_tie(model, seen), lr=0.0)
    records = _train(script, num_windows=1)
    moved = [sorted(seen[False]) != sorted(seen[True]), len(seen[False]) == len(seen[True])]
    return records, moved


def test_a_recompute_that_routes_differently_uses_f_of_the_first_pass():
    cells = [
        replace(BASE, mechanism=mechanism, checkpointing=mode, top_k=top_k, zero_stage=0)
        for mechanism in ("l_aux", "injection")
        for mode in ("reentrant", "non_reentrant")
        for top_k in (1, 2)
    ]
    results = run_ranks(_check_near_ties, 2, cells, timeout_s=120)
    for index, cell in enumerate(cells):
        per_rank = [records for records, _ in of_run(results, index)]
        assert all(moved == [True, True] for _, moved in of_run(results, index)), str(cell)
        assert wrong(cell, per_rank, without_column=0) == [], str(cell)


# ------------------------------------------------------------------------------------------------
# Precision


def _check_half(runs):
    return [_train(Script(cell, **extra)) for cell, extra in runs]


@pytest.mark.parametrize(
    ("extra", "tolerance"),
    [
        # Each gradient is rounded to 8 bits once in a micro-step, and in the sums over two
        # micro-steps and two ranks: four roundings of 2^-9, of partial sums up to twice the result.
        pytest.param({"bf16": {"enabled": True}}, 8 * 2**-9, id="bf16"),
        # Logits up to 8 in bf16 are off by 2^-6, the probabilities by as much of themselves, and
        # a gradient p (f - sum f p) by up to twice that.
        pytest.param(
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 2 * 2**-6, id="autocast"
        ),
    ],
)
def test_half_precision(extra, tolerance):
    runs = [(cell, extra) for stage in (1, 2) for cell in ways(tokens="masked", zero_stage=stage)]
    results = run_ranks(_check_half, 2, runs, timeout_s=120)
    for index, (cell, _) in enumerate(runs):
        assert wrong(cell, of_run(results, index), tolerance=tolerance) == [], str(cell)


def _check_loss_scale(cells):
    return [[_train_scaled(cell, scale) for scale in (1, 1024)] for cell in cells]


def _train_scaled(cell, scale):
    script = Script(cell)
    script.engine.optimizer.override_loss_scale(scale)
    records = _train(script)
    return records, [p.detach().clone() for p in script.model.parameters()]


def test_a_loss_scale_changes_nothing_once_it_is_taken_out():
    """fp16's way of scaling; by a power of two, so that every bit must be the same."""
    cells = ways(tokens="uneven")[::2] + ways(tokens="uneven", zero_stage=2)[1:3]
    for rank_results in run_ranks(_check_loss_scale, 2, cells, timeout_s=120):
        for cell, (plain, scaled) in zip(cells, rank_results, strict=True):
            for window in range(2):
                grads = zip(plain[0][window].grads, scaled[0][window].grads, strict=True)
                assert all(torch.equal(a * 1024, b) for a, b in grads), str(cell)
            assert all(torch.equal(a, b) for a, b in zip(plain[1], scaled[1], strict=True))


def _check_overflow(cells):
    return [_train_overflow(cell) for cell in cells]


def _train_overflow(cell):
    """Three windows; in the second, one token on one rank is NaN and the step is skipped."""
    script = Script(cell)
    records = []
    for window in range(3):
        window_batches = batches(cell, window=window, num=2)
        if window == 1 and dist.get_rank() == 1:
            window_batches[0] = _with_nan(window_batches[0])
        records.append(script.window(window_batches))
        assert script.engine.skipped_steps == (window > 0)
        if window == 1:
            assert all(grad.isnan().any() for grad in records[-1].grads)
            num_tokens = sum(batch.x[..., 0].numel() for batch in window_batches)
            assert [sum(n) for n in records[-1].counts] == [cell.top_k * num_tokens] * 2
        assert all(torch.isfinite(p).all() for p in script.model.parameters())
    script.finish()
    return records


def _with_nan(batch: Batch) -> Batch:
    x = batch.x.clone()
    x[0, 0] = float("nan")
    return replace(batch, x=x)


def test_a_skipped_step_discards_its_window():
    """Also for `boundary`, whose third window takes f from the first."""
    cells = ways() + ways(zero_stage=2)[1:3]
    results = run_ranks(_check_overflow, 2, cells, timeout_s=120)
    for index, cell in enumerate(cells):
        assert wrong(cell, of_run(results, index), discarded=[1]) == [], str(cell)


MANY = 2**28 + 1  # fp32 does not know this number, int32 not the sum of eight of them


def _check_many(cells):
    return [_train_many(cell) for cell in cells]


def _train_many(cell):
    """Every token stands for MANY of them."""
    script = Script(cell, lr=0.0)
    balancer = script.engine.load_balancer
    for router in balancer._routers:
        whole = router.open_call

        def many(probs_TE, *, routed_counts_E, whole=whole, **others):
            return whole(probs_TE, routed_counts_E=routed_counts_E * MANY, **others)

        router.open_call = many
    records = []
    for window in range(2):
        records.append(script.window(batches(cell, window=window, num=2)))
        record = records[-1]
        assert all(n % MANY == 0 for counts in record.counts for n in counts)
        record.counts = [[n // MANY for n in counts] for counts in record.counts]
        record.grads = [grad * MANY for grad in record.grads]
        record.input_grads = [[g * MANY for g in grads] for grads in record.input_grads]
    loads = balancer.monitor.last_load_F.tolist()
    if cell.estimate == "boundary":
        assert balancer.balance.previous.wait().counts_F.tolist() == loads
    script.finish()
    return records, loads


def test_counts_above_two_to_the_24_are_exact():
    cells = ways()
    results = run_ranks(_check_many, 2, cells, timeout_s=120)
    for index, cell in enumerate(cells):
        per_rank = [records for records, _ in of_run(results, index)]
        assert wrong(cell, per_rank) == [], str(cell)
        for _, loads in of_run(results, index):
            summed = [
                MANY * sum(records[1].counts[layer][expert] for records in per_rank)
                for layer in range(2)
                for expert in range(len(per_rank[0][1].counts[layer]))
            ]
            assert loads == summed and max(loads) > 2**31


def _check_conversions():
    cell = replace(BASE, zero_stage=0, estimate="boundary", gradient_accumulation_steps=4)
    script = Script(cell)
    balancer = script.engine.load_balancer
    window_batches = batches(cell, window=0, num=4)
    script.window(window_batches)
    previous = balancer.balance.previous.wait().counts_F.clone()
    totals = []
    script.l_aux = []
    for convert in (
        lambda module: module.half(),
        lambda module: module.to(torch.bfloat16),
        lambda module: module.float(),
    ):
        script.engine.backward(script.forward(window_batches[0]))
        before = script.counts
        convert(script.engine.module)
        assert script.counts == before
        assert all(n.dtype == torch.int64 for n in balancer.counts().values())
        totals.append([sum(n) for n in before])
        script.engine.optimizer.zero_grad()
    kept = balancer.balance.previous.wait().counts_F
    assert kept.dtype == torch.int64 and torch.equal(kept, previous)
    return totals


def test_counts_survive_conversions_of_the_model():
    per_step = BASE.top_k * 12
    for totals in run_ranks(_check_conversions, 2):
        assert totals == [[(i + 1) * per_step] * 2 for i in range(3)]
