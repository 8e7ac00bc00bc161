"""Times of variants side by side: an engine for each, dealt out anew for every block."""

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.accelerator import get_accelerator

from launch.benchmark.ranks import any_rank, say, sum_over_ranks
from launch.benchmark.shape import Variant, accepted, installed


@dataclass
class Times:
    """Of one micro-step on this rank; the processor's are of all its threads.

    Attributes:
        wall_s: seconds as a user waits.
        cpu_s: seconds of the processor.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0


# One micro-step after another of a variant on an engine, without end.
Lane = Iterator[Times]


@contextmanager
def stopwatch() -> Iterator[Times]:
    """Times what is in it, with what it left for the device to do."""
    times = Times()
    get_accelerator().synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    yield times
    get_accelerator().synchronize()
    times.wall_s, times.cpu_s = time.perf_counter() - wall, time.process_time() - cpu


def interleave(
    what: str,
    variants: Sequence[Variant],
    make_engine: Callable[[], Any],
    make_lane: Callable[[Any, Variant], Lane],
    *,
    micro_steps: int,
    blocks: int,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Seconds of so many micro-steps of every variant, block by block. Collective.

    What is compared lies one micro-step apart, whatever the machine's speed does meanwhile: the
    variants take turns, in an order drawn anew for each micro-step. Where an engine's memory lies
    makes it faster or slower than its twin for good, by more than the plugin costs, so each block
    deals the variants out to the engines again.

    Args:
        what: is timed, for the lines of progress.
        variants: the plugin's are installed for the length of a block.
        make_engine: each call the same engine again.
        make_lane: warms the variant up on the engine that it is installed on. Optimisations of the
            variant that are taken out are the lane's to take out, in its own turns alone.
        micro_steps: of each variant in a block.
        blocks: at most.
        seconds: no block begins later than this.
        seed: of dealing and order, the same on every rank.

    Returns:
        Under ``wall_s`` a list for each variant by name, one number for a block, on this rank;
        under ``cpu_s`` the same for the processors of all ranks together; under ``refused`` why
        the plugin was not installed for the others.
    """
    engines = [make_engine() for _ in variants]
    taken, refused = accepted(engines[0], list(variants))
    chance = random.Random(seed)
    wall: dict[str, list[float]] = {variant.name: [] for variant in taken}
    cpu: dict[str, list[float]] = {variant.name: [] for variant in taken}
    gc.freeze()  # what is there now is there for good: collecting later takes no time
    gc.disable()
    begun = time.monotonic()
    for block in range(blocks):
        if any_rank(block > 0 and time.monotonic() - begun > seconds):
            break
        gc.collect()
        with ExitStack() as dealt:
            lanes: dict[str, Lane] = {}
            for variant, engine in zip(taken, chance.sample(engines, len(taken)), strict=True):
                dealt.enter_context(installed(engine, replace(variant, without=None)))
                lanes[variant.name] = make_lane(engine, variant)
            for name in lanes:
                wall[name].append(0.0)
                cpu[name].append(0.0)
            for _ in range(micro_steps):
                for name in chance.sample(sorted(lanes), len(lanes)):
                    times = next(lanes[name])
                    wall[name][-1] += times.wall_s
                    cpu[name][-1] += times.cpu_s
        say(f"  {what}: block {block + 1} after {time.monotonic() - begun:.0f} s")
    gc.enable()
    return {
        "wall_s": wall,
        "cpu_s": {name: sum_over_ranks(numbers) for name, numbers in cpu.items()},
        "refused": refused,
    }
