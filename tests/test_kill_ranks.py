"""The short run of launch/kill_ranks.py, and that the script can tell when something is wrong."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import kill_ranks

SCRIPT = Path(kill_ranks.__file__)


@pytest.mark.slow
def test_killed_ranks_leave_no_hang_no_process_and_a_checkpoint_that_loads():
    """Seeds 0 to 3: two kills, an error in a layer, a rank that makes one micro-step less."""
    process = subprocess.run(
        [sys.executable, str(SCRIPT), "--runs", "4"], capture_output=True, text=True, timeout=280
    )
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    rows = ("hangs", "leftovers", "unreadable checkpoints", "latest unfinished")
    for row in (*rows, "ranks without an error"):
        assert f"{row:24}0\n" in output, output
    assert f"{'runs':24}4\n" in output, output


def test_every_seed_draws_the_same_case_and_every_fault_comes_up():
    cases = [kill_ranks.draw(seed) for seed in range(50)]
    assert cases == [kill_ranks.draw(seed) for seed in range(50)]
    kinds = {(case.fault, case.where) for case in cases}
    assert kinds == {
        ("kill", "any time"),
        ("kill", "save"),
        ("raise", "forward"),
        ("raise", "backward"),
        ("less", "stop"),
        ("less", "step"),
    }
    settings = {(case.estimate, case.mechanism) for case in cases}
    assert len(settings) == 4


def test_anything_wrong_is_exit_code_1(capsys):
    good = kill_ranks.Outcome([], [], [], [], [])
    assert kill_ranks.summarise([good, good]) == 0
    bad = kill_ranks.Outcome(["rank 0"], [], ["complete (4): no such file"], [], [])
    assert kill_ranks.summarise([good, bad]) == 1
    assert f"{'hangs':24}1\n" in capsys.readouterr().out
    assert "BAD seed" in kill_ranks.describe(kill_ranks.draw(3), bad)


def _leave_a_child(pid_file: str) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
    Path(pid_file).write_text(str(child))
    os._exit(0)


def test_a_process_that_a_rank_leaves_behind_is_seen_and_ended(tmp_path):
    processes = []
    for rank in range(kill_ranks.NUM_RANKS):
        process = kill_ranks._context.Process(
            target=_leads_and_leaves, args=(str(tmp_path / f"pid_{rank}"),)
        )
        process.start()
        processes.append(process)
    for process in processes:
        process.join(60.0)
    assert kill_ranks.end(processes) == [process.pid for process in processes]


def _leads_and_leaves(pid_file: str) -> None:
    os.setpgid(0, 0)
    _leave_a_child(pid_file)


def test_a_checkpoint_that_lost_its_end_is_unreadable(tmp_path):
    """Both the exception of the load and a missing file are problems that name the log's end."""
    case = kill_ranks.draw(0)
    (tmp_path / "checkpoints/4").mkdir(parents=True)
    (tmp_path / "checkpoints/latest").write_text("4")
    (tmp_path / "checkpoints/4/mp_rank_00_model_states.pt").write_bytes(b"half")
    problem = kill_ranks.read_back(case, tmp_path, None, tmp_path / "resume", 30.0)
    assert problem.startswith("exit codes [1, 1]")
