"""The sections of the page, each as HTML; empty where the runs have nothing of the kind."""

import base64
import json
from collections.abc import Sequence
from html import escape

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ds_moe_lb.report import charts
from ds_moe_lb.report.figures import expert_load, heat_maps, num_layers, validated_runs
from ds_moe_lb.report.run_log import EXPERT_LOAD, RunLog
from ds_moe_lb.report.status import UNEVEN, LayerStatus, layer_statuses, sentences
from ds_moe_lb.report.style import CSS, LOAD_MAP
from ds_moe_lb.report.svg import inline_svg
from ds_moe_lb.training.run_folder import Run

_HEAT_MAP_LAYERS = 4  # of domains and experts, in one figure
_PIXELS_PER_EXPERT = 4  # on the page; of a layer between the two heights below
_LOWEST, _HIGHEST = 48, 256

HOW_TO_READ = (
    "<p>f is the share of selections that each expert received, P its mean router probability, "
    "E the number of experts, k how many each token selects.</p><ul>"
    "<li><b>Balance loss (LBL)</b> E &Sigma; f P: 1 = even, E/k = all tokens on the same k "
    "experts. Over the micro-batch f is each micro-batch's own, over the global batch that of all "
    "ranks and micro-steps.</li>"
    "<li><b>MaxVio</b> load of the busiest expert / mean load - 1: 0 = even, E/k - 1 = collapsed. "
    "Its value in a micro-batch is higher by nature: few tokens fill experts unevenly, and text of "
    "one kind selects what it needs.</li>"
    "<li><b>Load entropy</b> divided by log E: 1 = even.</li>"
    "<li><b>Dead expert</b> no token of the global batch of a report selected it. A small batch "
    "can leave out an expert that is alive: look at how long it lasts.</li>"
    f"<li><b>&#9650;</b> marks dead experts in the last report, values that are not finite, and a "
    f"MaxVio above {UNEVEN:g}: some expert gets more than twice the mean load. The bound is a "
    "convention of this page, not a limit at which training fails.</li>"
    "<li><b>At the end</b> means over the last 50 reports, of a short run over its last "
    "quarter.</li></ul>"
)


def soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def status(logs: Sequence[RunLog]) -> str:
    """Each run in sentences."""
    cards = []
    for index, log in enumerate(logs):
        lines = "".join(
            f'<li class="{sentence.mark.value}">{escape(sentence.text)}</li>'
            for sentence in sentences(log)
        )
        cards.append(
            f'<div style="--run: {_colour(index)}"><h3>{escape(log.label)}</h3>'
            f"<ul>{lines}</ul></div>"
        )
    return f'<div class="grid runs">{"".join(cards)}</div>'


def curves(logs: Sequence[RunLog]) -> str:
    """Every chart over time for which a run has data."""
    drawn: list[str] = []
    for panel in charts.PANELS:
        if panel.has_data(logs):
            figure = Figure(figsize=(4.5, 2.6), layout="constrained")
            charts.draw_panel(panel, figure.subplots(), logs, CSS)
            drawn.append(_titled(figure, panel.title, identity=f"curve{len(drawn)}"))
    legend = "".join(
        f'<span style="--run: {_colour(index)}">{escape(log.label)}</span>'
        for index, log in enumerate(logs)
    )
    return (
        f'<div class="legend">{legend}</div><div class="grid charts">{"".join(drawn)}</div>'
        + soft(
            "Thin: every report (of long runs the extremes of each stretch); thick and dashed: "
            "smoothed. Dotted: even load. Peaks of the first tenth may be cut off."
        )
    )


def layers_over_time(logs: Sequence[RunLog]) -> str:
    """MaxVio of each layer, and dead experts where there are any."""
    drawn = []
    never_dead = []
    for name, title, label in (
        ("max_violation_global_batch", "MaxVio in the global batch", "MaxVio"),
        ("dead_experts", "Dead experts", "dead experts"),
    ):
        highest = charts.highest_of_later(logs, name)
        for index, log in enumerate(logs):
            if not log.layers(name):
                continue
            if name == "dead_experts" and not (log.layer_table(name)[1] > 0).any():
                never_dead.append(log.label)
                continue
            titled = f"{log.label}: {title}" if len(logs) > 1 else title
            figure = charts.draw_layers(log, name, label=label, highest=highest)
            drawn.append(_titled(figure, titled, identity=f"layers{index}{name[0]}"))
    if not drawn:
        return ""
    notes = [
        "One row per layer, 0 = even. A column is the highest report of its stretch; colours are "
        "the same for all runs and end at the highest of the second half, and not below 1."
    ]
    if never_dead:
        never = "" if len(logs) == 1 else f" of {', '.join(never_dead)}"
        notes.append(f"No layer{never} had a dead expert in any report.")
    if not any(log.layers(EXPERT_LOAD) for log in logs):
        notes.append('With monitor.detail "expert" the load of every expert is shown too.')
    return f'<div class="grid layers">{"".join(drawn)}</div>' + soft(" ".join(notes))


def experts_over_time(logs: Sequence[RunLog]) -> str:
    """One picture per layer whose experts were logged."""
    parts = []
    for log in logs:
        layers = log.layers(EXPERT_LOAD)
        if not layers:
            continue
        at, _ = log.expert_table(layers[0])
        figures = "".join(_expert_figure(log, layer) for layer in layers)
        parts.append(
            f"<h3>{escape(log.label)}, {log.unit} {int(at[0]):,} (left) to {int(at[-1]):,}</h3>"
            f'<div class="grid experts">{figures}</div>'
        )
    if not parts:
        return ""
    stops = ", ".join(to_hex(LOAD_MAP(step / 8)) for step in range(9))
    legend = (
        f'<p class="soft">load / mean load: 1/4 <span class="ramp" style="background: '
        f'linear-gradient(90deg, {stops})"></span> 4; <span class="dead"></span> not one token. '
        f"One row per expert, from the first at the top; of each stretch the report that is "
        f"farthest from even.</p>"
    )
    return legend + "".join(parts)


def _expert_figure(log: RunLog, layer: int) -> str:
    experts = log.experts(layer)
    height = min(max(len(experts) * _PIXELS_PER_EXPERT, _LOWEST), _HIGHEST)
    data = base64.b64encode(charts.expert_picture(log, layer)).decode()
    text = f"layer {layer}, experts {experts[0]} to {experts[-1]}"
    return (
        f'<figure><figcaption>{text}</figcaption><img alt="load over the run, {text}" '
        f'style="height: {height}px" src="data:image/png;base64,{data}"></figure>'
    )


def domains(logs: Sequence[RunLog]) -> str:
    """Which experts each domain selects, where runs counted it."""
    runs = validated_runs(logs)
    if not runs:
        return ""
    layers = range(num_layers(runs))
    drawn = []
    for first in range(0, len(layers), _HEAT_MAP_LAYERS):
        chunk = layers[first : first + _HEAT_MAP_LAYERS]
        svg = _wide(heat_maps(runs, chunk), alt="Domains and experts", identity=f"domains{first}")
        if first:
            svg = f"<details><summary>Layers {chunk[0]} to {chunk[-1]}</summary>{svg}</details>"
        drawn.append(svg)
    return "".join(drawn) + soft(
        "One row of panels per layer, one column per run, one colour scale. A row of one colour: "
        "the domain uses all experts alike. Bright cells: experts that a domain prefers."
    )


def held_out_load(logs: Sequence[RunLog]) -> str:
    """How even the experts are over all held-out text."""
    runs = validated_runs(logs)
    if not runs:
        return ""
    svg = _wide(expert_load(runs, CSS), alt="Expert load", identity="load")
    return svg + soft(
        "Tokens that each expert was selected for, relative to the mean. Specialised experts may "
        "still be evenly loaded."
    )


def layers_at_end(logs: Sequence[RunLog]) -> str:
    """The numbers of every layer, folded away."""
    parts = []
    for log in logs:
        layers = layer_statuses(log)
        if layers:
            parts.append(
                f"<details><summary>{escape(log.label)}: {len(layers)} layers</summary>"
                f"{_layer_table(layers, unit=log.unit)}</details>"
            )
    return "".join(parts)


def _layer_table(layers: list[LayerStatus], *, unit: str) -> str:
    names = ["layer", "MaxVio, global batch", "MaxVio, micro-batch", "LBL, global batch"]
    names += ["load entropy", "dead experts", f"since {unit}"]
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for layer in layers:
        violation = layer.max_violation
        kind = "worse" if violation is not None and violation > UNEVEN else ""
        numbers = [layer.max_violation_micro_batch, layer.lbl_global_batch, layer.load_entropy]
        counts = [layer.dead_experts, layer.dead_since]
        lines.append(
            f'<tr><td>{layer.layer}</td><td class="{kind}">{_number(violation)}</td>'
            + "".join(f"<td>{_number(number)}</td>" for number in numbers)
            + "".join(f"<td>{'-' if count is None else f'{count:,}'}</td>" for count in counts)
            + "</tr>"
        )
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def facts(logs: Sequence[RunLog]) -> str:
    """Where each run comes from and, for runs of our trainer, how it was made."""
    lines = [
        _facts_line("", [log.label for log in logs]),
        _facts_line("read from", [f"{log.source}: {log.path.name}" for log in logs]),
        _facts_line(
            "reports", [str(max(len(one.at) for one in log.series.values())) for log in logs]
        ),
    ]
    for name, describe in _FACTS_OF_OURS.items():
        if any(log.run is not None for log in logs):
            values = ["not in the logs" if log.run is None else describe(log.run) for log in logs]
            lines.append(_facts_line(name, values))
    return f'<div class="scroll"><table class="facts">{"".join(lines)}</table></div>'


def _facts_line(name: str, values: list[str]) -> str:
    cells = "".join(f"<td>{escape(value)}</td>" for value in values)
    return f"<tr><td>{escape(name)}</td>{cells}</tr>"


def _batch(run: Run) -> str:
    config = run.info["ds_config"]
    micro = config.get("train_micro_batch_size_per_gpu", "?")
    steps = config.get("gradient_accumulation_steps", 1)
    length = run.info["model"]["sequence_length"]
    ranks = run.info["world_size"]
    return f"{ranks} ranks x {steps} micro-steps x {micro} sequences of {length} bytes"


def _ep_size(run: Run) -> int:
    """Of the byte model, or what AutoEP was told for a model of a folder."""
    autoep = run.info["ds_config"].get("expert_parallel", {})
    size: int = run.info["model"].get("ep_size", autoep.get("autoep_size", 1))
    return size


_FACTS_OF_OURS = {
    "optimizer steps": lambda run: (
        f"{run.history[-1]['step'] if run.history else 0} ({run.info['status']})"
    ),
    "one global batch": _batch,
    "moe_load_balancing": lambda run: json.dumps(run.info["ds_config"].get("moe_load_balancing")),
    "expert-parallel size": lambda run: str(_ep_size(run)),
    "seed": lambda run: str(run.info["options"]["seed"]),
    "text (sha256)": lambda run: run.info["corpus"]["sha256"][:16],
    "versions": lambda run: ", ".join(f"{k} {v}" for k, v in run.info["versions"].items()),
}


def _titled(figure: Figure, title: str, *, identity: str) -> str:
    svg = inline_svg(figure, alt=title, identity=identity)
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"


def _wide(figure: Figure, *, alt: str, identity: str) -> str:
    return f'<div class="scroll wide">{inline_svg(figure, alt=alt, identity=identity)}</div>'


def _colour(index: int) -> str:
    return f"var(--run-{index % len(CSS.runs)})"
