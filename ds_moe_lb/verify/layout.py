"""What is taken over from the user's DeepSpeed config, and what verification sets itself."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_moe_lb.config import (
    ROUTER_SECTION,
    SECTION,
    LoadBalancingConfig,
    parse_config,
    parse_router_config,
)
from ds_moe_lb.verify.model import SEQUENCES

# What decides how gradients are made and reduced. Optimizer, scheduler, clipping and logs do not:
# gradients are compared before the optimizer steps.
_KEPT = (
    "zero_optimization",
    "fp16",
    "bf16",
    "data_types",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
)
# Parts of the loss that the reference leaves out; they are switched off.
_NOT_COVERED = ("z_loss_coeff", "bias_update_rate", "schedule")
# Scaled gradients of the small model must stay below 65504, also summed over a few ranks, and well
# above fp16's 6e-8.
_MAX_SCALE_POWER = 12


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The user's layout on this world.

    Attributes:
        world_size: ranks, all data-parallel.
        ep_size: expert-parallel size.
        gas: gradient_accumulation_steps.
        top_k: experts per token.
        precision: fp32, bf16 or fp16.
        zero_stage: ZeRO stage.
        section: the validated section, less what is not covered.
        not_covered: keys of the section that were switched off, and `moe_router`.
        kept: the parts of the user's config that are kept.
    """

    world_size: int
    ep_size: int
    gas: int
    top_k: int
    precision: str
    zero_stage: int
    section: LoadBalancingConfig
    not_covered: tuple[str, ...]
    kept: Mapping[str, Any]

    @property
    def estimate(self) -> str:
        """Where f comes from, as the reference names it."""
        if self.section.scope == "global_batch":
            return self.section.estimate
        return self.section.scope

    @property
    def coefficient(self) -> float:
        """The factor on the loss: the config's, or that of the script that adds ``l_aux``."""
        if self.estimate == "none":
            return 0.0
        return 1.0 if self.section.aux_loss_coeff is None else self.section.aux_loss_coeff

    def groups(self, *, ep_size: int) -> list[list[int]]:
        """The ranks that share counts. DeepSpeed puts neighbours in one expert-parallel group."""
        ranks = range(self.world_size)
        if self.section.sync_group == "data_parallel":
            return [list(ranks)]
        blocks = [list(ranks[start : start + ep_size]) for start in ranks[::ep_size]]
        if self.section.sync_group == "expert_parallel":
            return blocks
        return [list(column) for column in zip(*blocks, strict=True)]

    def engine_config(self, *, gas: int) -> dict[str, Any]:
        """The DeepSpeed JSON of one engine."""
        section = self.section.model_dump()
        section["monitor"] = {"enabled": True, "interval": 1}
        for key in _NOT_COVERED:
            section.pop(key)
        return {
            **self.kept,
            "train_micro_batch_size_per_gpu": SEQUENCES,
            "gradient_accumulation_steps": gas,
            "gradient_clipping": 0.0,
            "steps_per_print": 1_000_000_000,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            SECTION: section,
        }

    def describe(self) -> str:
        """One line for the head of the table."""
        coefficient, hybrid = self.section.aux_loss_coeff, self.section.micro_batch_weight
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return (
            f"{ranks}, ep_size {self.ep_size}, ZeRO {self.zero_stage}, "
            f"gradient_accumulation_steps {self.gas}, k {self.top_k}, {self.precision}, "
            f"f {self.estimate} over {self.section.sync_group}, "
            + (f"micro_batch_weight {hybrid:g}, " if hybrid else "")
            + ("l_aux" if coefficient is None else f"aux_loss_coeff {coefficient:g}")
        )


def make_layout(
    config: Mapping[str, Any], *, world_size: int, ep_size: int = 0, top_k: int = 2
) -> Layout:
    """Read the user's config.

    Args:
        config: the DeepSpeed JSON.
        world_size: ranks.
        ep_size: expert-parallel size, 0 = as many ranks as divide 16 experts, as in training.
        top_k: experts per token.

    Raises:
        ValueError: what the config asks for cannot be verified; the message says why.
    """
    section = parse_config(config)
    if section is None or not section.enabled:
        raise ValueError(f"--config: {SECTION} is absent or not enabled, so nothing is to verify")
    if not 1 <= top_k <= 8:
        raise ValueError(f"--top-k: got {top_k}, expected 1 to 8")
    if ep_size == 0:
        ep_size = math.gcd(world_size, 16)
    if ep_size < 1 or world_size % ep_size:
        raise ValueError(
            f"--ep-size: got {ep_size}, expected a divisor of the number of ranks ({world_size})"
        )
    if _enabled(config, "torch_autocast") or _enabled(config, "amp"):
        raise ValueError("--config: torch_autocast and amp are not covered by verify")
    kept = {key: _without_auto(config[key]) for key in _KEPT if key in config}
    if section.scope == "sequence":
        raise ValueError(
            "--config: moe_load_balancing.scope is 'sequence', which verify does not cover"
        )
    zero_stage = kept.get("zero_optimization", {}).get("stage", 0)
    if zero_stage == 3:
        raise ValueError(
            "--config: zero_optimization.stage is 3, which DeepSpeed refuses for its native MoE "
            "layers, and those are what verify builds"
        )
    precision = "bf16" if _enabled(kept, "bf16") else "fp16" if _enabled(kept, "fp16") else "fp32"
    if precision == "fp16":
        scaling = {
            "initial_scale_power": min(
                kept["fp16"].get("initial_scale_power", 16), _MAX_SCALE_POWER
            ),
            "loss_scale": min(kept["fp16"].get("loss_scale", 0), 2**_MAX_SCALE_POWER),
        }
        kept["fp16"] = {**kept["fp16"], **scaling}
    off = tuple(key for key in _NOT_COVERED if getattr(section, key))
    if parse_router_config(config).type != "linear":  # it has tests of its own
        off += (ROUTER_SECTION,)
    return Layout(
        world_size=world_size,
        ep_size=ep_size,
        gas=_accumulation_steps(config, world_size),
        top_k=top_k,
        precision=precision,
        zero_stage=zero_stage,
        section=section,
        not_covered=off,
        kept=kept,
    )


def _enabled(config: Mapping[str, Any], key: str) -> bool:
    section = config.get(key)
    return isinstance(section, Mapping) and section.get("enabled") is True


def _without_auto(value: Any) -> Any:
    """Without the "auto" that integrations such as Trainer would fill in."""
    if isinstance(value, Mapping):
        return {key: _without_auto(item) for key, item in value.items() if item != "auto"}
    return value


def _accumulation_steps(config: Mapping[str, Any], world_size: int) -> int:
    """G as DeepSpeed works it out from the three batch sizes."""
    given = config.get("gradient_accumulation_steps")
    if isinstance(given, int):
        return given
    batch, micro_batch = (
        config.get("train_batch_size"),
        config.get("train_micro_batch_size_per_gpu", 1),
    )
    if isinstance(batch, int) and isinstance(micro_batch, int):
        return max(batch // (micro_batch * world_size), 1)
    return 1
