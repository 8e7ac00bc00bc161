"""Meters: collectives, waits of the host, live memory, the plugin's own time, delayed networks.

Each meter is a context manager around a forward or a window.
"""

import sys
import time
import weakref
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import deepspeed.comm as dist
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations after which the host must know a number that the device has made.
_SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::item")
# Called by the plugin, this is the host's own work: the gate it derives from, the engine's methods
# it wraps, the softmax it only looks at.
_HOST = ("/deepspeed/moe/", "/deepspeed/runtime/", "/torch/nn/functional.py")
# These read memory directly on a CPU and never reach the dispatcher there.
_SYNCING_METHODS = ("tolist", "numpy", "cpu")


class Collectives:
    """Every ``torch.distributed.all_reduce``, which is what DeepSpeed's own comes down to.

    Attributes:
        calls: number of them.
        nbytes: their payload.
    """

    def __init__(self) -> None:
        self.calls = self.nbytes = 0

    def __enter__(self) -> "Collectives":
        self._original = torch.distributed.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.nbytes += tensor.numel() * tensor.element_size()
            return self._original(tensor, *args, **kwargs)

        torch.distributed.all_reduce = all_reduce
        return self

    def __exit__(self, *_: object) -> None:
        torch.distributed.all_reduce = self._original


class OtherCollectives(TorchDispatchMode):
    """All collectives by name as the process groups get them, so that none goes unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class HostSyncs:
    """Operations that make the host wait for the device; enter it around forwards only.

    Attributes:
        calls: number by name.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> "HostSyncs":
        calls = self.calls

        class Dispatched(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func._schema.name in _SYNCS:
                    calls[func._schema.name] += 1
                return func(*args, **(kwargs or {}))

        class Called(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if getattr(func, "__name__", "") in _SYNCING_METHODS:
                    calls[f"Tensor.{func.__name__}"] += 1
                return func(*args, **(kwargs or {}))

        self._modes = (Dispatched(), Called())
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*exception)


class LiveMemory(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive, on any device.

    Attributes:
        live: now.
        peak: most at once so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        # The Python object lives as long as the storage itself, also while autograd alone holds it.
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._free, key, nbytes).atexit = False
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


class OwnTime:
    """Wall time spent in the plugin's own code, with the operations and waits that it starts.

    The clock runs while the innermost frame that is the plugin's or the host's is the plugin's, so
    what the plugin hands on to DeepSpeed does not count. The interpreter's profiler is called at
    every Python call, which makes the time come out too large rather than too small. Left out is
    what autograd adds by itself: one sum of two gradients of the size of the probabilities per
    call of a router. Only the thread that enters is watched: on a CPU that is the one that runs
    backward too.

    Attributes:
        seconds: so far.
    """

    def __init__(self, package: Path) -> None:
        self.seconds = 0.0
        self._package = str(package)
        self._owners: dict[str, bool | None] = {}
        self._is_own = [False]
        self._since = 0.0

    def __enter__(self) -> "OwnTime":
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            file, before = frame.f_code.co_filename, self._is_own[-1]
            if file not in self._owners:
                self._owners[file] = self._owner(file)
            owner = self._owners[file]
            self._is_own.append(before if owner is None else owner)
        elif event == "return" and len(self._is_own) > 1:
            before = self._is_own.pop()
        else:
            return
        now = self._is_own[-1]
        if now and not before:
            self._since = time.perf_counter()
        elif before and not now:
            self.seconds += time.perf_counter() - self._since

    def _owner(self, file: str) -> bool | None:
        """True: the plugin's. False: the host's. None: of whoever calls."""
        if file.startswith(self._package):
            return True
        return False if any(part in file for part in _HOST) else None


class CountWaits:
    """Times the waits for count reductions, on a network that is slower by a given delay.

    Counts are told from the host's own reductions by being int64 and asynchronous. A work whose
    result is asked for sooner than `delay_s` after its launch is held back until then, as by a
    network with that latency; what runs in between hides it.

    Attributes:
        calls: reductions of counts.
        waited_s: time spent in their `wait`.
        launch_s: time spent in launching them.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.calls = 0
        self.waited_s = self.launch_s = 0.0

    def __enter__(self) -> "CountWaits":
        self._original = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            work = self._original(tensor, *args, **kwargs)
            if work is None or tensor.dtype != torch.int64 or not kwargs.get("async_op"):
                return work
            launched = time.perf_counter()
            self.calls += 1
            self.launch_s += launched - started
            return _Held(work, self, ready_at=launched + self.delay_s)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._original


class _Held:
    """A work whose wait is timed and does not return too early."""

    def __init__(self, work: Any, meter: CountWaits, *, ready_at: float) -> None:
        self._work, self._meter, self._ready_at = work, meter, ready_at

    def wait(self, *args: Any) -> Any:
        started = time.perf_counter()
        returned = self._work.wait(*args)
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))
        self._meter.waited_s += time.perf_counter() - started
        return returned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
