"""What launch/kill_ranks.py kills: a tiny training, drawn from a seed, with its fault planted.

Imports neither torch nor DeepSpeed by itself: the parent process needs neither.
"""

import faulthandler
import math
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

NUM_RANKS = 2
MODEL_DIM = 8
OPTIMIZER_STEPS = 400  # more than any fault waits for
SAVE_INTERVAL = 2
LIFE_S = 300.0
FAULTS = ("kill", "kill", "raise", "less")


@dataclass(frozen=True)
class Case:
    """One run, drawn from its seed."""

    seed: int
    fault: str
    guilty: int
    estimate: str
    mechanism: str
    gas: int
    ep_size: int
    zero_stage: int
    micro_step: int  # of the whole training, 1 = the first: when the guilty rank raises or skips
    where: str  # raise: in forward or in backward; less: stop or step early; kill: any time or save
    delay_s: float  # kill: after the moment that `where` names

    def __str__(self) -> str:
        return (
            f"{self.fault:5} rank {self.guilty} {self.where:8} micro-step {self.micro_step:2} "
            f"{self.estimate:8} {self.mechanism:9} G {self.gas} ep {self.ep_size} "
            f"zero {self.zero_stage}"
        )


def draw(seed: int) -> Case:
    """The case of this seed; the faults take turns."""
    rng = random.Random(seed)
    fault = FAULTS[seed % len(FAULTS)]
    where = {
        "kill": ("any time", "save"),
        "raise": ("forward", "backward"),
        "less": ("stop", "step"),
    }
    case = {
        "guilty": rng.randrange(NUM_RANKS),
        "estimate": rng.choice(("running", "boundary")),
        "mechanism": rng.choice(("l_aux", "injection")),
        "gas": rng.choice((2, 4)),
        "ep_size": rng.choice((1, 2)),
        "zero_stage": rng.choice((0, 1, 2)),
        "micro_step": rng.randint(17, 40),  # the first checkpoint is there by then
        "where": rng.choice(where[fault]),
    }
    delay_s = rng.uniform(0.0, 0.03 if case["where"] == "save" else 1.5)
    return Case(seed=seed, fault=fault, delay_s=delay_s, **case)


def make_engine(case: Case) -> Any:
    """A tiny model of two MoE blocks, on the real engine with balancing."""
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    import ds_moe_lb

    torch.manual_seed(7)

    class TinyMoE(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                MoE(MODEL_DIM, torch.nn.Linear(MODEL_DIM, MODEL_DIM), 4, ep_size=case.ep_size, k=2)
                for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total = x.new_zeros(())
            for block in self.blocks:
                output, l_aux, _ = block(x)
                x, total = x + output, total + l_aux
            return x, total

    model = TinyMoE()
    section: dict[str, Any] = {"estimate": case.estimate}
    if case.mechanism == "injection":
        section["aux_loss_coeff"] = 0.1
    parameters = {"params": list(model.parameters()), "name": "all"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.gas,
        "zero_optimization": {"stage": case.zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "moe_load_balancing": section,
    }
    parameter_groups = split_params_into_different_moe_groups_for_optimizer(parameters)
    return ds_moe_lb.initialize(model=model, model_parameters=parameter_groups, config=config)[0]


def micro_step(engine: Any, case: Case, number: int) -> float:
    """One forward, backward and step; returns the loss."""
    import torch

    generator = torch.Generator().manual_seed(1000 * number + engine.global_rank)
    prediction, l_aux = engine(torch.randn(2, 6, MODEL_DIM, generator=generator))
    loss = prediction.square().mean() + (0.1 * l_aux if case.mechanism == "l_aux" else 0.0)
    engine.backward(loss)
    engine.step()
    return float(loss)


def train(case: Case, folder: Path) -> None:
    """Train with checkpoints until the fault, or a peer's, ends this rank."""
    engine = make_engine(case)
    rank = engine.global_rank
    for number in range(1, OPTIMIZER_STEPS * case.gas + 1):
        if rank == case.guilty and number == case.micro_step:
            note(folder / "fault", case.fault)
            if case.fault == "raise":
                plant_error(engine, case.where)
            elif case.fault == "less" and case.where == "stop":
                return
            elif case.fault == "less":
                engine.set_gradient_accumulation_boundary(True)
        micro_step(engine, case, number)
        if case.fault == "less" and rank == case.guilty and number == case.micro_step:
            engine.set_gradient_accumulation_boundary(False)
            engine.micro_steps = case.gas * engine.global_steps
        steps = engine.global_steps
        if number % case.gas == 0 and steps % SAVE_INTERVAL == 0:
            if steps > SAVE_INTERVAL:
                note(folder / f"saving_{rank}", str(steps))
            engine.save_checkpoint(str(folder / "checkpoints"), tag=str(steps))
            if rank == 0:  # DeepSpeed returns behind a barrier: every rank has written its part
                note(folder / "complete", str(steps))
                note(folder / "started", "")


def plant_error(engine: Any, where: str) -> None:
    """Make the second MoE layer raise between its gate and its experts, or in its backward."""

    def fail(*arguments: Any) -> None:
        raise ValueError("the planted error")

    experts = engine.module.blocks[1].deepspeed_moe.experts
    if where == "forward":
        experts.register_forward_pre_hook(fail)
    else:
        experts.register_full_backward_hook(fail)


def resume(case: Case, folder: Path, tag: str | None, result: Path) -> None:
    """Load a checkpoint on fresh ranks and train two windows on; writes "step loss"."""
    engine = make_engine(case)
    path, _ = engine.load_checkpoint(str(folder / "checkpoints"), tag=tag)
    assert path is not None, "no checkpoint was found"
    loaded = engine.global_steps
    losses = [micro_step(engine, case, number) for number in range(1, 2 * case.gas + 1)]
    assert all(map(math.isfinite, losses)), f"losses after resuming: {losses}"
    assert engine.global_steps == loaded + 2
    assert engine.load_balancer.metrics()["valid_tokens"] == 12 * NUM_RANKS * case.gas
    if engine.global_rank == 0:
        note(result, str(loaded))


def note(path: Path, text: str) -> None:
    """Write in one step."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def worker(
    rank: int, directory: Path, timeout_s: float, function: Callable[..., None], arguments: tuple
) -> None:
    """Join the group, do the work, leave with exit code 1 and a traceback on any error."""
    os.setpgid(0, 0)
    log = os.open(directory / f"log_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    # If the parent itself is killed nobody is left to end us.
    faulthandler.dump_traceback_later(LIFE_S, exit=True)
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import deepspeed
        import deepspeed.comm as dist
        import torch

        # Else the first run compiles an op for 40 s, under a lock that a killed rank keeps.
        deepspeed.ops.__compatible_ops__ = {}
        torch.set_num_threads(1)
        # DeepSpeed makes its own groups with torch's default, which is 30 minutes.
        torch.distributed.distributed_c10d.default_pg_timeout = timedelta(seconds=timeout_s)
        dist.init_distributed(
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timedelta(seconds=timeout_s),
            init_method=f"file://{directory / 'store'}",
            rank=rank,
            world_size=NUM_RANKS,
        )
        function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
