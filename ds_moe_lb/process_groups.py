"""Which ranks share their counts, and the process groups in which they do.

Counts travel in process groups of their own, so that a mistake can never pair with a collective of
ZeRO. A group of one rank is None and makes no collective at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_moe_lb import _compat

ProcessGroup = Any


@dataclass(frozen=True)
class CountGroup:
    """Ranks whose counts are summed together.

    Attributes:
        ranks: global ranks, ascending.
        group: process group of the plugin's own, None for a single rank.
        num_ranks: D of the formulas, the ranks of the group over the sequence-parallel size, which
            the engine does not divide by. A group inside one sequence has less than 1.
    """

    ranks: tuple[int, ...]
    group: ProcessGroup | None
    num_ranks: float


class GroupFactory:
    """Creates the plugin's process groups; only the members of a group take part.

    They are kept for the life of the process, for the next installation too: torch would give the
    name of a destroyed group to the next one of the same ranks, which would then find the old one's
    addresses in the store.

    Args:
        model_groups: the host's groups which together connect all ranks that will share a group
            here. Collective over them.
    """

    def __init__(self, model_groups: Sequence[ProcessGroup]) -> None:
        self._made = _groups_of_this_world()
        _align_group_names(model_groups)

    def create(self, ranks: Sequence[int], *, replicas: int = 1) -> CountGroup:
        """Make the group of these ranks, or return the one made before. Collective over them.

        Args:
            ranks: global ranks, this one among them.
            replicas: sequence-parallel size, which the engine does not divide by.
        """
        members = tuple(sorted(ranks))
        if len(members) > 1 and members not in self._made:
            self._made[members] = _compat.new_group(members)
        return CountGroup(members, self._made.get(members), len(members) / replicas)


_kept: dict[Any, dict[tuple[int, ...], ProcessGroup]] = {}


def _groups_of_this_world() -> dict[tuple[int, ...], ProcessGroup]:
    """Ranks to group, as made since the process group of the world was initialised."""
    world = dist.get_world_group()
    if world not in _kept:
        _kept.clear()
    return _kept.setdefault(world, {})


def _align_group_names(model_groups: Sequence[ProcessGroup]) -> None:
    """Bring the ranks to the same number of process groups; else they would wait for ever.

    Ranks belong to different numbers of groups where DeepSpeed made the expert groups of one
    pipeline stage only, or where a script made a group of some ranks. Padded with groups of this
    rank alone.
    """
    number = own = _compat.num_group_names()
    for group in model_groups:
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, number, group=group)
        number = max(everyone)
    for _ in range(number - own):
        _compat.new_group([dist.get_rank()])


def model_groups(engine: Any) -> list[ProcessGroup]:
    """The host's groups that connect all ranks with a part of one model replica, or its copies."""
    groups = [engine.seq_data_parallel_group]
    if isinstance(engine, PipelineEngine):
        groups.append(engine.grid.get_pipe_parallel_group())
    return groups


def data_parallel_ranks(engine: Any) -> list[int]:
    """Ranks over which the engine averages the gate's gradient (data x sequence parallel)."""
    return list(dist.get_all_ranks_from_group(engine.seq_data_parallel_group))


def expert_group_ranks(expert_group_name: str, *, kind: str) -> list[int]:
    """Ranks of the `expert_parallel` or `expert_data_parallel` group of an MoE layer."""
    group = _compat.expert_group(expert_group_name, kind=kind)
    return list(dist.get_all_ranks_from_group(group))


def pipeline_ranks(engine: Any) -> list[int]:
    """Ranks that run this rank's micro-batches on the other stages, itself included."""
    return list(dist.get_all_ranks_from_group(engine.grid.get_pipe_parallel_group()))
