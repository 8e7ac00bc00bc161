"""Maps of domains and experts: the picture of specialisation, and all layers with their scores.

Shape legend: D domains, L MoE layers, E experts.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from ds_moe_lb.experiments.results import Results, selection_share
from ds_moe_lb.report.style import Palette

_METHODS = {
    "micro": "load balanced in every micro-batch",
    "global": "load balanced over the global batch",
}
_MARKED = 2.0  # cells with this many even shares carry their number
# White is an even share or less, so that only what is preferred has a colour.
_MAP = LinearSegmentedColormap.from_list("preferred", ["#ffffff", "#FFD27A", "#E69F00", "#8a3b00"])


def specialisation(results: Results, palette: Palette) -> Figure:
    """One layer under both losses: which experts each kind of text is sent to."""
    seed, layer = _first_seed(results), _clearest_layer(results)
    times = {name: _times_even(results, name, seed=seed)[layer] for name in _METHODS}
    highest = max(times_DE.max() for times_DE in times.values())
    domains = _domains(results)
    figure = Figure(figsize=(11, 1.5 + 0.42 * len(domains)), layout="constrained")
    axes = figure.subplots(1, len(_METHODS), sharey=True)
    image = None
    for panel, (name, title) in zip(axes, _METHODS.items(), strict=True):
        order_E = _order_by_favourite_domain(times[name])
        shown_DE = times[name][:, order_E]
        image = panel.imshow(shown_DE, vmin=1.0, vmax=highest, cmap=_MAP, aspect="auto")
        for (row, column), value in np.ndenumerate(shown_DE):
            if value >= _MARKED:
                dark = (value - 1.0) / (highest - 1.0) > 0.75
                panel.text(
                    column,
                    row,
                    f"{value:.1f}x",
                    ha="center",
                    va="center",
                    size=6.5,
                    color="white" if dark else palette.ink,
                )
        favourite = float(times[name].max(axis=1).mean())
        panel.set_title(f"{title}\na text's favourite expert: {favourite:.1f}x even use on average")
        _finish(panel, order_E)
    axes[0].set_yticks(range(len(domains)), domains)
    axes[0].set_ylabel("kind of text")
    figure.suptitle(
        f"Which experts is each kind of text sent to? (held-out files, layer {layer}, seed {seed})"
    )
    assert image is not None
    _add_bar(figure, image, axes)
    return figure


def routing_maps(results: Results, palette: Palette) -> Figure:
    """All layers, a column per loss; on the right the summed probability of the chosen."""
    seed = _first_seed(results)
    times = {name: _times_even(results, name, seed=seed) for name in _METHODS}
    highest = max(times_LDE.max() for times_LDE in times.values())
    domains = _domains(results)
    num_layers = len(next(iter(times.values())))
    figure = Figure(
        figsize=(12.5, 1.3 + num_layers * (0.6 + 0.26 * len(domains))), layout="constrained"
    )
    axes = figure.subplots(
        num_layers, 3, sharey=True, squeeze=False, gridspec_kw={"width_ratios": [2, 2, 1]}
    )
    image = None
    for layer in range(num_layers):
        for panel, (name, title) in zip(axes[layer], _METHODS.items(), strict=False):
            order_E = _order_by_favourite_domain(times[name][layer])
            image = panel.imshow(
                times[name][layer][:, order_E], vmin=1.0, vmax=highest, cmap=_MAP, aspect="auto"
            )
            panel.set_title(f"layer {layer}: {title}")
            _finish(panel, order_E)
        scores = axes[layer, 2]
        for name, colour in zip(_METHODS, palette.runs, strict=False):
            mean_D = _mean_scores(results, name)[layer]
            scores.plot(mean_D, range(len(domains)), "o", color=colour, label=name)
        scores.set_title("summed probability\nof the chosen experts")
        axes[layer, 0].set_yticks(range(len(domains)), domains)
    axes[0, 2].legend()
    assert image is not None
    _add_bar(figure, image, axes)
    return figure


def _add_bar(figure: Figure, image: AxesImage, axes: NDArray[np.object_]) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label("times as often as even use")


def _finish(panel: Axes, order_E: NDArray[np.int64]) -> None:
    panel.grid(False)
    panel.set_xticks(range(len(order_E)), [str(e) for e in order_E], size=7)
    panel.tick_params(length=0)
    panel.set_xlabel("expert")


def _first_seed(results: Results) -> int:
    """The first seed that was run with both losses."""
    return min(set.intersection(*(set(results.records[name]) for name in _METHODS)))


def _times_even(results: Results, name: str, *, seed: int) -> NDArray[np.float64]:
    """``(L, D, E)``: how many times as often as even use a domain selects each expert."""
    share_LDE = selection_share(results.records[name], seed=seed)
    return share_LDE * share_LDE.shape[2]


def _clearest_layer(results: Results) -> int:
    """The layer whose mutual information differs most between the losses, mean over seeds."""

    def information(name: str) -> NDArray[np.float64]:
        per_run = [record["mutual_information_L"] for record in results.records[name].values()]
        mean: NDArray[np.float64] = np.mean(per_run, axis=0)
        return mean

    return int((information("global") - information("micro")).argmax())


def _mean_scores(results: Results, name: str) -> NDArray[np.float64]:
    """``(L, D)``, mean over seeds."""
    per_run = [record["top_k_score_LD"] for record in results.records[name].values()]
    mean_LD: NDArray[np.float64] = np.mean(per_run, axis=0)
    return mean_LD


def _domains(results: Results) -> list[str]:
    return list(results.all_records()[0]["loss_per_domain"])


def _order_by_favourite_domain(times_DE: NDArray[np.float64]) -> NDArray[np.int64]:
    """Experts of the first domain first, within a domain the most used first."""
    return np.lexsort((-times_DE.max(axis=0), times_DE.argmax(axis=0)))
