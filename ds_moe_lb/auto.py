"""`import ds_moe_lb.auto`: every engine whose JSON has our section gets the plugin by itself.

Whoever builds the engine: the script, accelerate or transformers' Trainer. Engines are caught as
they are made, since some libraries look up `deepspeed.initialize` before this import. The import
brings in neither torch nor DeepSpeed, so a script may still choose its accelerator afterwards.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _AfterImport:
    """Finds one module as Python would, and calls a function once it has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that calls the function at its end."""
        if fullname != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # Not before: libraries also ask for the spec just to see whether there is one.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _once_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


def _catch_engines(deepspeed: ModuleType) -> None:
    """Install the plugin at the end of the constructor of every kind of engine."""
    classes = [deepspeed.DeepSpeedEngine]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
        if "__init__" in cls.__dict__:
            cls.__init__ = _caught(cls.__init__)


_under_way: list[Any] = []


def _caught(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(engine: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        from ds_moe_lb import _compat, installation

        is_outermost = not any(other is engine for other in _under_way)
        _under_way.append(engine)
        try:
            building: Any = nullcontext()
            if is_outermost:
                ds_config = kwargs.get("config_class")
                raw = None if ds_config is None else _compat.raw_config_of(ds_config)
                building = installation.before_build(raw, kwargs)
            with building:
                construct(engine, *args, **kwargs)
        finally:
            _under_way.pop()
        if is_outermost:
            installation.install_as_configured(engine)

    return __init__


def _add_trainer_callback(trainer: ModuleType) -> None:
    """Before the callbacks that report, so that they see the metrics too."""
    from ds_moe_lb.adapters.trainer import LoadBalancingCallback

    trainer.DEFAULT_CALLBACKS.insert(0, LoadBalancingCallback)


_once_imported("deepspeed", _catch_engines)
_once_imported("transformers.trainer", _add_trainer_callback)
