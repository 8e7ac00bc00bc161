"""The numbers of a run that are compared: pure, from what the run folder holds."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ds_moe_lb.metrics import max_selection_frequency, max_violation, mutual_information
from ds_moe_lb.training.run_folder import Run

LAST_STEPS = 50  # optimizer steps that "at the end of training" averages over


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run in numbers.

    Attributes:
        label: name of the run.
        step: optimizer steps done at the last validation.
        validation_loss: nats per byte, mean over domains.
        loss_per_domain: nats per byte.
        balance: means over the last steps of training, by name of the metric; empty without plugin.
        validation_max_violation: MaxVio of all held-out text, mean over layers.
        mutual_information: between domain and expert, nats, mean over layers.
        selection_frequency: per domain, the largest share of its selections that one expert took,
            in any layer.
        tokens_per_second: median over training.
    """

    label: str
    step: int
    validation_loss: float
    loss_per_domain: dict[str, float]
    balance: dict[str, float]
    validation_max_violation: float
    mutual_information: float
    selection_frequency: dict[str, float]
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison.

    Attributes:
        name: what it is.
        values: one per run; None where a run has no such number.
        better: "low" or "high" where one direction is better, "" where it depends.
        digits: after the point.
    """

    name: str
    values: tuple[float | None, ...]
    better: str = ""
    digits: int = 3


def summarise(run: Run) -> Summary:
    """Reduce a run to its numbers.

    Raises:
        ValueError: when the run has not been validated yet.
    """
    if not run.validations:
        raise ValueError(
            f"{run.path}: the run has no validation yet (status {run.info['status']!r})"
        )
    last = run.validations[-1]
    counts_LDE = torch.tensor(last["tokens_per_expert_LDE"])
    frequency_LD = torch.stack([max_selection_frequency(counts_DE) for counts_DE in counts_LDE])
    domains = list(last["loss_per_domain"])
    return Summary(
        label=run.label,
        step=last["step"],
        validation_loss=last["loss"],
        loss_per_domain=last["loss_per_domain"],
        balance=_mean_of_last_steps(run),
        validation_max_violation=float(max_violation(counts_LDE.sum(dim=1)).mean()),
        mutual_information=sum(map(mutual_information, counts_LDE)) / len(counts_LDE),
        selection_frequency=dict(zip(domains, frequency_LD.amax(dim=0).tolist(), strict=True)),
        tokens_per_second=_median([record["tokens_per_second"] for record in run.history]),
    )


def overview_rows(summaries: list[Summary]) -> list[Row]:
    """The main table: loss, specialisation, balance, speed."""

    def balance(key: str) -> tuple[float | None, ...]:
        return tuple(summary.balance.get(key) for summary in summaries)

    def attribute(name: str) -> tuple[float | None, ...]:
        return tuple(getattr(summary, name) for summary in summaries)

    rows = [
        Row(
            name="validation loss (nats per byte)",
            values=attribute("validation_loss"),
            better="low",
            digits=4,
        ),
        Row(
            name="specialisation: mutual information domain/expert (nats)",
            values=attribute("mutual_information"),
            better="high",
            digits=4,
        ),
        Row(name="LBL over the micro-batch (1 = even)", values=balance("lbl_micro_batch")),
        Row(
            name="LBL over the global batch (1 = even)",
            values=balance("lbl_global_batch"),
            better="low",
        ),
        Row(name="MaxVio in a micro-batch (0 = even)", values=balance("max_violation_micro_batch")),
        Row(
            name="MaxVio in a global batch (0 = even)",
            values=balance("max_violation_global_batch"),
            better="low",
        ),
        Row(
            name="MaxVio on held-out text",
            values=attribute("validation_max_violation"),
            better="low",
        ),
        Row(name="tokens per second", values=attribute("tokens_per_second"), digits=0),
    ]
    return [row for row in rows if any(value is not None for value in row.values)]


def domain_rows(summaries: list[Summary], attribute: str, *, better: str) -> list[Row]:
    """One row per domain of `loss_per_domain` or `selection_frequency`."""
    domains = dict.fromkeys(name for summary in summaries for name in getattr(summary, attribute))
    return [
        Row(
            name=domain,
            values=tuple(getattr(summary, attribute).get(domain) for summary in summaries),
            better=better,
        )
        for domain in domains
    ]


def difference(row: Row) -> float | None:
    """Second run minus first, where there are exactly two."""
    if len(row.values) != 2 or row.values[0] is None or row.values[1] is None:
        return None
    return row.values[1] - row.values[0]


def common_folder(runs: list[Run]) -> Path:
    """Where things that belong to several runs go: the folder that holds the first run."""
    return runs[0].path.resolve().parent


def _mean_of_last_steps(run: Run) -> dict[str, float]:
    records = run.history[-LAST_STEPS:]
    keys = [
        key
        for key in (records[-1] if records else {})
        if key.startswith(("lbl_", "max_violation_"))
    ]
    return {key: sum(record.get(key, 0.0) for record in records) / len(records) for key in keys}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
