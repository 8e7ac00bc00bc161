"""`estimate: exact` on transformers models and under AutoEP: the cut of the batch does not matter.

One global batch of four parts with two sequences each, cut into D x G pieces; the reference is one
process in fp64 on all of it.
"""

from dataclasses import replace
from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch

import hf_runs
import reference
from families import FAMILIES
from hf_runs import COEFF, FLOOR, TOLERANCE, Run
from ranks import run_ranks

pytestmark = pytest.mark.ranks

NUM_PARTS, NUM_WINDOWS = 4, 2
SECTION = {"aux_loss_coeff": COEFF, "estimate": "exact"}
BASE = Run("qwen3_moe", padding="right", section=SECTION)


def micro_batches(run: Run, *, window: int, num_ranks: int, rank: int) -> list[dict[str, Any]]:
    """A rank's micro-batches: part 0 is the first micro-step of rank 0, and so on by rank."""
    gas = run.gradient_accumulation_steps
    size = NUM_PARTS // (num_ranks * gas)
    batches = []
    for micro_step in range(gas):
        first = (rank * gas + micro_step) * size
        parts = [
            hf_runs.make_inputs(run, window=window, micro_step=part, rank=0)
            for part in range(first, first + size)
        ]
        batches.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return batches


def _check_exact(runs: list[Run]) -> list[list[dict[str, Any]]]:
    return [_train_exact(run) for run in runs]


def _train_exact(run: Run) -> list[dict[str, Any]]:
    engine = hf_runs.start_engine(run)
    routers = hf_runs.find_routers(engine.module)
    recorder = hf_runs.Recorder(routers, engine.load_balancer.layout.layers[0].top_k)

    def count(batch: dict[str, Any]) -> None:
        hf_runs.forward(run, engine, batch)

    for window in range(NUM_WINDOWS):
        weights = {
            name: hf_runs.full(hf_runs.own_parameters(router)["weight"]).double().tolist()
            for name, router in routers.items()
        }
        batches = micro_batches(
            run, window=window, num_ranks=dist.get_world_size(), rank=dist.get_rank()
        )
        recorder.is_paused = True
        counted = engine.load_balancer.window(batches, count)
        recorder.is_paused = False
        for number, batch in enumerate(counted, start=1):
            recorder.valid.append(batch["valid"].flatten().tolist())
            engine.backward(0.0 * hf_runs.forward(run, engine, batch).loss)
            if number == len(batches):
                grads = {
                    name: deepspeed.utils.safe_get_full_grad(
                        hf_runs.own_parameters(router)["weight"]
                    ).tolist()
                    for name, router in routers.items()
                }
                recorder.close_window(weights, grads)
            engine.step()
    engine.load_balancer.uninstall()
    engine.destroy()
    return recorder.windows


def joined(by_rank: list[Any]) -> list[Any]:
    """What each rank has for each micro-step, one after the other in the order of the parts."""
    return [token for of_rank in by_rank for of_step in of_rank for token in of_step]


def gradients(run: Run, windows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The reference's gradient of each router, of one process with one micro-step."""
    found = {}
    for name, weight in windows[0]["weights"].items():
        inputs = joined([record["inputs"][name] for record in windows])
        selections = joined([record["selections"][name] for record in windows])
        whole = reference.Window(
            weight,
            [[inputs]],
            [[selections]],
            [[joined([record["valid"] for record in windows])]],
            top_k=len(selections[0]),
            score_function=FAMILIES[run.family].score_function,
        )
        found[name] = torch.tensor(
            reference.balance(whole, estimate="exact", coeff=COEFF).weight_grad
        ).double()
    return found


def cut(run: Run, *, num_ranks: int, gas: int) -> Run:
    """The run with the batch cut into D x G."""
    size = hf_runs.SEQUENCES * NUM_PARTS // (num_ranks * gas)
    autoep_size = None if run.autoep_size is None else min(run.autoep_size, num_ranks)
    return replace(
        run,
        gradient_accumulation_steps=gas,
        autoep_size=autoep_size,
        extra={"train_micro_batch_size_per_gpu": size},
    )


def test_exact_is_one_process_on_the_whole_batch_however_it_is_cut() -> None:
    kinds = [
        replace(BASE, checkpointing="reentrant"),
        replace(BASE, family="deepseek_v3", padding="left", zero_stage=3),
        replace(BASE, family="mixtral", autoep_size=2, zero_stage=3),
    ]
    first: dict[tuple[str, str], torch.Tensor] = {}
    for num_ranks, all_gas in ((1, (4, 1)), (2, (2, 1))):
        runs = [cut(kind, num_ranks=num_ranks, gas=gas) for kind in kinds for gas in all_gas]
        results = run_ranks(_check_exact, num_ranks, runs, timeout_s=150)
        for index, run in enumerate(runs):
            for window in range(NUM_WINDOWS):
                records = [of_rank[index][window] for of_rank in results]
                for name, expected in gradients(run, records).items():
                    assert expected.abs().max() > 1e-3, "nothing to compare"
                    grad = torch.tensor(records[0]["grads"][name]).double()
                    scale = expected.abs().clamp(min=FLOOR)
                    deviation = float(((grad - expected).abs() / scale).max())
                    assert deviation <= TOLERANCE, f"{run}: window {window} {name} {deviation:.1e}"
                    if window == 0:  # later, what a near tie chose may have changed the weights
                        other = first.setdefault((run.family, name), grad)
                        torch.testing.assert_close(grad, other, rtol=1e-5, atol=1e-7)


def _check_noise(runs: list[Run]) -> list[list[Any]]:
    """Is the random state restored, and what the counts differ by with it and with another."""
    return [_seen_with_noise(run) for run in runs]


def _seen_with_noise(run: Run) -> list[Any]:
    engine = hf_runs.start_engine(run)
    balancer, seen = engine.load_balancer, []
    for seed in (None, 6):
        batches = [hf_runs.make_inputs(run, window=0, micro_step=m) for m in range(2)]
        before = torch.get_rng_state()
        yielded = balancer.window(batches, lambda batch: hf_runs.forward(run, engine, batch))
        seen.append(torch.equal(before, torch.get_rng_state()))
        if seed is not None:
            torch.manual_seed(seed)
        for number, batch in enumerate(yielded):
            engine.backward(hf_runs.forward(run, engine, batch).loss)
            if number == 1:
                seen.append(balancer.balance.recount_difference())
            engine.step()
    balancer.uninstall()
    engine.destroy()
    return seen


def test_the_counting_pass_sees_the_dropout_and_jitter_of_training() -> None:
    noise = {"attention_dropout": 0.3}
    runs = [
        replace(BASE, family="mixtral", model={"router_jitter_noise": 0.3}),
        replace(
            BASE, family="phimoe", model={"router_jitter_noise": 0.3, "input_jitter_noise": 0.3}
        ),
        replace(BASE, model=noise, zero_stage=3),
        replace(BASE, model=noise, autoep_size=2),
    ]
    for of_rank in run_ranks(_check_noise, 2, runs, timeout_s=90):
        for run, (is_restored, same, is_restored_again, other) in zip(runs, of_rank, strict=True):
            assert is_restored and is_restored_again, run.family
            assert same == 0.0 and other > 0.0, (run.family, same, other)
