"""What rank 0 says about an installation: one line, and a warning if it cannot have an effect."""

from typing import TYPE_CHECKING, Any

import deepspeed.comm as dist
from deepspeed.utils import logger
from deepspeed.utils.logging import print_dist

from ds_moe_lb.balancer import LoadBalancer
from ds_moe_lb.config import SECTION
from ds_moe_lb.monitor import MAX_EXPERT_KEYS

if TYPE_CHECKING:
    from ds_moe_lb.adapters.transformers import OwnLoss


def announce(engine: Any, balancer: LoadBalancer, replaced_loss: "OwnLoss | None") -> None:
    """Say on rank 0 what was installed; warn where it cannot change anything.

    Args:
        engine: that the plugin was installed on.
        balancer: the handle.
        replaced_loss: the model's own auxiliary loss, whose place was taken.
    """
    config, reducer = balancer.policy.config, balancer.balance.reducer
    gas = engine.gradient_accumulation_steps()
    layers = balancer.place.layout.layers
    num_ranks = min((group.num_ranks for group in reducer.groups), default=1.0)
    kinds = sorted({(layer.num_experts, layer.top_k) for layer in layers})
    shapes = ", ".join(f"E={num_experts} k={top_k}" for num_experts, top_k in kinds)
    line = f"{SECTION}: {len(layers)} MoE layers ({shapes}), scope {config.scope}"
    if config.scope == "global_batch":
        sequences = round(num_ranks * gas * engine.train_micro_batch_size_per_gpu())
        line += (
            f", estimate {config.estimate}, counts over {config.sync_group}: "
            f"D x G = {num_ranks:g} x {gas}, balance batch size {sequences} sequences, "
            f"{_collectives_per_step(balancer, gas)} count collectives per optimizer step"
        )
    if balancer.policy.coefficients is None:
        line += ", loss as l_aux" if balancer.policy.replaces_l_aux else ""
    elif config.aux_loss_coeff is not None:
        line += f", aux_loss_coeff {config.aux_loss_coeff:g}"
    for key in ("micro_batch_weight", "z_loss_coeff", "bias_update_rate"):
        if getattr(config, key):
            line += f", {key} {getattr(config, key):g}"
    later = [entry.step for entry in config.schedule if entry.step > engine.global_steps]
    if later:
        line += f", changes by the schedule at the steps {', '.join(map(str, later))}"
    if replaced_loss is not None and balancer.policy.coefficients is not None:
        line += _weights(balancer, replaced_loss)
    print_dist(line, ranks=[0])
    num_loads = balancer.place.layout.num_counts
    if config.monitor.detail == "expert" and num_loads > MAX_EXPERT_KEYS and dist.get_rank() == 0:
        logger.warning(
            f"{SECTION}.monitor.detail: the loads of the first {MAX_EXPERT_KEYS} experts are "
            f"written, of {num_loads} in all layers; more keys would drown a dashboard"
        )
    if config.scope == "global_batch" and num_ranks * gas <= 1 and dist.get_rank() == 0:
        logger.warning(
            f"{SECTION}: D x G is 1, so the global batch is the micro-batch and nothing changes; "
            f"raise gradient_accumulation_steps or the number of data-parallel ranks"
        )


def _weights(balancer: LoadBalancer, replaced: "OwnLoss") -> str:
    """Both weights: of the model's own loss, which is off now, and of the one in its place."""
    if not replaced.is_on:
        return ""
    off = "the model's own loss over all layers pooled, which is off now"
    if balancer.config.aux_loss_coeff is not None:
        return f", instead of router_aux_loss_coef {replaced.coefficient:g} on {off}"
    assert balancer.policy.coefficients is not None
    ours = " and ".join(f"{value:g}" for value in sorted(set(balancer.policy.coefficients)))
    return (
        f", {ours} (router_aux_loss_coef {replaced.coefficient:g} x k / L) on each layer's loss, "
        f"instead of {off}; under transformers' Trainer that one weighed D x G times as much"
    )


def _collectives_per_step(balancer: LoadBalancer, gas: int) -> int:
    reducer, reduction = balancer.balance.reducer, balancer.policy.reduction
    if reduction == "none":  # only the bias asks for the window's counts then
        needs_counts = balancer.policy.config.bias_update_rate > 0
        return reducer.num_collectives_per_message if needs_counts else 0
    if balancer.policy.estimate in ("boundary", "exact"):
        return reducer.num_collectives_per_message
    if reduction == "after_forward":
        return gas * reducer.num_collectives_per_message
    return gas * sum(group.group is not None for group in reducer.groups)
