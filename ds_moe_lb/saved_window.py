"""The last complete window in a checkpoint: that of all pipeline stages, on the CPU."""

from typing import Any

import torch

from ds_moe_lb.counts import CountLayout
from ds_moe_lb.sync import ModelPlace
from ds_moe_lb.window import CompleteWindow


def signature(layout: CountLayout) -> list[tuple[str, int, int]]:
    """What a model must have in common with the one that was saved."""
    return [(layer.name, layer.num_experts, layer.top_k) for layer in layout.layers]


def pack(window: CompleteWindow, place: ModelPlace) -> dict[str, Any]:
    """Entries of a saved state. Collective over the pipeline."""
    fullness_L = torch.tensor(window.fullness, dtype=torch.float64).to(window.counts_F.device)
    return {
        "previous_counts": place.gather(place.embed_counts(window.counts_F)).cpu(),
        "previous_fullness": place.gather(place.embed_layers(fullness_L)).tolist(),
        "previous_micro_steps": window.num_micro_steps,
    }


def is_in(state: dict[str, Any]) -> bool:
    """Whether a saved state has a window."""
    return "previous_counts" in state


def unpack(
    state: dict[str, Any], place: ModelPlace, *, device: torch.device, gas: int
) -> CompleteWindow:
    """This stage's part of the window."""
    return CompleteWindow(
        state["previous_counts"][place.counts].to(device),
        state["previous_fullness"][place.layers],
        state.get("previous_micro_steps", gas),  # absent before there was `carry`
    )
