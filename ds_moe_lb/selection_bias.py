"""Auxiliary-loss-free balancing (arXiv 2408.15664): a bias on the selection, and its step.

The bias is added to a router's scores when it chooses and nowhere else: neither the weights of the
chosen experts nor P know of it. It has no gradient; after each optimizer step
``b_i += u * sign(mean count - count_i)`` with the counts of the whole global batch.

Shape legend: E experts of one layer, F = sum of E over the layers (flat).
"""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_moe_lb.counts import CountLayout

# Not with "expert" in it: DeepSpeed would take it for a part of the experts' own state.
NAME = "lb_bias"
# What models call the bias that they were trained with.
OWN_NAMES = ("e_score_correction_bias", "expert_bias")


class SelectionBias:
    """A router's bias, where it is kept: by name, since a cast or a load may replace the tensor.

    In half precision a step of u = 0.001 is lost beside values of 0.25 and more, so the sum is kept
    in fp32 here and what the router reads is that sum rounded, as an optimizer does with weights.

    Args:
        owner: has it as a buffer or a parameter.
        key: its name there; NAME = a buffer of ours, which :meth:`add` makes.

    Attributes:
        master_E: the fp32 sum, ``(E,)``; None in full precision, and before the first step.
    """

    def __init__(self, owner: nn.Module, key: str = NAME) -> None:
        self._owner = owner
        self._key = key
        self.master_E: Tensor | None = None

    @property
    def tensor(self) -> Tensor | None:
        """The tensor, with E entries unless ZeRO-3 has partitioned it; None before :meth:`add`."""
        return tensor_named(self._owner, self._key)

    @property
    def refusal(self) -> str | None:
        """Why it cannot be moved; None where it can."""
        if self.tensor is None or not self.tensor.requires_grad:
            return None
        return (
            f"its {self._key} is a trainable parameter, which the optimizer would write over; call "
            f"requires_grad_(False) on it before the engine is built, or set the rate to 0"
        )

    def add(self, *, num_experts: int) -> None:
        """Where the model has none of its own: a persistent buffer of zeros."""
        if self._key == NAME:
            device = next(self._owner.parameters()).device
            self._owner.register_buffer(NAME, torch.zeros(num_experts, device=device))

    def move(self, step_E: Tensor) -> None:
        """Add to it in place; under ZeRO-3 a parameter has to be gathered.

        Args:
            step_E: ``(E,)`` fp32.
        """
        assert self.tensor is not None
        bias = self.tensor.detach()
        step_E = step_E.to(bias.device)
        if bias.dtype.itemsize >= 4:
            bias.add_(step_E.view_as(bias))
            return
        now_E = bias.flatten()
        master_E = now_E.float()
        if self.master_E is not None:
            kept_E = self.master_E.to(bias.device)
            # Elsewhere somebody has loaded other values since.
            master_E = torch.where(kept_E.to(bias.dtype) == now_E, kept_E, master_E)
        self.master_E = master_E + step_E
        bias.copy_(self.master_E.view_as(bias))


def move_biases(
    biases: Sequence[SelectionBias | None], counts_F: Tensor, layout: CountLayout, *, rate: float
) -> None:
    """Take the step of an optimizer step that was applied. Collective where ZeRO-3 has a parameter.

    Args:
        biases: of each layer.
        counts_F: ``(F,)`` int64 counts of the global batch.
        layout: the flat layout.
        rate: u.
    """
    step_F = rate * bias_step(counts_F, layout)
    # Does nothing for tensors that ZeRO-3 has not partitioned.
    there = [bias for bias in biases if bias is not None]
    with GatheredParameters([bias.tensor for bias in there], modifier_rank=0):
        for bias, where in zip(there, layout.count_slices, strict=True):
            bias.move(step_F[where])


def masters_of(biases: Sequence[SelectionBias | None], layout: CountLayout) -> dict[str, Tensor]:
    """What a checkpoint needs besides the biases themselves: fp32 sums by layer, on the CPU."""
    return {
        layer.name: bias.master_E.cpu()
        for layer, bias in zip(layout.layers, biases, strict=True)
        if bias is not None and bias.master_E is not None
    }


def restore_masters(
    biases: Sequence[SelectionBias | None], layout: CountLayout, masters: dict[str, Tensor]
) -> None:
    """Take up what was saved; nothing of layers that are not there, or of another size."""
    for layer, bias in zip(layout.layers, biases, strict=True):
        master_E = masters.get(layer.name)
        fits = master_E is not None and len(master_E) == layer.num_experts
        if bias is not None:
            bias.master_E = master_E if fits else None


def bias_step(counts_F: Tensor, layout: CountLayout) -> Tensor:
    """``sign(mean count - count)`` of every expert, ``(F,)`` fp32; compared in int64.

    Args:
        counts_F: ``(F,)`` int64 counts of the global batch.
        layout: the flat layout.
    """
    layer_F = layout.layer_of_expert_F
    total_F = layout.per_layer_sum(counts_F)[layer_F]
    return torch.sign(total_F - layout.num_experts_L[layer_F] * counts_F).float()


def tensor_named(module: nn.Module, key: str) -> Tensor | None:
    """The module's own buffer or parameter of this name."""
    parameter = module._parameters.get(key)
    return parameter if parameter is not None else module._buffers.get(key)


def bias_of(module: nn.Module) -> Tensor | None:
    """The bias of ours, ``(E,)`` fp32; None where the router has none."""
    return module._buffers.get(NAME)


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
            own = [name for name in OWN_NAMES if tensor_named(module, name) is not None]
            logger.warning(
                f"moe_load_balancing: the checkpoint's {key} was left alone, because "
                + (
                    f"the router has a bias of its own, {own[0]}, which is the one that moves; "
                    f"routing will differ from that of the run that was saved"
                    if own
                    else "bias_update_rate is 0 throughout; routing will differ from that of the "
                    "run that was saved. To go on with a bias as it is, set it to a number and to "
                    "0 by the schedule"
                )
            )

    return module.register_load_state_dict_pre_hook(before_load)
