"""What the logs of a run say, in a few sentences: pure, from the series alone."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from ds_moe_lb.report.run_log import (
    EXPERT_LOAD,
    TRAIN_LOSS,
    VALIDATION_LOSS,
    RunLog,
    Series,
    mean_at_end,
    tail,
)

# A layer is marked where one expert gets more than twice its even share. A convention of this
# report, which it says on the page; nothing is known to break there.
UNEVEN = 1.0
_SHOWN = 4  # layers or experts that a sentence lists


class Mark(Enum):
    """How a sentence is marked."""

    NOTHING = ""
    FINE = "fine"
    LOOK = "look"


@dataclass(frozen=True, kw_only=True)
class Sentence:
    text: str
    mark: Mark = Mark.NOTHING


@dataclass(frozen=True, kw_only=True)
class LayerStatus:
    """One layer at the end of the run; None where it was not logged.

    Attributes:
        layer: index among the MoE layers.
        max_violation: and the three below: means over the last reports.
        dead_experts: in the last report.
        dead_since: first report of the last stretch with dead experts; None if there are none.
    """

    layer: int
    max_violation: float | None
    max_violation_micro_batch: float | None
    lbl_global_batch: float | None
    load_entropy: float | None
    dead_experts: int | None
    dead_since: int | None


def sentences(log: RunLog) -> list[Sentence]:
    """The status of one run, most important first."""
    layers = layer_statuses(log)
    found = [
        _where(log),
        _not_finite(log),
        _dead(log, layers),
        _evenness(log, layers),
        _micro_against_global(log),
        _loss_used(log),
        _losses(log),
        _detail(log),
    ]
    return [sentence for sentence in found if sentence is not None]


def layer_statuses(log: RunLog) -> list[LayerStatus]:
    """Every layer that was logged on its own, in order."""
    statuses = []
    for layer in log.layers("max_violation_global_batch"):
        dead = log.get("dead_experts", layer)
        statuses.append(
            LayerStatus(
                layer=layer,
                max_violation=mean_at_end(log.get("max_violation_global_batch", layer)),
                max_violation_micro_batch=mean_at_end(log.get("max_violation_micro_batch", layer)),
                lbl_global_batch=mean_at_end(log.get("lbl_global_batch", layer)),
                load_entropy=mean_at_end(log.get("load_entropy", layer)),
                dead_experts=None if dead is None else int(np.nan_to_num(dead.values[-1])),
                dead_since=None if dead is None else start_of_last_stretch(dead, above_zero=True),
            )
        )
    return statuses


def start_of_last_stretch(series: Series, *, above_zero: bool) -> int | None:
    """First report since which all values are above zero, or all are zero; None if not now."""
    holds = (series.values > 0) == above_zero
    if not holds[-1]:
        return None
    breaks = np.flatnonzero(~holds)
    return int(series.at[breaks[-1] + 1 if len(breaks) else 0])


def worst_layer(layers: list[LayerStatus]) -> LayerStatus | None:
    """The layer whose busiest expert is farthest above the mean."""
    known = [layer for layer in layers if layer.max_violation is not None]
    return max(known, key=lambda layer: layer.max_violation or 0.0) if known else None


def _where(log: RunLog) -> Sentence:
    layers = log.layers("max_violation_global_batch") or log.layers(EXPERT_LOAD)
    parts = [f"{len(layers)} MoE layer{'s' * (len(layers) != 1)}"] if layers else []
    if log.num_experts is not None:
        parts.append(f"{log.num_experts} experts each")
    if log.top_k is not None:
        parts.append(f"top-{log.top_k}")
    parts.append(f"last report at {log.unit} {log.last_at:,}")
    tokens = log.get("valid_tokens")
    if tokens is not None and np.isfinite(tokens.values[-1]):
        parts.append(f"{tokens.values[-1]:,.0f} tokens in its global batch")
    text = ", ".join(parts) + "."
    return Sentence(text=text[0].upper() + text[1:])


def _not_finite(log: RunLog) -> Sentence | None:
    bad = {key: ~np.isfinite(one.values) for key, one in log.series.items()}
    number = sum(int(flags.sum()) for flags in bad.values())
    if not number:
        return None
    firsts = {
        key: int(log.series[key].at[flags.argmax()]) for key, flags in bad.items() if any(flags)
    }
    key, first = min(firsts.items(), key=lambda item: item[1])
    where = key.name if key.layer is None else f"{key.name} of layer {key.layer}"
    return Sentence(
        text=f"{number:,} logged value{'s are' if number > 1 else ' is'} NaN or infinite, first "
        f"{where} at {log.unit} {first:,}; left out of every mean and curve.",
        mark=Mark.LOOK,
    )


def _dead(log: RunLog, layers: list[LayerStatus]) -> Sentence | None:
    counted = [layer for layer in layers if layer.dead_experts is not None]
    if not counted:
        return _dead_of_model(log)
    dead = [layer for layer in counted if layer.dead_experts]
    if not dead:
        series = [log.get("dead_experts", layer.layer) for layer in counted]
        since = [
            at
            for one in series
            if one is not None
            and (at := start_of_last_stretch(one, above_zero=False)) is not None
            and at > one.at[0]
        ]
        text = f"since {log.unit} {max(since):,}" if since else "in any report"
        return Sentence(text=f"Dead experts: none {text}.", mark=Mark.FINE)
    listed = [_dead_in(log, layer) for layer in dead[:_SHOWN]]
    if len(dead) > _SHOWN:
        listed.append(f"and {len(dead) - _SHOWN} more layers")
    number = sum(layer.dead_experts or 0 for layer in dead)
    return Sentence(
        text=f"Dead experts in the last report: {number} in {len(dead)} of {len(counted)} layers: "
        f"{'; '.join(listed)}.",
        mark=Mark.LOOK,
    )


def _dead_in(log: RunLog, layer: LayerStatus) -> str:
    """How many, since when; where the loads of experts were logged, which ones."""
    since = {
        expert: start_of_last_stretch(load, above_zero=False)
        for expert in log.experts(layer.layer)
        if (load := log.get(EXPERT_LOAD, layer.layer, expert)) is not None
    }
    dead = [f"{expert} since {at:,}" for expert, at in since.items() if at is not None]
    if len(dead) == layer.dead_experts and len(dead) <= _SHOWN:
        return f"layer {layer.layer}: expert {', '.join(dead)}"
    number, since_some = layer.dead_experts, layer.dead_since
    return f"layer {layer.layer}: {number}, some in every report since {since_some:,}"


def _dead_of_model(log: RunLog) -> Sentence | None:
    series = log.get("dead_experts")
    if series is None or not np.isfinite(series.values[-1]):
        return None
    value = float(series.values[-1])
    since = start_of_last_stretch(series, above_zero=value > 0)
    return Sentence(
        text=f"Dead experts in the last report: {value:.3g} per layer (mean over layers), "
        f"{'some' if value else 'none'} since {log.unit} {since:,}.",
        mark=Mark.LOOK if value else Mark.FINE,
    )


def _evenness(log: RunLog, layers: list[LayerStatus]) -> Sentence | None:
    model = log.get("max_violation_global_batch")
    mean = mean_at_end(model)
    if model is None or mean is None:
        return None
    text = f"MaxVio in the global batch: {mean:.2f}{', mean over layers' * (len(layers) != 1)}"
    if len(model.values) >= 8:
        half = Series(at=model.at[: len(model.at) // 2], values=model.values[: len(model.at) // 2])
        if len(values := tail(half)):
            text += f" ({values.mean():.2f} half-way)"
    worst = worst_layer(layers)
    highest = mean
    if worst is not None and worst.max_violation is not None and len(layers) > 1:
        highest = worst.max_violation
        text += (
            f"; worst {highest:.2f} in layer {worst.layer}, whose busiest expert gets "
            f"{1 + highest:.2f} times the mean load"
        )
        uneven = sum((layer.max_violation or 0) > UNEVEN for layer in layers)
        text += f"; {uneven} of {len(layers)} layers above {UNEVEN:g}"
    if log.num_experts is not None and log.top_k is not None:
        text += f" (0 = even, collapsed = {log.num_experts / log.top_k - 1:.3g})"
    return Sentence(text=text + ".", mark=Mark.LOOK if highest > UNEVEN else Mark.FINE)


def _micro_against_global(log: RunLog) -> Sentence | None:
    micro, whole = (mean_at_end(log.get(f"lbl_{part}_batch")) for part in ("micro", "global"))
    if micro is None or whole is None:
        return None
    return Sentence(
        text=f"Balance loss with the load of the global batch {whole:.3f}, with each "
        f"micro-batch's own {micro:.3f} (1 = even)."
    )


def _loss_used(log: RunLog) -> Sentence | None:
    used = log.get("lbl_used")
    if used is None:
        return Sentence(text="No balance loss is applied (lbl_used was not logged).")
    return _from_to("Balance loss as it is applied", used, log)


def _losses(log: RunLog) -> Sentence | None:
    for name, text in ((VALIDATION_LOSS, "Validation loss"), (TRAIN_LOSS, "Training loss")):
        series = log.get(name)
        if series is not None and (sentence := _from_to(text, series, log)) is not None:
            return sentence
    return None


def _from_to(what: str, series: Series, log: RunLog) -> Sentence | None:
    finite = np.flatnonzero(np.isfinite(series.values))
    end = mean_at_end(series)
    if not len(finite) or end is None:
        return None
    first = finite[0]
    return Sentence(
        text=f"{what}: {series.values[first]:.3f} at {log.unit} {int(series.at[first]):,}, "
        f"{end:.3f} at the end."
    )


def _detail(log: RunLog) -> Sentence | None:
    if not log.layers("max_violation_global_batch"):
        return Sentence(
            text="Only means over layers were logged: a single bad layer is not seen. "
            'Set monitor.detail to "layer" or "expert".',
            mark=Mark.LOOK,
        )
    return None
