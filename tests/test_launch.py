"""The launch scripts, each running a few tiny steps of the same training on two CPU ranks."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
TINY = ["--steps", "3", "--eval-interval", "0", "--eval-batches", "1", "--eval-batch-size", "2"]
TINY += ["--num-layers", "2", "--model-dim", "16", "--expert-dim", "16", "--sequence-length", "32"]
TIMEOUT_S = 270.0

# What Slurm's commands do for one node, as far as the batch script can see.
FAKE_SRUN = """#!/usr/bin/env bash
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    ranks+=($!)
done
for rank in "${ranks[@]}"; do wait "$rank" || exit $?; done
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2" == "show hostnames" ]] && echo "$3"
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains that two ranks can read in no time."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "digits.txt").write_text("".join(f"{i * i:08d} " for i in range(3000)))
    (folder / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 600)
    return folder


def _run(script: str, arguments: list[str], *, cwd: Path, **environment: str) -> str:
    """Run one script to its end; returns what it printed. Ends what it started when it is late."""
    process = subprocess.Popen(
        ["bash", str(LAUNCH / script), *arguments],
        cwd=cwd,
        env={**_without_ranks(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # Launchers end their ranks, which may be in sessions of their own, when they are asked to.
        process.terminate()
        output, _ = process.communicate(timeout=30.0)
        pytest.fail(f"{script} did not end within {TIMEOUT_S:g} s\n{output[-6000:]}")
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert process.returncode == 0, output[-6000:]
    return output


def _without_ranks() -> dict[str, str]:
    """The environment of a user's shell: no rank of an outer launcher; the checkout importable."""
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    return {**kept, "PYTHONPATH": str(LAUNCH.parent), "COLUMNS": "120"}


def _expect_a_run_of_two_ranks(run: Path, output: str) -> None:
    assert "balance batch size 32 sequences" in output  # 2 ranks x 8 micro-batches x 2 sequences
    steps = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    # A bar or lines, as the launcher gives the ranks a terminal or not: both show the balance.
    assert "MaxVio" in output and "finished at step 3" in output


@pytest.mark.parametrize("script", ["run_deepspeed.sh", "run_mpirun.sh", "run_torchrun.sh"])
def test_launcher_trains_on_two_ranks(script: str, texts: Path, tmp_path: Path) -> None:
    arguments = [*TINY, "--data", str(texts), "--output", str(tmp_path / "run")]
    output = _run(script, arguments, cwd=tmp_path)
    _expect_a_run_of_two_ranks(tmp_path / "run", output)


def test_slurm_script_gives_each_task_its_rank(texts: Path, tmp_path: Path) -> None:
    """With stand-ins for Slurm's own two commands, which no test machine has."""
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(LAUNCH.parent),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": "2",
    }
    arguments = [*TINY, "--data", str(texts), "--output", str(tmp_path / "run")]
    output = _run("run_slurm.sbatch", arguments, cwd=tmp_path, **slurm)
    _expect_a_run_of_two_ranks(tmp_path / "run", output)


def test_two_nodes_meet_and_verify(tmp_path: Path) -> None:
    """Two torchrun processes of one rank each, as on two machines."""
    output = _run("verify_two_nodes.sh", [], cwd=tmp_path, DS_ACCELERATOR="cpu")
    assert output.count("2 ranks, ep_size 2") == 1  # one world, one table
    assert "all properties hold" in output


def test_scripts_are_valid_bash() -> None:
    for script in [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")]:
        subprocess.run(["bash", "-n", str(script)], check=True)
