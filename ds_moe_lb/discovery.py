"""Which layers of an engine's model can be balanced, and what has to be refused before training."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from ds_moe_lb.config import SECTION, LoadBalancingConfig
from ds_moe_lb.gate import NativeSite
from ds_moe_lb.sites import RouterSite

if TYPE_CHECKING:
    from ds_moe_lb.adapters.transformers import OwnLoss


_NO_BIAS = (
    "it has no correction bias of its own, and ours has no place outside of native and AutoEP "
    "layers; set the rate to 0, or train the model with AutoEP (expert_parallel)"
)


def refuse_unsupported(engine: Any, config: LoadBalancingConfig) -> None:
    if isinstance(engine, PipelineEngine) and config.aux_loss_coeff is None:
        if config.scope != "none":
            raise ValueError(
                f"{SECTION}.aux_loss_coeff: got None, but PipelineEngine hands no l_aux to a loss; "
                f"set it to a number, and the plugin adds the gradient on every stage"
            )
    if isinstance(engine, PipelineEngine) and config.estimate == "exact":
        raise ValueError(
            f"{SECTION}.estimate: got 'exact', but PipelineEngine fetches its batches itself, so "
            f"they cannot be counted first; use 'boundary', which has the whole last window"
        )
    if engine.is_compiled:
        raise ValueError(
            f"{SECTION}: the engine is compiled already (engine.compile()), which is not "
            f"supported; remove the section or do not compile"
        )
    mesh = engine.mesh_device
    if mesh is not None and mesh.mesh.dim() > 1 and mesh.mesh.shape[1] > 1:
        raise ValueError(
            f"{SECTION}: mesh_param / sequence_parallel_size is not supported: DeepSpeed does not "
            f"reduce gradients over its sequence ranks. Use an mpu with sequence-parallel groups"
        )
    if config.monitor.image_interval:
        if not engine.monitor.monitor_config.tensorboard.enabled:
            raise ValueError(
                f"{SECTION}.monitor.image_interval: got {config.monitor.image_interval}, but "
                f"pictures go to TensorBoard only; add "
                f'"tensorboard": {{"enabled": true, ...}} or set it to 0'
            )
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"{SECTION}.monitor.image_interval: pictures need matplotlib; pip install "
                f"'ds_moe_lb[report]' or set it to 0"
            ) from error


def refuse_terms(engine: Any, sites: Sequence[RouterSite], config: LoadBalancingConfig) -> None:
    """Refuse terms that these routers, or this layout of ranks, cannot have."""
    if config.scope == "sequence" and engine.sequence_parallel_size > 1:
        raise ValueError(
            f"{SECTION}.scope: got 'sequence', but with sequence parallelism no rank has a whole "
            f"sequence; use 'global_batch' or 'micro_batch'"
        )
    for site in sites if config.bias_update_rate else ():
        refusal = site.bias.refusal if site.bias is not None else _NO_BIAS
        if refusal is not None:
            raise ValueError(
                f"{SECTION}.bias_update_rate: got {config.bias_update_rate!r}, but the selection "
                f"of layer {site.name!r} ({type(site.module).__qualname__}) cannot be biased: "
                f"{refusal}"
            )
    without = [site.name for site in sites if not site.has_logits]
    if config.z_loss_coeff and without:
        raise ValueError(
            f"{SECTION}.z_loss_coeff: got {config.z_loss_coeff!r}, but the router of layer "
            f"{without[0]!r} gives probabilities and no logits; set it to 0"
        )


class NothingToBalanceError(ValueError):
    """The model has no router."""


def find_sites(model: torch.nn.Module) -> list[RouterSite]:
    """The routers that can be balanced, in the model's order; a pipeline stage may have none.

    Raises:
        NothingToBalanceError: there are none; names what looks like some.
        ValueError: one of them cannot be read; says why.
    """
    modules = list(model.named_modules())
    sites: list[RouterSite] = [
        NativeSite(name, module)
        for name, module in modules
        if isinstance(module, MOELayer) and _is_plain_gate(name, module)
    ]
    # Both packages are in memory if the model has anything of theirs.
    if "deepspeed.module_inject.auto_ep_layer" in sys.modules:
        from ds_moe_lb.adapters.autoep import find_autoep_sites

        sites += find_autoep_sites(modules)
    if "transformers" in sys.modules:
        from ds_moe_lb.adapters.transformers import find_transformers_sites

        replaced = [site.name for site in sites if not site.has_l_aux]
        sites += find_transformers_sites(modules, replaced=replaced)
    if not sites and not isinstance(model, PipelineModule):
        gates = [
            name
            for name, _ in modules
            if any(word in name.rsplit(".", 1)[-1] for word in ("gate", "router"))
        ]
        seen = f"; modules that look like gates: {', '.join(gates[:8])}" if gates else ""
        raise NothingToBalanceError(
            f"{SECTION}: the model ({type(model).__name__}) has no deepspeed.moe.layer.MoE layers "
            f"and no routers of transformers' MoE families, so there is nothing to balance; remove "
            f"the section or use MoE layers{seen}"
        )
    order = {module: index for index, (_, module) in enumerate(modules)}
    return sorted(sites, key=lambda site: order[site.module])


def find_own_loss(model: torch.nn.Module) -> "OwnLoss | None":
    """The auxiliary loss that a transformers model would add itself."""
    if "transformers" not in sys.modules:
        return None
    from ds_moe_lb.adapters import transformers

    return transformers.find_own_loss(model)


def _is_plain_gate(name: str, moe_layer: MOELayer) -> bool:
    if type(moe_layer.gate) is not TopKGate:
        raise ValueError(
            f"{SECTION}: the gate of MoE layer {name!r} is a "
            f"{type(moe_layer.gate).__qualname__}; only deepspeed.moe.sharded_moe.TopKGate itself "
            f"can be balanced"
        )
    return True


def input_models(
    root: torch.nn.Module, sites: Sequence[RouterSite]
) -> list[tuple[torch.nn.Module, bool]]:
    """The models whose arguments tell which tokens count.

    Returns:
        The outermost transformers models that hold observed routers, each with True; else the root
        with False, whose arguments the plugin knows less about.
    """
    routers = {site.module for site in sites if not site.has_l_aux}
    if not routers:
        return [(root, False)]
    from transformers import PreTrainedModel

    models: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for module in root.modules():
        if module not in inside and isinstance(module, PreTrainedModel):
            parts = set(module.modules())
            if routers & parts:
                models.append(module)
                inside |= parts
    return [(model, True) for model in models] or [(root, False)]
