"""Joining the other ranks, however this process was started."""

import math
import os
from collections import defaultdict

import deepspeed
import deepspeed.comm as dist
import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT

_LAUNCHER_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def join() -> None:
    """Initialise DeepSpeed's process group; alone when no launcher started this process."""
    is_alone = not any(name in os.environ for name in _LAUNCHER_VARIABLES)
    if is_alone:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT="0")
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile a shared-memory op under a lock that a killed rank leaves behind
        # for ever. It serves inference only; this private table is where DeepSpeed looks it up.
        deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # 0.19.0 indexes, later ones use .get
    if is_alone:
        # A port that is free now may be taken a moment later, and nobody has to be met.
        torch.distributed.init_process_group(
            get_accelerator().communication_backend_name(),
            store=torch.distributed.HashStore(),
            rank=0,
            world_size=1,
        )
    # Under mpirun DeepSpeed overwrites MASTER_PORT with this argument, so that two jobs on one host
    # would meet at its default.
    port = int(os.environ.get("MASTER_PORT", TORCH_DISTRIBUTED_DEFAULT_PORT))
    deepspeed.init_distributed(distributed_port=port, verbose=False)


def expert_parallel_size(requested: int, *, num_experts: int) -> int:
    """The expert-parallel size to use; 0 asks for as many ranks as divide the experts.

    Raises:
        ValueError: a size that does not divide both the number of ranks and the number of experts.
    """
    world_size = dist.get_world_size()
    if requested == 0:
        return math.gcd(world_size, num_experts)
    if world_size % requested or num_experts % requested:
        raise ValueError(
            f"--ep-size: got {requested}, expected a divisor of the number of ranks ({world_size}) "
            f"and of --num-experts ({num_experts})"
        )
    return requested


def rank_and_world_size() -> tuple[int, int]:
    """This process among all ranks."""
    return dist.get_rank(), dist.get_world_size()


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier(group=dist.get_world_group())


def leave() -> None:
    """Wait for all ranks and close the process group."""
    barrier()
    dist.destroy_process_group()
