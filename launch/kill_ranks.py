"""Kill ranks of a small training again and again, and see that nothing hangs and nothing is lost.

    python launch/kill_ranks.py --runs 50

Every run trains a tiny MoE on two ranks with balancing on and checkpoints every other optimizer
step. At a random moment one rank is killed (SIGKILL, half of the times while a checkpoint is being
written), raises in the middle of an MoE layer, or makes one micro-step less. Then:

- every other rank must end with an error within the timeout of the process group;
- no process may be left behind;
- the last complete checkpoint must load on fresh ranks, which must train on from there;
- `latest` must name a checkpoint that loads: the plugin moves it on in one step once every rank has
  written its part. DeepSpeed alone does so once rank 0 has; a rank that died in between left it
  empty, or naming a checkpoint whose other parts never came. Counted as "latest unfinished".

One line for each run, with the seed that repeats it (`--runs 1 --seed N`), and a table at the end.
Exit code 1 if anything hung, was left behind or could not be read, or `latest` was unfinished.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # ranks inherit it

from launch.doomed_training import NUM_RANKS, Case, draw, resume, train, worker  # noqa: E402

GRACE_S = 10.0  # what a rank may take to leave, on a busy machine, once its collective has failed
START_S = 120.0

# The preload makes a rank start in 0.2 s: torch, DeepSpeed and what an optimizer imports.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "deepspeed", "deepspeed.runtime.zero.muon.original_muon"])


@dataclass
class Outcome:
    """What one run left behind; every list is empty when all is well."""

    hung: list[str]
    left_over: list[str]
    unreadable: list[str]
    silent: list[str]
    unfinished: list[str]
    error: str = ""
    wait_s: float = 0.0
    resumed_at: str = ""

    @property
    def is_good(self) -> bool:
        wrong = (self.hung, self.left_over, self.unreadable, self.silent, self.unfinished)
        return not any(wrong)


def start(
    directory: Path, timeout_s: float, function: Callable[..., None], *arguments: Any
) -> list[BaseProcess]:
    """Start the ranks of one training, each in a process group of its own."""
    directory.mkdir()
    processes = []
    for rank in range(NUM_RANKS):
        process = _context.Process(
            target=worker, args=(rank, directory, timeout_s, function, arguments)
        )
        process.start()
        processes.append(process)
    return processes


def end(processes: list[BaseProcess]) -> list[int]:
    """Kill whatever is still there of our own ranks; returns the process groups that were."""
    left = []
    for process in processes:
        process.join(0.0)
        alone = process.is_alive()
        try:
            os.killpg(process.pid, signal.SIGKILL)
            left += [] if alone else [process.pid]
        except ProcessLookupError:
            process.kill()
        process.join()
    return left


def wait_for(path: Path, processes: list[BaseProcess], limit_s: float) -> bool:
    """Wait until a file is there; False if a rank ended or the time was up before."""
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline or not all(process.is_alive() for process in processes):
            return path.exists()
        time.sleep(0.002)
    return True


def run_case(case: Case, folder: Path, timeout_s: float) -> Outcome:
    """Train, break, and look at what is left."""
    outcome = Outcome([], [], [], [], [])
    logs = folder / "training"
    processes = start(logs, timeout_s, train, case, folder)
    guilty = processes[case.guilty]
    try:
        if not wait_for(folder / "started", processes, START_S):
            raise RuntimeError(f"the training never started:\n{last_lines(logs / 'log_0', 20)}")
        if case.fault == "kill":
            if case.where == "save":
                wait_for(folder / f"saving_{case.guilty}", processes, START_S)
            time.sleep(case.delay_s)
            guilty.kill()
        else:
            wait_for(folder / "fault", processes, START_S)
        began = time.monotonic()
        for process in processes:
            process.join(max(0.0, began + timeout_s + GRACE_S - time.monotonic()))
        outcome.wait_s = time.monotonic() - began
        for rank, process in enumerate(processes):
            if process.is_alive():
                outcome.hung.append(f"rank {rank}")
            elif process.exitcode == 0 or (process.exitcode < 0 and process is not guilty):
                outcome.silent.append(f"rank {rank} left with exit code {process.exitcode}")
        other = logs / f"log_{1 - case.guilty}"
        outcome.error = last_lines(other, 1)
    finally:
        left = end(processes)
    outcome.left_over = [f"process group {pid}" for pid in left]
    complete = (folder / "complete").read_text()
    problem = read_back(case, folder, complete, folder / "resume_complete", timeout_s)
    outcome.unreadable += [f"step {complete}: {problem}"] if problem else []
    if latest(folder) != complete:
        problem = read_back(case, folder, None, folder / "resume_latest", timeout_s)
        outcome.unfinished += [f"latest is {latest(folder)!r}: {problem}"] if problem else []
    outcome.resumed_at = complete
    return outcome


def latest(folder: Path) -> str:
    """What the file `latest` says."""
    return (folder / "checkpoints/latest").read_text()


def read_back(case: Case, folder: Path, tag: str | None, logs: Path, timeout_s: float) -> str:
    """Resume on fresh ranks; returns what went wrong, or nothing."""
    result = folder / f"{logs.name}.result"
    processes = start(logs, max(timeout_s, 30.0), resume, case, folder, tag, result)
    deadline = time.monotonic() + START_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    end(processes)
    if codes != [0] * NUM_RANKS:
        return f"exit codes {codes}: " + "; ".join(
            last_lines(logs / f"log_{rank}", 1) for rank in range(NUM_RANKS)
        )
    loaded = result.read_text()
    wanted = tag or latest(folder)
    return "" if loaded == wanted else f"loaded step {loaded}, not {wanted}"


def last_lines(path: Path, number: int) -> str:
    """The end of a log."""
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return "\n".join(lines[-number:])[:400]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--timeout-s", type=float, default=12.0, help="of the process group")
    parser.add_argument("--keep", type=Path, help="keep the folders of runs that went wrong here")
    options = parser.parse_args(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcomes = []
    for seed in range(options.seed, options.seed + options.runs):
        case = draw(seed)
        folder = Path(tempfile.mkdtemp(prefix="kill_ranks_"))
        outcome = run_case(case, folder, options.timeout_s)
        outcomes.append(outcome)
        print(describe(case, outcome), flush=True)
        if not outcome.is_good and options.keep:
            shutil.copytree(folder, options.keep / f"seed_{seed}", dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return summarise(outcomes)


def describe(case: Case, outcome: Outcome) -> str:
    """One run as one line, and as a second one what went wrong."""
    line = (
        f"{'ok ' if outcome.is_good else 'BAD'} seed {case.seed:4} {case}: others ended after "
        f"{outcome.wait_s:4.1f} s, resumed at step {outcome.resumed_at}"
    )
    wrong = {name: value for name, value in asdict(outcome).items() if value}
    return line if outcome.is_good else f"{line}\n    {wrong}"


def summarise(outcomes: list[Outcome]) -> int:
    """Print the table; returns the exit code."""
    rows = {
        "runs": len(outcomes),
        "hangs": sum(bool(outcome.hung) for outcome in outcomes),
        "leftovers": sum(bool(outcome.left_over) for outcome in outcomes),
        "unreadable checkpoints": sum(bool(outcome.unreadable) for outcome in outcomes),
        "latest unfinished": sum(bool(outcome.unfinished) for outcome in outcomes),
        "ranks without an error": sum(bool(outcome.silent) for outcome in outcomes),
        "longest wait (s)": round(max((outcome.wait_s for outcome in outcomes), default=0.0), 1),
    }
    for name, value in rows.items():
        print(f"{name:24}{value}")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
