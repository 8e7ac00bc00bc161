"""What each optimisation of the plugin saves: the same measurements with it and without."""

from collections.abc import Sequence
from typing import Any

from launch.benchmark import gates
from launch.benchmark.ablations import ASYNCHRONOUS, NAMESPACE, SHARED_SOFTMAX
from launch.benchmark.one_engine import Bench
from launch.benchmark.ranks import run_ranks, say
from launch.benchmark.shape import Shape, ablated, plugin_variants

WINDOWS = 3  # over which a wait is the median


def measure(
    shape: Shape, blocks: int, seconds: float, seed: int, *, delays_ms: Sequence[float]
) -> dict[str, Any]:
    """Gates without the optimisations that are in forward, and waits without overlap."""
    _, whole = plugin_variants(("running",))
    variants = [whole, *(ablated(whole, name) for name in (SHARED_SOFTMAX, NAMESPACE))]
    alone = run_ranks(gates.measure, 1, shape, blocks, seconds, seed, variants)
    return {
        "baseline": whole.name,
        "gate_wall_s": alone["gate_wall_s"],
        "waits": run_ranks(_waits, shape.ranks, shape, tuple(delays_ms)),
    }


def _waits(shape: Shape, delays_ms: Sequence[float]) -> dict[str, dict[str, dict[str, float]]]:
    """By way of adding the loss and delay: reductions' exposed milliseconds in a step."""
    bench = Bench(shape, ("running",))
    l_aux, coefficient = plugin_variants(("running",))
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for variant in (l_aux, coefficient):
        for name, one in (("", variant), (ASYNCHRONOUS, ablated(variant, ASYNCHRONOUS))):
            rows.setdefault(variant.name, {})[name] = {
                f"{delay_ms:g}": bench.waits(one, delay_ms=delay_ms, windows=WINDOWS)["exposed_s"]
                for delay_ms in delays_ms
            }
            say(f"  waits: {variant.name} {'without: ' + name if name else ''}")
    return rows
