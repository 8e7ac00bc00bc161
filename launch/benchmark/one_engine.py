"""Counts, waits, memory and own time of every variant, on one engine that they take in turn."""

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

import ds_moe_lb
from launch.benchmark.meters import (
    Collectives,
    CountWaits,
    HostSyncs,
    LiveMemory,
    OtherCollectives,
    OwnTime,
)
from launch.benchmark.ranks import say
from launch.benchmark.shape import (
    AGAIN,
    ESTIMATES,
    PLAIN,
    WARM_UP_TOKENS,
    Shape,
    Variant,
    accepted,
    installed,
    make_batches,
    make_engine,
    make_model,
    plugin_variants,
)
from launch.benchmark.whole_steps import micro_steps

MEASURES = ("counts", "waits", "own")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        delays_ms: networks; for each the exposed time is measured.
        waits: windows over which an exposed time is the median.
        memory_tokens: tokens per micro-step at which memory is counted.
        estimates: of the plugin.
        measure: of MEASURES.
        own_windows: over which the plugin's own time is taken.
    """

    delays_ms: tuple[float, ...] = (0.0,)
    waits: int = 3
    memory_tokens: tuple[int, ...] = ()
    estimates: tuple[str, ...] = ESTIMATES
    measure: tuple[str, ...] = MEASURES
    own_windows: int = 8


class Bench:
    """One engine, on which the plugin comes and goes."""

    def __init__(self, shape: Shape, estimates: Sequence[str] = ESTIMATES) -> None:
        self.shape = shape
        self.engine = make_engine(make_model(shape), shape)
        self.small = self.batches(WARM_UP_TOKENS)
        self.full = self.batches(shape.tokens)
        plugin, self.refused = accepted(self.engine, plugin_variants(estimates))
        self.variants = [PLAIN, AGAIN, *plugin]
        gc.freeze()  # what is there now is there for good: collecting later takes no time

    def batches(self, tokens: int) -> list[Any]:
        return make_batches(self.shape, tokens=tokens, device=self.engine.device)

    def window(self, variant: Variant, batches: list[Any], forward: Any = None) -> None:
        """One optimizer step as a script makes it. Collective."""
        for _ in micro_steps(self.engine, variant, batches, forward):
            pass

    def count(self, variant: Variant) -> dict[str, Any]:
        """Collectives and host syncs of one optimizer step; neither depends on the tokens."""
        with installed(self.engine, variant):
            self.window(variant, self.small)
            with Collectives() as reductions, OtherCollectives() as all_collectives:
                self.window(variant, self.small)
            syncs = HostSyncs()

            def forward(batch: Any) -> Any:
                with syncs:
                    return self.engine(batch)

            self.window(variant, self.small, forward)
        return {
            "all_reduces": reductions.calls,
            "all_reduce_bytes": reductions.nbytes,
            "collectives": dict(all_collectives.calls),
            "host_syncs_in_forward": dict(syncs.calls),
        }

    def waits(self, variant: Variant, *, delay_ms: float, windows: int) -> dict[str, float]:
        """Time that one optimizer step spends in the reductions of counts, on rank 0."""
        waited, launch = [], []
        # One meter for all: what one window launches, the next one may await.
        with CountWaits(delay_ms / 1000.0) as meter, installed(self.engine, variant):
            self.window(variant, self.full)
            for _ in range(windows):
                before = (meter.waited_s, meter.launch_s)
                self.window(variant, self.full)
                waited.append(meter.waited_s - before[0])
                launch.append(meter.launch_s - before[1])
        return {"exposed_s": median(waited), "launch_s": median(launch)}

    def own_time(self, variant: Variant, *, windows: int) -> dict[str, list[float]]:
        """Seconds in the plugin's own code on rank 0, and of the whole optimizer step, each."""
        own, wall = [], []
        with installed(self.engine, variant):
            self.window(variant, self.small)
            for _ in range(windows):
                _meet()
                started = time.perf_counter()
                with OwnTime(Path(ds_moe_lb.__file__).parent) as meter:
                    self.window(variant, self.full)
                own.append(meter.seconds)
                wall.append(time.perf_counter() - started)
        return {"own_s": own, "wall_s": wall}

    def memory(self, variant: Variant, *, tokens: int) -> dict[str, int]:
        """Bytes that live because of installing and of training; the least of three windows."""
        batches = self.batches(tokens)
        gc.collect()
        peaks, after_forward = [], []
        with LiveMemory() as memory, installed(self.engine, variant):
            highest = 0

            def forward(batch: Any) -> Any:
                nonlocal highest
                gc.collect()  # what waits in cycles belongs to the last micro-step
                output = self.engine(batch)
                highest = max(highest, memory.live)
                return output

            self.window(variant, batches)
            # The threads of the backend let go of a buffer when they come to it; as a rule soon.
            for _ in range(3):
                memory.peak = highest = 0
                self.window(variant, batches, forward)
                peaks.append(memory.peak)
                after_forward.append(highest)
            gc.collect()
            at_rest = memory.live
        return {"peak": min(peaks), "after_forward": min(after_forward), "at_rest": at_rest}


def _meet() -> None:
    get_accelerator().synchronize()
    dist.barrier()


def measure(shape: Shape, plan: Plan) -> dict[str, Any]:
    """Everything about whole steps of one shape. Collective; plain data for JSON."""
    bench = Bench(shape, plan.estimates)
    for name, reason in bench.refused.items():
        say(f"  not run: {name}: {reason}")
    bench.window(PLAIN, bench.full)  # what happens only once is over then
    result: dict[str, Any] = {
        "shape": asdict(shape),
        "device": get_accelerator().device_name(),
        "refused": bench.refused,
        "variants": {variant.name: {} for variant in bench.variants},
    }
    _measure_each(bench, plan, result["variants"])
    return result


def _measure_each(bench: Bench, plan: Plan, rows: dict[str, dict[str, Any]]) -> None:
    """What is measured of one variant after the other."""
    plugin = [variant for variant in bench.variants if variant.section is not None]
    for variant in [PLAIN, *plugin] if "counts" in plan.measure else []:
        row = rows[variant.name]
        row["counted"] = bench.count(variant)
        row["memory"] = {
            str(tokens): bench.memory(variant, tokens=tokens) for tokens in plan.memory_tokens
        }
        say(f"  counted: {variant.name}")
    for variant in plugin if "waits" in plan.measure else []:
        rows[variant.name]["waits"] = {
            f"{delay_ms:g}": bench.waits(variant, delay_ms=delay_ms, windows=plan.waits)
            for delay_ms in plan.delays_ms
        }
        say(f"  waits: {variant.name}")
    own = [variant for variant in plugin if not variant.has_second_forward]
    for variant in own if "own" in plan.measure else []:
        rows[variant.name]["own"] = bench.own_time(variant, windows=plan.own_windows)
        say(f"  own time: {variant.name}")
