"""Results as tables of ratios, counts and waits, in Markdown for the README and the terminal."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any

from launch.benchmark.shape import AGAIN, FACTORS, PLAIN
from launch.benchmark.statistics import Estimate, estimate

# Ratios that issue and README promise: gates forward and backward, whole step by estimate.
TARGET_GATE = 1.05
TARGET_STEP = {"running": 1.01, "boundary": 1.005}
TARGET_HALF_WIDTH = 0.005
_UNDECIDED = "too noisy to tell"

Result = dict[str, Any]


def ratios(times: dict[str, list[float]], name: str, *, baseline: str = PLAIN.name) -> Estimate:
    """Median over blocks of the time relative to the baseline's in the same block."""
    return estimate([a / b for a, b in zip(times[name], times[baseline], strict=True)])


def column(result: Result, key: str) -> dict[str, list[float]]:
    """One measured list of every variant of a shape's result."""
    return {name: row[key] for name, row in result["variants"].items() if row.get(key)}


def all_tables(results: Sequence[Result], peers: dict[str, Result]) -> str:
    """Everything that was measured, as Markdown."""
    parts = []
    for result in results:
        parts.append(f"### {describe(result['shape'])}\n")
        if column(result, "wall_s") or result.get("gate_wall_s"):
            parts.append(_costs(result))
        if column(result, "own"):
            parts.append(_own(result))
        if column(result, "counted"):
            parts.append(_counts(result))
        if _delays(result):
            parts.append(_waits(result))
        if column(result, "memory"):
            parts.append(_memory(result))
        if result.get("savings"):
            parts.append(_savings(result["savings"]))
        parts += [f"Not run: {name}: {why}\n" for name, why in result["refused"].items()]
    parts += [_side_by_side(family) for family in _repeated(results)]
    for name, peer in peers.items():
        parts.append(_peer(name, peer))
    return "\n".join(parts)


def describe(shape: dict[str, int]) -> str:
    """A shape in one line."""
    return (
        f"{shape['tokens']} tokens, width {shape['model_dim']}, {shape['num_experts']} experts, "
        f"k {shape['top_k']}, {shape['layers']} layers, G {shape['gas']}, D {shape['ranks']}"
    )


def _costs(result: Result) -> str:
    """Ratios of the times; a column for each that was measured."""
    times = {"step, wall": column(result, "wall_s"), "step, processor": column(result, "cpu_s")}
    times |= {
        "gate, wall": result.get("gate_wall_s", {}),
        "gate, processor": result.get("gate_cpu_s", {}),
    }
    times = {head: seconds for head, seconds in times.items() if seconds}
    rows = []
    for name in result["variants"]:
        if name == PLAIN.name:
            continue
        cells = [str(ratios(one, name)) if name in one else "" for one in times.values()]
        rows.append([name, *cells, _verdict(result, name)])
    table = markdown(["against plain DeepSpeed", *times, "target"], rows)
    plain = []
    if "step, wall" in times:
        steps = times["step, wall"][PLAIN.name]
        plain.append(f"{len(steps)} blocks; a plain step takes {median(steps):.3f} s")
    if "gate, wall" in times:
        gates = times["gate, wall"][PLAIN.name]
        plain.append(f"{len(gates)} blocks of gates, {1e3 * median(gates):.1f} ms plain")
    return f"{table}\n{'; '.join(plain)}.\n"


def own_share(row: Result) -> Estimate:
    """The plugin's own time as a share of the rest of the step that it was measured in."""
    own = row["own"]
    return estimate([a / (b - a) for a, b in zip(own["own_s"], own["wall_s"], strict=True)])


def own_milliseconds(row: Result) -> Estimate:
    """The plugin's own time in an optimizer step."""
    return estimate([1e3 * seconds for seconds in row["own"]["own_s"]])


def _own(result: Result) -> str:
    rows = []
    for name, row in result["variants"].items():
        if not row.get("own"):
            continue
        share, target = own_share(row), TARGET_STEP.get(name.split(",")[0])
        verdict = ""
        if target is not None and "report" not in name:
            # By the whole interval: as a share, none is narrow beside its target.
            verdict = f"{_verdict_on(share, target - 1)} ({target - 1:.1%})"
        interval = "" if share.low is None else f" [{share.low:.3%}, {share.high:.3%}]"
        milliseconds = own_milliseconds(row).median
        rows.append([name, f"{milliseconds:.2f}", f"{share.median:.3%}{interval}", verdict])
    head = ["the plugin's own code in an optimizer step", "ms", "share of the rest", "target"]
    return markdown(head, rows)


def _savings(savings: dict[str, Any]) -> str:
    """Each optimisation, and what is measured without it."""
    baseline, times = savings["baseline"], savings["gate_wall_s"]
    rows = [
        [name, str(ratios(times, name, baseline=baseline)), _added_ms(seconds, times[baseline])]
        for name, seconds in times.items()
        if name != baseline
    ]
    gates = markdown(
        ["an optimisation", f"gates without it, against {baseline!r}", "added, ms"], rows
    )
    rows, delays = [], []
    for name, by_optimisation in savings["waits"].items():
        for without, exposed in by_optimisation.items():
            delays = list(exposed)
            cells = [f"{1e3 * seconds:.2f} ms" for seconds in exposed.values()]
            rows.append([name, without or "(all)", *cells])
    head = ["waiting for counts in an optimizer step", "without"]
    return f"{gates}\n{markdown([*head, *(f'delay {delay} ms' for delay in delays)], rows)}"


def _verdict(result: Result, name: str) -> str:
    """Whether the wall times meet the targets, which speak of reports switched off."""
    target = TARGET_STEP.get(name.split(",")[0])
    if target is None or "report" in name or name == AGAIN.name:
        return ""
    verdicts = []
    if column(result, "wall_s"):
        verdicts.append(_meets("step", ratios(column(result, "wall_s"), name), target))
    if result.get("gate_wall_s"):
        verdicts.append(_meets("gate", ratios(result["gate_wall_s"], name), TARGET_GATE))
    return ", ".join(verdicts)


def _meets(what: str, value: Estimate, target: float) -> str:
    verdict = _verdict_on(value, target, narrow=TARGET_HALF_WIDTH)
    return f"{what} {verdict}" + (f" ({target:g})" if verdict != _UNDECIDED else "")


def _verdict_on(value: Estimate, target: float, *, narrow: float = 0.0) -> str:
    """By the median where the interval is at most so narrow to either side, else by all of it."""
    is_narrow = value.half_width is not None and value.half_width <= narrow
    if value.high is not None and (value.high <= target or is_narrow and value.median <= target):
        return "met"
    if value.low is not None and (value.low > target or is_narrow):
        return "MISSED"
    return _UNDECIDED


def _repeated(results: Sequence[Result]) -> list[list[Result]]:
    """The results of each shape that was measured more than once."""
    families: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        families.setdefault(tuple(sorted(result["shape"].items())), []).append(result)
    return [family for family in families.values() if len(family) > 1]


def _side_by_side(runs: Sequence[Result]) -> str:
    """Of runs of one shape, what targets are set for, with the half-width of each interval."""

    def each(digits: str, measured: Callable[[Result], Estimate | None]) -> str:
        values = [value for value in map(measured, runs) if value is not None]
        return ", ".join(f"{x.median:{digits}}{_plus_minus(x, digits)}" for x in values)

    def step(name: str, run: Result) -> Estimate | None:
        times = column(run, "wall_s")
        return ratios(times, name) if name in times else None

    def share(name: str, run: Result) -> Estimate | None:
        row = run["variants"].get(name, {})
        return own_share(row) if row.get("own") else None

    def gate(name: str, run: Result) -> Estimate | None:
        times = run.get("gate_wall_s", {})
        return ratios(times, name) if name in times else None

    columns = {
        "whole step / plain's": (step, ".3f"),
        "own code / rest of a step": (share, ".2%"),
        "gates / plain's": (gate, ".3f"),
    }
    rows = [
        [name, *(each(digits, partial(measured, name)) for measured, digits in columns.values())]
        for name in runs[0]["variants"]
        if name != PLAIN.name
    ]
    title = f"{len(runs)} runs: {describe(runs[0]['shape'])}"
    return f"### {title}\n\n{markdown(['in each run', *columns], rows)}"


def _plus_minus(value: Estimate, digits: str) -> str:
    return "" if value.half_width is None else f" +- {value.half_width:{digits}}"


def _counts(result: Result) -> str:
    rows, plain = [], result["variants"][PLAIN.name]["counted"]
    for name, row in result["variants"].items():
        if "counted" not in row or name == PLAIN.name:
            continue
        counted = row["counted"]
        others = _added(counted["collectives"], plain["collectives"])
        others.pop("c10d::allreduce_", None)
        syncs = _added(counted["host_syncs_in_forward"], plain["host_syncs_in_forward"])
        rows.append(
            [
                name,
                str(counted["all_reduces"] - plain["all_reduces"]),
                str(counted["all_reduce_bytes"] - plain["all_reduce_bytes"]),
                _listed(others),
                _listed(syncs),
            ]
        )
    head = ["added in an optimizer step", "all_reduces", "bytes", "other collectives"]
    return markdown([*head, "host syncs in forward"], rows)


def _added(ours: dict[str, int], plain: dict[str, int]) -> dict[str, int]:
    names = {*ours, *plain}
    return {
        n: ours.get(n, 0) - plain.get(n, 0) for n in sorted(names) if ours.get(n) != plain.get(n)
    }


def _listed(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:+d}" for name, number in numbers.items()) or "0"


def _delays(result: Result) -> list[str]:
    for row in result["variants"].values():
        if row.get("waits"):
            return list(row["waits"])
    return []


def _waits(result: Result) -> str:
    delays, rows = _delays(result), []
    for name, row in result["variants"].items():
        if row.get("waits"):
            exposed = [row["waits"][delay]["exposed_s"] for delay in delays]
            rows.append([name, *(f"{1e3 * s:.2f} ms" for s in exposed)])
    head = [f"delay {delay} ms" for delay in delays]
    return markdown(["waiting for counts in an optimizer step", *head], rows)


def _memory(result: Result) -> str:
    rows, plain = [], result["variants"][PLAIN.name]["memory"]
    for name, row in result["variants"].items():
        if name == PLAIN.name or not row.get("memory"):
            continue
        for tokens, bytes_ in row["memory"].items():
            base = plain[tokens]
            rows.append(
                [
                    name,
                    tokens,
                    *(f"{bytes_[k] - base[k]:+,}" for k in ("at_rest", "after_forward", "peak")),
                    f"{base['peak']:,}",
                ]
            )
    head = ["added bytes", "tokens", "between windows", "after a forward", "at the peak"]
    return markdown([*head, "peak of plain"], rows)


def _peer(name: str, peer: Result) -> str:
    if "not_run" in peer:
        return f"{name}: not run: {peer['not_run']}\n"
    key = "wall_s" if "wall_s" in peer else "gate_wall_s"
    what = "whole step" if key == "wall_s" else "routers forward and backward"
    times, baseline = peer[key], peer["baseline"]
    rows = [
        [kind, str(ratios(times, kind, baseline=baseline)), _added_ms(times[kind], times[baseline])]
        for kind in times
        if kind != baseline
    ]
    title = f"{name} {peer['version']}, {what}, against {baseline!r}"
    return markdown([title, "wall", "added, ms"], rows)


def _added_ms(ours: list[float], baseline: list[float]) -> str:
    return f"{1e3 * median(a - b for a, b in zip(ours, baseline, strict=True)):+.2f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns line up in a terminal too."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    texts = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([texts[0], rule, *texts[1:]]) + "\n"


def varied(results: Sequence[Result]) -> dict[str, list[Result]]:
    """For each factor that was varied, the results that differ in nothing else, by its value."""
    found: dict[str, list[Result]] = {}
    for factor in FACTORS:
        families: dict[Any, list[Result]] = {}
        for result in results:
            rest = tuple(sorted((k, v) for k, v in result["shape"].items() if k != factor))
            families.setdefault(rest, []).append(result)
        # Runs of one shape, laid side by side elsewhere, vary nothing.
        family = max(families.values(), key=lambda one: len(_values(one, factor)))
        if len(_values(family, factor)) > 1:
            found[factor] = sorted(family, key=lambda result: result["shape"][factor])
    return found


def _values(results: Sequence[Result], factor: str) -> set[int]:
    return {result["shape"][factor] for result in results}
