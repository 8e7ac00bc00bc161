"""Pipelines of two stages, the same layers without one, and what a rank sees of their training."""

from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import nn

import ds_moe_lb
from models import MODEL_DIM, moe_param_groups

COEFF = 0.5
GAS = 3
NUM_WINDOWS = 2
NUM_LAYERS = 4  # two on each stage
# Where the MoE layers are, with the expert-parallel size: number of experts by layer.
EVERY_STAGE = {1: 8, 3: 12}
FIRST_STAGE = {0: 8, 1: 12}
LAST_STAGE = {2: 8}


@dataclass(frozen=True)
class Case:
    """One engine; two windows. `terms` are further keys of the section."""

    zero_stage: int = 0
    estimate: str = "running"
    checkpointing: str = "off"
    loss_scale: int = 1
    sync_group: str = "data_parallel"
    bf16: bool = False
    terms: tuple[tuple[str, Any], ...] = ()

    @property
    def section(self) -> dict[str, Any]:
        """The JSON section of a pipeline, whose gradient the plugin injects."""
        return {**self.explicit_section, "aux_loss_coeff": COEFF}

    @property
    def explicit_section(self) -> dict[str, Any]:
        """That of a script which adds `l_aux` itself."""
        return {"estimate": self.estimate, "sync_group": self.sync_group, **dict(self.terms)}


def cannot_step(moe_on: dict[int, int], zero_stage: int) -> str | None:
    """Why plain DeepSpeed has no optimizer step for this pipeline, or None where it has."""
    if zero_stage > 0 and len({layer // 2 for layer in moe_on}) == 1:
        return (
            "MoE on one stage only with ZeRO 1: the norm of the gradients is summed over the "
            "stages once by a stage without experts, twice by one with experts; it hangs"
        )
    return None


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MODEL_DIM, MODEL_DIM)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Sparse(nn.Module):
    def __init__(self, num_experts: int, ep_size: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(MODEL_DIM, MODEL_DIM), nn.Tanh())
        self.moe = MoE(MODEL_DIM, expert, num_experts, ep_size, k=2, top2_2nd_expert_sampling=False)
        self.l_aux: Any = None
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.mul_(2.0)  # uneven routing

    def forward(self, x):
        output, self.l_aux, _ = self.moe(x)
        return x + output


def make_layers(moe_on: dict[int, int], ep_size: int) -> list[nn.Module]:
    torch.manual_seed(42)
    return [
        Sparse(moe_on[index], ep_size) if index in moe_on else Dense()
        for index in range(NUM_LAYERS)
    ]


def square_loss(output, label):
    return (output - label).square().mean()


def make_batch(
    case: Case, window: int, micro_step: int, data_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    seed = (window * GAS + micro_step) * 10 + data_rank
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, MODEL_DIM, generator=generator)
    x += torch.randn(MODEL_DIM, generator=generator)
    label = torch.randn(x.shape, generator=generator)
    return x.bfloat16() if case.bf16 else x, label


def make_engine(model: nn.Module, case: Case, section: dict[str, Any] | None) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": case.zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    if isinstance(model, PipelineModule):
        config["pipeline"] = {
            "activation_checkpoint_interval": int(case.checkpointing != "off"),
            "use_reentrant": case.checkpointing != "non_reentrant",
        }
    if case.bf16:
        config["bf16"] = {"enabled": True}
    if section is not None:
        config["moe_load_balancing"] = section
    engine = ds_moe_lb.initialize(
        model=model, optimizer=torch.optim.SGD(moe_param_groups(model), lr=0.1), config=config
    )[0]
    if case.loss_scale != 1:
        engine.optimizer.override_loss_scale(case.loss_scale)
    return engine


def watch_steps(engine: Any, *, takes_step: bool, scale: int) -> list[dict[str, torch.Tensor]]:
    """Record all gradients before each optimizer step, which may be left out."""
    windows: list[dict[str, torch.Tensor]] = []
    step = engine._take_model_step

    def watched(*args: Any) -> None:
        windows.append(
            {
                name.removeprefix("layers."): deepspeed.utils.safe_get_full_grad(p).float() / scale
                for name, p in engine.module.named_parameters()
            }
        )
        if takes_step:
            step(*args)
        else:
            engine.optimizer.zero_grad()
            for accumulated in getattr(engine.optimizer, "averaged_gradients", {}).values():
                accumulated.clear()
            engine.global_steps += 1

    engine._take_model_step = watched
    return windows


@dataclass
class Outcome:
    """What one rank saw: gradients by window and name, losses and the last report."""

    grads: list[dict[str, torch.Tensor]]
    losses: list[float]
    report: dict[str, float]


def make_pipeline(moe_on: dict[int, int], ep_size: int) -> PipelineModule:
    return PipelineModule(
        make_layers(moe_on, ep_size), num_stages=2, loss_fn=square_loss, partition_method="uniform"
    )


def train_window(engine: Any, case: Case, window: int) -> float:
    """One ``train_batch`` of a pipeline; the loss."""
    data_rank = engine.grid.get_data_parallel_rank()
    batches = [make_batch(case, window, m, data_rank) for m in range(GAS)]
    return engine.train_batch(iter(batches)).item()


def run_pipeline(
    model: PipelineModule, moe_on: dict[int, int], case: Case, section: dict[str, Any] | None
) -> Outcome:
    engine = make_engine(model, case, section)
    takes_step = cannot_step(moe_on, case.zero_stage) is None
    grads = watch_steps(engine, takes_step=takes_step, scale=case.loss_scale)
    losses = [train_window(engine, case, window) for window in range(NUM_WINDOWS)]
    balancer = engine.load_balancer
    return Outcome(grads, losses, balancer.metrics() if balancer is not None else {})


class Whole(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x), sum(x.l_aux for x in self.layers if isinstance(x, Sparse))


def run_whole(
    moe_on: dict[int, int], ep_size: int, case: Case, takes_step: bool, coefficient: float
) -> Outcome:
    engine = make_engine(Whole(make_layers(moe_on, ep_size)), case, case.explicit_section)
    grads = watch_steps(engine, takes_step=takes_step, scale=1)
    losses = []
    for window in range(NUM_WINDOWS):
        total = torch.zeros(())
        for micro_step in range(GAS):
            x, label = make_batch(case, window, micro_step, dist.get_rank())
            output, l_aux = engine(x)
            loss = square_loss(output, label)
            total += loss.detach() / GAS
            engine.backward(loss + coefficient * l_aux)
            engine.step()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return Outcome(grads, losses, engine.load_balancer.metrics())
