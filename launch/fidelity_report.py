"""The table and the figure of launch/fidelity.py."""

import math
import statistics
from pathlib import Path
from typing import Any

ESTIMATES = ("micro_batch", "running", "carry", "boundary")
NAMES = ("error_step", "cosine_step", "error_window", "cosine_window")


def interval(values: list[float]) -> tuple[float, float]:
    """Mean over seeds and half of its 95% interval (Student's t); infinite for one seed."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}[len(values)]
    return mean, t * statistics.stdev(values) / len(values) ** 0.5


def summarise(records: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row for each G and estimate: means over layers and looks, intervals over seeds."""
    rows = []
    for num_steps in sorted({record["G"] for record in records}):
        for estimate in ESTIMATES:
            row: dict[str, Any] = {"G": num_steps, "estimate": estimate}
            for name in names:
                by_seed: dict[int, list[float]] = {}
                for record in records:
                    if record["G"] == num_steps:
                        by_seed.setdefault(record["seed"], []).append(record[estimate][name])
                row[name] = interval([statistics.fmean(values) for values in by_seed.values()])
            rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """As Markdown."""
    print("| G | estimate | error, micro-step | cosine | error, window | cosine |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = [f"{row[name][0]:.3f} +- {row[name][1]:.3f}" for name in NAMES]
        print(f"| {row['G']} | {row['estimate']} | {' | '.join(cells)} |")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Relative error against G, for each micro-step and for the window."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    colors = dict(zip(ESTIMATES, ("#E69F00", "#0072B2", "#009E73", "#CC79A7"), strict=True))
    titles = ("in each micro-step", "summed over the window")
    for panel, name, title in zip(panels, ("error_step", "error_window"), titles, strict=True):
        for estimate in ESTIMATES:
            mine = [row for row in rows if row["estimate"] == estimate]
            mine = [row for row in mine if row[name][0] > 0]
            panel.errorbar(
                [row["G"] for row in mine],
                [row[name][0] for row in mine],
                yerr=[row[name][1] if math.isfinite(row[name][1]) else 0 for row in mine],
                color=colors[estimate],
                marker="o",
                markersize=4,
                capsize=2,
                label=estimate.replace("_", "-"),
            )
        panel.set(xscale="log", yscale="log", xlabel="accumulation steps G", title=title)
        panel.set_xticks(sorted({row["G"] for row in rows}))
        panel.set_yticks([0.2, 0.5, 1.0, 2.0])
        panel.xaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        panel.grid(color="#d9dde2", linewidth=0.6)
    panels[0].set_ylabel("error of the router's gradient\nagainst the exact global batch")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(ESTIMATES),
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
