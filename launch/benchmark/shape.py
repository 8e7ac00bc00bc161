"""What is measured: the shapes, the ways of balancing, and the model that they balance.

Shape legend: B sequences, S tokens each, T = B S tokens of a micro-step on one rank, M width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

COEFFICIENT = 0.01
SEQUENCES = 2
WARM_UP_TOKENS = 64
_SEED = 42
_NEVER = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One point of the benchmark.

    Attributes:
        tokens: per micro-step and rank.
        model_dim: width of the model.
        expert_dim: hidden width of an expert; small, so that the gate's share is not flattered.
        num_experts: per layer, over all ranks.
        top_k: experts of a token.
        layers: MoE layers.
        gas: G, micro-steps of an optimizer step.
        ranks: D.
    """

    tokens: int = 2048
    model_dim: int = 512
    expert_dim: int = 128
    num_experts: int = 64
    top_k: int = 8
    layers: int = 4
    gas: int = 4
    ranks: int = 2

    @property
    def ep_size(self) -> int:
        """Two ranks share the experts wherever there are two."""
        return min(self.ranks, 2)


# One factor at a time around the fixed shape.
FACTORS: dict[str, tuple[int, ...]] = {
    "num_experts": (16, 128, 256),
    "top_k": (1, 2),
    "layers": (1, 16, 48),
    "gas": (1, 16, 64),
    "ranks": (4,),
}


def shapes_of(factor: str, base: Shape) -> list[Shape]:
    """The shapes that differ from the base in this factor."""
    return [replace(base, **{factor: v}) for v in FACTORS[factor] if v != getattr(base, factor)]


@dataclass(frozen=True)
class Variant:
    """One way to train: with DeepSpeed's own gate, or with the plugin.

    Attributes:
        name: as it stands in the table.
        section: content of the JSON section; None = the plugin is not installed.
        without: one of the plugin's optimisations that is taken out (`ablations`).
    """

    name: str
    section: dict[str, Any] | None = None
    without: str | None = None

    @property
    def adds_loss(self) -> bool:
        """Whether the plugin adds the gradient itself; else the script adds ``l_aux``."""
        return self.section is not None and self.section.get("aux_loss_coeff") is not None

    @property
    def has_second_forward(self) -> bool:
        """Whether the plugin runs the model a second time, which is no code of its own."""
        return self.section is not None and self.section["estimate"] == "exact"


PLAIN = Variant("plain DeepSpeed")
# Plain against plain: what the measurement itself cannot tell apart.
AGAIN = Variant("plain DeepSpeed again")
REPORT = "report"
ESTIMATES = ("running", "boundary", "carry", "exact", REPORT)


def plugin_variants(estimates: Sequence[str]) -> list[Variant]:
    """These estimates in both ways of adding the loss; REPORT is the default with its reports."""
    quiet = {"enabled": False}
    variants = []
    for estimate in estimates:
        if estimate == REPORT:
            reporting = {"estimate": "running", "monitor": {"enabled": True, "interval": 1}}
            variants.append(Variant("running, l_aux, report each step", reporting))
            continue
        section = {"estimate": estimate, "monitor": quiet}
        variants.append(Variant(f"{estimate}, l_aux", section))
        variants.append(
            Variant(f"{estimate}, aux_loss_coeff", {**section, "aux_loss_coeff": COEFFICIENT})
        )
    return variants


def ablated(variant: Variant, optimisation: str) -> Variant:
    """The variant without one of the plugin's optimisations."""
    return replace(variant, name=optimisation, without=optimisation)


def accepted(engine: Any, variants: list[Variant]) -> tuple[list[Variant], dict[str, str]]:
    """Those that this version of the plugin installs on the engine, and why it refuses the others.

    Collective; refusals are the same on all ranks, as they follow from config and model.
    """
    taken, refused = [], {}
    for variant in variants:
        try:
            with installed(engine, variant):
                taken.append(variant)
        except ValueError as error:
            refused[variant.name] = str(error)
    return taken, refused


@contextmanager
def installed(engine: Any, variant: Variant) -> Iterator[None]:
    """The plugin on a live engine, and off it afterwards. Collective."""
    if variant.section is None:
        yield
        return
    import ds_moe_lb
    from launch.benchmark.ablations import taken_out

    balancer = ds_moe_lb.install(engine, variant.section)
    try:
        with taken_out(variant.without):
            yield
    finally:
        balancer.uninstall()


def make_model(shape: Shape) -> Any:
    """Pre-norm blocks with nothing but an MoE layer, the same weights on every rank.

    No attention: a real model spends more time outside of its gates, so shares come out smaller.
    """
    import torch
    from deepspeed.moe.layer import MoE
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(shape.model_dim)
            self.moe = MoE(
                shape.model_dim,
                nn.Sequential(
                    nn.Linear(shape.model_dim, shape.expert_dim),
                    nn.GELU(),
                    nn.Linear(shape.expert_dim, shape.model_dim),
                ),
                shape.num_experts,
                ep_size=shape.ep_size,
                k=shape.top_k,
                top2_2nd_expert_sampling=False,
                use_rts=False,
            )

        def forward(self, x_BSM: Tensor) -> tuple[Tensor, Tensor]:
            output_BSM, l_aux, _ = self.moe(self.norm(x_BSM))
            return x_BSM + output_BSM, l_aux

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(shape.layers))

        def forward(self, x_BSM: Tensor) -> tuple[Tensor, Tensor]:
            losses = []
            for block in self.blocks:
                x_BSM, l_aux = block(x_BSM)
                losses.append(l_aux)
            return x_BSM.square().mean(), torch.stack(losses).sum()

    torch.manual_seed(_SEED)
    return Model()


def make_engine(model: Any, shape: Shape, *, zero_stage: int = 1) -> Any:
    """The engine, with an optimizer that leaves the weights as they are.

    Every window then does the same work on the same numbers, with the operations of a real step.
    """
    import deepspeed
    import torch
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": shape.gas,
        "gradient_clipping": 0.0,
        "steps_per_print": _NEVER,
        # The default bucket is a buffer of 2 GB, beside which no memory of a layer shows.
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": 20_000_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(groups, lr=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def make_batches(shape: Shape, *, tokens: int, device: Any) -> list[Any]:
    """This rank's ``(B, S, M)`` micro-batch for each micro-step, each with a mean of its own."""
    import deepspeed.comm as dist
    import torch

    batches = []
    for micro_step in range(shape.gas):
        generator = torch.Generator().manual_seed(1_000 * dist.get_rank() + micro_step)
        size = (SEQUENCES, max(tokens // SEQUENCES, 1), shape.model_dim)
        mean_M = torch.randn(shape.model_dim, generator=generator)
        batches.append((torch.randn(size, generator=generator) + 0.5 * mean_M).to(device))
    return batches
