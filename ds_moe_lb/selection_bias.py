"""Auxiliary-loss-free balancing (arXiv 2408.15664): a bias on the selection, and its step.

The bias is added to a router's scores when it chooses and nowhere else: neither the weights of the
chosen experts nor P know of it. It has no gradient; after each optimizer step
``b_i += u * sign(mean count - count_i)`` with the counts of the whole global batch.

Shape legend: E experts of one layer, F = sum of E over the layers (flat).
"""

from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_moe_lb.counts import CountLayout

# Not with "expert" in it: DeepSpeed would take it for a part of the experts' own state.
NAME = "lb_bias"


def bias_step(counts_F: Tensor, layout: CountLayout) -> Tensor:
    """``sign(mean count - count)`` of every expert, ``(F,)`` fp32; compared in int64.

    Args:
        counts_F: ``(F,)`` int64 counts of the global batch.
        layout: the flat layout.
    """
    layer_F = layout.layer_of_expert_F
    total_F = layout.per_layer_sum(counts_F)[layer_F]
    return torch.sign(total_F - layout.num_experts_L[layer_F] * counts_F).float()


def bias_of(module: nn.Module) -> Tensor | None:
    """The router's bias, ``(E,)`` fp32; None where it has none."""
    return module._buffers.get(NAME)


def add_bias(module: nn.Module, *, num_experts: int) -> None:
    """Give a router a persistent bias of zeros, which its checkpoints hold from now on."""
    device = next(module.parameters()).device
    module.register_buffer(NAME, torch.zeros(num_experts, device=device))


def remove_bias(module: nn.Module) -> None:
    """Take it away again, if it is there."""
    module._buffers.pop(NAME, None)
    module._non_persistent_buffers_set.discard(NAME)


def accept_all_checkpoints(module: nn.Module) -> Any:
    """Let checkpoints without a bias load zeros, and those with one load where there is none.

    Returns:
        The handle of the hook.
    """

    def before_load(
        module: nn.Module, state: dict[str, Any], prefix: str, *_: Any, **__: Any
    ) -> None:
        key, bias_E = f"{prefix}{NAME}", bias_of(module)
        if bias_E is not None:
            state.setdefault(key, torch.zeros_like(bias_E))
        elif state.pop(key, None) is not None:
            logger.warning(
                f"moe_load_balancing: the checkpoint's {key} was left alone, because "
                f"bias_update_rate is 0 throughout; routing will differ from that of the run that "
                f"was saved. To go on with a bias as it is, set it to a number and to 0 by the "
                f"schedule"
            )

    return module.register_load_state_dict_pre_hook(before_load)
