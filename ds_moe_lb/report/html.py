"""One self-contained HTML page: status, tables and figures, no scripts, nothing loaded."""

import time
from collections.abc import Sequence
from html import escape

from ds_moe_lb.report import sections
from ds_moe_lb.report.page_style import PAGE_STYLE
from ds_moe_lb.report.run_log import RunLog
from ds_moe_lb.report.style import CSS, styled
from ds_moe_lb.report.summary import Row
from ds_moe_lb.report.tables import all_tables, format_difference, format_value, is_better

_SHOWN_LABELS = 3  # in the title


def html_page(logs: Sequence[RunLog], *, reload_seconds: float | None = None) -> str:
    """The page as text.

    Args:
        logs: the runs, over one unit.
        reload_seconds: how often a browser loads the page again; None = never.
    """
    labels = [log.label for log in logs]
    named = labels if len(labels) <= _SHOWN_LABELS else [f"{len(labels)} runs"]
    together = (" against " if len(named) == 2 else ", ").join(named)
    tables = [_section(title, _table(rows, labels)) for title, rows in all_tables(logs)]
    with styled(CSS):
        parts = [
            _section("Status", sections.status(logs)),
            *tables[:1],
            _section("Over the run", sections.curves(logs)),
            _section("Layers over the run", sections.layers_over_time(logs)),
            _section("Experts over the run", sections.experts_over_time(logs)),
            _section("Domains and experts", sections.domains(logs)),
            _section("Expert load on held-out files", sections.held_out_load(logs)),
            *tables[1:],
            _section("Layers at the end", sections.layers_at_end(logs)),
            _section("Runs", sections.facts(logs)),
            _section("How to read this", sections.HOW_TO_READ),
        ]
    reload = (
        ""
        if reload_seconds is None
        else (f'<meta http-equiv="refresh" content="{max(1, round(reload_seconds))}">')
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{reload}'
        f"<title>{escape(' / '.join(named))}</title><style>{PAGE_STYLE}</style></head><body><main>"
        f"<h1>Expert load balancing: {escape(together)}</h1>"
        f"{_introduction(logs)}{''.join(parts)}</main></body></html>\n"
    )


def _introduction(logs: Sequence[RunLog]) -> str:
    written = f"Written {time.strftime('%Y-%m-%d %H:%M:%S')}."
    first = logs[0].run
    if first is None or any(log.run is None or log.num_experts is None for log in logs):
        return sections.soft(written)
    domains = [domain["name"] for domain in first.info["corpus"]["domains"]]
    model = first.info["model"]
    return sections.soft(
        f"A byte-level MoE language model, {model['num_layers']} layers with "
        f"{model['num_experts']} experts, top-{model['top_k']}, trained on {len(domains)} domains "
        f"of text ({', '.join(domains)}), each sequence from one domain. Validation losses are on "
        f"held-out files, domains weighted equally. {written}"
    )


def _section(title: str, content: str) -> str:
    """Nothing where there is nothing to show."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _table(rows: list[Row], labels: list[str]) -> str:
    """With two runs a column of differences, with more the difference from the first below."""
    two = len(labels) == 2
    head = "".join(f"<th>{escape(cell)}</th>" for cell in ("", *labels))
    lines = [f"<tr>{head}{'<th class=whole>difference</th>' if two else ''}</tr>"]
    for row in rows:
        cells = [f"<td>{escape(row.name)}</td>"]
        for run, value in enumerate(row.values):
            below = ""
            if not two and (text := format_difference(row, run)):
                below = f'<small class="{_kind(row, run)}">{text}</small>'
            cells.append(f"<td>{format_value(value, row)}{below}</td>")
        if two:
            cells.append(f'<td class="{_kind(row, 1)}">{format_difference(row)}</td>')
        lines.append("<tr>" + "".join(cells) + "</tr>")
    note = ""
    if len(labels) > 2:
        note = sections.soft("Small: difference from the first run.")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>{note}'


def _kind(row: Row, run: int) -> str:
    return {True: "better", False: "worse", None: ""}[is_better(row, run)]
