"""Faults to plant in the core inside a rank, one by one, to see that `verify` reports them.

Each is a context manager that patches the plugin as a plausible mistake would have written it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed.comm as dist
import torch

from ds_moe_lb import _compat, construction
from ds_moe_lb.balancer import LoadBalancer
from ds_moe_lb.counts import CountLayout
from ds_moe_lb.estimates import BalanceCounts
from ds_moe_lb.router import Router
from ds_moe_lb.router_call import RouterCall

FAULTS: dict[str, Callable[[], Any]] = {}


def _fault(function: Callable[[], Iterator[None]]) -> Callable[[], Any]:
    FAULTS[function.__name__] = contextmanager(function)
    return FAULTS[function.__name__]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _scaled_slope(factor: Callable[[BalanceCounts], float]) -> Any:
    """Patch: f, and with it both the value and the gradient, times a factor."""
    original = BalanceCounts.slope

    def slope(self: BalanceCounts, call: Any) -> torch.Tensor:
        return original(self, call) * factor(self)

    return mock.patch.object(BalanceCounts, "slope", slope)


@_fault
def f_divided_by_d() -> Iterator[None]:
    """Averages over the ranks where it should sum (seen: fractions that sum to 1/D)."""
    with _scaled_slope(lambda balance: 1.0 / dist.get_world_size()):
        yield


@_fault
def gradient_divided_by_d() -> Iterator[None]:
    """The value is right and the gradient 1/D of it (Megatron 3672)."""
    finish, before_forward = RouterCall.finish, LoadBalancer.before_forward

    def halved(self: RouterCall, l_aux: torch.Tensor) -> torch.Tensor:
        value = finish(self, l_aux)
        shrunk = value / dist.get_world_size()
        return shrunk + (value - shrunk).detach()

    def halving(self: LoadBalancer, *, training: bool) -> None:
        before_forward(self, training=training)
        if self.micro_step is not None:  # set anew by every micro-step
            self.gradient_scale = self.gradient_scale / dist.get_world_size()

    with (
        mock.patch.object(RouterCall, "finish", halved),
        mock.patch.object(LoadBalancer, "before_forward", halving),
    ):
        yield


@_fault
def missing_k() -> Iterator[None]:
    """Takes selections for tokens."""
    original = CountLayout.__init__

    def init(self: CountLayout, layers: Any, device: Any) -> None:
        original(self, [dataclasses.replace(layer, top_k=1) for layer in layers], device)

    with mock.patch.object(CountLayout, "__init__", init):
        yield


@_fault
def recompute_counts_again() -> Iterator[None]:
    """A recomputed forward is counted like a first one (torchtitan, ms-swift)."""
    original = Router.open_call

    def open_call(self: Router, *args: Any, **kwargs: Any) -> RouterCall:
        call = original(self, *args, **kwargs)
        if _in_backward():
            where = self.balancer.layout.count_slices[self.layer.index]
            for counts_F in (self.balancer.balance.window.local_F, _global_counts(self.balancer)):
                counts_F[where] += call.counts
        return call

    with mock.patch.object(Router, "open_call", open_call):
        yield


def _global_counts(balancer: LoadBalancer) -> torch.Tensor:
    return balancer.balance.window.global_F


@_fault
def evaluation_counts() -> Iterator[None]:
    """Forwards in evaluation are taken for micro-steps."""
    original = LoadBalancer.before_forward

    def before_forward(self: LoadBalancer, *, training: bool) -> None:
        with torch.enable_grad():
            original(self, training=True)

    with mock.patch.object(LoadBalancer, "before_forward", before_forward):
        yield


@_fault
def mask_ignored() -> Iterator[None]:
    """Padding is balanced like text."""
    with mock.patch.object(Router, "_valid_mask", lambda self, probs_TE, **_: None):
        yield


@_fault
def wrong_factor_of_g() -> Iterator[None]:
    """Multiplies by G what the engine divides by G anyway."""
    with _scaled_slope(lambda balance: float(balance._gas)):
        yield


@_fault
def missing_factor_of_g() -> Iterator[None]:
    """Leaves out the G of `boundary`, or divides twice."""
    with _scaled_slope(lambda balance: 1.0 / balance._gas):
        yield


@_fault
def window_never_reset() -> Iterator[None]:
    """Counts of the windows before go on to count."""
    original = BalanceCounts.start_window

    def start_window(self: BalanceCounts, **now: Any) -> None:
        before = self.__dict__.get("window")
        original(self, **now)
        if before is not None:
            self.window.local_F += before.local_F
            self.window.global_F += before.global_F

    with mock.patch.object(BalanceCounts, "start_window", start_window):
        yield


@_fault
def stale_previous_window() -> Iterator[None]:
    """`boundary` never goes on from the first window that it kept."""
    original = BalanceCounts.close_window

    def close_window(self: BalanceCounts, *, applied: bool) -> Any:
        before = self.previous
        whole = original(self, applied=applied)
        self.previous = before or self.previous
        return whole

    with mock.patch.object(BalanceCounts, "close_window", close_window):
        yield


@_fault
def resume_keeps_old_counts() -> Iterator[None]:
    """A loaded checkpoint does not replace the counts of what was trained before it."""
    with mock.patch.object(BalanceCounts, "load_state_dict", lambda self, state: None):
        yield


@_fault
def own_rank_only() -> Iterator[None]:
    """Counts are summed over the wrong group: each rank alone."""
    with mock.patch.object(construction, "data_parallel_ranks", lambda engine: [dist.get_rank()]):
        yield


@_fault
def expert_groups_swapped() -> Iterator[None]:
    """Counts are summed over the other of the two expert groups."""
    original = construction.expert_group_ranks
    other = {
        "expert_parallel": "expert_data_parallel",
        "expert_data_parallel": "expert_parallel",
    }

    def swapped(name: str, *args: Any, kind: str, **kwargs: Any) -> Any:
        return original(name, *args, kind=other[kind], **kwargs)

    with mock.patch.object(construction, "expert_group_ranks", swapped):
        yield


@_fault
def loss_scale_forgotten() -> Iterator[None]:
    """The injected gradient is not scaled as the main loss is."""
    with mock.patch.object(_compat, "loss_scale", lambda engine: 1.0):
        yield
