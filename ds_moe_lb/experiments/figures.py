"""One figure or two for each experiment; every difference has its interval and its seeds.

Shape legend: D domains, L MoE layers, E experts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ds_moe_lb.experiments.experiment import Variant
from ds_moe_lb.experiments.maps import routing_maps, specialisation
from ds_moe_lb.experiments.results import INFORMATION, LOSS, VIOLATION, Results
from ds_moe_lb.report.style import LIGHT, Palette, styled

_TITLES = {
    LOSS: "validation loss (nats per byte)\nless is better",
    INFORMATION: "specialisation: mutual information\nof domain and expert (nats)",
    VIOLATION: "MaxVio of the global batch\n0 = even load",
}
_BALANCED = {"micro": "each micro-batch", "global": "the global batch"}
_TICKS = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0)
Draw = Callable[[Results, Palette], Figure]


def save_figures(results: Results, folder: Path) -> list[Path]:
    """Write the figures of an experiment as PNG; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with styled(LIGHT):
        for name, draw in _FIGURES[results.experiment.name].items():
            paths.append(folder / f"{name}.png")
            draw(results, LIGHT).savefig(paths[-1], dpi=150)
    return paths


def differences(results: Results, palette: Palette) -> Figure:
    """Each variant against its baseline: mean, interval, and a small dot for each seed."""
    variants = [v for v in results.variants if v.baseline in results.records]
    baselines = dict.fromkeys(variant.baseline for variant in variants)
    names = [v.name if len(baselines) == 1 else f"{v.name}  -  {v.baseline}" for v in variants]
    width = 10 if len(baselines) == 1 else 12  # long names take their room from the panels
    figure = Figure(figsize=(width, 1.7 + 0.34 * len(variants)), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for panel, (metric, title) in zip(axes, _TITLES.items(), strict=True):
        panel.axvline(0.0, color=palette.ink, linewidth=0.9)
        for row, variant in enumerate(variants):
            _dot(panel, results, variant, metric, row, palette)
        panel.set_title(title)
        panel.grid(False, axis="y")
        panel.xaxis.set_major_locator(MaxNLocator(5))
    axes[0].set_yticks(range(len(variants)), names)
    axes[0].set_ylim(len(variants) - 0.5, -0.5)
    against = f" to {next(iter(baselines))!r}" if len(baselines) == 1 else ""
    seeds = max(len(by_seed) for by_seed in results.records.values())
    figure.supxlabel(
        f"difference{against}, paired by seed: mean and 95% interval of {seeds} seeds", size=9.5
    )
    return figure


def _dot(
    panel: Axes, results: Results, variant: Variant, metric: str, row: float, palette: Palette
) -> None:
    difference = results.difference(variant.name, metric, baseline=variant.baseline)
    if difference is None:
        return
    own, other = (results.values(x, metric) for x in (variant.name, variant.baseline))
    each = [own[seed] - other[seed] for seed in own.keys() & other.keys()]
    colour = palette.runs[1] if difference.sign else palette.ink
    panel.plot(each, [row + 0.24] * len(each), "o", color=colour, markersize=2.5, alpha=0.5)
    panel.errorbar(
        difference.mean,
        row,
        xerr=_drawable(difference.half_width),
        fmt="o",
        color=colour,
        markersize=5,
        capsize=3,
    )


def balance_batch(results: Results, palette: Palette) -> Figure:
    """The paper's Figure 2: loss and specialisation against the balance batch size."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    sizes = [variant.at or 0.0 for variant in results.variants]
    first = results.variants[0].name
    loss = [results.difference(v.name, LOSS, baseline=first) for v in results.variants]
    _curve(
        axes[0],
        sizes,
        [0.0 if x is None else x.mean for x in loss],
        [0.0 if x is None else x.half_width for x in loss],
        colour=palette.runs[1],
    )
    axes[0].axhline(0.0, color=palette.ink, linewidth=0.9, linestyle=":")
    axes[0].set_title(f"validation loss minus that of balance batch {first}\n(nats per byte)")
    information = [results.mean(v.name, INFORMATION) for v in results.variants]
    _curve(
        axes[1],
        sizes,
        [x.mean for x in information],
        [x.half_width for x in information],
        colour=palette.runs[2],
    )
    axes[1].set_ylim(bottom=0.0)
    axes[1].set_title(_TITLES[INFORMATION])
    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
        panel.minorticks_off()
        panel.set_xlabel("balance batch: sequences that f is taken over")
    return figure


def frontier(results: Results, palette: Palette) -> Figure:
    """Loss and specialisation against MaxVio, one line per method, weights along the line.

    What a seed does to all of its losses is taken out, or it would hide everything.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    level = _seed_levels(results)
    for group, colour in zip(("micro", "global"), palette.runs, strict=False):
        variants = results.group(group)
        for panel, metric in zip(axes, (LOSS, INFORMATION), strict=True):
            points = []
            for variant in variants:
                values = results.values(variant.name, metric)
                if metric == LOSS:
                    values = {seed: value - level[seed] for seed, value in values.items()}
                violation = results.values(variant.name, VIOLATION)
                panel.plot(
                    [violation[seed] for seed in values],
                    list(values.values()),
                    "o",
                    color=colour,
                    markersize=3,
                    alpha=0.35,
                )
                points.append((np.mean(list(violation.values())), np.mean(list(values.values()))))
            panel.plot(*zip(*points, strict=True), color=colour, marker="o", label=_BALANCED[group])
            # On the side where the other curve is not expected.
            is_above = (group == "micro") == (metric == LOSS)
            for variant, point in zip(variants, points, strict=True):
                panel.annotate(
                    f"{variant.at:g}",
                    point,
                    xytext=(5, 5 if is_above else -11),
                    textcoords="offset points",
                    size=8,
                    color=colour,
                )
    axes[0].set_title("validation loss (nats per byte)\nless is better")
    axes[1].set_title(_TITLES[INFORMATION])
    for panel in axes:
        panel.set_xscale("log")
        panel.set_xticks(
            [tick for tick in _TICKS if np.prod(tick - np.array(panel.get_xlim())) < 0]
        )
        panel.xaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        panel.set_xlabel("MaxVio of the global batch (0 = even load)")
    axes[0].legend(title="balanced over (small numbers: weight)")
    return figure


def _seed_levels(results: Results) -> Mapping[int, float]:
    """By how much a seed's mean loss over its runs is above that of all seeds."""
    by_seed: dict[int, list[float]] = {}
    for variant in results.variants:
        for seed, value in results.values(variant.name, LOSS).items():
            by_seed.setdefault(seed, []).append(value)
    means = {seed: float(np.mean(values)) for seed, values in by_seed.items()}
    overall = float(np.mean(list(means.values())))
    return {seed: mean - overall for seed, mean in means.items()}


def switch(results: Results, palette: Palette) -> Figure:
    """Loss and specialisation at the end against the share of training before the switch."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    groups = dict.fromkeys(variant.group for variant in results.variants)
    for group, colour in zip(groups, palette.runs[1:], strict=False):
        variants = results.group(group)
        for panel, metric in zip(axes, (LOSS, INFORMATION), strict=True):
            found = [results.difference(v.name, metric, baseline="micro") for v in variants]
            _curve(
                panel,
                [100 * (variant.at or 0.0) for variant in variants],
                [0.0 if x is None else x.mean for x in found],
                [0.0 if x is None else x.half_width for x in found],
                colour=colour,
                label=group,
            )
    for panel, metric in zip(axes, (LOSS, INFORMATION), strict=True):
        panel.axhline(0.0, color=palette.ink, linewidth=0.9, linestyle=":")
        panel.set_title(_TITLES[metric])
        panel.set_xlabel("switched at (% of training)")
    axes[0].set_ylabel("minus 'micro' all the way")
    axes[0].legend()
    return figure


def _curve(
    panel: Axes,
    x: Sequence[float],
    y: Sequence[float],
    half_widths: Sequence[float],
    *,
    colour: str,
    label: str | None = None,
) -> None:
    panel.errorbar(
        x,
        y,
        yerr=[_drawable(half_width) for half_width in half_widths],
        color=colour,
        marker="o",
        markersize=5,
        capsize=3,
        label=label,
    )


def _drawable(half_width: float) -> float:
    """A single seed has no interval."""
    return 0.0 if math.isinf(half_width) else half_width


_FIGURES: dict[str, dict[str, Draw]] = {
    "methods": {"methods": differences},
    "weights": {"weights": frontier},
    "routers": {"routers": differences},
    "balance-batch": {"balance_batch": balance_batch},
    "routing": {"specialisation": specialisation, "routing": routing_maps},
    "switch": {"switch": switch},
}
