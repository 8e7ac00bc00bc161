"""The flat layout of the int64 expert counts of all layers, and the messages in which they travel.

No collectives and no DeepSpeed here. All layers share one flat layout so that one reduction, and a
handful of tensor operations, serve the whole model.

Shape legend: L layers on this rank, E experts of one layer, F = sum of E over the layers (flat).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
            x_L = to_device(positions, torch.int64, self.device)
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


def count_selections(
    selected_TK: Tensor,
    *,
    num_experts: int,
    valid_mask_T: Tensor | None = None,
    num_rows: int | None = None,
) -> Tensor:
    """How often each expert was selected; no loop, and nothing waits for the device.

    Args:
        selected_TK: ``(T, K)`` int64 experts of each token.
        num_experts: E.
        valid_mask_T: ``(T,)`` bool, True = the token counts; None = all do.
        num_rows: B, to count in each of B sequences of equal length.

    Returns:
        ``(E,)``, or ``(B, E)`` with rows; int64.
    """
    at_TK = selected_TK
    if num_rows is not None:
        row_T = torch.arange(len(selected_TK), device=selected_TK.device)
        row_T = row_T // max(len(selected_TK) // max(num_rows, 1), 1)
        at_TK = selected_TK + num_experts * row_T.unsqueeze(1)
    weight_TK = torch.ones_like(at_TK)
    if valid_mask_T is not None:
        weight_TK = valid_mask_T.to(torch.int64).unsqueeze(1).expand_as(at_TK)
    num_counts = num_experts * (1 if num_rows is None else num_rows)
    counts = torch.zeros(num_counts, dtype=torch.int64, device=selected_TK.device)
    counts.scatter_add_(0, at_TK.reshape(-1), weight_TK.reshape(-1))
    return counts if num_rows is None else counts.view(num_rows, num_experts)


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
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
