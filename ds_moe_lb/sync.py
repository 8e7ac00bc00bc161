"""Every collective of the plugin, but for those that make its process groups."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_moe_lb.counts import CountLayout, RouterLayer, describe_position
from ds_moe_lb.process_groups import CountGroup


@contextmanager
def _naming(what: str, count_group: CountGroup) -> Iterator[None]:
    """Have a collective that fails say what it was for; the backend's own words tell nothing."""
    try:
        yield
    except RuntimeError as error:  # timeouts and lost connections, of every backend
        raise RuntimeError(
            f"moe_load_balancing: rank {dist.get_rank()} got no sum of {what} over the ranks "
            f"{list(count_group.ranks)}. One of them has died, raised an error, or makes fewer "
            f"micro-steps or runs other MoE layers than this one: look for the first error in the "
            f"output of the others, and see that each gets the same number of micro-batches. The "
            f"backend says: {error}"
        ) from error


@dataclass(frozen=True)
class _Part:
    """The share of a message that travels in one group.

    Attributes:
        tensor: what is summed, in place.
        work: of the collective; None where there is nobody to wait for.
        count_group: who sums.
        where: its place in the message; None = it is the message.
    """

    tensor: Tensor
    work: Any
    count_group: CountGroup
    where: Tensor | None = None


@dataclass
class PendingCounts:
    """An asynchronous sum of one message; `wait` returns it and blocks this rank's stream only.

    Attributes:
        what: micro-step and layer, for the error of a rank that waits in vain.
    """

    parts: list[_Part]
    message: Tensor
    what: str

    def wait(self) -> Tensor:
        for part in self.parts:
            if part.work is not None:
                with _naming(self.what, part.count_group):
                    part.work.wait()
            if part.where is not None:
                self.message[part.where] = part.tensor
        self.parts = []
        return self.message


@dataclass(frozen=True)
class ModelPlace:
    """Where this rank's layers stand among the layers of all pipeline stages.

    Attributes:
        layout: of the whole model's layers; this rank's own layout without pipeline parallelism.
        counts: this rank's part of a flat ``(F,)`` tensor of the whole model.
        layers: this rank's part of an ``(L,)`` tensor of the whole model.
        pipe_group: one rank of each stage; None without pipeline parallelism.
    """

    layout: CountLayout
    counts: slice
    layers: slice
    pipe_group: CountGroup | None = None

    def embed_counts(self, own_F: Tensor) -> Tensor:
        """A tensor of the whole model with this rank's numbers in their place, zero elsewhere."""
        whole_F = self.layout.zeros(own_F.dtype)
        whole_F[self.counts] = own_F
        return whole_F

    def embed_layers(self, own_L: Tensor) -> Tensor:
        """The same for one number per layer."""
        whole_L = torch.zeros(len(self.layout.layers), dtype=own_L.dtype, device=own_L.device)
        whole_L[self.layers] = own_L
        return whole_L

    def gather(self, embedded: Tensor) -> Tensor:
        """Fill in the other stages' numbers: a sum, in place. Collective over the pipeline."""
        what = "what the stages report or save at the end of a window"
        return sum_over(embedded, count_group=self.pipe_group, what=what)


class CountReducer:
    """Sums the counts of all layers, or of one, over each layer's count group."""

    def __init__(self, layout: CountLayout, groups: Sequence[CountGroup]) -> None:
        """Args:
        layout: the flat layout.
        groups: for each layer its count group.
        """
        self.groups = tuple(groups)
        self.rank = dist.get_rank()
        self.num_collectives = 0
        self._layers = layout.layers
        self._layers_of: dict[tuple[int, ...], list[int]] = {}
        for layer, count_group in enumerate(groups):
            self._layers_of.setdefault(count_group.ranks, []).append(layer)
        self._where = {
            ranks: torch.cat(
                [
                    torch.arange(
                        layout.message_slices[layer].start, layout.message_slices[layer].stop
                    )
                    for layer in layers
                ]
            ).to(layout.device)
            for ranks, layers in self._layers_of.items()
        }

    @property
    def num_collectives_per_message(self) -> int:
        """Collectives of one message of all layers: one for each group of several ranks."""
        return sum(len(ranks) > 1 for ranks in self._layers_of)

    def start(self, message: Tensor, *, step: int) -> PendingCounts:
        """Launch the sum of a message of all layers (``CountLayout.pack``); reuses its memory.

        Args:
            message: ``(F + 3 L,)`` int64.
            step: micro-step of this rank, for errors.
        """
        what = f"the counts of all layers at micro-step {step}"
        if len(self._layers_of) <= 1:
            parts = [self._launch(message, group, what) for group in self.groups[:1]]
            return PendingCounts(parts, message, what)
        return PendingCounts(
            [
                self._launch(
                    message[self._where[ranks]], self.groups[layers[0]], what, self._where[ranks]
                )
                for ranks, layers in self._layers_of.items()
            ],
            message,
            what,
        )

    def start_layer(self, message: Tensor, *, layer: int, step: int) -> PendingCounts:
        """Launch the sum of one layer's ``(E + 3,)`` message; reuses its memory."""
        what = f"the counts of layer {self._layers[layer].name!r} at micro-step {step}"
        return PendingCounts([self._launch(message, self.groups[layer], what)], message, what)

    def _launch(
        self, tensor: Tensor, count_group: CountGroup, what: str, where: Tensor | None = None
    ) -> _Part:
        if count_group.group is None:
            return _Part(tensor, None, count_group, where)
        self.num_collectives += 1
        with _naming(what, count_group):
            work = dist.all_reduce(tensor, group=count_group.group, async_op=True)
        return _Part(tensor, work, count_group, where)


@dataclass(frozen=True)
class PositionCheck:
    """Summed headers of one message, to be compared once the host may wait.

    Attributes:
        sums_N3: ``(N, 3)`` int64, the group's sums of x, x^2 and rank * x.
        own: this rank's x in each row.
        layers: the layer of each row.
    """

    sums_N3: Tensor
    own: Sequence[int]
    layers: Sequence[int]


def check_positions(
    checks: Sequence[PositionCheck],
    *,
    rank: int,
    groups: Sequence[CountGroup],
    layers: Sequence[RouterLayer],
) -> None:
    """Raise if the ranks were not at the same call when they reduced; waits for the device once.

    Args:
        checks: what was reduced since the last time.
        rank: this global rank.
        groups: each layer's count group.
        layers: the layers.

    Raises:
        RuntimeError: naming the rank that was elsewhere, and where it was.
    """
    if not checks:
        return
    sums = torch.cat([check.sums_N3 for check in checks]).tolist()
    own = [x for check in checks for x in check.own]
    rows = [layer for check in checks for layer in check.layers]
    for (total, squares, weighted), x, layer in zip(sums, own, rows, strict=True):
        size = len(groups[layer].ranks)
        if total == size * x and squares == size * x * x:
            continue
        # One rank alone away from the others can be named without another collective, which the
        # ranks, being at different places, could not be trusted to pair. Seen from any rank that is
        # not the odd one: total = size * x + delta, weighted = x * sum(ranks) + odd * delta.
        delta = total - size * x
        offset = weighted - x * sum(groups[layer].ranks)
        odd = offset // delta if delta and offset % delta == 0 else None
        here = describe_position(x, layers)
        if odd in groups[layer].ranks and squares == (size - 1) * x * x + (x + delta) ** 2:
            there = describe_position(x + delta, layers)
            detail = f"rank {odd} was at {there}, rank {rank} at {here}"
        else:
            detail = f"rank {rank} was at {here}, unlike other ranks of its group"
        raise RuntimeError(
            f"moe_load_balancing: the ranks {list(groups[layer].ranks)} disagree at layer "
            f"{layers[layer].name!r}: {detail}. All ranks must run the same MoE layers and the "
            f"same number of micro-steps; counts summed here would be wrong."
        )


def place_among_stages(own: CountLayout, *, pipe_group: CountGroup) -> ModelPlace:
    """Ask the other stages for their layers. Collective over the pipeline.

    The group's ranks ascend with the stages, so its order is the model's order.
    """
    everyone: list[Any] = [None] * len(pipe_group.ranks)
    if pipe_group.group is None:
        everyone = [own.layers]
    else:
        dist.all_gather_object(everyone, own.layers, group=pipe_group.group)
    before = pipe_group.ranks.index(dist.get_rank())
    whole = [layer for stage in everyone for layer in stage]
    first_layer = sum(len(stage) for stage in everyone[:before])
    first_count = sum(layer.num_experts for layer in whole[:first_layer])
    numbered = [replace(layer, index=index) for index, layer in enumerate(whole)]
    return ModelPlace(
        CountLayout(numbered, own.device),
        slice(first_count, first_count + own.num_counts),
        slice(first_layer, first_layer + len(own.layers)),
        pipe_group,
    )


def sum_over(tensor: Tensor, *, count_group: CountGroup | None, what: str) -> Tensor:
    """Sum a tensor over a group in place and wait; nothing happens in a group of one rank.

    Args:
        tensor: any.
        count_group: who sums; None = nobody else.
        what: the tensor in words, for the error of a rank that waits in vain.
    """
    if count_group is not None and count_group.group is not None:
        with _naming(what, count_group):
            dist.all_reduce(tensor, group=count_group.group)
    return tensor


def compare_signatures(signature: dict[str, Any], *, count_group: CountGroup) -> None:
    """Raise RuntimeError naming rank and difference if the ranks were set up differently.

    gloo does not reject mismatched collectives, so this is asked once, before the first count.
    """
    if count_group.group is None:
        return
    everyone: list[Any] = [None] * len(count_group.ranks)
    dist.all_gather_object(everyone, signature, group=count_group.group)
    first = everyone[0]
    for rank, other in zip(count_group.ranks, everyone, strict=True):
        for key in first:
            if other[key] != first[key]:
                raise RuntimeError(
                    f"moe_load_balancing: rank {rank} has {key} = {other[key]!r}, rank "
                    f"{count_group.ranks[0]} has {first[key]!r}; all ranks need the same model and "
                    f"config"
                )
