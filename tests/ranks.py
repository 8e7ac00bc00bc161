"""The one launcher of multi-rank tests: real processes, real gloo, the real DeepSpeed engine.

    def _check_sum(value):                      # module level, plain-data arguments
        tensor = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor.item()                    # comes back, one entry per rank

    @pytest.mark.ranks
    def test_sum():
        assert run_ranks(_check_sum, 2, 10) == [21, 21]

Every call starts fresh processes, because DeepSpeed keeps expert and data-parallel groups in module
globals. One call may build many engines in sequence as long as their expert-parallel sizes agree.
"""

import faulthandler
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

BASE_SEED = 1234
LOG_TAIL_CHARS = 4000

# A fork server that has imported torch and deepspeed once starts a rank in 0.1 s instead of 5 s.
# The third name brings in torch's compiler, which the first optimizer of each process would
# otherwise import for 6 s.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "deepspeed", "deepspeed.runtime.zero.muon.original_muon"])


class RankError(RuntimeError):
    """A rank raised, died or was still running at the deadline; the text says which and where."""


class _Failure(NamedTuple):
    when_ns: int
    rank: int
    text: str


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` new processes that form one DeepSpeed process group.

    The group's backend is the accelerator's: gloo on CPU, which is the default here, and NCCL with
    ``DS_ACCELERATOR=cuda``. Python, NumPy and torch are seeded with ``BASE_SEED + rank``.

    Args:
        fn: a module-level function; it asks ``deepspeed.comm`` for its rank.
        args: plain data, the same for every rank.
        timeout_s: for the whole call. A collective gives up after half of it, so a hang usually
            ends in the traceback of a collective rather than in the parent's deadline.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        RankError: with the traceback of the rank that failed first in time.
    """
    deadline = time.monotonic() + timeout_s
    # The fork server takes its environment from here when it starts; ranks inherit it.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Importing DeepSpeed may touch CUDA, which a forked process cannot take along.
    on_cpu = os.environ["DS_ACCELERATOR"] == "cpu"
    context = _context if on_cpu else multiprocessing.get_context("spawn")
    directory = Path(tempfile.mkdtemp(prefix="ranks_"))
    processes: list[BaseProcess] = []
    try:
        for rank in range(world_size):
            process = context.Process(
                target=_worker,
                args=(fn, args, rank, world_size, str(directory), timeout_s),
                name=f"rank {rank}",
            )
            process.start()
            processes.append(process)
        _wait_for_all(processes, directory, deadline, timeout_s)
        return [pickle.loads(_path(directory, r, "result").read_bytes()) for r in range(world_size)]
    finally:
        _kill(processes)
        shutil.rmtree(directory, ignore_errors=True)


def _path(directory: Path, rank: int, kind: str) -> Path:
    return directory / f"rank_{rank}.{kind}"


def _wait_for_all(
    processes: Sequence[BaseProcess], directory: Path, deadline: float, timeout_s: float
) -> None:
    """Return when every rank has exited with 0; raise at the first failure or at the deadline."""
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        seen_ns = time.monotonic_ns()
        if not ended:
            stacks = _stacks(processes, directory, sorted(running.values()))
            raise RankError(
                f"no end after {timeout_s:g} s; still running: ranks {sorted(running.values())}\n"
                + stacks
            )
        for sentinel in ended:
            processes[running.pop(sentinel)].join()  # type: ignore[index]
        if any(process.exitcode for process in processes):
            failures = sorted(_failures(processes, directory, seen_ns))
            first = failures[0]
            others = [f.rank for f in failures[1:]]
            raise RankError(
                f"rank {first.rank} failed first (later: ranks {others}; "
                f"still running: ranks {sorted(set(running.values()) - set(others))})\n"
                + first.text
                + _log_tail(directory, first.rank)
            )


def _failures(processes: Sequence[BaseProcess], directory: Path, seen_ns: int) -> list[_Failure]:
    """All failures known now, with the time each happened.

    A rank writes its traceback before its sockets close, so whoever only failed because a peer was
    gone has a later time.
    """
    failures = []
    for rank, process in enumerate(processes):
        error = _path(directory, rank, "error")
        if error.exists():
            when_ns, text = pickle.loads(error.read_bytes())
            failures.append(_Failure(when_ns, rank, text))
        elif process.exitcode:
            stack = _path(directory, rank, "stack")
            text = stack.read_text() if stack.exists() else ""
            if text:  # faulthandler wrote it at the moment of the crash
                seen_ns = time.monotonic_ns() - (time.time_ns() - stack.stat().st_mtime_ns)
            failures.append(_Failure(seen_ns, rank, _cause(process.exitcode) + "\n" + text))
    return failures


def _cause(exitcode: int) -> str:
    if exitcode < 0:
        return f"died of {signal.Signals(-exitcode).name}, with no Python exception"
    return f"left with exit code {exitcode}, with no Python exception"


def _stacks(processes: Sequence[BaseProcess], directory: Path, ranks: Sequence[int]) -> str:
    """Ask each rank that hangs where it is."""
    texts = []
    for rank in ranks:
        try:
            os.kill(processes[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
        except ProcessLookupError:
            pass
    time.sleep(0.5)
    for rank in ranks:
        stack = _path(directory, rank, "stack")
        where = stack.read_text() if stack.exists() else "(still starting)\n"
        texts.append(f"--- rank {rank} is at\n{where}{_log_tail(directory, rank)}")
    return "".join(texts)


def _log_tail(directory: Path, rank: int) -> str:
    log = _path(directory, rank, "log")
    text = log.read_text(errors="replace") if log.exists() else ""
    return f"--- end of what rank {rank} printed\n{text[-LOG_TAIL_CHARS:]}\n" if text else ""


def _kill(processes: Sequence[BaseProcess]) -> None:
    """End our own ranks, with whatever they started, and nothing else.

    Each rank leads a process group, which outlives a rank that left a child behind.
    """
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        except ProcessLookupError:  # nobody left, or not yet the leader of its own group
            process.kill()
        process.join()
        process.close()


def _worker(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    directory_name: str,
    timeout_s: float,
) -> None:
    directory = Path(directory_name)
    os.setpgid(0, 0)
    log = os.open(_path(directory, rank, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = open(_path(directory, rank, "stack"), "w")  # noqa: SIM115 (open for life)
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack)
    # If the parent itself is killed nobody is left to end us.
    faulthandler.dump_traceback_later(timeout_s + 10.0, exit=True, file=stack)
    try:
        result = _run_in_group(fn, args, rank, world_size, directory, timeout_s)
        _write(_path(directory, rank, "result"), result)
    except BaseException:
        _write(_path(directory, rank, "error"), (time.monotonic_ns(), traceback.format_exc()))
        # No clean-up: closing sockets in order could wait for ranks that will never come.
        sys.stdout.flush()
        os._exit(1)


def _run_in_group(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    directory: Path,
    timeout_s: float,
) -> Any:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Do not depend on how this host resolves its own name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    import deepspeed
    import deepspeed.comm as dist
    import numpy
    import torch

    # Else the first run on CPU compiles DeepSpeed's shared-memory op for 40 s, under a lock that a
    # killed rank leaves behind for ever.
    deepspeed.ops.__compatible_ops__ = {}
    torch.set_num_threads(1)
    random.seed(BASE_SEED + rank)
    numpy.random.seed(BASE_SEED + rank)
    torch.manual_seed(BASE_SEED + rank)
    deepspeed.get_accelerator().set_device(rank)  # nothing on a CPU
    dist.init_distributed(
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=timeout_s / 2),
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=world_size,
    )
    result = fn(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _write(path: Path, value: Any) -> None:
    """Write in one step, so that a reader sees all of it or nothing."""
    unfinished = path.with_suffix(path.suffix + ".part")
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(path)
