"""The window: int64 expert counts of all layers from the first micro-step to the optimizer step.

No collectives and no DeepSpeed here. All layers share one flat layout so that one reduction, and a
handful of tensor operations, serve the whole model.

Shape legend: L layers on this rank, E experts of one layer, F = sum of E over the layers (flat).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_moe_lb import loss

# Besides its counts every layer sends x, x^2 and rank * x of x = "which call of which layer is
# this"; they tell after the reduction whether all ranks were at the same place, and if not, which
# one was not.
HEADER = 3
_CALLS = 16


@dataclass(frozen=True)
class RouterLayer:
    """What the window needs to know of one MoE layer.

    Attributes:
        index: position among the MoE layers of this rank.
        name: module name in the model.
        num_experts: E, over all expert-parallel ranks.
        top_k: experts per token.
    """

    index: int
    name: str
    num_experts: int
    top_k: int


class CountLayout:
    """Where each layer's numbers stand in the flat tensors.

    `counts` tensors are ``(F,)``; `message` tensors, which travel, are ``(F + 3 L,)``: each
    layer's counts followed by its header.
    """

    def __init__(self, layers: Sequence[RouterLayer], device: torch.device) -> None:
        self.layers = tuple(layers)
        self.device = device
        self.count_slices: list[slice] = []
        self.message_slices: list[slice] = []
        flat = message = 0
        for layer in self.layers:
            self.count_slices.append(slice(flat, flat + layer.num_experts))
            self.message_slices.append(slice(message, message + layer.num_experts + HEADER))
            flat += layer.num_experts
            message += layer.num_experts + HEADER
        self.num_counts, self.message_size = flat, message
        sizes = torch.tensor([layer.num_experts for layer in self.layers], dtype=torch.int64)
        self.layer_of_expert_F = torch.repeat_interleave(torch.arange(len(self.layers)), sizes).to(
            device
        )
        self.num_experts_L = sizes.to(device)
        self.top_k_L = torch.tensor([layer.top_k for layer in self.layers], device=device)
        # A pipeline stage may have no MoE layer: nothing here may need at least one.
        in_message = [i for s in self.message_slices for i in range(s.start, s.stop - HEADER)]
        self._counts_in_message = torch.tensor(in_message, dtype=torch.int64, device=device)
        headers = [list(range(s.stop - HEADER, s.stop)) for s in self.message_slices]
        in_headers = torch.tensor(headers, dtype=torch.int64).reshape(-1, HEADER)
        self._headers_in_message = in_headers.to(device)
        self._layer_index_L = torch.arange(len(self.layers), device=device)

    def zeros(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """A flat ``(F,)`` tensor of zeros."""
        return torch.zeros(self.num_counts, dtype=dtype, device=self.device)

    def per_layer_sum(self, flat_F: Tensor) -> Tensor:
        """``(F,)`` -> ``(L,)``: sum over each layer's experts."""
        sums = torch.zeros(len(self.layers), dtype=flat_F.dtype, device=flat_F.device)
        return sums.index_add_(0, self.layer_of_expert_F, flat_F)

    def per_layer_max(self, flat_F: Tensor) -> Tensor:
        """``(F,)`` -> ``(L,)``: maximum over each layer's experts (of non-negative values)."""
        peaks = torch.zeros(len(self.layers), dtype=flat_F.dtype, device=flat_F.device)
        return peaks.scatter_reduce_(0, self.layer_of_expert_F, flat_F, "amax")

    def num_tokens(self, counts_F: Tensor) -> Tensor:
        """``(F,)`` int64 counts -> ``(L,)`` fp64 tokens: every token makes k selections."""
        return self.per_layer_sum(counts_F).double() / self.top_k_L

    def positions(self, *, micro_step: int, calls: Sequence[int]) -> list[int]:
        """Where this rank is, for every layer; see :func:`position`."""
        num_layers = len(self.layers)
        return [
            position(micro_step=micro_step, call=calls[layer], layer=layer, num_layers=num_layers)
            for layer in range(num_layers)
        ]

    def pack(self, counts_F: Tensor, positions: Sequence[int], *, rank: int) -> Tensor:
        """Build the message of all layers: counts and headers, ``(F + 3 L,)`` int64."""
        message = torch.empty(self.message_size, dtype=torch.int64, device=self.device)
        message[self._counts_in_message] = counts_F
        # As a rule the layers were called equally often and stand in a row: no copy from the host.
        start = positions[0] if positions else 0
        if list(positions) == list(range(start, start + len(positions))):
            x_L = self._layer_index_L + start
        else:
            x_L = _to_device(positions, torch.int64, self.device)
        message[self._headers_in_message] = torch.stack([x_L, x_L * x_L, x_L * rank], dim=1)
        return message

    def pack_layer(self, counts_E: Tensor, x: int, *, rank: int) -> Tensor:
        """Build the message of one layer: ``(E + 3,)`` int64."""
        num_experts = counts_E.numel()
        message = torch.empty(num_experts + HEADER, dtype=torch.int64, device=self.device)
        message[:num_experts] = counts_E
        for offset, value in enumerate((x, x * x, rank * x)):
            message[num_experts + offset] = value
        return message

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Split a message into counts ``(F,)`` and headers ``(L, 3)``."""
        return message[self._counts_in_message], message[self._headers_in_message]

    def slopes(self, counts_F: Tensor, token_weight_L: Tensor) -> Tensor:
        """``w E f`` of all layers, ``(F,)`` fp32; see :func:`ds_moe_lb.loss.balance_slope`."""
        total_L = self.per_layer_sum(counts_F).clamp(min=1).double()
        scale_L = token_weight_L.double() * self.num_experts_L / total_L
        return (counts_F.double() * scale_L[self.layer_of_expert_F]).float()


def _to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a few numbers, without waiting for what the device has yet to do."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def position(*, micro_step: int, call: int, layer: int, num_layers: int) -> int:
    """The number x that ranks compare: the same on all of them iff they are at the same call."""
    return (micro_step * _CALLS + call % _CALLS) * num_layers + layer


def describe_position(x: int, layers: Sequence[RouterLayer]) -> str:
    """Say in words where a rank with the position x is."""
    step_and_call, layer = divmod(x, len(layers))
    micro_step, call = divmod(step_and_call, _CALLS)
    return f"micro-step {micro_step}, call {call} of layer {layers[layer].name!r}"


@dataclass
class MicroStep:
    """What one counted forward of the whole model leaves behind.

    Attributes:
        index: m, 1 for the first micro-step of the window.
        counts_F: local counts, int64.
        calls: calls of each layer in this forward.
        global_counts_F: counts of the balance group, as far as they were reduced, int64.
        slopes_F: ``w E f`` of all layers, fp32, where they are made together; None until then.
        prob_sum_F: local sums of valid probabilities, fp32; None in windows without a report.
        used_L: where the values of the balancing terms are summed up, fp64; None likewise.
        has_ended: the forward came to its end.
    """

    index: int
    counts_F: Tensor
    calls: list[int]
    global_counts_F: Tensor
    slopes_F: Tensor | None = None
    prob_sum_F: Tensor | None = None
    used_L: Tensor | None = None
    has_ended: bool = False


@dataclass
class CompleteWindow:
    """Counts of a finished window, summed over the balance group.

    Attributes:
        counts_F: ``(F,)`` int64.
        fullness: each layer's calls over the G of that time: 1, unless the window ended early or
            the model calls the layer more or less often than once per forward.
    """

    counts_F: Tensor
    fullness: list[float]

    def slopes(self, layout: CountLayout, *, num_ranks_L: Tensor, gas: int) -> Tensor:
        """``w E f`` of all layers with f over this window, ``w = D G / N``; ``(F,)`` fp32.

        N is what a full window would have had, so that one which ended early does not make the
        next one's balancing stronger.
        """
        tokens_L = layout.num_tokens(self.counts_F)
        fullness_L = _to_device(self.fullness, torch.float64, num_ranks_L.device)
        weight_L = loss.token_weight(tokens_L, numerator=num_ranks_L * gas * fullness_L)
        return layout.slopes(self.counts_F, weight_L)


@dataclass
class Window:
    """Counts since the last optimizer step.

    Attributes:
        layout: the flat layout.
        num_micro_steps: m so far.
        local_F: this rank's counts over finished micro-steps, int64.
        global_F: counts of the balance group as far as they were reduced, int64 (estimate
            `running`).
        calls: calls of each layer so far.
    """

    layout: CountLayout
    num_micro_steps: int = 0
    local_F: Tensor = field(init=False)
    global_F: Tensor = field(init=False)
    calls: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.local_F = self.layout.zeros()
        self.global_F = self.layout.zeros()
        self.calls = [0] * len(self.layout.layers)

    def begin_micro_step(self) -> MicroStep:
        """Open the record of the next counted forward; it belongs to the window once it has ended.

        A forward that raises is never heard of again.
        """
        layout = self.layout
        return MicroStep(
            self.num_micro_steps + 1, layout.zeros(), [0] * len(self.calls), layout.zeros()
        )

    def add(self, micro_step: MicroStep, *, layer: int, counts_E: Tensor) -> None:
        """Count one call of one layer on this rank."""
        micro_step.counts_F[self.layout.count_slices[layer]] += counts_E
        micro_step.calls[layer] += 1

    def end_micro_step(self, micro_step: MicroStep) -> None:
        """The model's forward has ended: take its record in."""
        micro_step.has_ended = True
        self.num_micro_steps += 1
        self.calls = [sum(both) for both in zip(self.calls, micro_step.calls, strict=True)]
        self.local_F += micro_step.counts_F
        self.global_F += micro_step.global_counts_F

    def running_slopes(
        self, micro_step: MicroStep, global_counts_F: Tensor, *, num_ranks_L: Tensor
    ) -> Tensor:
        """Take in a micro-step's reduced counts; ``w E f`` with f over micro-steps 1..m, w = D /
        N_m.

        A layer called c times in one forward makes c terms over shared counts, each over 1/c of
        N_m.
        """
        self.global_F += global_counts_F
        tokens_L = self.layout.num_tokens(global_counts_F)
        weight_L = loss.token_weight(tokens_L, numerator=num_ranks_L)
        if any(calls > 1 for calls in micro_step.calls):
            calls = [max(n, 1) for n in micro_step.calls]
            weight_L = weight_L * _to_device(calls, torch.float64, weight_L.device)
        return self.layout.slopes(self.global_F, weight_L)

    def running_slope(
        self, micro_step: MicroStep, *, layer: int, global_counts_E: Tensor, num_ranks: float
    ) -> Tensor:
        """The same for one call of one layer in a forward under way; ``(E,)``."""
        where = self.layout.count_slices[layer]
        micro_step.global_counts_F[where] += global_counts_E
        tokens = global_counts_E.sum().double() / self.layout.layers[layer].top_k
        weight = loss.token_weight(tokens, numerator=num_ranks)
        so_far_E = self.global_F[where] + micro_step.global_counts_F[where]
        return loss.balance_slope(so_far_E, token_weight=weight)

    def complete(self, global_counts_F: Tensor, *, gas: int) -> CompleteWindow:
        """The finished window, given its counts summed over the balance group."""
        return CompleteWindow(global_counts_F, [calls / gas for calls in self.calls])
