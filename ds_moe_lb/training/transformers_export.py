"""Trained weights back into the layout of transformers, from ZeRO's and AutoEP's.

Shape legend: E experts, F hidden width of an expert, M model width.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_moe_lb.convert.new_folder import copy_companions, new_folder

# Families whose AutoEP layers are put back: those that `convert` writes.
AUTOEP_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")


def export(model: PreTrainedModel, folder: Path, *, source: Path) -> None:
    """Write a folder for `from_pretrained`, in the precision that was trained in. Collective.

    Args:
        model: the engine's module.
        folder: replaced if it exists.
        source: where the model came from; its tokenizer is taken along.
    """
    blocks = _autoep_blocks(model)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not any(name.startswith(f"{block}.") for block in blocks):
            state[name] = _whole(tensor)
    for name, block in blocks.items():
        state |= {f"{name}.{key}": tensor for key, tensor in _family_layout(block)}
    if dist.get_rank() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        with new_folder(folder) as partial:
            _in_own_layout(model, state).save_pretrained(partial)
            copy_companions(source, partial)
    dist.barrier(group=dist.get_world_group())


def _autoep_blocks(model: nn.Module) -> dict[str, Any]:
    if "deepspeed.module_inject.auto_ep_layer" not in sys.modules:
        return {}
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    return {name: m for name, m in model.named_modules() if isinstance(m, AutoEPMoELayer)}


def _family_layout(block: Any) -> Iterator[tuple[str, Tensor]]:
    """An AutoEP block's tensors with all experts, by their names in `AUTOEP_FAMILIES`."""
    yield "gate.weight", _whole(block.router.gate.weight)
    # w1 (E, F, M) is the gate's, w3 (E, F, M) the up and w2 (E, M, F) the down projection.
    w1, w2, w3 = (
        _all_experts(_whole(getattr(block.experts, name)), block) for name in ("w1", "w2", "w3")
    )
    yield "experts.gate_up_proj", torch.cat([w1, w3], dim=1)
    yield "experts.down_proj", w2
    for name, module in (
        ("shared_expert", block.shared_experts),
        ("shared_expert_gate", block.shared_experts_gate),
    ):
        if module is not None:
            for key, parameter in module.named_parameters():
                yield f"{name}.{key}", _whole(parameter)


def _whole(tensor: Tensor) -> Tensor:
    """On the CPU, put together where ZeRO-3 has partitioned it; shared memory elsewhere."""
    if not hasattr(tensor, "ds_id"):
        return tensor.detach().cpu()
    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().cpu().clone()


def _all_experts(local: Tensor, block: Any) -> Tensor:
    """``(E, ...)`` from the experts of this rank, which follow those of the rank before."""
    if block.ep_size == 1:
        return local
    on_device = local.to(block.router.gate.weight.device).contiguous()
    parts = [torch.empty_like(on_device) for _ in range(block.ep_size)]
    dist.all_gather(parts, on_device, group=block.ep_group)
    return torch.cat(parts).cpu()


def _in_own_layout(model: PreTrainedModel, state: dict[str, Tensor]) -> PreTrainedModel:
    """The model as transformers builds it, without the replaced layers."""
    with torch.device("meta"):
        own: PreTrainedModel = type(model)(model.config)
    own.load_state_dict(state, assign=True)
    own.tie_weights()
    return own
