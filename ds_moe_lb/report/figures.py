"""Figures of one or more runs: training curves, domain x expert heat maps, expert load.

Shape legend: D domains, L layers, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from ds_moe_lb.metrics import mutual_information
from ds_moe_lb.training.run_folder import Run

# Okabe-Ito, distinguishable with colour-blind eyes; its blue is too dark for dark paper.
_RUNS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_RUNS_ON_DARK = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#F0E442")
_LIGHT: dict[str, Any] = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "faint": "#d9dde2",
    "runs": _RUNS,
}
_DARK: dict[str, Any] = {
    "paper": "#161b22",
    "ink": "#e6edf3",
    "faint": "#3b434d",
    "runs": _RUNS_ON_DARK,
}
_SMOOTHED_SHARE = 0.04  # width of the moving average, as a share of the run


def draw_figures(runs: list[Run], *, dark: bool = False) -> dict[str, Figure]:
    """All figures by name, in the order in which they are read."""
    palette = _DARK if dark else _LIGHT
    figures: dict[str, Figure] = {}
    with _style(palette):
        if any(run.history for run in runs):
            figures["training_curves"] = _training_curves(runs, palette)
        if any(run.validations for run in runs):
            figures["domain_expert_heatmaps"] = _heatmaps([run for run in runs if run.validations])
            figures["expert_load"] = _expert_load([run for run in runs if run.validations], palette)
    return figures


def save_figures(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Write each figure as a PNG; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=150)
    return paths


@contextmanager
def _style(palette: dict[str, Any]) -> Iterator[None]:
    settings: Any = {
        "figure.facecolor": palette["paper"],
        "savefig.facecolor": palette["paper"],
        "axes.facecolor": palette["paper"],
        "axes.edgecolor": palette["faint"],
        "axes.labelcolor": palette["ink"],
        "axes.titlecolor": palette["ink"],
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": palette["faint"],
        "grid.linewidth": 0.6,
        "grid.alpha": 0.7,
        "text.color": palette["ink"],
        "xtick.color": palette["ink"],
        "ytick.color": palette["ink"],
        "legend.frameon": False,
        "figure.constrained_layout.w_pad": 0.09,
        "figure.constrained_layout.h_pad": 0.09,
        "font.size": 9.5,
    }
    with matplotlib.rc_context(settings):
        yield


def _training_curves(runs: list[Run], palette: dict[str, Any]) -> Figure:
    """Losses above, balance below; every panel shares the optimizer steps."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    panels: list[tuple[Axes, str, str, Callable[[Run], list[dict[str, Any]]], bool]] = [
        (axes[0, 0], "Training loss (nats per byte)", "lm_loss", lambda run: run.history, True),
        (
            axes[0, 1],
            "Validation loss on held-out files",
            "loss",
            lambda run: run.validations,
            False,
        ),
        (
            axes[1, 0],
            "Balance loss over the global batch",
            "lbl_global_batch",
            lambda run: run.history,
            True,
        ),
        (
            axes[1, 1],
            "MaxVio in a global batch",
            "max_violation_global_batch",
            lambda run: run.history,
            True,
        ),
    ]
    for panel, title, key, records_of, smooth in panels:
        panel.set_title(title)
        for run, colour in zip(runs, cycle(palette["runs"]), strict=False):
            records = [record for record in records_of(run) if key in record]
            steps = [record["step"] for record in records]
            values = np.array([record[key] for record in records], dtype=float)
            if smooth:
                panel.plot(steps, values, color=colour, alpha=0.22, linewidth=0.8)
                panel.plot(steps, _smoothed(values), color=colour, linewidth=1.8, label=run.label)
            else:
                panel.plot(
                    steps,
                    values,
                    color=colour,
                    linewidth=1.8,
                    marker="o",
                    markersize=4,
                    label=run.label,
                )
    for panel, even in ((axes[1, 0], 1.0), (axes[1, 1], 0.0)):
        panel.axhline(even, color=palette["ink"], linewidth=0.9, linestyle=":")
        panel.annotate(
            "even load", (0.02, even), xycoords=("axes fraction", "data"), va="bottom", size=8
        )
        panel.set_xlabel("optimizer step")
        _clip_first_steps(panel, floor=even)
    axes[0, 0].legend()
    return figure


def _heatmaps(runs: list[Run]) -> Figure:
    """One row per layer, one column per run; a cell is the share of a domain's selections."""
    shares = [_selection_share(run) for run in runs]
    num_layers = max(len(share_LDE) for share_LDE in shares)
    num_domains = max(share_LDE.shape[1] for share_LDE in shares)
    num_experts = max(share_LDE.shape[2] for share_LDE in shares)
    highest = max(share_LDE.max() for share_LDE in shares)
    figure = Figure(
        figsize=(1.6 + 4.2 * len(runs), 1.2 + num_layers * (0.5 + 0.22 * num_domains)),
        layout="constrained",
    )
    axes = figure.subplots(num_layers, len(runs), squeeze=False)
    image = None
    for column, (run, share_LDE) in enumerate(zip(runs, shares, strict=True)):
        domains = list(run.validations[-1]["loss_per_domain"])
        for layer in range(num_layers):
            panel = axes[layer, column]
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
            panel.set_title(f"{run.label}\n{title}" if layer == 0 else title)
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


def _expert_load(runs: list[Run], palette: dict[str, Any]) -> Figure:
    """Load of each expert on all held-out text relative to the mean, most used first."""
    shares = [_relative_load(run) for run in runs]
    num_layers = max(len(load_LE) for load_LE in shares)
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, num_layers, sharey=True, squeeze=False)[0]
    width = 0.8 / len(runs)
    for layer, panel in enumerate(axes):
        panel.set_title(f"layer {layer}")
        for index, (run, load_LE) in enumerate(zip(runs, shares, strict=True)):
            if layer < len(load_LE):
                load_E = np.sort(load_LE[layer])[::-1]
                left = np.arange(1, len(load_E) + 1) + (index - (len(runs) - 1) / 2) * width
                panel.bar(
                    left,
                    load_E,
                    width=width,
                    color=palette["runs"][index % len(_RUNS)],
                    label=run.label,
                )
        panel.axhline(1.0, color=palette["ink"], linewidth=0.9, linestyle=":")
        panel.grid(False, axis="x")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_xlabel("experts, most used first")
    axes[0].set_ylabel("load / mean load")
    axes[-1].legend(loc="upper right")
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


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred moving average; at both ends over the steps that there are."""
    half = max(1, int(len(values) * _SMOOTHED_SHARE / 2))
    return np.array(
        [values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))], dtype=float
    )


def _clip_first_steps(panel: Axes, *, floor: float) -> None:
    """Let the curves fill the panel; the first steps, before balancing acts, may be cut off."""
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in panel.get_lines()]
    later = [values[len(values) // 10 :] for values in drawn if len(values) > 2]
    if later:
        top = max(values.max() for values in later)
        panel.set_ylim(floor - 0.05 * (top - floor), top + 0.08 * (top - floor))
