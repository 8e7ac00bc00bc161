"""The cost against layers, experts, G and whatever else was varied, as one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.benchmark.tables import own_share, varied

# Okabe-Ito, which colour-blind eyes can tell apart.
_COLOURS = {
    "running, l_aux": "#D55E00",
    "running, aux_loss_coeff": "#E69F00",
    "boundary, l_aux": "#0072B2",
    "boundary, aux_loss_coeff": "#56B4E9",
    "carry, l_aux": "#009E73",
    "carry, aux_loss_coeff": "#7FCDBB",
    "exact, l_aux": "#000000",
    "exact, aux_loss_coeff": "#CC79A7",
}
_NAMES = {"num_experts": "experts", "top_k": "k", "gas": "G", "ranks": "D"}


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel for each factor that was varied: the plugin's own code as a share of the step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    panels = varied(results)
    figure = Figure(figsize=(3.6 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (factor, family) in zip(axes, panels.items(), strict=True):
        for number, (name, colour) in enumerate(_COLOURS.items()):
            _line(axis, family, factor, name, colour=colour, shift=0.02 * (number - 2))
        axis.set_xscale("log", base=2)
        values = [result["shape"][factor] for result in family]
        axis.set_xticks(values, [str(value) for value in values])
        axis.minorticks_off()
        axis.set_xlabel(_NAMES.get(factor, factor))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(bottom=0)
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    axes[0].set_ylabel("plugin's own code / rest of a step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _line(
    axis: Any,
    family: Sequence[dict[str, Any]],
    factor: str,
    name: str,
    *,
    colour: str,
    shift: float,
) -> None:
    """Medians with their intervals, a little apart so that they do not hide each other."""
    rows = [(result["shape"][factor], result["variants"].get(name, {})) for result in family]
    points = [(value, own_share(row)) for value, row in rows if row.get("own")]
    if not points:
        return
    x = [value * 2**shift for value, _ in points]
    y = [ratio.median for _, ratio in points]
    low = [ratio.median - (ratio.median if ratio.low is None else ratio.low) for _, ratio in points]
    high = [
        (ratio.median if ratio.high is None else ratio.high) - ratio.median for _, ratio in points
    ]
    axis.errorbar(
        x, y, yerr=[low, high], label=name, color=colour, marker="o", markersize=3.5, linewidth=1.2
    )
