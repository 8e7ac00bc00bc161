"""Switching the plugin on and off: the only file that changes an engine."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger

from ds_moe_lb import _compat, checkpoints
from ds_moe_lb.adapters.model_inputs import InputReader, OwnLossSwitch
from ds_moe_lb.announce import announce
from ds_moe_lb.balancer import LoadBalancer
from ds_moe_lb.coefficients import layer_coefficients
from ds_moe_lb.config import SECTION, LoadBalancingConfig, parse_config, parse_section
from ds_moe_lb.construction import build_balancer
from ds_moe_lb.discovery import (
    NothingToBalanceError,
    find_own_loss,
    find_sites,
    input_models,
    refuse_terms,
    refuse_unsupported,
)
from ds_moe_lb.of_model import remember
from ds_moe_lb.policy import make_policy
from ds_moe_lb.router import Router
from ds_moe_lb.routers.change import changed_routers, refuse_unchanged
from ds_moe_lb.sites import RouterSite

if TYPE_CHECKING:
    from ds_moe_lb.adapters.transformers import OwnLoss


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with global-batch load balancing: same arguments, same results.

    Reads the sections ``moe_load_balancing`` and ``moe_router`` of the DeepSpeed config. With the
    first absent or ``"enabled": false``, and no second, this is ``deepspeed.initialize`` and
    ``engine.load_balancer`` is None; all that differs is that a loaded client state lacks what the
    plugin once saved in it.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)``; ``engine.load_balancer`` is the
        :class:`~ds_moe_lb.LoadBalancer`.

    Raises:
        ValueError: a section is wrong (before the engine is built), trained routers would be
            replaced, or the model has no MoE layers (without an optimizer: only a warning).
    """
    arguments = _compat.named_arguments(args, kwargs)
    with before_build(_compat.config_argument(arguments), arguments):
        returned = deepspeed.initialize(**arguments)
    install_as_configured(returned[0])
    return returned


def before_build(ds_config: dict[str, Any] | None, arguments: dict[str, Any]) -> Any:
    """Refuse wrong sections, and return the context in which the engine is to be constructed.

    Args:
        ds_config: the DeepSpeed JSON; None where DeepSpeed will complain about its absence.
        arguments: what the engine is constructed with, by name; changed in place.
    """
    if ds_config is None:
        return nullcontext()
    section = parse_config(ds_config)
    if section is not None and section.enabled:
        _compat.refuse_broken_autoep(ds_config)
    return changed_routers(ds_config, arguments)


def install_as_configured(engine: Any) -> None:
    """Do what a new engine's JSON says, once; see :func:`initialize`."""
    if "load_balancer" in engine.__dict__:  # `ds_moe_lb.auto` was there first
        return
    if SECTION not in _compat.raw_config(engine):
        _leave_off(engine)
        return
    try:
        install(engine)
    except NothingToBalanceError as error:
        # Trainers of preferences build engines of reward models from the JSON of the policy.
        if _compat.has_optimizer(engine):
            raise
        _leave_off(engine)
        if dist.get_rank() == 0:
            logger.warning(f"{error}; left off, since this engine trains nothing")


def install(engine: Any, config: Mapping[str, Any] | None = None) -> LoadBalancer | None:
    """Put the plugin on a live engine. Collective: every rank must call it.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        config: the section's content; by default that of the engine's own JSON, or the defaults
            where the JSON has no such section.

    Returns:
        The handle, also ``engine.load_balancer``; None if the section says ``"enabled": false``.

    Raises:
        ValueError: the section is wrong, or the model has no MoE layers that can be balanced.
        RuntimeError: the plugin is installed already, the host lacks something it needs, or the
            ranks were set up differently.
    """
    if isinstance(engine.__dict__.get("load_balancer"), LoadBalancer):
        raise RuntimeError(
            "moe_load_balancing: already installed on this engine; uninstall() it first"
        )
    section = parse_config(_compat.raw_config(engine)) if config is None else parse_section(config)
    settings = section or LoadBalancingConfig()
    if not settings.enabled:
        _leave_off(engine)
        return None
    warnings = _compat.check_host(engine)
    refuse_unchanged(engine.module, _compat.raw_config(engine))
    states = settings.states()
    for _, state in states:
        refuse_unsupported(engine, state)
    sites = find_sites(engine.module)
    for _, state in states:
        refuse_terms(engine, sites, state)
    own_loss = find_own_loss(engine.module)
    policies = [
        (step, make_policy(state, layer_coefficients(state, sites, own_loss)))
        for step, state in states
    ]
    balancer = build_balancer(engine, settings, sites, policies)
    replaced = own_loss if any(x.coefficients is not None for _, x in policies) else None
    _Installation(engine, balancer, sites, replaced).apply()
    if dist.get_rank() == 0:
        for warning in warnings:
            logger.warning(f"{SECTION}: {warning}")
    announce(engine, balancer, replaced)
    return balancer


def _leave_off(engine: Any) -> None:
    engine.load_balancer = None
    checkpoints.hide_state(engine)


class _Installation:
    """What was changed on an engine, and how to change it back."""

    def __init__(
        self,
        engine: Any,
        balancer: LoadBalancer,
        sites: Sequence[RouterSite],
        replaced_loss: "OwnLoss | None",
    ) -> None:
        self._engine = engine
        self._balancer = balancer
        self._sites = sites
        self._replaced_loss = replaced_loss
        self._handles: list[Any] = []
        self._methods: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {}

    def apply(self) -> None:
        balancer, root = self._balancer, self._engine.module
        states = balancer.config.states()
        routers = [
            Router(layer, balancer, site)
            for layer, site in zip(balancer.layout.layers, self._sites, strict=True)
        ]
        for site, router in zip(self._sites, routers, strict=True):
            if site.bias is not None and any(state.bias_update_rate for _, state in states):
                site.bias.add(num_experts=site.num_experts)
            site.attach(router)
            if any(state.scope == "sequence" for _, state in states):
                self._handles.append(site.watch_sequences())

        # A deep copy of the model takes the hooks along, and is nothing of the engine's.
        def before_forward(module: torch.nn.Module, args: Any) -> None:
            if module is root:
                balancer.before_forward(training=module.training)

        def after_forward(module: torch.nn.Module, args: Any, output: Any) -> None:
            if module is root:
                balancer.after_forward()

        self._handles.append(root.register_forward_pre_hook(before_forward))
        for model, has_routers in input_models(root, self._sites):
            self._handles.append(InputReader(model, balancer, reads_attention_mask=has_routers))
        if self._replaced_loss is not None:
            for own_model in self._replaced_loss.models:
                self._handles.append(OwnLossSwitch(own_model, balancer))

        def leave_forward(module: torch.nn.Module, args: Any, output: Any) -> None:
            if module is root:
                balancer.leave_forward()

        self._handles.append(root.register_forward_hook(after_forward))
        self._handles.append(root.register_forward_hook(leave_forward, always_call=True))
        # All ranks come back from these together. A pipeline's own `step` is not for callers, and
        # its next forward would be too late: there a stage waits for the one before it.
        is_pipeline = isinstance(self._engine, PipelineEngine)
        self._wrap("train_batch" if is_pipeline else "step", self._step)
        self._wrap("save_checkpoint", self._save_checkpoint)
        self._wrap("load_checkpoint", self._load_checkpoint)
        self._wrap("compile", self._compile)
        balancer.wire(routers, forget_calls=self._forget_calls, uninstall=self.revert)
        self._engine.load_balancer = balancer
        remember(root, balancer)
        frozen = [site.name for site in self._sites if not site.is_trainable]
        if frozen and balancer.policy.injects and dist.get_rank() == 0:
            logger.warning(
                f"{SECTION}: the routers of {', '.join(frozen)} are frozen; their balance is "
                f"measured but nothing is added to their gradients"
            )

    def revert(self) -> None:
        if self._engine.__dict__.get("load_balancer") is not self._balancer:
            return
        for handle in self._handles:
            handle.remove()
        for site in self._sites:
            site.detach()
        own = self._engine.__dict__
        for name, (wrapper, before) in self._methods.items():
            # Somebody may have wrapped ours since; then it stays in between and does nothing.
            if own.get(name) is not wrapper:
                continue
            del own[name]
            if before is not None:  # somebody had wrapped the engine's before
                own[name] = before
        self._engine.load_balancer = None

    def _wrap(self, name: str, method: Callable[..., Any]) -> None:
        original = getattr(self._engine, name)

        @functools.wraps(original)  # Trainer asks save_checkpoint for its parameters
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._engine.__dict__.get("load_balancer") is not self._balancer:
                return original(*args, **kwargs)
            return method(original, *args, **kwargs)

        self._methods[name] = wrapper, self._engine.__dict__.get(name)
        self._engine.__dict__[name] = wrapper

    def _forget_calls(self) -> None:
        for site in self._sites:
            site.forget_call()

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        returned = original(*args, **kwargs)
        self._balancer.close_window_if_stepped()
        return returned

    def _compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{SECTION}: engine.compile() is not supported: the compiler would bake in what the "
            f"routers do once. Train without it, or uninstall() the plugin first"
        )

    def _save_checkpoint(
        self,
        original: Callable[..., Any],
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._balancer.close_window_if_stepped()
        state = dict(client_state or {})
        state[SECTION] = self._balancer.state_dict()
        if not save_latest or checkpoints.writes_latest_late(self._engine):
            return original(save_dir, tag, state, save_latest, *args, **kwargs)
        # As DeepSpeed chooses it; handed over, so that `latest` cannot name another.
        tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        returned = original(save_dir, tag, state, False, *args, **kwargs)
        checkpoints.move_latest(save_dir, tag)
        return returned

    def _load_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with checkpoints.explaining_routers():
            path, client_state = original(*args, **kwargs)
        if path is None:
            return path, client_state
        own = client_state.pop(SECTION, None) if client_state else None
        arguments = inspect.signature(self._engine.__class__.load_checkpoint).bind_partial(
            self._engine, *args, **kwargs
        )
        if arguments.arguments.get("load_module_only"):
            own = None  # weights to start another training from, perhaps on other data
        # DeepSpeed saves no partial gradients, so whatever was accumulated is void.
        self._balancer.start_window()
        news = self._balancer.load_state_dict(own)
        if news is not None and dist.get_rank() == 0:
            logger.warning(f"{SECTION}: {news}")
        return path, client_state
