"""The verdict as a table on a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ds_moe_lb.verify.checks import Line
from ds_moe_lb.verify.comparison import FLOOR, KINDS
from ds_moe_lb.verify.layout import Layout

_MAX_FAILURES = 3


def print_table(lines: Sequence[Line], layout: Layout) -> None:
    """Print one line per property, then the first failures of each in words."""
    console = Console()
    console.print(layout.describe(), highlight=False, markup=False)
    # Fits 80 columns.
    table = Table(title="Largest deviation / tolerance", title_justify="left", pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.title_style = table.header_style = "bold"
    table.add_column("property", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for kind in KINDS:
        table.add_column(kind, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line.name, *_cells(line))
    console.print(table)
    basis = (
        f"max(|ref|, {FLOOR:g}), per unit of the coefficient"
        if layout.precision == "fp32"
        else "the largest sum of the ranks' absolute contributions"
    )
    notes = [f"{line.name}: {line.reason}" for line in lines if line.reason]
    notes.append(f"counts: exact; loss: relative to max(|ref|, 1); gradient: to {basis}")
    notes.append("reference: one process, fp64, the gathered batch, the recorded selections")
    if layout.not_covered:
        notes.append(f"switched off, not covered: {', '.join(layout.not_covered)}")
    for line in lines:
        failures = line.verdict.failures if line.verdict else []
        notes += [f"{line.name}: {failure}" for failure in failures[:_MAX_FAILURES]]
        if len(failures) > _MAX_FAILURES:
            notes.append(f"{line.name}: and {len(failures) - _MAX_FAILURES} more")
    for note in notes:
        console.print(f"- {note}", highlight=False, markup=False)
    number = sum(line.has_failed for line in lines)
    console.print(f"FAILED: {number} of {len(lines)}" if number else "all properties hold")


def _cells(line: Line) -> list[str]:
    verdict = line.verdict
    if verdict is None:
        return ["[dim]n/a[/dim]", *[""] * len(KINDS)]
    result = "[red]FAIL[/red]" if line.has_failed else "[green]pass[/green]"
    loss, gradient = (
        f"{verdict.deviation[kind]:.1e} / {verdict.tolerance[kind]:.1g}" for kind in KINDS[1:]
    )
    return [result, f"{verdict.deviation['counts']:g}", loss, gradient]
