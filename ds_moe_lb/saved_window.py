"""The last complete window in a checkpoint: that of all pipeline stages, on the CPU."""

from typing import Any

import torch

from ds_moe_lb.counts import CountLayout
from ds_moe_lb.sync import ModelPlace
from ds_moe_lb.window import CompleteWindow

_VERSION = 1


def pack(
    window: CompleteWindow | None, *, place: ModelPlace, micro_steps_begun: int
) -> dict[str, Any]:
    """What is saved. Collective over the pipeline.

    Args:
        window: the last complete window; None = none, or none that can be saved.
        place: where this rank's layers stand in the model.
        micro_steps_begun: of the window in progress, which is not saved.
    """
    state: dict[str, Any] = {
        "version": _VERSION,
        "layers": _signature(place.layout),
        "micro_steps_begun": micro_steps_begun,
    }
    if window is not None:
        fullness_L = torch.tensor(window.fullness, dtype=torch.float64).to(window.counts_F.device)
        state["previous_counts"] = place.gather(place.embed_counts(window.counts_F)).cpu()
        state["previous_fullness"] = place.gather(place.embed_layers(fullness_L)).tolist()
        state["previous_micro_steps"] = window.num_micro_steps
    return state


def unpack(
    state: dict[str, Any], *, place: ModelPlace, device: torch.device, gas: int
) -> tuple[CompleteWindow | None, str | None]:
    """This stage's part of the window, if there is one, and what the user should know."""
    if state["version"] != _VERSION or state["layers"] != _signature(place.layout):
        return None, (
            "the checkpoint's balancing state belongs to another model and was left alone; the "
            "first window uses estimate 'running'"
        )
    window = None
    if "previous_counts" in state:
        window = CompleteWindow(
            state["previous_counts"][place.counts].to(device),
            state["previous_fullness"][place.layers],
            state.get("previous_micro_steps", gas),  # absent before there was `carry`
        )
    news = None
    if state["micro_steps_begun"]:
        news = (
            f"the checkpoint was saved {state['micro_steps_begun']} micro-steps into an "
            f"accumulation window, whose gradients and counts DeepSpeed does not save; a new "
            f"window begins"
        )
    return window, news


def _signature(layout: CountLayout) -> list[tuple[str, int, int]]:
    return [(layer.name, layer.num_experts, layer.top_k) for layer in layout.layers]
