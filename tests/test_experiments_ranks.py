"""Experiments on two ranks: the shuffle control, and a tiny experiment that is interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import pytest
import torch

from ds_moe_lb.data.folder import folder_corpus
from ds_moe_lb.experiments.catalogue import EXPERIMENTS, runs_of
from ds_moe_lb.experiments.run import _ExperimentTrainer, _InMemory, run_one
from ds_moe_lb.experiments.setting import RunSpec, Setting
from ds_moe_lb.training.stop_request import StopRequest
from ds_moe_lb.training.trainer import Task
from ranks import run_ranks

pytestmark = pytest.mark.ranks

CHECKOUT = Path(__file__).resolve().parent.parent
MODEL = {"num_layers": 2, "model_dim": 16, "num_heads": 2, "expert_dim": 16, "num_experts": 4}
TINY = Setting(steps=2, global_batch_size=8, model={**MODEL, "sequence_length": 16}, eval_batches=1)


def _texts(folder: Path) -> Path:
    data = folder / "texts"
    data.mkdir()
    (data / "digits.txt").write_text("".join(f"{i * i:08d}\n" for i in range(2000)))
    (data / "words.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    return data


def _shuffled(*, seed: int = 1) -> RunSpec:
    variants = {v.name: spec for v, spec in runs_of(EXPERIMENTS["methods"], TINY, num_seeds=1)}
    return replace(variants["shuffle"], seed=seed)


def _check_shuffle(data: str) -> dict[str, Any]:
    """One step by hand: what was drawn, what was selected, and the slopes that were used."""
    spec = _shuffled()
    task = Task(
        options=spec.options(),
        model=spec.model_config(),
        ds_config=spec.ds_config,
        corpus=folder_corpus(Path(data)),
    )
    trainer = _ExperimentTrainer(task, _InMemory(), shuffled=True)
    balance = trainer.engine.load_balancer.balance
    slopes: list[list[float]] = []
    add_call = balance.add_call

    def spy(*args: Any, **kwargs: Any) -> Any:
        call = add_call(*args, **kwargs)
        slopes.append(balance.slope(call).tolist())
        return call

    balance.add_call = spy
    tokens = torch.arange(17).repeat(2, 1) + dist.get_rank()
    before = torch.get_rng_state()
    batches = list(trainer._window([tokens, tokens + 40]))
    kept_random_state = torch.equal(before, torch.get_rng_state())
    counted = balance.window.num_micro_steps  # the look ahead is no micro-step
    for batch in batches:
        trainer.engine.backward(trainer.engine(batch[:, :-1]).logits_BSV.float().mean())
        trainer.engine.step()
    return {
        "drawn": balance.drawn_GLE.tolist(),
        "slopes": slopes,
        "counted": counted,
        "kept_random_state": kept_random_state,
        "steps": trainer.engine.global_steps,
    }


def test_shuffle_balances_by_a_sample_of_all_ranks_tokens(tmp_path: Path) -> None:
    results = run_ranks(_check_shuffle, 2, str(_texts(tmp_path)), timeout_s=120.0)
    drawn = torch.tensor(results[0]["drawn"])
    assert drawn.shape == (2, 2, 4)  # two micro-steps, two layers, four experts
    assert (drawn.sum(dim=2) == 2 * 32).all()  # k x tokens of one micro-batch
    assert results[1]["drawn"] == results[0]["drawn"]
    # w E f with w = 1 / 32 tokens, f = drawn / 64 selections and E = 4, layer after layer
    expected = [(4 * counts_E / 64 / 32).tolist() for counts_E in drawn.flatten(0, 1)]
    for result in results:
        assert result["slopes"] == [pytest.approx(slope, rel=1e-6) for slope in expected]
        assert result["counted"] == 0 and result["kept_random_state"] and result["steps"] == 1


def _check_runs(data: str, labels: list[str]) -> list[dict[str, Any]]:
    corpus = folder_corpus(Path(data))
    variants = {v.name: spec for v, spec in runs_of(EXPERIMENTS["methods"], TINY, num_seeds=1)}
    records = []
    with StopRequest() as stop:
        for label in labels:
            record = run_one(variants[label], corpus, stop=stop, on_step=lambda step, record: None)
            assert record is not None
            records.append(record)
    return records


def test_a_run_is_the_same_whatever_ran_before_it(tmp_path: Path) -> None:
    """Else a resumed experiment would give other numbers than one that was left alone."""
    data = str(_texts(tmp_path))
    both = run_ranks(_check_runs, 2, data, ["shuffle", "bias", "micro"], timeout_s=200.0)
    alone = run_ranks(_check_runs, 2, data, ["micro"], timeout_s=120.0)
    passing = ("seconds", "finished")
    first = {k: v for k, v in both[0][2].items() if k not in passing}
    assert first == {k: v for k, v in alone[0][0].items() if k not in passing}
    assert {k: v for k, v in both[1][2].items() if k not in passing} == first
    counts = torch.tensor(first["tokens_per_expert_LDE"])
    assert (counts.sum(dim=2) == 2 * 16 * 2 * 16).all()  # k, positions, ranks, sequences
    scores = torch.tensor(first["top_k_score_LD"])
    # The two largest of four probabilities that sum to 1.
    assert scores.shape == (2, 2) and (scores > 0.5).all() and (scores <= 1.0).all()
    assert first["validation_loss"] == pytest.approx(
        sum(first["loss_per_domain"].values()) / 2, rel=1e-12
    )
    assert first["max_violation_global_batch"] >= 0.0
    assert "max_violation_global_batch" in both[0][1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_experiment_goes_on_with_what_is_left(tmp_path: Path) -> None:
    data = _texts(tmp_path)
    command = [sys.executable, "-m", "ds_moe_lb", "experiment", "routing", "--seeds", "1"]
    command += ["--steps", "2", "--data", str(data), "--output", "out"]
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    environment = {**kept, "PYTHONPATH": str(CHECKOUT)}

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    records = tmp_path / "out" / "runs.jsonl"
    process = start()
    deadline = time.monotonic() + 200.0
    while time.monotonic() < deadline and process.poll() is None and not records.exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100.0)
    done = records.read_text().splitlines()
    assert process.returncode == 130 and len(done) == 1, output[-6000:]
    assert "interrupted in the run 'global, seed 1'; 1 of 2 are left" in output
    assert not (tmp_path / "out" / "pending.json").exists()
    process = start()
    output, _ = process.communicate(timeout=200.0)
    assert process.returncode == 0, output[-6000:]
    assert "2 runs, 1 recorded" in output
    lines = records.read_text().splitlines()
    assert lines[0] == done[0] and len(lines) == 2
    assert [json.loads(line)["label"] for line in lines] == ["micro, seed 1", "global, seed 1"]
    page = (tmp_path / "out" / "routing.md").read_text()
    assert "| micro |" in page and "2 runs of 2 steps" in page
