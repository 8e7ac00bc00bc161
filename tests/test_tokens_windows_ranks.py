"""Which tokens count, and where windows begin and end: real engines against the reference."""

from dataclasses import replace

import deepspeed.comm as dist
import pytest
import torch

from engine_grid import Batch, make_model
from models import MODEL_DIM
from ranks import run_ranks
from window_runs import BASE, Script, batches, of_run, ways, wrong

pytestmark = pytest.mark.ranks


# ------------------------------------------------------------------------------------------------
# Tokens


def _laid_out(sequences: list[torch.Tensor], how: str, window: int) -> Batch:
    """The same sequences in one row, or in a row each with padding that looks like tokens."""
    if how == "packed":
        x = torch.cat(sequences).unsqueeze(0)
        return Batch(x, torch.zeros(x.shape[:2]), None)
    length = max(len(sequence) for sequence in sequences) + 2
    generator = torch.Generator().manual_seed(window)
    x = 3.0 * torch.randn(len(sequences), length, MODEL_DIM, generator=generator)
    valid_mask = torch.zeros(len(sequences), length, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        start = length - len(sequence) if how == "left" else 0
        x[row, start : start + len(sequence)] = sequence
        valid_mask[row, start : start + len(sequence)] = True
    return Batch(x, torch.zeros(x.shape[:2]), valid_mask)


def _check_padding(cells):
    """Per cell and layout of the tokens the gates' gradients and the counts of two windows."""
    return [[_train_padded(cell, how) for how in ("packed", "right", "left")] for cell in cells]


def _train_padded(cell, how):
    model = make_model(cell, drop_tokens=False)  # else padding takes the place of tokens
    script = Script(cell, model=model)
    seen = []
    for window in range(2):
        generator = torch.Generator().manual_seed(100 * window + dist.get_rank())
        sequences = [
            [
                torch.randn(length, MODEL_DIM, generator=generator) + offset
                for length in (1 + (3 * m + 2 * dist.get_rank()) % 5, 4, 2)
            ]
            for m, offset in ((0, 1.0), (1, -1.0))
        ]
        record = script.window([_laid_out(s, how, window) for s in sequences])
        seen.append((record.grads, record.counts))
    script.finish()
    return seen


def test_padding_tokens_are_not_counted_left_right_or_packed():
    cells = ways() + ways(top_k=1, zero_stage=2)[::3] + ways(checkpointing="reentrant")[1:3]
    for rank_results in run_ranks(_check_padding, 2, cells, timeout_s=180):
        for cell, (packed, *padded) in zip(cells, rank_results, strict=True):
            for other in padded:
                for (grads, counts), (expected, expected_counts) in zip(other, packed, strict=True):
                    assert counts == expected_counts, str(cell)
                    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-7)


def _check_masked_out(cells):
    """Rank 1 never has a valid token; at micro-step 1 nobody has."""
    return [_train_masked_out(cell) for cell in cells]


def _train_masked_out(cell):
    script = Script(cell)
    records = []
    for window in range(2):
        window_batches = batches(cell, window=window, num=3)
        for micro_step, batch in enumerate(window_batches):
            if dist.get_rank() == 1 or micro_step == 1:
                batch.valid_mask = torch.zeros(batch.x.shape[:2], dtype=torch.bool)
        records.append(script.window(window_batches))
        assert all(torch.isfinite(grad).all() for grad in records[-1].grads)
    script.finish()
    return records


def test_a_rank_and_a_micro_step_without_any_valid_token():
    cells = ways(gradient_accumulation_steps=3, top_k=4)
    results = run_ranks(_check_masked_out, 2, cells, timeout_s=120)
    for index, cell in enumerate(cells):
        assert wrong(cell, of_run(results, index)) == [], str(cell)


def _check_no_tokens(runs):
    return [_train_no_tokens(*run) for run in runs]


def _train_no_tokens(cell, drop_tokens):
    """In turn each rank has a micro-batch with no tokens at all."""
    script = Script(cell, model=make_model(cell, drop_tokens=drop_tokens))
    records = []
    for window in range(2):
        window_batches = batches(cell, window=window, num=2)
        empty = window_batches[dist.get_rank()]
        empty.x, empty.y = empty.x[:, :0], empty.y[:, :0]
        records.append(script.window(window_batches))
        assert torch.tensor(script.l_aux).isfinite().all()
    script.finish()
    return records


def test_a_rank_without_tokens():
    """DeepSpeed's own loss is NaN there."""
    runs = [(cell, False) for top_k in (1, 4) for cell in ways(top_k=top_k)]
    runs += [(cell, True) for cell in ways(top_k=2)]
    results = run_ranks(_check_no_tokens, 2, runs, timeout_s=120)
    for index, (cell, drop_tokens) in enumerate(runs):
        assert wrong(cell, of_run(results, index)) == [], (str(cell), drop_tokens)


def _check_uniform(cells):
    """Native l_aux at each micro-step with gates that give every expert the same probability."""
    return [_uniform_l_aux(cell) for cell in cells]


def _uniform_l_aux(cell):
    model = make_model(cell, gate_scale=0.0)
    script = Script(cell, model=model, lr=0.0)
    l_aux = []
    for window in range(2):
        script.window(batches(cell, window=window, num=cell.gradient_accumulation_steps))
        l_aux += script.l_aux
    script.finish()
    return l_aux


def test_f_sums_to_one_whatever_tokens_the_micro_steps_have():
    """With P = 1/E everywhere the loss is the sum of f, though all tokens pick the same experts."""
    cells = [
        replace(BASE, tokens=tokens, top_k=top_k, gradient_accumulation_steps=4)
        for tokens in ("uneven", "masked")
        for top_k in (1, 2, 4)
    ]
    results = run_ranks(_check_uniform, 2, cells, timeout_s=120)
    for index, cell in enumerate(cells):
        for of_ranks in zip(*of_run(results, index), strict=True):
            mean = torch.tensor(of_ranks).mean(dim=0)
            assert (mean - 1.0).abs().max() < 1e-5, (str(cell), mean)


# ------------------------------------------------------------------------------------------------
# Windows


def _check_boundaries(runs):
    return [_train_windows(*run) for run in runs]


def _train_windows(cell, boundary, lengths):
    extra = {"managed_gradient_accumulation": False} if boundary == "unmanaged" else {}
    script = Script(cell, **extra)
    records = []
    for window, length in enumerate(lengths):
        before = [gate.wg.weight.detach().clone() for gate in script.model.gates()]
        record = script.window(batches(cell, window=window, num=length), boundary=boundary)
        if boundary == "unmanaged":  # reduced in the step: read off what plain SGD made of it
            after = [gate.wg.weight.detach() for gate in script.model.gates()]
            record.grads = [(a - b) / 0.1 for a, b in zip(before, after, strict=True)]
        records.append(record)
    script.finish()
    return records


@pytest.mark.parametrize("boundary", ["early", "accelerate", "unmanaged", "backward"])
def test_windows_end_where_the_script_says(boundary):
    """Windows shorter and longer than G; the engine divides by the configured G all the same."""
    cells = [
        replace(cell, zero_stage=stage, checkpointing=mode, gradient_accumulation_steps=3)
        for stage, mode in ((0, "reentrant"), (1, "off"), (2, "non_reentrant"))
        for at, cell in enumerate(ways(tokens="uneven"))
        if (at + at // 2 + stage) % 2 == 0
    ]
    lengths = (2, 3, 4)
    if boundary == "backward":  # refused by DeepSpeed with ZeRO 0
        cells, lengths = [cell for cell in cells if cell.zero_stage], (3, 3)
    runs = [(cell, boundary, lengths) for cell in cells]
    results = run_ranks(_check_boundaries, 2, runs, timeout_s=180)
    # 1e-7 of a weight, over the learning rate, is all that a difference of weights can tell.
    tolerance = 1e-4 if boundary == "unmanaged" else 0.0
    for index, cell in enumerate(cells):
        assert wrong(cell, of_run(results, index), tolerance=tolerance) == [], str(cell)


def _check_epochs(cells):
    return [_train_epochs(cell) for cell in cells]


def _train_epochs(cell):
    """Epochs of three micro-steps with G = 2: the second window has one of each epoch."""
    script = Script(cell)
    counts = []

    def between(micro_step):
        if micro_step == 1:  # between the epochs
            counts.append(script.counts)
            script.engine.eval()
            with torch.no_grad(), script.recorder.paused():
                script.engine(torch.randn(1, 3, MODEL_DIM))
            script.engine.train()
            assert script.counts == counts[-1]

    windows = [batches(cell, window=window, num=2) for window in range(3)]
    records = [script.window(windows[0])]
    records.append(script.window(windows[1], between=between))
    records.append(script.window(windows[2]))
    assert sum(counts[0][0]) == cell.top_k * windows[1][0].x[..., 0].numel()
    script.finish()
    return records


def test_a_last_incomplete_window_carries_over_into_the_next_epoch():
    cells = ways()
    results = run_ranks(_check_epochs, 2, cells, timeout_s=120)
    for index, cell in enumerate(cells):
        assert wrong(cell, of_run(results, index)) == [], str(cell)
