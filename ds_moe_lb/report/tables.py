"""The comparison as tables on a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ds_moe_lb.report.run_log import RunLog
from ds_moe_lb.report.status import Mark, sentences
from ds_moe_lb.report.summary import Row, difference, domain_rows, overview_rows, summaries_of

OVERVIEW_TITLE = "Runs compared"
OVERVIEW_OF_ONE = "At the end"
LOSS_TITLE = "Validation loss per domain (nats per byte)"
FREQUENCY_TITLE = "Largest share of a domain's selections on one expert, any layer"


def print_tables(logs: Sequence[RunLog]) -> None:
    """Print the status of every run and the tables to standard output."""
    console = Console()
    for log in logs:
        console.print(f"{log.label}", style="bold", markup=False)
        for sentence in sentences(log):
            style = {Mark.LOOK: "yellow", Mark.FINE: "green", Mark.NOTHING: None}[sentence.mark]
            console.print(f"  {sentence.text}", style=style, markup=False, highlight=False)
    for title, rows in all_tables(logs):
        console.print(_table(title, rows, [log.label for log in logs]))


def all_tables(logs: Sequence[RunLog]) -> list[tuple[str, list[Row]]]:
    """Titles and rows of the tables that have any, in reading order."""
    summaries = summaries_of(logs)
    tables = [
        (OVERVIEW_TITLE if len(logs) > 1 else OVERVIEW_OF_ONE, overview_rows(logs)),
        (LOSS_TITLE, domain_rows(summaries, "loss_per_domain", better="low")),
        (FREQUENCY_TITLE, domain_rows(summaries, "selection_frequency", better="high")),
    ]
    return [(title, rows) for title, rows in tables if rows]


def format_value(value: float | None, row: Row) -> str:
    """A number as it is shown; a dash where there is none."""
    return "-" if value is None else f"{value:,.{row.digits}f}"


def format_difference(row: Row, run: int = 1) -> str:
    """A run minus the first one with its sign; empty where there is nothing to subtract."""
    value = difference(row, run)
    if value is None:
        return ""
    rounded = round(value, row.digits)
    return f"{rounded:+,.{row.digits}f}" if rounded else f"{0:.{row.digits}f}"


def is_better(row: Row, run: int = 1) -> bool | None:
    """Whether a run is better than the first; None where no direction is or nothing differs."""
    value = difference(row, run)
    if value is None or not row.better or round(value, row.digits) == 0:
        return None
    return (value < 0) == (row.better == "low")


def _table(title: str, rows: list[Row], labels: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("")
    for label in labels:
        table.add_column(label, justify="right", no_wrap=True)
    if len(labels) == 2:
        table.add_column("difference", justify="right", no_wrap=True)
    for row in rows:
        cells = [row.name, *(format_value(value, row) for value in row.values)]
        if len(labels) == 2:
            style = {True: "green", False: "yellow", None: ""}[is_better(row)]
            text = format_difference(row)
            cells.append(f"[{style}]{text}[/{style}]" if style else text)
        table.add_row(*cells)
    return table
