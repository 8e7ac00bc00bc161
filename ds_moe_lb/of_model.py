"""Whose model is this: for those who are handed the model and not its engine."""

import weakref

from torch import nn

from ds_moe_lb.balancer import LoadBalancer

_of_model: weakref.WeakKeyDictionary[nn.Module, weakref.ref[LoadBalancer]]
_of_model = weakref.WeakKeyDictionary()


def remember(model: nn.Module, balancer: LoadBalancer) -> None:
    """Note whose model this is."""
    _of_model[model] = weakref.ref(balancer)


def load_balancer_of(model: nn.Module) -> LoadBalancer | None:
    """The handle of the engine that trains the model; None without the plugin."""
    reference = _of_model.get(model)
    balancer = reference() if reference is not None else None
    is_on = balancer is not None and balancer.engine.__dict__.get("load_balancer") is balancer
    return balancer if is_on else None
