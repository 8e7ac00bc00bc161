"""The numbers of runs that are compared: pure, from logs and from what our run folders hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_moe_lb.metrics import max_selection_frequency, max_violation, mutual_information
from ds_moe_lb.report.run_log import TRAIN_LOSS, RunLog, mean_at_end
from ds_moe_lb.report.status import layer_statuses, worst_layer
from ds_moe_lb.training.run_folder import Run


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One validated run of our trainer in numbers.

    Attributes:
        label: name of the run.
        step: optimizer steps done at the last validation.
        validation_loss: nats per byte, mean over domains.
        loss_per_domain: nats per byte.
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
        validation_max_violation=float(max_violation(counts_LDE.sum(dim=1)).mean()),
        mutual_information=sum(map(mutual_information, counts_LDE)) / len(counts_LDE),
        selection_frequency=dict(zip(domains, frequency_LD.amax(dim=0).tolist(), strict=True)),
        tokens_per_second=_median([record["tokens_per_second"] for record in run.history]),
    )


def summaries_of(logs: Sequence[RunLog]) -> list[Summary | None]:
    """One for each run; None where it is not one of our trainer's or counted no experts yet."""
    return [
        summarise(log.run) if log.run is not None and log.run.counts_experts else None
        for log in logs
    ]


def overview_rows(logs: Sequence[RunLog]) -> list[Row]:
    """The main table: loss, specialisation, balance, speed; without rows that nobody has."""
    summaries = summaries_of(logs)

    def attribute(name: str) -> tuple[float | None, ...]:
        return tuple(None if one is None else getattr(one, name) for one in summaries)

    def at_end(name: str) -> tuple[float | None, ...]:
        return tuple(mean_at_end(log.get(name)) for log in logs)

    worst = [worst_layer(layer_statuses(log)) for log in logs]
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
        Row(name="training loss", values=at_end(TRAIN_LOSS), better="low", digits=4),
        Row(name="LBL as it is applied (1 = even)", values=at_end("lbl_used")),
        Row(name="LBL over the micro-batch (1 = even)", values=at_end("lbl_micro_batch")),
        Row(
            name="LBL over the global batch (1 = even)",
            values=at_end("lbl_global_batch"),
            better="low",
        ),
        Row(name="MaxVio in a micro-batch (0 = even)", values=at_end("max_violation_micro_batch")),
        Row(
            name="MaxVio in a global batch (0 = even)",
            values=at_end("max_violation_global_batch"),
            better="low",
        ),
        Row(
            name="MaxVio in a global batch, worst layer",
            values=tuple(None if layer is None else layer.max_violation for layer in worst),
            better="low",
        ),
        Row(name="load entropy (1 = even)", values=at_end("load_entropy"), better="high"),
        Row(name="dead experts, mean over layers", values=at_end("dead_experts"), better="low"),
        Row(
            name="MaxVio on held-out text",
            values=attribute("validation_max_violation"),
            better="low",
        ),
        Row(name="tokens per second", values=attribute("tokens_per_second"), digits=0),
    ]
    return [row for row in rows if any(value is not None for value in row.values)]


def domain_rows(summaries: Sequence[Summary | None], attribute: str, *, better: str) -> list[Row]:
    """One row per domain of `loss_per_domain` or `selection_frequency`."""
    tables = [{} if summary is None else getattr(summary, attribute) for summary in summaries]
    return [
        Row(name=domain, values=tuple(table.get(domain) for table in tables), better=better)
        for domain in dict.fromkeys(name for table in tables for name in table)
    ]


def difference(row: Row, run: int = 1) -> float | None:
    """A run minus the first one; None where there is nothing to subtract."""
    if run >= len(row.values) or run == 0:
        return None
    first, other = row.values[0], row.values[run]
    return None if first is None or other is None else other - first


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
