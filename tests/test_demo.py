"""The commands as a user runs them, on two CPU ranks: compare, Ctrl-C, resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ds_moe_lb.training.free_port import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # each starts several launchers

CHECKOUT = Path(__file__).resolve().parent.parent
TINY = ["--num-layers", "2", "--model-dim", "16", "--num-heads", "2", "--expert-dim", "16"]
TINY += ["--sequence-length", "32", "--eval-batches", "1", "--eval-batch-size", "4"]
TIMEOUT_S = 240.0


def _environment() -> dict[str, str]:
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    return {**kept, "PYTHONPATH": str(CHECKOUT), "COLUMNS": "120"}


def _start(
    arguments: list[str], cwd: Path, *, program: list[str] | None = None
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*(program or [sys.executable, "-m", "ds_moe_lb"]), *arguments],
        cwd=cwd,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: "subprocess.Popen[str]") -> str:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # the command passes it on to its ranks
        output, _ = process.communicate(timeout=30.0)
        pytest.fail(f"did not end within {TIMEOUT_S:g} s\n{output[-6000:]}")
    return output


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _wait_for_step(run: Path, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    history = run / "history.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if history.exists() and len(history.read_text().splitlines()) >= step:
            return
        time.sleep(0.1)
    process.terminate()
    pytest.fail(f"step {step} was not reached\n{process.communicate()[0][-6000:]}")


def test_compare_trains_both_and_shows_the_difference(tmp_path: Path) -> None:
    process = _start(["compare", "--output", "out", "--steps", "4", *TINY], tmp_path)
    output = _finish(process)
    assert process.returncode == 0, output[-6000:]
    for text in ("validation loss", "mutual information", "MaxVio", "tensorboard --logdir"):
        assert text in output
    infos = []
    for scope in ("micro_batch", "global_batch"):
        run = tmp_path / "out" / scope
        assert [record["step"] for record in _lines(run / "history.jsonl")] == [1, 2, 3, 4]
        assert "lbl_global_batch" in _lines(run / "history.jsonl")[-1]
        validation = _lines(run / "validation.jsonl")[-1]
        # Every held-out position selects two experts, in every layer and domain.
        for counts_DE in validation["tokens_per_expert_LDE"]:
            assert {sum(counts_E) for counts_E in counts_DE} == {2 * 32 * 4 * 2}
        assert list((run / "tensorboard").rglob("events.out.tfevents.*"))
        assert (run / "checkpoints" / "latest").read_text() == "step000004"
        infos.append(json.loads((run / "run.json").read_text()))
    assert infos[0]["corpus"]["sha256"] == infos[1]["corpus"]["sha256"]
    assert infos[0]["model"]["ep_size"] == 2 and infos[0]["world_size"] == 2
    # Nothing but the scope differs: the first forward sees the same weights and the same text.
    losses = [
        _lines(tmp_path / "out" / scope / "history.jsonl")[0]["lm_loss"]
        for scope in ("micro_batch", "global_batch")
    ]
    assert losses[0] == losses[1]
    assert (tmp_path / "out" / "report.html").is_file()
    assert (tmp_path / "out" / "figures" / "domain_expert_heatmaps.png").is_file()


def test_interrupted_comparison_leaves_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    process = _start(["compare", "--output", "out", "--steps", "5000", *TINY], tmp_path)
    run = tmp_path / "out" / "micro_batch"
    _wait_for_step(run, 2, process)
    process.send_signal(signal.SIGINT)
    output = _finish(process)
    assert process.returncode == 130, output[-6000:]
    step = _lines(run / "history.jsonl")[-1]["step"]
    assert (run / "checkpoints" / "latest").read_text() == f"step{step:06d}"
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    resume = f"--num_accelerators 2 --module ds_moe_lb train --resume {run}"
    assert f"go on: deepspeed {resume}" in output
    launcher = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--master_port",
        str(free_port()),
    ]
    resumed = _start([*resume.split(), "--steps", str(step + 2)], tmp_path, program=launcher)
    output = _finish(resumed)
    assert resumed.returncode == 0, output[-6000:]
    steps = [record["step"] for record in _lines(run / "history.jsonl")]
    assert steps == list(range(1, step + 3))
    assert json.loads((run / "run.json").read_text())["status"] == "finished"


def test_resuming_continues_as_if_never_stopped(tmp_path: Path) -> None:
    """On a user's folder: Ctrl-C, --resume, and the losses of a run that was left alone.

    Domains are sampled by weights that follow the validation losses.
    """
    data = tmp_path / "texts"
    data.mkdir()
    (data / "digits.txt").write_text("".join(f"{i * i:08d}\n" for i in range(2000)))
    (data / "words.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    train = ["train", "--config", "zero1_ep2_global_batch", "--data", str(data), "--steps", "12"]
    train += ["--eval-interval", "4", *TINY]
    for flag, values in (
        ("--domain-weights", {"digits": 1, "words": 3}),
        ("--reference-losses", {"digits": 5.0, "words": 6.0}),
    ):
        file = tmp_path / f"{flag[2:]}.json"
        file.write_text(json.dumps(values))
        train += [flag, str(file)]
    stopped = _start([*train, "--output", "stopped"], tmp_path)
    _wait_for_step(tmp_path / "stopped", 2, stopped)
    stopped.send_signal(signal.SIGINT)
    output = _finish(stopped)
    history = tmp_path / "stopped" / "history.jsonl"
    stop_step = _lines(history)[-1]["step"]
    assert stopped.returncode == 130 and stop_step < 12, output[-6000:]
    resumed = _start(["train", "--resume", "stopped"], tmp_path)
    output = _finish(resumed)
    assert resumed.returncode == 0, output[-6000:]
    whole = _start([*train, "--output", "whole"], tmp_path)
    output = _finish(whole)
    assert whole.returncode == 0, output[-6000:]
    expected = _lines(tmp_path / "whole" / "history.jsonl")
    found = _lines(history)
    assert [record["step"] for record in found] == list(range(1, 13))
    for key in ("lm_loss", "l_aux", "lbl_global_batch"):
        assert [r[key] for r in found] == pytest.approx([r[key] for r in expected], rel=1e-6)
    validations = [_lines(tmp_path / name / "validation.jsonl") for name in ("stopped", "whole")]
    assert validations[0][-1]["loss"] == pytest.approx(validations[1][-1]["loss"], rel=1e-6)
    # Every line says what the weights are from then on, and each update changes them.
    for name in ("stopped", "whole"):
        weights = [
            line["domain_weights"]["digits"]
            for line in _lines(tmp_path / name / "validation.jsonl")
        ]
        assert len(set(weights)) == 3 and 0.25 not in weights
    assert validations[0][-1]["domain_weights"] == pytest.approx(
        validations[1][-1]["domain_weights"], rel=1e-6
    )


def test_resume_takes_its_flags_from_the_run(tmp_path: Path) -> None:
    process = _start(["train", "--resume", str(tmp_path), "--seed", "3"], tmp_path)
    output = _finish(process)
    assert process.returncode == 2
    assert "--resume takes --seed from the run; only --steps" in output
