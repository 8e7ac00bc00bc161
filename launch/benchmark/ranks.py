"""Ranks on this machine: fresh processes for each shape, which form one DeepSpeed process group."""

import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

# The third name brings in what the first optimizer of a process would import for seconds.
_PRELOAD = ["torch", "deepspeed", "deepspeed.runtime.zero.muon.original_muon"]
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a whole training step may lie between two of them


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> Any:
    """Run a module-level function on new ranks; returns what rank 0's returned, through JSON.

    Raises:
        Exception: of torch.multiprocessing, with the traceback of the rank that failed.
    """
    import multiprocessing

    import torch.multiprocessing

    choose_device(num_ranks)
    multiprocessing.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        torch.multiprocessing.start_processes(
            _rank, (num_ranks, folder, function, arguments), num_ranks, start_method="forkserver"
        )
        return json.loads(Path(folder, "result.json").read_text())


def choose_device(num_ranks: int) -> None:
    """One GPU for each rank or the CPU; one thread for each rank, as they share the cores."""
    import torch

    if torch.cuda.device_count() < num_ranks:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _rank(
    rank: int,
    num_ranks: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore")
    # DeepSpeed prints from every rank; what is ours to say goes to stderr.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        import deepspeed
        import deepspeed.comm as dist
        import torch
        from deepspeed.accelerator import get_accelerator
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        # Else the first run on a CPU compiles an op that only inference uses.
        deepspeed.ops.__compatible_ops__ = {}
        torch.set_num_threads(1)
        if get_accelerator().device_name() != "cpu":
            get_accelerator().set_device(rank)
        dist.init_distributed(
            auto_mpi_discovery=False,
            verbose=False,
            timeout=_COLLECTIVE_TIMEOUT,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
        )
        result = function(*arguments)
        if rank == 0:
            Path(folder, "result.json").write_text(json.dumps(result, default=asdict))
        dist.barrier()
        dist.destroy_process_group()


def say(text: str) -> None:
    """A line of progress from rank 0."""
    import deepspeed.comm as dist

    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def any_rank(condition: bool) -> bool:
    """Whether it holds on any rank, so that all of them go on or stop. Collective."""
    import deepspeed.comm as dist
    import torch
    from deepspeed.accelerator import get_accelerator

    flag = torch.tensor([float(condition)], device=get_accelerator().current_device_name())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def sum_over_ranks(numbers: list[float]) -> list[float]:
    """Each number summed over the ranks. Collective."""
    import deepspeed.comm as dist
    import torch
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    total = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    summed: list[float] = total.tolist()
    return summed
