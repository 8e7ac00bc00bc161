"""What balancing costs: one run, a table of ratios with 95% intervals, JSON, and a picture.

    python launch/bench.py --quick                     the fixed shape alone
    python launch/bench.py --factor layers             the fixed shape, then one factor around it
    python launch/bench.py                             everything
    python launch/bench.py --quick --delay-ms 0,1,2,5  waits on slower networks
    python launch/bench.py --quick --measure gates     one thing alone
    python launch/bench.py --draw A.json B.json        tables and picture of earlier runs

In the same processes, on one live engine, the plugin comes and goes: each block of repetitions
times plain DeepSpeed (twice: their ratio is the noise), every estimate and both ways of adding the
loss once, in random order, and every ratio is taken inside its block. Its median comes with a
distribution-free 95% interval. Measured are whole optimizer steps on several ranks; in one process
the gates alone, each variant with an engine of its own and a block being one micro-step of each;
and the time spent in the plugin's own code, which tells more where the machine's speed varies by
more than the plugin costs. Counted are collectives and their bytes, waits of the host in forward,
and bytes that live. `wall` is what a user waits; `processor` is the time of all ranks' processors,
which other programs on the machine disturb less. Run it on a quiet machine with a core for each
rank; without GPUs it uses CPU ranks.
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

# What is timed or counted, in this order; the last three for the fixed shape only.
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
        runs = [json.loads(path.read_text()) for path in options.draw]
        peers = {name: peer for run in runs for name, peer in run["peers"].items()}
        results = [result for run in runs for result in run["results"]]
        merged = {**runs[-1], "results": results, "peers": peers}
        return _show(merged, options.output, options.name, write=False)
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
    return _show(run, options.output, options.name, write=True)


def _measure(shape: Shape, options: argparse.Namespace, *, is_base: bool) -> dict[str, Any]:
    from launch.benchmark import gates, savings, steps

    plan = steps.Plan(
        blocks=options.blocks,
        seconds=options.seconds,
        delays_ms=options.delay_ms if is_base else (),
        memory_tokens=(shape.tokens // 4, shape.tokens) if is_base else (),
        seed=options.seed,
        estimates=options.estimates,
        measure=options.measure,
        own_windows=options.windows,
    )
    result: dict[str, Any] = run_ranks(steps.measure, shape.ranks, shape, plan)
    arguments = (shape, options.gate_blocks, options.seconds, options.seed)
    if is_base and "gates" in options.measure:
        alone = run_ranks(gates.measure, 1, *arguments, _gate_variants(options))
        result |= {key: alone[key] for key in ("gate_wall_s", "gate_cpu_s")}
    if is_base and "savings" in options.measure:
        result["savings"] = savings.measure(*arguments, delays_ms=options.delay_ms)
    return result


def _gate_variants(options: argparse.Namespace) -> list[Variant]:
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
        of_gates = (options.gate_blocks, options.seconds, options.seed, _gate_variants(options))
        ours = run_ranks(gates.measure, base.ranks, base, *of_gates)
        measured["DeepSpeed"] = {
            "version": version("deepspeed"),
            "baseline": PLAIN.name,
            "gate_wall_s": ours["gate_wall_s"],
        }
    return measured


def _show(run: dict[str, Any], folder: Path, name: str, *, write: bool) -> int:
    if write:
        (folder / f"{name}.json").write_text(json.dumps(run, indent=1) + "\n")
    environment = run["environment"]
    print(
        f"{environment['command']}, {environment['date']}, DeepSpeed {environment['deepspeed']}, "
        f"torch {environment['torch']}, {environment['processor']}, {environment['cores']} cores\n"
    )
    print(all_tables(run["results"], run["peers"]))
    if varied(run["results"]):
        from launch.benchmark.picture import draw

        draw(run["results"], folder / f"{name}.png")
    print(f"results in {folder}: {', '.join(sorted(p.name for p in folder.glob(name + '.*')))}")
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
    parser.add_argument("--blocks", type=int, default=30, help="of whole steps, at most")
    parser.add_argument("--gate-blocks", type=int, default=1500, help="of gates, at most")
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
    parser.add_argument("--seed", type=int, default=1, help="of the order inside blocks")
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
