"""The plugin's optimisations, each taken out again for as long as its saving is measured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.moe.sharded_moe import TopKGate
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_moe_lb.gate import _RoutingObserver
from ds_moe_lb.sync import CountReducer

SHARED_SOFTMAX = "takes the softmax that the gate computes"
NAMESPACE = "sees it in the gate's namespace, not by a TorchFunctionMode"
ASYNCHRONOUS = "awaits a reduction when its sum is needed, not at its launch"


@contextmanager
def taken_out(optimisation: str | None) -> Iterator[None]:
    """Run without one of them; None = with all."""
    if optimisation is None:
        yield
        return
    with _PATCHES[optimisation]():
        yield


def _softmax_of_its_own() -> Any:
    original = _RoutingObserver.note_softmax

    def note_softmax(self: _RoutingObserver, logits_TE: Tensor, probs_TE: Tensor) -> None:
        original(self, logits_TE, probs_TE)
        self.probs_TE = torch.softmax(logits_TE.float(), dim=1)

    return mock.patch.object(_RoutingObserver, "note_softmax", note_softmax)


class _Watching(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _function_mode() -> Any:
    original = TopKGate.forward

    def forward(*args: Any) -> Any:
        with _Watching():
            return original(*args)

    return mock.patch.object(TopKGate, "forward", forward)


def _waiting_at_launch() -> Any:
    original = CountReducer._launch

    def launch(*args: Any) -> Any:
        part = original(*args)
        if part.work is not None:
            part.work.wait()
        return part

    return mock.patch.object(CountReducer, "_launch", launch)


_PATCHES: dict[str, Callable[[], Any]] = {
    SHARED_SOFTMAX: _softmax_of_its_own,
    NAMESPACE: _function_mode,
    ASYNCHRONOUS: _waiting_at_launch,
}
