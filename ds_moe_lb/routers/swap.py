"""A module whose `weight` is made anew whenever it is read, and otherwise what it was.

Its class is a subclass of its own, of the same name: everything that looks for routers by class or
name goes on finding it, and an instance that somebody makes of the class has an ordinary weight.
"""

import functools
from typing import Any

from torch import Tensor, nn

from ds_moe_lb.config import ROUTER_SECTION
from ds_moe_lb.routers.weights import RouterWeight

# Not with "expert" in it: DeepSpeed would take it for a part of the experts' own state.
NAME = "router_weight"


def replace_weight(owner: nn.Module, source: RouterWeight) -> None:
    """Let `owner.weight` be what `source` makes; its own parameter of that name is dropped."""
    del owner._parameters["weight"]
    owner.add_module(NAME, source)
    cls: Any = type(owner)
    owner.__class__ = _with_made_weight(cls)
    owner.register_load_state_dict_pre_hook(_refuse_other_kinds)


def made_weight(owner: nn.Module) -> RouterWeight | None:
    """What makes the module's weight; None where it is an ordinary parameter."""
    source = owner._modules.get(NAME)
    return source if isinstance(source, RouterWeight) else None


@functools.cache
def _with_made_weight(cls: Any) -> type[nn.Module]:
    def weight(module: nn.Module) -> Tensor:
        source = made_weight(module)
        if source is None:  # a fresh instance of the class; nn.Module finds its parameter
            raise AttributeError("weight")
        made: Tensor = source()
        return made

    attributes: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "weight": property(weight),
    }
    return type(cls.__name__, (cls,), attributes)


def _refuse_other_kinds(
    owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any, **__: Any
) -> None:
    """A checkpoint with another kind of router would leave this one as it was drawn."""
    source = made_weight(owner)
    assert source is not None
    own = {f"{NAME}.{name}" for name, _ in source.named_parameters()}
    found = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
    if found and not own & found:
        raise ValueError(
            f"{ROUTER_SECTION}: the checkpoint has another kind of router at {prefix!r} (it holds "
            f"{', '.join(sorted(found))}) than this model, which needs {', '.join(sorted(own))}; "
            f"set the section to what the checkpoint was trained with, or remove it for linear "
            f"routers"
        )
