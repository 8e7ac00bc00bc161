"""Figures of one or more runs: training curves, domain x expert heat maps, expert load.

Shape legend: D domains, L layers, E experts.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from ds_moe_lb.metrics import mutual_information
from ds_moe_lb.report.charts import PANELS, draw_panel
from ds_moe_lb.report.run_log import RunLog
from ds_moe_lb.report.style import LIGHT, Palette, styled
from ds_moe_lb.training.run_folder import Run

_LAYERS_PER_ROW = 4


def draw_figures(logs: Sequence[RunLog]) -> dict[str, Figure]:
    """The figures that are kept as files, by name, in the order in which they are read."""
    with styled(LIGHT):
        figures = {"training_curves": training_curves(logs, LIGHT)}
        runs = validated_runs(logs)
        if runs:
            layers = range(num_layers(runs))
            figures["domain_expert_heatmaps"] = heat_maps(runs, layers)
            figures["expert_load"] = expert_load(runs, LIGHT)
    return figures


def save_figures(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Write each figure as a PNG; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=150)
    return paths


def validated_runs(logs: Sequence[RunLog]) -> Sequence[Run]:
    """The files of those runs that counted which experts each domain selects."""
    return [log.run for log in logs if log.run is not None and log.run.counts_experts]


def num_layers(runs: Sequence[Run]) -> int:
    """MoE layers of the deepest run."""
    return max(len(_counts(run)) for run in runs)


def training_curves(logs: Sequence[RunLog], palette: Palette) -> Figure:
    """Every panel that has data, two beside each other."""
    panels = [panel for panel in PANELS if panel.has_data(logs)]
    rows = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(10, 0.4 + 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).flat
    for panel, place in zip(panels, axes, strict=False):
        place.set_title(panel.title)
        draw_panel(panel, place, logs, palette)
    for place in list(axes)[len(panels) :]:
        place.set_axis_off()
    axes[0].legend()
    return figure


def heat_maps(runs: Sequence[Run], layers: Sequence[int]) -> Figure:
    """One row per layer, one column per run; a cell is the share of a domain's selections."""
    shares = [_selection_share(run) for run in runs]
    num_domains = max(share_LDE.shape[1] for share_LDE in shares)
    num_experts = max(share_LDE.shape[2] for share_LDE in shares)
    highest = max(share_LDE.max() for share_LDE in shares)
    figure = Figure(
        figsize=(1.6 + 4.2 * len(runs), 1.2 + len(layers) * (0.5 + 0.22 * num_domains)),
        layout="constrained",
    )
    axes = figure.subplots(len(layers), len(runs), squeeze=False)
    image = None
    for column, (run, share_LDE) in enumerate(zip(runs, shares, strict=True)):
        domains = list(run.validations[-1]["loss_per_domain"])
        for row, layer in enumerate(layers):
            panel = axes[row, column]
            if layer >= len(share_LDE):
                panel.set_axis_off()
                continue
            order_E = _order_by_favourite_domain(share_LDE[layer])
            image = panel.imshow(
                share_LDE[layer][:, order_E], vmin=0.0, vmax=highest, cmap="viridis", aspect="auto"
            )
            panel.grid(False)
            information = mutual_information(_counts(run)[layer])
            title = f"layer {layer}: mutual information {information:.3f} nats"
            panel.set_title(f"{run.label}\n{title}" if row == 0 else title)
            panel.set_yticks(range(len(domains)), domains if column == 0 else [""] * len(domains))
            panel.set_xticks(range(len(order_E)), [str(expert) for expert in order_E], size=7)
            panel.tick_params(length=0)
        axes[-1, column].set_xlabel("expert, ordered by the domain that uses it most")
    figure.suptitle("Which experts each domain selects on held-out files")
    assert image is not None, "callers pass runs with a validation"
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.outline.set_visible(False)
    uniform = 1 / num_experts
    bar.ax.axhline(uniform, color="white", linewidth=1.5)
    bar.set_label(
        f"share of the domain's selections (white line: all experts alike, {uniform:.4g})"
    )
    return figure


def expert_load(runs: Sequence[Run], palette: Palette) -> Figure:
    """Load of each expert on all held-out text relative to the mean, most used first."""
    shares = [_relative_load(run) for run in runs]
    layers = num_layers(runs)
    in_row = min(layers, _LAYERS_PER_ROW)
    rows = math.ceil(layers / in_row)
    figure = Figure(figsize=(10, 1.0 + 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, in_row, sharey=True, squeeze=False)
    width = 0.8 / len(runs)
    for layer, panel in enumerate(panels.flat):
        if layer >= layers:
            panel.set_axis_off()
            continue
        panel.set_title(f"layer {layer}")
        for index, (run, load_LE) in enumerate(zip(runs, shares, strict=True)):
            if layer < len(load_LE):
                load_E = np.sort(load_LE[layer])[::-1]
                left = np.arange(1, len(load_E) + 1) + (index - (len(runs) - 1) / 2) * width
                colour = palette.runs[index % len(palette.runs)]
                panel.bar(left, load_E, width=width, color=colour, label=run.label)
        panel.axhline(1.0, color=palette.ink, linewidth=0.9, linestyle=":")
        panel.grid(False, axis="x")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_xlabel("experts, most used first")
    for row in panels:
        row[0].set_ylabel("load / mean load")
    panels[0, -1].legend(loc="upper right")
    figure.suptitle("Expert load on held-out files (dotted: even)")
    return figure


def _counts(run: Run) -> Tensor:
    """``(L, D, E)`` int64 selections of the last validation."""
    return torch.tensor(run.validations[-1]["tokens_per_expert_LDE"])


def _selection_share(run: Run) -> NDArray[np.float64]:
    counts_LDE = _counts(run).double()
    return (counts_LDE / counts_LDE.sum(dim=2, keepdim=True).clamp(min=1)).numpy()


def _relative_load(run: Run) -> NDArray[np.float64]:
    counts_LE = _counts(run).double().sum(dim=1)
    return (counts_LE / counts_LE.mean(dim=1, keepdim=True)).numpy()


def _order_by_favourite_domain(share_DE: NDArray[np.float64]) -> NDArray[np.int64]:
    """Experts of the first domain first, within a domain the most used first."""
    return np.lexsort((-share_DE.max(axis=0), share_DE.argmax(axis=0)))
