"""Tables of experiments as Markdown, each with how it was made."""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ds_moe_lb.experiments.analysis import (
    Interval,
    at_equal_violation,
    best,
    common_violations,
    paired_difference,
)
from ds_moe_lb.experiments.catalogue import DEFAULT_SEEDS
from ds_moe_lb.experiments.experiment import Variant
from ds_moe_lb.experiments.results import INFORMATION, LOSS, VIOLATION, Results
from ds_moe_lb.experiments.setting import Setting

NUM_COMPARED = 5  # MaxVios at which frontiers are compared
METRICS = {
    LOSS: ("validation loss", 4),
    INFORMATION: ("specialisation", 3),
    VIOLATION: ("MaxVio", 2),
}
_NOTES = (
    "Validation loss: nats per byte on held-out files, mean over domains. Specialisation: mutual "
    "information between domain and expert on held-out files, nats, mean over layers. MaxVio: "
    "largest expert load in a global batch over the mean load, minus 1, mean over layers and the "
    "last 50 steps. Differences are paired by seed: mean [95% interval, Student's t]; **bold** "
    "where the interval excludes zero."
)


def write_table(results: Results, folder: Path) -> str:
    """Write NAME.md into the folder and return its text."""
    text = page(results)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{results.experiment.name}.md").write_text(text)
    return text


def page(results: Results) -> str:
    """Everything in words and numbers: question, tables, how it was made."""
    experiment = results.experiment
    parts = [
        f"# {experiment.name}",
        f"{experiment.question} ({experiment.source[0].upper()}{experiment.source[1:]}.)",
    ]
    parts.append(main_table(results))
    if experiment.also_against in results.records:
        parts.append(differences_table(results, baseline=experiment.also_against))
    if experiment.name == "weights":
        parts += [best_weights(results), equal_balance_table(results)]
    if experiment.name == "routing":
        parts.append(score_table(results))
    return "\n\n".join([*parts, _NOTES, provenance(results)]) + "\n"


def main_table(results: Results) -> str:
    """One row per variant: three means, and their differences to what it is compared with."""
    rows = []
    for variant in results.variants:
        means = [
            f"{results.mean(variant.name, metric).mean:.{digits}f}"
            for metric, (_, digits) in METRICS.items()
        ]
        differences = _differences(results, variant.name, baseline=variant.baseline)
        number = str(len(results.records[variant.name]))
        verdict = _verdict(results, variant)
        rows.append([variant.name, *means, variant.baseline, *differences, verdict, number])
    titles = [title for title, _ in METRICS.values()]
    shown = ["", *titles, "against", *_difference_titles(), "the paper's loss", "seeds"]
    return markdown(shown, rows)


def differences_table(results: Results, *, baseline: str) -> str:
    """The differences of all variants to one."""
    rows = [
        [variant.name, *_differences(results, variant.name, baseline=baseline)]
        for variant in results.variants
        if variant.name != baseline
    ]
    return f"Against `{baseline}`:\n\n" + markdown(["", *_difference_titles()], rows)


def _difference_titles() -> list[str]:
    return [f"{title}, difference" for title, _ in METRICS.values()]


def _differences(results: Results, name: str, *, baseline: str) -> list[str]:
    found = {metric: results.difference(name, metric, baseline=baseline) for metric in METRICS}
    return [
        "" if difference is None else show(difference, digits=METRICS[metric][1])
        for metric, difference in found.items()
    ]


def _verdict(results: Results, variant: Variant) -> str:
    """Whether the loss differs in the direction in which the paper's does."""
    difference = results.difference(variant.name, LOSS, baseline=variant.baseline)
    if difference is None or variant.paper_lowers_loss is None:
        return ""
    said = "lower" if variant.paper_lowers_loss else "higher"
    if difference.sign == 0:
        return f"{said}; open here"
    agrees = (difference.sign < 0) == variant.paper_lowers_loss
    return f"{said}, as here" if agrees else f"{said}, **not here**"


def best_weights(results: Results) -> str:
    """Each method at the weight with its lowest mean loss, in a sentence."""
    chosen = {
        group: best({v.name: results.values(v.name, LOSS) for v in results.group(group)})
        for group in ("micro", "global")
    }
    difference = paired_difference(
        results.values(chosen["global"], LOSS), results.values(chosen["micro"], LOSS)
    )
    text = "" if difference is None else show(difference, digits=METRICS[LOSS][1])
    at = ", ".join(
        f"{name} (MaxVio {results.mean(name, VIOLATION).mean:.2f})" for name in chosen.values()
    )
    return f"At each one's best weight ({at}) the global batch minus the micro-batch is {text}."


def equal_balance_table(results: Results) -> str:
    """Both methods at MaxVios that all their runs reach."""
    micro, over_global = results.frontiers("micro"), results.frontiers("global")
    common = common_violations([*micro.values(), *over_global.values()], number=NUM_COMPARED)
    if not common:
        return "No MaxVio is reached by both methods with every seed."
    rows = []
    for violation in common:
        cells = [f"{violation:.2f}"]
        for metric, column in ((LOSS, "losses"), (INFORMATION, "information")):
            difference = at_equal_violation(over_global, micro, violation, column)
            cells.append("" if difference is None else show(difference, digits=METRICS[metric][1]))
        rows.append(cells)
    header = ["equal MaxVio", "validation loss, global - micro", "specialisation, global - micro"]
    return markdown(header, rows)


def score_table(results: Results) -> str:
    """Mean sum of a token's selected probabilities, by layer and domain, mean over seeds."""
    first = results.all_records()[0]
    domains = list(first["loss_per_domain"])
    rows = []
    for variant in results.variants:
        scores_LD = np.mean(
            [record["top_k_score_LD"] for record in results.records[variant.name].values()], axis=0
        )
        for layer, scores_D in enumerate(scores_LD):
            rows.append([variant.name, str(layer), *(f"{score:.3f}" for score in scores_D)])
    return "Sum of a token's selected probabilities:\n\n" + markdown(["", "layer", *domains], rows)


def provenance(results: Results) -> str:
    """Command, setting, text, versions, time and machine, from the records."""
    records = results.all_records()
    setting = results.setting
    seconds = sum(record["seconds"] for record in records)
    versions = _distinct(
        ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        for record in records
    )
    machines = _distinct(
        f"{record['machine']['cores']} cores ({record['machine']['processor']})"
        for record in records
    )
    model = ", ".join(f"{name} {value}" for name, value in setting.model.items())
    dates = sorted(record["finished"][:10] for record in records)
    return (
        f"Made by `{_command(results)}` ({dates[0]} to {dates[-1]}): "
        f"{len(records)} runs of {setting.steps} steps x {setting.global_batch_size} sequences on "
        f"2 ranks ({model}; the rest as `ds-moe-lb train`), weight {setting.aux_loss_coeff:g} "
        f"where none is named, {seconds / 60:.0f} minutes in all. Text: corpus "
        f"{' / '.join(_distinct(record['corpus'][:12] for record in records))}. "
        f"Versions: {' / '.join(versions)}. Machine: {' / '.join(machines)}."
    )


def _command(results: Results) -> str:
    """What makes these runs again, as it is typed."""
    usual = Setting()
    words = ["ds-moe-lb experiment", results.experiment.name]
    if results.num_seeds != DEFAULT_SEEDS:
        words.append(f"--seeds {results.num_seeds}")
    if results.setting.steps != usual.steps:
        words.append(f"--steps {results.setting.steps}")
    return " ".join(words)


def show(value: Interval, *, digits: int) -> str:
    """A difference with its interval, bold where the interval excludes zero."""
    if math.isinf(value.half_width):
        return f"{value.mean:+.{digits}f} (1 seed)"
    text = f"{value.mean:+.{digits}f} [{value.low:+.{digits}f}, {value.high:+.{digits}f}]"
    return f"**{text}**" if value.sign else text


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
