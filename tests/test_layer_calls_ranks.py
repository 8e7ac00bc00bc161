"""Layers that a forward calls not once: skipped on all ranks, or called twice."""

from dataclasses import replace

import pytest
import torch

from engine_grid import WindowRecord
from models import TinyMoE
from ranks import run_ranks
from window_runs import Script, batches, of_run, ways, wrong

pytestmark = pytest.mark.ranks


class Uneven(TinyMoE):
    """Calls each block as often as ``times`` says; one ``l_aux`` (the sum) per called block."""

    times = (1, 1)

    def forward(self, x, used_token=None):
        h = self.project(x)
        losses = []
        for block, times in zip(self.blocks, self.times, strict=True):
            terms = []
            for _ in range(times):
                h, l_aux = block(h, used_token)
                terms.append(l_aux)
            losses.append(sum(terms) if terms else None)
        return self.head(h).squeeze(-1), losses


def _check_calls(runs):
    return [_train_calls(*run) for run in runs]


def _train_calls(cell, times_of_micro_steps):
    torch.manual_seed(42)
    script = Script(cell, model=Uneven(k=cell.top_k))

    def between(micro_step):
        script.model.times = times_of_micro_steps[micro_step]

    num = cell.gradient_accumulation_steps
    records = [
        script.window(batches(cell, window=window, num=num), between=between) for window in range(2)
    ]
    for record in records:  # in the order of the backwards, unlike the calls
        if max(max(times) for times in times_of_micro_steps) > 1:
            record.input_grads = [[] for _ in record.input_grads]
    script.finish()
    return records


def _call_factor(gas, times_of_micro_steps, is_running_once):
    """A call's term has the weight of a micro-step's: 1/G, over the tokens of one call."""

    def factor(layer, number, window, previous):
        num_calls = sum(times[layer] for times in times_of_micro_steps)
        if previous is not None:  # previous counts over all calls: w = D G calls / (G N_prev)
            return num_calls / gas
        return num_calls / window.num_micro_steps if is_running_once else num_calls / gas

    return factor


def test_a_layer_that_all_ranks_skip():
    times = ((1, 1), (1, 0), (0, 1), (1, 0))
    cells = [
        replace(cell, zero_stage=stage, gradient_accumulation_steps=4)
        for stage in (0, 2)
        for cell in ways(tokens="uneven")
    ]
    results = run_ranks(_check_calls, 2, [(cell, times) for cell in cells], timeout_s=120)
    for index, cell in enumerate(cells):
        factor = _call_factor(4, times, False)
        assert wrong(cell, of_run(results, index), factor=factor) == [], str(cell)


def _merged_calls(record: WindowRecord, times) -> WindowRecord:
    """The calls of one forward as one, because their counts are shared."""
    for name in ("inputs", "selections", "valid"):
        merged = []
        for layer, calls in enumerate(getattr(record, name)):
            calls = iter(calls)
            merged.append([[x for _ in range(t[layer]) for x in next(calls)] for t in times])
        setattr(record, name, merged)
    return record


def test_a_layer_called_twice_makes_two_terms_over_shared_counts():
    """At the gate f of the first call cannot know the second; after the forward it does."""
    times = ((2, 1), (2, 1))
    cells = [replace(cell, zero_stage=stage) for stage in (0, 1) for cell in ways(tokens="even")]
    results = run_ranks(_check_calls, 2, [(cell, times) for cell in cells], timeout_s=120)
    for index, cell in enumerate(cells):
        per_rank = of_run(results, index)
        if cell.mechanism == "injection":
            per_rank = [[_merged_calls(r, times) for r in records] for records in per_rank]
        factor = _call_factor(2, times, cell.mechanism == "injection")
        assert wrong(cell, per_rank, factor=factor) == [], str(cell)
