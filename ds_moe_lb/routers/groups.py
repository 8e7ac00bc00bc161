"""Optimizer parameter groups after routers were changed: old weights out, embeddings in.

An embedding goes where the weight was that it stands in for, and gets no weight decay. What was
left out of the optimizer stays out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_moe_lb.routers.weights import RouterWeight

Group = dict[str, Any]


@dataclass(frozen=True)
class Swap:
    """A router weight and what stands in for it.

    Attributes:
        name: of the layer.
        old: the weight that is gone; None where it had been replaced before.
        new: what makes the weight now.
    """

    name: str
    old: nn.Parameter | None
    new: RouterWeight


def repaired(parameters: Sequence[Any], swaps: Sequence[Swap]) -> list[Any]:
    """What to hand to the optimizer; nothing of the caller's is changed.

    Args:
        parameters: parameters, or groups of them, from before or after the routers were changed.
        swaps: the changes.
    """
    if not parameters or isinstance(parameters[0], dict):
        groups = [{**group, "params": _as_list(group["params"])} for group in parameters]
        return _repair(groups, swaps)
    rest, embeddings = _split(list(parameters), swaps)
    if not embeddings:
        return rest
    return [  # DeepSpeed splits groups for its experts by name
        {"params": rest, "name": "parameters"},
        {"params": embeddings, "weight_decay": 0.0, "name": "router_embeddings"},
    ]


def repair_optimizer(optimizer: torch.optim.Optimizer, swaps: Sequence[Swap]) -> None:
    """The same for an optimizer that exists already, in place."""
    before, groups = len(optimizer.param_groups), _groups_afterwards(optimizer, swaps)
    for group, new in zip(optimizer.param_groups, groups, strict=False):
        group["params"][:] = new["params"]
    for group in groups[before:]:
        optimizer.add_param_group(group)
    for swap in swaps:
        if swap.old is not None:
            optimizer.state.pop(swap.old, None)


def adds_group(optimizer: torch.optim.Optimizer, swaps: Sequence[Swap]) -> bool:
    """Whether :func:`repair_optimizer` would need a group that the optimizer has not got."""
    return len(_groups_afterwards(optimizer, swaps)) > len(optimizer.param_groups)


def empties_group(optimizer: torch.optim.Optimizer, swaps: Sequence[Swap]) -> bool:
    """Whether :func:`repair_optimizer` would leave a group without parameters."""
    pairs = zip(optimizer.param_groups, _groups_afterwards(optimizer, swaps), strict=False)
    return any(before["params"] and not after["params"] for before, after in pairs)


def trained_in(optimizer: torch.optim.Optimizer, swaps: Sequence[Swap]) -> list[str]:
    """The layers whose old weight the optimizer has stepped already."""
    return [x.name for x in swaps if x.old is not None and optimizer.state.get(x.old)]


def _groups_afterwards(optimizer: torch.optim.Optimizer, swaps: Sequence[Swap]) -> list[Group]:
    """The optimizer's groups repaired, new ones last; the optimizer itself is not changed."""
    return _repair([dict(group) for group in optimizer.param_groups], swaps)


def _repair(groups: list[Group], swaps: Sequence[Swap]) -> list[Group]:
    """Repair groups and add to the list those that are needed besides; returns the list."""
    for group in list(groups):
        group["params"], embeddings = _split(_as_list(group["params"]), swaps)
        if embeddings:
            home = _without_decay(group, groups)
            home["params"] = [*home["params"], *embeddings]
    return groups


def _split(
    parameters: list[nn.Parameter], swaps: Sequence[Swap]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those that stay, and the embeddings that belong in their midst."""
    embeddings_of: dict[int, list[nn.Parameter]] = {}
    for swap in swaps:
        trained, frozen = swap.new.split_parameters()
        embeddings_of[id(swap.old)] = trained
        embeddings_of |= {id(p): [p] for p in trained} | {id(p): [] for p in frozen}
    rest = [p for p in parameters if id(p) not in embeddings_of]
    return rest, [e for p in parameters for e in embeddings_of.get(id(p), [])]


def _without_decay(group: Group, groups: list[Group]) -> Group:
    """The group for the embeddings of one: itself, another one of the kind, or a new one."""
    for other in (group, *groups):
        if other.get("weight_decay") == 0 and _settings(other) == _settings(group):
            return other
    name = {"name": f"{group['name']}_router_embeddings"} if "name" in group else {}
    groups.append({**group, **name, "params": [], "weight_decay": 0.0})
    return groups[-1]


def _settings(group: Group) -> Group:
    own = ("params", "weight_decay", "name")
    return {
        key: float(value) if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in own
    }


def _as_list(params: Any) -> list[nn.Parameter]:
    return [params] if isinstance(params, nn.Parameter) else list(params)
