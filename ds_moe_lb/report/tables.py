"""The comparison as tables on a terminal."""

from rich.console import Console
from rich.table import Table

from ds_moe_lb.report.summary import Row, Summary, difference, domain_rows, overview_rows

OVERVIEW_TITLE = "Runs compared"
LOSS_TITLE = "Validation loss per domain (nats per byte)"
FREQUENCY_TITLE = "Largest share of a domain's selections on one expert, any layer"


def print_tables(summaries: list[Summary]) -> None:
    """Print the overview and the two tables per domain to standard output."""
    console = Console()
    for title, rows in all_tables(summaries):
        console.print(_table(title, rows, [summary.label for summary in summaries]))


def all_tables(summaries: list[Summary]) -> list[tuple[str, list[Row]]]:
    """Titles and rows of the tables, in reading order."""
    return [
        (OVERVIEW_TITLE, overview_rows(summaries)),
        (LOSS_TITLE, domain_rows(summaries, "loss_per_domain", better="low")),
        (FREQUENCY_TITLE, domain_rows(summaries, "selection_frequency", better="high")),
    ]


def format_value(value: float | None, row: Row) -> str:
    """A number as it is shown; a dash where there is none."""
    return "-" if value is None else f"{value:,.{row.digits}f}"


def format_difference(row: Row) -> str:
    """Second minus first with its sign; empty where there is nothing to subtract."""
    value = difference(row)
    return "" if value is None else f"{value:+,.{row.digits}f}"


def is_better(row: Row) -> bool | None:
    """Whether the second run is better; None where no direction is better or nothing differs."""
    value = difference(row)
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
