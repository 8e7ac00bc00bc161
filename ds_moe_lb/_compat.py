"""Every private name of torch or DeepSpeed that the plugin touches, each with its reason.

Nothing else in the package reaches behind a public name, so a new host version is checked here.
"""

import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe import sharded_moe
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import groups
from packaging.version import Version

# First and first-not-tested versions: the range in which the facts this plugin rests on were
# checked.
TESTED = {"deepspeed": ("0.19.8", "0.19.9"), "torch": ("2.13", "2.14")}

_EXPERT_GROUP_GETTER = {
    "expert_parallel": "_get_expert_parallel_group",
    "expert_data_parallel": "_get_expert_data_parallel_group",
}

# What the plugin calls on the engine; the private ones have no public equal.
_ENGINE_NAMES = {
    "seq_data_parallel_group": "the ranks over which the gate's gradient is averaged",
    "sequence_parallel_size": "ranks the engine does not divide by",
    "global_steps": "tells one accumulation window from the next",
    "skipped_steps": "tells a step that overflowed from one that was applied",
    "global_samples": "abscissa of DeepSpeed's own monitor events",
    "mesh_device": "a sequence-parallel mesh is refused",
    "torch_autocast_z0_gradscaler": "scales the loss under autocast without ZeRO",
    "is_compiled": "a compiled engine is refused",
    "checkpoint_engine": "tells whether a save ends later, in the background",
    "monitor": "DeepSpeed's monitor, which writes the reports",
    "_config": "holds the JSON as the engine read it",
}


_MODULE_NAMES = (
    (sharded_moe, "F", "gate.py puts an observer of softmax and one_hot in its place"),
    (ZeROOptimizer, "scale_if_loss", "tells the loss scale"),
    (MonitorMaster, "write_events", "writes the reports"),
)

# Set on a parameter by those who treat it in a way of their own: by AutoEP on its routers' weights.
_MARKS = ("allreduce", "ds_zero_placement_family", "ds_autoep_folding_param_family")


def in_backward() -> bool:
    """Whether autograd is running this code, which means a checkpointed forward is being
    recomputed.

    `torch.is_grad_enabled()` cannot tell: reentrant checkpointing runs its *first* forward without
    grad.
    """
    return torch._C._current_graph_task_id() != -1


def raw_config(engine: Any) -> dict[str, Any]:
    """The DeepSpeed JSON that the engine was built from, custom sections included."""
    return raw_config_of(engine._config)


def raw_config_of(ds_config: Any) -> dict[str, Any]:
    """The same out of a ``DeepSpeedConfig``, before there is an engine."""
    config: dict[str, Any] = ds_config._param_dict
    return config


def named_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `deepspeed.initialize` by name."""
    return dict(inspect.signature(deepspeed.initialize).bind_partial(*args, **kwargs).arguments)


def config_argument(bound: dict[str, Any]) -> dict[str, Any] | None:
    """The config among the arguments of `deepspeed.initialize`, as DeepSpeed itself would read it.

    Returns:
        The JSON as a dict; None where DeepSpeed will have to complain about a missing config.
    """
    config = bound.get("config")
    if config is None:
        config = bound.get("config_params")
    if config is None:
        config = getattr(bound.get("args"), "deepspeed_config", None)
    return None if config is None else load_ds_config(config)


def new_group(ranks: Sequence[int]) -> Any:
    """A process group that its members alone create; `deepspeed.comm` has no such call.

    An ordinary `new_group` wants every rank of the world, in the same order. DeepSpeed itself makes
    the expert groups of a pipeline only on the stages that have experts, after which the ranks of
    an ordinary group would wait for each other under different names.

    It gives up waiting when the world would; torch itself lets every further group wait for 30
    minutes, whatever the script asked for.
    """
    return torch.distributed.new_group(
        list(ranks), timeout=_world_timeout(), use_local_synchronization=True
    )


def _world_timeout() -> timedelta | None:
    """How long a collective of the default group waits; None where the backend does not tell."""
    device = torch.device(get_accelerator().device_name())
    world = torch.distributed.group.WORLD
    assert world is not None  # an engine exists
    options = getattr(world._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def num_group_names() -> int:
    """How many process groups this rank belongs to, as torch counts them.

    Together with the ranks it makes the name under which the members of a :func:`new_group` look
    for each other, so they must agree on it.
    """
    return len(torch.distributed.distributed_c10d._world.pg_names)


def expert_group(expert_group_name: str, *, kind: str) -> Any:
    """The process group of an MoE layer; DeepSpeed keeps them by name, with private getters."""
    getter: Callable[[str], Any] = getattr(groups, _EXPERT_GROUP_GETTER[kind])
    return getter(expert_group_name)


def loss_scale(engine: Any) -> torch.Tensor | float:
    """The factor that `engine.backward` puts on the main loss besides 1/G.

    Asked for outside backward and on a tensor with a graph: DeepSpeed's scaler returns anything
    else unscaled, in silence.
    """
    with torch.enable_grad():
        one = torch.ones((), device=engine.device, requires_grad=True) * 1.0
        if isinstance(engine.optimizer, ZeROOptimizer):
            return engine.optimizer.scale_if_loss(one).detach()
        scaler = engine.torch_autocast_z0_gradscaler
        return scaler.scale(one).detach() if scaler is not None else 1.0


def has_optimizer(engine: Any) -> bool:
    """Whether the engine can train; without one, ZeRO-3 has something else in its place."""
    return engine.optimizer is not None and not isinstance(engine.optimizer, DeepSpeedZeRoOffload)


def has_autoep(ds_config: dict[str, Any]) -> bool:
    """Whether DeepSpeed's AutoEP will convert the model."""
    section = ds_config.get("expert_parallel")
    return isinstance(section, dict) and bool(section.get("enabled"))


@contextmanager
def once_converted(model: torch.nn.Module, then: Callable[[], None]) -> Iterator[None]:
    """Within it an engine of this model calls a function when AutoEP has converted the model.

    The converted parameters are there, and neither dtype nor device nor optimizer has been decided;
    DeepSpeed has no public hook at that place.
    """
    configure = DeepSpeedEngine._configure_distributed_model

    def call_before(engine: Any, given: torch.nn.Module) -> Any:
        if given is model:
            then()
        return configure(engine, given)

    DeepSpeedEngine._configure_distributed_model = call_before
    try:
        yield
    finally:
        DeepSpeedEngine._configure_distributed_model = configure


def copy_marks(old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Let DeepSpeed treat a parameter like the one that it stands in for."""
    for name in _MARKS:
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    if hasattr(old, "use_muon"):  # Muon is for matrices that are multiplied by activations
        new.use_muon = False  # type: ignore[attr-defined]


def refuse_broken_autoep(ds_config: dict[str, Any]) -> None:
    """Say what is wrong before DeepSpeed's AutoEP fails on a transformers it does not know.

    Raises:
        ValueError: transformers 5.23 changed a signature that AutoEP of DeepSpeed 0.19 calls.
    """
    if not has_autoep(ds_config):
        return
    if Version(deepspeed.__version__) >= Version("0.20"):
        return
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return
    if Version(version) >= Version("5.23.dev0"):
        raise ValueError(
            f"expert_parallel: AutoEP of DeepSpeed {deepspeed.__version__} does not work with "
            f"transformers {version}; pip install 'transformers>=5.0,<5.23' (5.22.2 is tested)"
        )


def check_host(engine: Any) -> list[str]:
    """Check every private name that is used.

    Returns:
        Warnings: host versions outside the tested range.

    Raises:
        RuntimeError: naming what is missing and the host's version.
    """
    missing = [f"{name} ({why})" for name, why in _ENGINE_NAMES.items() if not _has(engine, name)]
    if not hasattr(torch._C, "_current_graph_task_id"):
        missing.append("torch._C._current_graph_task_id (tells a recompute from a forward)")
    if not hasattr(getattr(engine, "_config", None), "_param_dict"):
        missing.append("DeepSpeedConfig._param_dict (the JSON with its custom sections)")
    if not hasattr(torch.distributed.distributed_c10d._world, "pg_names"):
        missing.append("torch.distributed's pg_names (the name of a process group depends on it)")
    for owner, name, why in _MODULE_NAMES:
        if not hasattr(owner, name):
            missing.append(f"{owner.__name__}.{name} ({why})")
    for getter in _EXPERT_GROUP_GETTER.values():
        if not hasattr(groups, getter):
            missing.append(f"deepspeed.utils.groups.{getter} (an MoE layer's ranks)")
    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    if missing:
        raise RuntimeError(
            f"moe_load_balancing: DeepSpeed {versions['deepspeed']} with torch "
            f"{versions['torch']} lacks {'; '.join(missing)}. {_tested_range()}"
        )
    return [
        f"{name} {version} is outside the tested range. {_tested_range()}"
        for name, version in versions.items()
        if not Version(TESTED[name][0])
        <= Version(Version(version).public)
        < Version(TESTED[name][1])
    ]


def _has(engine: Any, name: str) -> bool:
    # DeepSpeedEngine.__getattr__ looks into the client's model, which must not stand in for the
    # engine.
    return name in engine.__dict__ or hasattr(type(engine), name)


def _tested_range() -> str:
    ranges = ", ".join(f"{name} >= {low}, < {high}" for name, (low, high) in TESTED.items())
    return f"Tested: {ranges}."
