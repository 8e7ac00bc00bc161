"""The balancing policies on real engines, against the fp64 reference."""

import tempfile
from dataclasses import replace

import pytest

from engine_grid import BASE
from ranks import run_ranks
from window_runs import Script, batches, of_run, wrong

pytestmark = pytest.mark.ranks

CARRY = replace(BASE, estimate="carry", gradient_accumulation_steps=3)


def _check_windows(runs):
    return [_train_windows(*run) for run in runs]


def _train_windows(cell, lengths, resumes_after, folder):
    script = Script(cell)
    records = []
    for window, length in enumerate(lengths):
        if window == resumes_after:
            script.engine.save_checkpoint(folder)
            script.finish()
            script = Script(cell)
            script.window(batches(cell, window=9, num=length))
            assert script.engine.load_checkpoint(folder)[0] is not None
        boundary = "early" if set(lengths) != {cell.gradient_accumulation_steps} else "engine"
        window_batches = batches(cell, window=window, num=length)
        records.append(script.window(window_batches, boundary=boundary))
    script.finish()
    return records


def test_carry_in_full_short_and_long_windows_and_after_a_resume():
    both = [CARRY, replace(CARRY, mechanism="injection")]
    with tempfile.TemporaryDirectory() as folder:
        runs = [(replace(cell, tokens="masked", zero_stage=2), (3, 3), None, "") for cell in both]
        runs += [(replace(cell, ep_size=1, top_k=4), (2, 3, 4, 3), None, "") for cell in both]
        runs += [(cell, (3, 3, 3), 2, f"{folder}/{cell.mechanism}") for cell in both]
        recomputed = [replace(both[0], checkpointing="reentrant"), both[1]]
        runs += [(replace(cell, top_k=1), (3, 3), None, "") for cell in recomputed]
        results = run_ranks(_check_windows, 2, runs, timeout_s=180)
    for index, run in enumerate(runs):
        assert wrong(run[0], of_run(results, index)) == [], str(run)
