"""The picture of expert load that the monitor sends to TensorBoard while a model trains."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor


def load_heat_map(loads: Sequence[Tensor]) -> Figure:
    """Load of every expert relative to its layer's mean, as layers x experts.

    Args:
        loads: for each layer its ``(E,)`` counts on the CPU; layers may differ in E.

    Returns:
        A figure of its own, unknown to pyplot: nothing to close.
    """
    widest = max(load.numel() for load in loads)
    relative = torch.full((len(loads), widest), float("nan"), dtype=torch.float64)
    for layer, load in enumerate(loads):
        mean = load.double().mean().clamp(min=1e-30)
        relative[layer, : load.numel()] = load.double() / mean
    figure = Figure(
        figsize=(min(3 + 0.25 * widest, 16), min(1.8 + 0.3 * len(loads), 12)), layout="constrained"
    )
    axes = figure.subplots()
    image = axes.imshow(relative, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
    axes.set_xlabel("expert")
    axes.set_ylabel("MoE layer")
    axes.set_yticks(range(len(loads)))
    axes.set_title("expert load / mean load of the layer (1 = even)")
    figure.colorbar(image, ax=axes, extend="max")
    return figure
