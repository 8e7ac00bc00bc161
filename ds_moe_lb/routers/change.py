"""Applying the section `moe_router` to a model, and to what is to become its optimizer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.utils import log_dist
from torch import nn

from ds_moe_lb import _compat
from ds_moe_lb.config import ROUTER_SECTION, RouterConfig, parse_router_config
from ds_moe_lb.discovery import NothingToBalanceError
from ds_moe_lb.routers import groups
from ds_moe_lb.routers.discovery import RouterLinear, find_router_linears, weight_shape
from ds_moe_lb.routers.groups import Swap
from ds_moe_lb.routers.swap import made_weight, replace_weight
from ds_moe_lb.routers.weights import (
    FrozenRouterWeight,
    HyperRouterWeight,
    RouterWeight,
    layer_generator,
)


@contextmanager
def changed_routers(ds_config: dict[str, Any], arguments: dict[str, Any]) -> Iterator[None]:
    """Within it an engine gets its routers as the section says.

    Args:
        ds_config: the DeepSpeed JSON.
        arguments: those of ``deepspeed.initialize``, or of the engine's constructor, by name;
            changed in place where they hold parameters.

    Raises:
        ValueError: the section is wrong, or the model or its optimizer does not go with it.
    """
    config = parse_router_config(ds_config)
    context: Any = nullcontext()
    if config.type != "linear":
        try:
            change = _Change(config, arguments)
        except NothingToBalanceError as error:
            # Trainers of preferences build engines of reward models from the JSON of the policy.
            if arguments.get("optimizer") is not None or "optimizer" in ds_config:
                raise
            log_dist(f"{error}; left off, since this engine trains nothing", ranks=[0])
        else:
            context = change.at_the_right_time(_compat.has_autoep(ds_config))
    with context:
        yield


def refuse_unchanged(model: nn.Module, ds_config: dict[str, Any]) -> None:
    """Refuse a live engine whose JSON has the section and whose routers are the model's own."""
    config = parse_router_config(ds_config)
    if config.type == "linear":
        return
    unchanged = [x.name for x in find_router_linears(model) if made_weight(x.owner) is None]
    if unchanged:
        raise ValueError(
            f"{ROUTER_SECTION}.type: got {config.type!r}, but this engine has the model's own "
            f"routers ({_some(unchanged)}), and its optimizer holds their weights. The section is "
            f"applied by ds_moe_lb.initialize or ds-moe-lb run, before there is an engine; build "
            f"the engine so (with replace_trained true for a model that is trained), or remove the "
            f"section"
        )


class _Change:
    """Changes one model's routers and its optimizer's parameters; not before it is told to."""

    def __init__(self, config: RouterConfig, arguments: dict[str, Any]) -> None:
        self._config = config
        self._arguments = arguments
        self._model: nn.Module = arguments["model"]
        optimizer = arguments.get("optimizer")
        # It may also be a function that makes one of the parameters.
        self._optimizer = optimizer if hasattr(optimizer, "param_groups") else None
        found = find_router_linears(self._model)
        if not config.replace_trained:
            _refuse_loaded(config, found)

    def at_the_right_time(self, is_converted: bool) -> Any:
        """Change at once, or within the context that is returned, after AutoEP's conversion."""
        given = self._arguments.get("model_parameters")
        if not is_converted:
            # A generator would find the new parameters.
            parameters = list(self._model.parameters() if given is None else given)
            swaps = self._apply()
            if given is not None or self._optimizer is None:
                self._arguments["model_parameters"] = groups.repaired(parameters, swaps)
            return nullcontext()
        if isinstance(given, list):  # DeepSpeed exchanges the converted parameters in there
            own = [{**x, "params": list(x["params"])} if isinstance(x, dict) else x for x in given]

            def change() -> None:
                own[:] = groups.repaired(own, self._apply())

            self._arguments["model_parameters"] = own
            return _compat.once_converted(self._model, change)
        late = _LateParameters(self._model, given)
        if given is not None or self._optimizer is None:
            self._arguments["model_parameters"] = late
        return _compat.once_converted(self._model, lambda: late.swaps.extend(self._apply()))

    def _apply(self) -> list[Swap]:
        """Change the model, and the optimizer if there is one already."""
        config, stage = self._config, getattr(self._model, "stage_id", 0)
        found = find_router_linears(self._model)
        swaps = []
        for layer, linear in enumerate(found):
            source = made_weight(linear.owner)
            old = linear.owner._parameters.get("weight")
            if source is None:
                source = _make(
                    config, linear, layer_generator(config.seed, stage=stage, layer=layer)
                )
            elif source.made_by != config:
                raise ValueError(
                    f"{ROUTER_SECTION}: the router of {linear.name!r} was changed before, by "
                    f"another section ({source.made_by}); make a new model"
                )
            swaps.append(Swap(linear.name, old, source))
        if self._optimizer is not None:
            self._refuse_optimizer(self._optimizer, swaps)
            groups.repair_optimizer(self._optimizer, swaps)
        for linear, swap in zip(found, swaps, strict=True):
            if swap.old is not None:
                _put(config, linear.owner, swap.new)
        _announce(config, swaps)
        return swaps

    def _refuse_optimizer(self, optimizer: torch.optim.Optimizer, swaps: Sequence[Swap]) -> None:
        trained = groups.trained_in(optimizer, swaps)
        if trained and not self._config.replace_trained:
            raise _trained_error(self._config, trained, "the optimizer has stepped them")
        scheduler = self._arguments.get("lr_scheduler")
        if scheduler is None or callable(scheduler):
            return
        # DeepSpeed's own schedulers pair groups with learning rates by their order, in silence.
        if groups.adds_group(optimizer, swaps):
            raise ValueError(
                f"{ROUTER_SECTION}: the embeddings take no weight decay, so they need a group of "
                f"their own in the optimizer, and lr_scheduler was made for its present groups. "
                f"Make the scheduler afterwards (lr_scheduler may be a function of the optimizer), "
                f"or give the optimizer the routers' weights in a group with weight_decay 0"
            )
        if groups.empties_group(optimizer, swaps):
            raise ValueError(
                f"{ROUTER_SECTION}: a group of the optimizer holds nothing but weights of routers, "
                f"which type {self._config.type!r} takes out of it; DeepSpeed drops groups without "
                f"parameters, and lr_scheduler was made for the present ones. Make the scheduler "
                f"afterwards (lr_scheduler may be a function of the optimizer), or leave the "
                f"routers in a group with other parameters"
            )


class _LateParameters:
    """The parameters of a model, looked up when the engine does, after AutoEP's conversion."""

    def __init__(self, model: nn.Module, given: Any) -> None:
        self.swaps: list[Swap] = []
        self._model = model
        self._given = given

    def __iter__(self) -> Iterator[Any]:
        given = self._model.parameters() if self._given is None else self._given
        return iter(groups.repaired(list(given), self.swaps))


def _refuse_loaded(config: RouterConfig, found: Sequence[RouterLinear]) -> None:
    loaded = [
        linear.name
        for linear in found
        if getattr(linear.owner._parameters.get("weight"), "_is_hf_initialized", False)
    ]
    if loaded:
        raise _trained_error(config, loaded, "they were loaded by from_pretrained")


def _trained_error(config: RouterConfig, names: Sequence[str], how: str) -> ValueError:
    return ValueError(
        f"{ROUTER_SECTION}.type: got {config.type!r}, which would throw away trained routers: "
        f"{_some(names)}; {how}. Set replace_trained to true to begin with new ones, or remove the "
        f"section"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(map(repr, names[:2])) + more


def _make(config: RouterConfig, linear: RouterLinear, generator: torch.Generator) -> RouterWeight:
    """What is to make the weight of a router, with the marks of the weight that it replaces."""
    old = linear.owner._parameters["weight"]
    assert old is not None
    num_experts, model_dim = weight_shape(old)
    source: RouterWeight
    if config.type == "hyper":
        source = HyperRouterWeight(
            num_experts=num_experts,
            model_dim=model_dim,
            embedding_dim=config.embedding_dim or model_dim,
            hidden_dim=config.hidden_dim,
            init_scale=config.init_scale,
            generator=generator,
        )
        source.embedding.requires_grad_(old.requires_grad)
    else:
        source = FrozenRouterWeight(
            num_experts=num_experts,
            model_dim=model_dim,
            init_scale=config.init_scale,
            generator=generator,
        )
    source.made_by = config
    is_elsewhere = hasattr(old, "ds_id") or old.is_meta  # its memory says nothing of where it is
    source.to(dtype=old.dtype, device=None if is_elsewhere else old.device)
    for parameter in source.parameters():
        _compat.copy_marks(old, parameter)
    return source


def _put(config: RouterConfig, owner: nn.Module, source: RouterWeight) -> None:
    replace_weight(owner, source)
    bias = owner._parameters.get("bias")
    if bias is not None and config.type == "frozen":
        bias.requires_grad_(False)


def _announce(config: RouterConfig, swaps: Sequence[Swap]) -> None:
    counts = [[sum(map(_size, part)) for part in swap.new.split_parameters()] for swap in swaps]
    trained, frozen = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    log_dist(
        f"{ROUTER_SECTION}: {config.type} routers on {len(swaps)} MoE layers, {trained} trained "
        f"and {frozen} frozen values in all",
        ranks=[0],
    )


def _size(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))
