"""Charts of what was logged over the run: curves of all runs, and layers over time of one.

Shape legend: L layers, E experts of one layer, N reports, C columns of a picture.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from ds_moe_lb.report.run_log import TRAIN_LOSS, VALIDATION_LOSS, RunLog, Series
from ds_moe_lb.report.style import DEAD_COLOUR, LOAD_MAP, Palette
from ds_moe_lb.report.thinning import columns, smoothed, thin

_SMOOTHED_SHARE = 0.04  # width of the moving mean, as a share of the run
_FEW = 40  # points up to which a curve shows each of them
_MOST_UNEVEN_LOAD = 4.0  # times the mean, or a quarter of it: where the colours end
_END_OF_COLOURS = 1.0  # up to which those of layers reach at least


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart over time.

    Attributes:
        title: above it.
        solid: the series of each run that is drawn, if it has one.
        dashed: a second one beside it.
        even: the value of an even load, marked; None where there is none.
        whole: the first reports are never cut off.
    """

    title: str
    solid: Callable[[RunLog], Series | None]
    dashed: Callable[[RunLog], Series | None] | None = None
    even: float | None = None
    whole: bool = False

    def has_data(self, logs: Sequence[RunLog]) -> bool:
        draws = [self.solid] if self.dashed is None else [self.solid, self.dashed]
        return any(draw(log) is not None for log in logs for draw in draws)


def _of(name: str) -> Callable[[RunLog], Series | None]:
    return lambda log: log.get(name)


def _worst_layer(log: RunLog) -> Series | None:
    """The highest MaxVio of any layer in each report."""
    if len(log.layers("max_violation_global_batch")) < 2:
        return None
    at, table_LN = log.layer_table("max_violation_global_batch")
    finite_LN = np.where(np.isfinite(table_LN), table_LN, -np.inf)
    highest_N = finite_LN.max(axis=0)
    return Series(at=at, values=np.where(np.isfinite(highest_N), highest_N, np.nan))


PANELS = (
    Panel(title="Training loss", solid=_of(TRAIN_LOSS)),
    Panel(title="Validation loss on held-out files", solid=_of(VALIDATION_LOSS)),
    Panel(title="LBL (balance loss) as it is applied", solid=_of("lbl_used"), even=1.0),
    Panel(
        title="LBL: global batch (solid), micro-batch (dashed)",
        solid=_of("lbl_global_batch"),
        dashed=_of("lbl_micro_batch"),
        even=1.0,
    ),
    Panel(
        title="MaxVio: global batch (solid), micro-batch (dashed)",
        solid=_of("max_violation_global_batch"),
        dashed=_of("max_violation_micro_batch"),
        even=0.0,
    ),
    Panel(title="MaxVio of the worst layer, global batch", solid=_worst_layer, even=0.0),
    Panel(title="Dead experts, mean over layers", solid=_of("dead_experts"), even=0.0, whole=True),
)


def draw_panel(panel: Panel, axes: Axes, logs: Sequence[RunLog], palette: Palette) -> None:
    """Draw one chart, its title left out: thin lines are reports, thick ones their moving mean."""
    later: list[NDArray[np.float64]] = []
    for index, log in enumerate(logs):
        colour = palette.runs[index % len(palette.runs)]
        for draw, style in ((panel.solid, "-"), (panel.dashed, (0, (4, 1.5)))):
            series = None if draw is None else draw(log)
            if series is None:
                continue
            series = Series(
                at=series.at, values=np.where(np.isfinite(series.values), series.values, np.nan)
            )
            label = log.label if draw is panel.solid else "_dashed"
            later.append(series.values[0 if panel.whole else len(series.values) // 10 :])
            _draw_curve(axes, series, colour=colour, style=style, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(logs[0].unit)
    if panel.even is not None:
        axes.axhline(panel.even, color=palette.ink, linewidth=0.9, linestyle=":")
    _fit(axes, later, even=panel.even)


def _draw_curve(
    axes: Axes,
    series: Series,
    *,
    colour: str,
    style: str | tuple[int, tuple[float, float]],
    label: str,
) -> None:
    if len(series.at) <= _FEW:
        axes.plot(
            series.at,
            series.values,
            color=colour,
            linewidth=1.6,
            linestyle=style,
            label=label,
            marker="o",
            markersize=3,
        )
        return
    mean = thin(smoothed(series, share=_SMOOTHED_SHARE))
    if style == "-":
        raw = thin(series)
        axes.plot(raw.at, raw.values, color=colour, alpha=0.25, linewidth=0.7)
    axes.plot(mean.at, mean.values, color=colour, linewidth=1.7, linestyle=style, label=label)


def _fit(axes: Axes, later: list[NDArray[np.float64]], *, even: float | None) -> None:
    """Let the curves fill the panel; the first tenth, before balancing acts, may be cut off."""
    values = np.concatenate([*later, np.array([] if even is None else [even])])
    values = values[np.isfinite(values)]
    if not len(values):
        axes.set_yticks([])
        return
    low, high = float(values.min()), float(values.max())
    if low == high:
        high += max(abs(high), 1.0)
    space = high - low
    axes.set_ylim(low - 0.05 * space, high + 0.08 * space)


def highest_of_later(logs: Sequence[RunLog], name: str) -> float:
    """The highest value of any layer in the second half of any run, and at least 1.

    Where colours end: the first reports, before balancing acts, would leave the rest in the dark.
    """
    later = [
        series.values[len(series.values) // 2 :]
        for log in logs
        for layer in log.layers(name)
        if (series := log.get(name, layer)) is not None
    ]
    values = np.concatenate([*later, [_END_OF_COLOURS]])
    return float(values[np.isfinite(values)].max())


def draw_layers(log: RunLog, name: str, *, label: str, highest: float) -> Figure:
    """Layers from top to bottom, the run from left to right: the highest of each stretch.

    Args:
        log: a run in which `name` was logged for layers.
        name: of the metric.
        label: of the colours.
        highest: value at which they end.
    """
    at, table_LN = log.layer_table(name)
    layers = log.layers(name)
    (left, right), picture_LC = columns(at, table_LN, distance_RN=table_LN)
    figure = Figure(figsize=(5.0, 1.0 + 0.075 * max(len(layers), 8)), layout="constrained")
    axes = figure.subplots()
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=(0, 0, 0, 0))
    image = axes.imshow(
        picture_LC,
        extent=(left, right, len(layers) - 0.5, -0.5),
        aspect="auto",
        cmap=colours,
        vmin=0.0,
        vmax=highest,
        interpolation="none",
    )
    axes.grid(False)
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    ticks = [int(t) for t in axes.get_yticks() if 0 <= t < len(layers)]
    axes.set_yticks(ticks, [str(layers[tick]) for tick in ticks])
    axes.set_ylabel("MoE layer")
    axes.set_xlabel(log.unit)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    ticks_of_bar = MaxNLocator(4, integer=True) if name == "dead_experts" else MaxNLocator(4)
    bar = figure.colorbar(image, ax=axes, pad=0.02, extend="max", aspect=12, ticks=ticks_of_bar)
    bar.outline.set_visible(False)
    bar.set_label(label)
    return figure


def expert_picture(log: RunLog, layer: int) -> bytes:
    """A PNG with one pixel per expert (down) and stretch of reports (right).

    Grey: the mean load; orange: more; blue: less; pink: none at all. Of a stretch the report that
    is farthest from even is shown.
    """
    at, load_EN = log.expert_table(layer)
    total_N = np.nansum(load_EN, axis=0)
    mean_N = total_N / len(load_EN)
    relative_EN = load_EN / np.where(mean_N > 0, mean_N, np.nan)
    with np.errstate(divide="ignore"):
        distance_EN = np.abs(np.log(relative_EN))
    distance_EN = np.where(np.isposinf(distance_EN), 1e9, distance_EN)
    _, relative_EC = columns(at, relative_EN, distance_RN=distance_EN)
    with np.errstate(divide="ignore"):
        position = 0.5 + np.log(relative_EC) / (2 * np.log(_MOST_UNEVEN_LOAD))
    pixels = LOAD_MAP(np.clip(np.nan_to_num(position, nan=0.5, neginf=0.0), 0.0, 1.0))
    pixels[relative_EC == 0] = matplotlib.colors.to_rgba(DEAD_COLOUR)
    pixels[np.isnan(relative_EC)] = 0.0
    png = io.BytesIO()
    imsave(png, pixels, format="png")
    return png.getvalue()
