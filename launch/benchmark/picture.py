"""The cost against layers, experts, G and whatever else was varied, as one picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.benchmark.statistics import Estimate
from launch.benchmark.tables import own_milliseconds, own_share, varied

# Okabe-Ito, which colour-blind eyes can tell apart.
_COLOURS = {
    "running, l_aux": "#D55E00",
    "running, aux_loss_coeff": "#E69F00",
    "boundary, l_aux": "#0072B2",
    "boundary, aux_loss_coeff": "#56B4E9",
    "carry, l_aux": "#009E73",
    "carry, aux_loss_coeff": "#7FCDBB",
}
_NAMES = {"num_experts": "experts", "top_k": "k", "gas": "G", "ranks": "D"}


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A column for each factor that was varied: the plugin's own code, in time and as a share."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, PercentFormatter

    columns = varied(results)
    figure = Figure(figsize=(2.9 * len(columns) + 0.8, 5.4), layout="constrained")
    axes = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False)
    for column, (factor, family) in enumerate(columns.items()):
        for row, measure in enumerate((own_milliseconds, own_share)):
            axis = axes[row][column]
            for number, (name, colour) in enumerate(_COLOURS.items()):
                _line(axis, family, factor, name, measure, colour=colour, shift=0.02 * (number - 2))
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        values = [result["shape"][factor] for result in family]
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [str(value) for value in values])
        axis.minorticks_off()
        axis.set_xlabel(_NAMES.get(factor, factor))
    axes[0][0].set_yscale("log")
    axes[0][0].yaxis.set_major_formatter(LogFormatter())
    axes[0][0].set_ylabel("plugin's own code,\nms in an optimizer step")
    axes[1][0].set_ylim(bottom=0)
    axes[1][0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    axes[1][0].set_ylabel("as a share of\nthe rest of the step")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _line(
    axis: Any,
    family: Sequence[dict[str, Any]],
    factor: str,
    name: str,
    measure: Callable[[dict[str, Any]], Estimate],
    *,
    colour: str,
    shift: float,
) -> None:
    """Medians with their intervals, a little apart so that they do not hide each other."""
    rows = [(result["shape"][factor], result["variants"].get(name, {})) for result in family]
    points = [(value, measure(row)) for value, row in rows if row.get("own")]
    if not points:
        return
    x = [value * 2**shift for value, _ in points]
    y = [point.median for _, point in points]
    low = [point.median - (point.median if point.low is None else point.low) for _, point in points]
    high = [
        (point.median if point.high is None else point.high) - point.median for _, point in points
    ]
    axis.errorbar(
        x, y, yerr=[low, high], label=name, color=colour, marker="o", markersize=3.5, linewidth=1.2
    )
