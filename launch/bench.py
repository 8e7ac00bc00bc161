"""What balancing costs: one run, a table of ratios with 95% intervals, JSON, and a picture.

    python launch/bench.py --quick                     the fixed shape alone
    python launch/bench.py --factor layers             the fixed shape, then one factor around it
    python launch/bench.py                             everything
    python launch/bench.py --quick --delay-ms 0,1,2,5  waits on slower networks
    python launch/bench.py --quick --measure gates     one thing alone
    python launch/bench.py --draw A.json B.json        tables and picture of earlier runs

In the same processes there is an engine for each of plain DeepSpeed (twice: their ratio is the
noise), every estimate and both ways of adding the loss. Each block deals them out to the engines
anew, micro-step by micro-step they take turns in random order, and every ratio is taken inside its
block. Its median comes with a distribution-free 95% interval. Measured are whole optimizer steps on
several ranks, and in one process the gates alone. The time spent in the plugin's own code tells
more where the machine's speed varies by more than the plugin costs; it, collectives and their
bytes, waits of the host in forward and bytes that live are taken on one live engine, on which the
plugin comes and goes. `wall` is what a user waits; `processor` is the time of all ranks'
processors, which other programs on the machine disturb less. Run it on a quiet machine with a core
for each rank; without GPUs it uses CPU ranks.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # ranks inherit it

# What is timed or counted, in this order; from "steps" on for the fixed shape only.
MEASURES = ("counts", "waits", "own", "steps", "gates", "savings", "peers")

from launch.benchmark.ranks import choose_device, run_ranks  # noqa: E402
from launch.benchmark.shape import (  # noqa: E402
    AGAIN,
    ESTIMATES,
    FACTORS,
    PLAIN,
    Shape,
    Variant,
    plugin_variants,
    shapes_of,
)
from launch.benchmark.tables import all_tables, varied  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.draw:
        return _show([json.loads(path.read_text()) for path in options.draw], options)
    base = Shape(**{name: getattr(options, name) for name in asdict(Shape())})
    shapes = [base]
    for factor in [] if options.quick else [options.factor] if options.factor else FACTORS:
        shapes += shapes_of(factor, base)
    run: dict[str, Any] = {"environment": _environment(argv), "results": [], "peers": {}}
    for number, shape in enumerate(shapes, start=1):
        print(f"[{number}/{len(shapes)}] {shape}", file=sys.stderr, flush=True)
        run["results"].append(_measure(shape, options, is_base=shape == base))
        # Written each time: a run of hours may be stopped.
        _path(options, "json").write_text(json.dumps(run, indent=1) + "\n")
    if "peers" in options.measure:
        run["peers"] = _measure_peers(base, options)
    run["environment"]["load_at_end"] = os.getloadavg()
    _path(options, "json").write_text(json.dumps(run, indent=1) + "\n")
    return _show([run], options)


def _measure(shape: Shape, options: argparse.Namespace, *, is_base: bool) -> dict[str, Any]:
    from launch.benchmark import gates, one_engine, savings, whole_steps

    plan = one_engine.Plan(
        delays_ms=options.delay_ms if is_base else (),
        memory_tokens=(shape.tokens // 4, shape.tokens) if is_base else (),
        estimates=options.estimates,
        measure=options.measure,
        own_windows=options.windows,
    )
    result: dict[str, Any] = run_ranks(one_engine.measure, shape.ranks, shape, plan)
    if is_base and "steps" in options.measure:
        arguments = (shape, options.blocks, options.seconds, options.seed)
        whole = run_ranks(whole_steps.measure, shape.ranks, *arguments, _timed_variants(options))
        for name in whole["wall_s"]:
            result["variants"][name] |= {key: whole[key][name] for key in ("wall_s", "cpu_s")}
    arguments = (shape, options.gate_blocks, options.seconds, options.seed)
    if is_base and "gates" in options.measure:
        alone = run_ranks(gates.measure, 1, *arguments, _timed_variants(options))
        result |= {key: alone[key] for key in ("gate_wall_s", "gate_cpu_s")}
    if is_base and "savings" in options.measure:
        result["savings"] = savings.measure(*arguments, delays_ms=options.delay_ms)
    return result


def _timed_variants(options: argparse.Namespace) -> list[Variant]:
    return [PLAIN, AGAIN, *plugin_variants(options.estimates)]


def _measure_peers(base: Shape, options: argparse.Namespace) -> dict[str, Any]:
    from launch.benchmark import gates, peers

    arguments = (options.blocks, options.seconds, options.seed)
    # Its layers loop over all experts on each rank: fewer of them show the same.
    small = replace(base, tokens=min(base.tokens, 512), num_experts=min(base.num_experts, 16))
    measured = {
        "transformers": run_ranks(peers.measure_transformers, base.ranks, small, *arguments),
        "megatron-core": run_ranks(peers.measure_megatron, base.ranks, base, *arguments),
    }
    if "not_run" not in measured["megatron-core"]:  # ours on the same ranks, to lay beside it
        of_gates = (options.gate_blocks, options.seconds, options.seed, _timed_variants(options))
        ours = run_ranks(gates.measure, base.ranks, base, *of_gates)
        measured["DeepSpeed"] = {
            "version": version("deepspeed"),
            "baseline": PLAIN.name,
            "gate_wall_s": ours["gate_wall_s"],
        }
    return measured


def _show(runs: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """Under the commands of all runs, their tables and the picture of their results together."""
    for run in runs:
        environment = run["environment"]
        print(
            f"{environment['command']}, {environment['date']}, DeepSpeed "
            f"{environment['deepspeed']}, torch {environment['torch']}, "
            f"{environment['processor']}, {environment['cores']} cores"
        )
    results = [result for run in runs for result in run["results"]]
    peers = {name: peer for run in runs for name, peer in run["peers"].items()}
    print("\n" + all_tables(results, peers))
    if varied(results):
        from launch.benchmark.picture import draw

        draw(results, _path(options, "png"))
    written = sorted(path.name for path in options.output.glob(f"{options.name}.*"))
    print(f"results in {options.output}: {', '.join(written)}")
    return 0


def _path(options: argparse.Namespace, suffix: str) -> Path:
    return Path(options.output, f"{options.name}.{suffix}")


def _environment(argv: list[str] | None) -> dict[str, Any]:
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return {
        "command": f"python launch/bench.py {arguments}".strip(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "deepspeed": version("deepspeed"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_at_start": os.getloadavg(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="the fixed shape alone")
    which.add_argument("--factor", choices=FACTORS, help="the fixed shape and one factor")
    which.add_argument("--draw", type=Path, nargs="+", metavar="JSON", help="measure nothing")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="results folder")
    parser.add_argument("--name", default="bench", help="of the files in it")
    parser.add_argument("--blocks", type=int, default=100, help="of whole steps, at most")
    parser.add_argument("--gate-blocks", type=int, default=100, help="of gates, at most")
    parser.add_argument("--windows", type=int, default=8, help="for the plugin's own time")
    parser.add_argument(
        "--seconds", type=float, default=1800.0, help="per shape, after which no block begins"
    )
    parser.add_argument(
        "--delay-ms",
        type=_delays,
        default=(0.0,),
        help="comma-separated: count reductions take at least so long",
    )
    parser.add_argument(
        "--estimates",
        type=lambda text: tuple(text.split(",")),
        default=ESTIMATES,
        help=f"comma-separated, of {', '.join(ESTIMATES)}, for a shorter run",
    )
    parser.add_argument(
        "--measure",
        type=_measures,
        default=MEASURES,
        help=f"comma-separated, of {', '.join(MEASURES)}; by default all",
    )
    parser.add_argument("--seed", type=int, default=1, help="of dealing and order")
    for name, value in asdict(Shape()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=value, help=f"of the fixed shape: {value}")
    options = parser.parse_args(argv)
    choose_device(options.ranks)
    return options


def _measures(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(unknown)}, expected one or more of {', '.join(MEASURES)}"
        )
    return names


def _delays(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
