"""The counting pass of estimate `exact`: a window is forwarded once before it is trained on."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from ds_moe_lb.window import Window

if TYPE_CHECKING:
    from ds_moe_lb.balancer import LoadBalancer

_Batch = TypeVar("_Batch")


def take_batches(batches: Iterable[_Batch], *, gas: int) -> list[_Batch]:
    """The G batches of one window.

    Args:
        batches: a collection of G, or an iterator, from which G are taken and no more.
        gas: G.

    Raises:
        ValueError: there are fewer, or a collection has more.
    """
    number = len(batches) if isinstance(batches, Sized) else None
    taken = list(islice(batches, gas)) if number in (None, gas) else []
    if len(taken) != gas:
        raise ValueError(
            f"LoadBalancer.window: got {len(taken) if number is None else number} batches, "
            f"expected gradient_accumulation_steps = {gas}, those of one optimizer step; an "
            f"iterator may have more, of which the next {gas} are taken"
        )
    return taken


def count_window(
    balancer: "LoadBalancer", batches: Iterable[_Batch], forward: Callable[[_Batch], Any]
) -> list[_Batch]:
    """The batches of the window that begins; see :meth:`ds_moe_lb.LoadBalancer.window`."""
    taken = take_batches(batches, gas=balancer.engine.gradient_accumulation_steps())
    balancer.close_window_if_stepped()
    if balancer.policy.estimate == "exact":
        num_micro_steps = balancer.balance.window.num_micro_steps
        if num_micro_steps:
            raise RuntimeError(
                f"LoadBalancer.window: called {num_micro_steps} micro-steps into an accumulation "
                f"window; finish that one first, by an optimizer step"
            )
        balancer.balance.start_counted(count_batches(balancer, taken, forward))
    return taken


def require_counted(balancer: "LoadBalancer") -> None:
    """RuntimeError if a window that has to be counted first is trained on at once."""
    if balancer.policy.estimate == "exact" and not balancer.balance.has_counted:
        raise RuntimeError(
            "moe_load_balancing.estimate: 'exact' counts a window before its first backward, so "
            "training has to go through `for batch in engine.load_balancer.window(batches, "
            "forward)` with the batches of each optimizer step; where a trainer owns the loop, use "
            "'boundary' (the whole last window) or 'carry'"
        )


def count_batches(
    balancer: "LoadBalancer", batches: Iterable[_Batch], forward: Callable[[_Batch], Any]
) -> Window:
    """Forward every batch without grad and count; the random state is as before afterwards.

    Raises:
        RuntimeError: the engine is not in training mode, or a call of `forward` was not one forward
            of it.
    """
    engine = balancer.engine
    if not engine.module.training:
        raise RuntimeError(
            "LoadBalancer.window: the engine is in evaluation mode, where routing may differ from "
            "training; call engine.train() first"
        )
    counted = balancer.counting = Window(balancer.layout)
    try:
        with torch.no_grad(), random_state_restored():
            for number, batch in enumerate(batches, start=1):
                forward(batch)
                if counted.num_micro_steps != number:
                    raise RuntimeError(
                        f"LoadBalancer.window: forward(batch) ran the engine "
                        f"{counted.num_micro_steps - number + 1} times for batch {number}, "
                        f"expected once, as in training: lambda batch: engine(batch)"
                    )
    finally:
        balancer.counting = None
    return counted


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Leave the generators of torch, the device, DeepSpeed's checkpointing, Python and NumPy as
    they were.
    """
    accelerator, tracker = get_accelerator(), get_cuda_rng_tracker()
    numpy = sys.modules.get("numpy")
    cpu, device = torch.get_rng_state(), accelerator.get_rng_state()
    tracked, python = tracker.get_states(), random.getstate()
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        accelerator.set_rng_state(device)
        tracker.set_states(tracked)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
