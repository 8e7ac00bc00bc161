"""Whole training steps on several ranks: forward, backward and the engine's step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import deepspeed.comm as dist

from launch.benchmark.shape import (
    COEFFICIENT,
    PLAIN,
    WARM_UP_TOKENS,
    Shape,
    Variant,
    make_batches,
    make_engine,
    make_model,
)
from launch.benchmark.side_by_side import Lane, interleave, stopwatch


def measure(
    shape: Shape, blocks: int, seconds: float, seed: int, variants: Sequence[Variant]
) -> dict[str, Any]:
    """Wall and processor seconds of an optimizer step, block by block. Collective; for JSON."""

    def engine() -> Any:
        made = make_engine(make_model(shape), shape)
        # What happens only once is over then.
        _run(made, PLAIN, make_batches(shape, tokens=WARM_UP_TOKENS, device=made.device))
        return made

    return interleave(
        "whole steps",
        variants,
        engine,
        lambda engine, variant: _lane(engine, variant, shape),
        micro_steps=shape.gas,
        blocks=blocks,
        seconds=seconds,
        seed=seed,
    )


def micro_steps(
    engine: Any,
    variant: Variant,
    batches: list[Any],
    forward: Callable[[Any], tuple[Any, Any]] | None = None,
) -> Iterator[None]:
    """The micro-steps of one optimizer step as a script makes them, one at a time. Collective."""
    window: Iterable[Any] = batches
    if variant.has_second_forward:
        window = engine.load_balancer.window(batches, engine)
    for batch in window:
        loss, l_aux = (forward or engine)(batch)
        engine.backward(loss if variant.adds_loss else loss + COEFFICIENT * l_aux)
        engine.step()
        yield


def _run(engine: Any, variant: Variant, batches: list[Any]) -> None:
    for _ in micro_steps(engine, variant, batches):
        pass


def _lane(engine: Any, variant: Variant, shape: Shape) -> Lane:
    # `boundary` has a last window afterwards; the others get the same start.
    _run(engine, variant, make_batches(shape, tokens=WARM_UP_TOKENS, device=engine.device))
    return _timed(engine, variant, make_batches(shape, tokens=shape.tokens, device=engine.device))


def _timed(engine: Any, variant: Variant, batches: list[Any]) -> Lane:
    while True:
        window = micro_steps(engine, variant, batches)
        for _ in batches:
            dist.barrier()
            with stopwatch() as times:
                # With the first comes the second forward of `exact`, of the whole window.
                next(window)
                dist.barrier()
            yield times
