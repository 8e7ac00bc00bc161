"""One self-contained HTML page: tables and figures, no scripts, nothing loaded from elsewhere."""

import base64
import io
import json
from html import escape

from matplotlib.figure import Figure

from ds_moe_lb.report.figures import draw_figures
from ds_moe_lb.report.summary import Row, summarise
from ds_moe_lb.report.tables import all_tables, format_difference, format_value, is_better
from ds_moe_lb.training.run_folder import Run

_CAPTIONS = {
    "training_curves": "Thin: every optimizer step; thick: smoothed. A balance loss of 1 and a "
    "MaxVio of 0 mean that all experts are used alike.",
    "domain_expert_heatmaps": "One row of panels per layer, one column per run, one colour scale. "
    "A row of one colour: the domain uses all experts alike. Bright cells: experts that a domain "
    "prefers.",
    "expert_load": "Tokens that each expert was selected for, relative to the mean. Specialised "
    "experts may still be evenly loaded.",
}
_TITLES = {
    "training_curves": "Training",
    "domain_expert_heatmaps": "Domains and experts",
    "expert_load": "Expert load",
}
_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --soft: #59636e;
  --line: #d9dde2; --better: #1a7f37; --worse: #9a6700; --back: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --paper: #161b22; --ink: #e6edf3; --soft: #9198a1;
  --line: #3b434d; --better: #3fb950; --worse: #d29922; --back: #0d1117; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 8px; }
h2 { font-size: 1.15rem; margin: 0 0 12px; }
p { margin: 0 0 12px; } .soft { color: var(--soft); font-size: .9rem; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px; margin-top: 18px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 11em; }
tr:last-child td { border-bottom: 0; } th { color: var(--soft); font-weight: 600; }
.better { color: var(--better); font-weight: 600; }
.worse { color: var(--worse); font-weight: 600; }
img { display: block; width: 100%; min-width: 640px; height: auto; }
picture + p, .scroll + p { margin-top: 12px; margin-bottom: 0; }
.facts td { white-space: normal; text-align: left; vertical-align: top; min-width: 15em; }
.facts td:first-child { min-width: 8em; color: var(--soft); }
@media (max-width: 600px) {
  section { padding: 14px 12px; } table { font-size: .8rem; } th, td { padding: 5px 4px; }
  th:first-child, td:first-child { min-width: 7em; } .facts td { min-width: 12em; }
}
"""


def html_page(runs: list[Run]) -> str:
    """The page as text.

    Raises:
        ValueError: when a run has no validation yet.
    """
    summaries = [summarise(run) for run in runs]
    labels = [summary.label for summary in summaries]
    light, dark = draw_figures(runs), draw_figures(runs, dark=True)
    parts = [_section(title, _table(rows, labels)) for title, rows in all_tables(summaries)]
    figures = [
        _section(
            _TITLES[name], _picture(figure, dark[name], alt=_TITLES[name]) + _soft(_CAPTIONS[name])
        )
        for name, figure in light.items()
    ]
    body = "\n".join([*parts[:1], *figures, *parts[1:], _section("Runs", _facts(runs))])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(' / '.join(labels))}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>Expert load balancing: {escape(' against '.join(labels))}</h1>{_introduction(runs)}"
        f"{body}</main></body></html>\n"
    )


def _introduction(runs: list[Run]) -> str:
    domains = [domain["name"] for domain in runs[0].info["corpus"]["domains"]]
    model = runs[0].info["model"]
    return _soft(
        f"A byte-level MoE language model, {model['num_layers']} layers with "
        f"{model['num_experts']} experts, top-{model['top_k']}, trained on {len(domains)} domains "
        f"of text ({', '.join(domains)}), each sequence from one domain. All losses are on "
        f"held-out files, domains weighted equally."
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def _table(rows: list[Row], labels: list[str]) -> str:
    head = ["", *labels, *(["difference"] if len(labels) == 2 else [])]
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows:
        cells = [f"<td>{escape(row.name)}</td>"]
        cells += [f"<td>{format_value(value, row)}</td>" for value in row.values]
        if len(labels) == 2:
            kind = {True: "better", False: "worse", None: ""}[is_better(row)]
            cells.append(f'<td class="{kind}">{format_difference(row)}</td>')
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _picture(light: Figure, dark: Figure, *, alt: str) -> str:
    return (
        f'<div class="scroll"><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="{_data_url(dark)}"><img alt="{escape(alt)}" src="{_data_url(light)}">'
        f"</picture></div>"
    )


def _data_url(figure: Figure) -> str:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=130)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def _facts(runs: list[Run]) -> str:
    def line(name: str, values: list[str]) -> str:
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        return f"<tr><td>{escape(name)}</td>{cells}</tr>"

    def batch(run: Run) -> str:
        config = run.info["ds_config"]
        micro = config.get("train_micro_batch_size_per_gpu", "?")
        steps = config.get("gradient_accumulation_steps", 1)
        length = run.info["model"]["sequence_length"]
        ranks = run.info["world_size"]
        return f"{ranks} ranks x {steps} micro-steps x {micro} sequences of {length} bytes"

    lines = [
        line("", [run.label for run in runs]),
        line(
            "optimizer steps",
            [
                f"{run.history[-1]['step'] if run.history else 0} ({run.info['status']})"
                for run in runs
            ],
        ),
        line("one global batch", [batch(run) for run in runs]),
        line(
            "moe_load_balancing",
            [json.dumps(run.info["ds_config"].get("moe_load_balancing")) for run in runs],
        ),
        line("expert-parallel size", [str(run.info["model"]["ep_size"]) for run in runs]),
        line("seed", [str(run.info["options"]["seed"]) for run in runs]),
        line("text (sha256)", [run.info["corpus"]["sha256"][:16] for run in runs]),
        line(
            "versions",
            [", ".join(f"{k} {v}" for k, v in run.info["versions"].items()) for run in runs],
        ),
        line("folder", [run.path.name for run in runs]),
    ]
    return f'<div class="scroll"><table class="facts">{"".join(lines)}</table></div>'
