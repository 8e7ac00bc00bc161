"""The JSON sections `moe_load_balancing` and `moe_router`: their keys and what contradicts what.

This is the only file that knows JSON keys. Everything else receives a :class:`LoadBalancingConfig`
or a :class:`RouterConfig`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ds_moe_lb.sections import Path, Section, SectionReader, refuse_misspelt

SECTION = "moe_load_balancing"
ROUTER_SECTION = "moe_router"

Scope = Literal["global_batch", "micro_batch", "sequence", "none"]
Estimate = Literal["running", "carry", "boundary", "exact"]
SyncGroupName = Literal["data_parallel", "expert_parallel", "expert_data_parallel"]
ValidTokens = Literal["mask", "labels", "all"]
Detail = Literal["model", "layer", "expert"]
RouterType = Literal["linear", "hyper", "frozen"]
Coefficient = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class MonitorConfig(Section):
    """`moe_load_balancing.monitor`: what is reported through DeepSpeed's monitor, and how often.

    Attributes:
        enabled: write reports at all.
        interval: optimizer steps from one report to the next.
        detail: `model` means over layers; `layer` adds each layer; `expert` adds each expert's
            load.
        image_interval: reports from one TensorBoard heat map (layers x experts) to the next; 0 =
            none.
    """

    enabled: bool = True
    interval: int = Field(default=1, ge=1)
    detail: Detail = "layer"
    image_interval: int = Field(default=0, ge=0)


class ScheduleEntry(Section):
    """One entry of `moe_load_balancing.schedule`: what changes, and from which step on.

    Attributes:
        step: the first window that begins with this many optimizer steps done, or more.
        scope: and the others: keys of the section; those that are left out stay as they were.
    """

    step: int = Field(ge=0)
    scope: Scope = "global_batch"
    estimate: Estimate = "running"
    aux_loss_coeff: Coefficient = 0.0
    micro_batch_weight: Coefficient = 0.0
    z_loss_coeff: Coefficient = 0.0
    bias_update_rate: Coefficient = 0.0

    @property
    def changes(self) -> dict[str, Any]:
        """The keys that are given."""
        return {key: getattr(self, key) for key in self.model_fields_set - {"step"}}


class LoadBalancingConfig(Section):
    """The section `moe_load_balancing` of a DeepSpeed JSON: its keys and their defaults."""

    enabled: bool = True
    scope: Scope = "global_batch"
    estimate: Estimate = "running"
    sync_group: SyncGroupName = "data_parallel"
    valid_tokens: ValidTokens = "mask"
    aux_loss_coeff: Coefficient | None = None
    micro_batch_weight: Coefficient = 0.0
    z_loss_coeff: Coefficient = 0.0
    bias_update_rate: Coefficient = 0.0
    schedule: list[ScheduleEntry] = []
    monitor: MonitorConfig = MonitorConfig()

    def states(self) -> list[tuple[int, "LoadBalancingConfig"]]:
        """The section as it is from step 0 on, and as the schedule changes it from which step on;
        each entry builds on the one before.
        """
        states = [(0, self)]
        for entry in self.schedule:
            states.append((entry.step, states[-1][1].model_copy(update=entry.changes)))
        return states


class RouterConfig(Section):
    """The section `moe_router` of a DeepSpeed JSON: what makes the routers' weights.

    Attributes:
        type: `linear`, the model's own trainable weights, as without the section; `hyper`, weights
            that a frozen network makes of one trainable embedding per layer; `frozen`, random
            weights that are not trained.
        embedding_dim: width d of the embedding; None = the model's width M.
        hidden_dim: width H of the frozen network's hidden layer.
        init_scale: standard deviation of the entries of each layer's (E, M) weight at the start;
            None = whatever PyTorch's default initialisation of linear layers gives.
        seed: of the embeddings and of everything frozen, with the index of the layer.
        replace_trained: replace weights, too, that have been trained.
    """

    type: RouterType = "linear"
    embedding_dim: int | None = Field(default=None, ge=1)
    hidden_dim: int = Field(default=256, ge=1)
    init_scale: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**63)
    replace_trained: bool = False


def parse_config(ds_config: Mapping[str, Any]) -> LoadBalancingConfig | None:
    """Read and validate the section out of a whole DeepSpeed config.

    Args:
        ds_config: the DeepSpeed JSON as a mapping.

    Returns:
        The validated section, or None when it is absent (the plugin stays off).

    Raises:
        ValueError: naming section, key, value, what is allowed and the nearest valid key; also for
            a top-level key that looks like a misspelt section name.
    """
    if SECTION not in ds_config:
        refuse_misspelt(ds_config, SECTION, is_meant=_means_balancing)
        return None
    return parse_section(ds_config[SECTION])


def parse_router_config(ds_config: Mapping[str, Any]) -> RouterConfig:
    """The same for the section `moe_router`; the defaults, linear routers, where it is absent."""
    if ROUTER_SECTION not in ds_config:
        refuse_misspelt(ds_config, ROUTER_SECTION, is_meant=_means_routers)
        return RouterConfig()
    config = _router_reader.read(RouterConfig, ds_config[ROUTER_SECTION])
    means_nothing = {
        "linear": ("embedding_dim", "hidden_dim", "init_scale", "seed"),
        "frozen": ("embedding_dim", "hidden_dim"),
        "hyper": (),
    }[config.type]
    for key in means_nothing:
        got = getattr(config, key)
        if got != getattr(RouterConfig(), key):
            raise ValueError(
                f"{ROUTER_SECTION}.{key}: got {got!r}, which means nothing with type "
                f"{config.type!r}; leave it out, or set type to "
                + ("'hyper'" if key in ("embedding_dim", "hidden_dim") else "'hyper' or 'frozen'")
            )
    return config


def parse_section(section: Any) -> LoadBalancingConfig:
    """Validate the section's content; raises ValueError as :func:`parse_config` does."""
    config = _reader.read(LoadBalancingConfig, section)
    _refuse_schedule(config)
    states = config.states()
    is_global = any(state.scope == "global_batch" for _, state in states)
    for number, (step, state) in enumerate(states):
        try:
            _refuse_contradictions(state, is_ever_global=is_global)
        except ValueError as error:
            if number == 0:
                raise
            where = f"{SECTION}.schedule[{number - 1}] (from step {step} on)"
            raise ValueError(f"{where}: {error}") from None
    return config


def _model_at(path: Path) -> type[Section]:
    if path[:1] == ("schedule",) and len(path) > 1:
        return ScheduleEntry
    return MonitorConfig if path[:1] == ("monitor",) else LoadBalancingConfig


def _means_balancing(key: str) -> bool:
    return "moe" in key and ("bal" in key or key.endswith("_lb"))


def _means_routers(key: str) -> bool:
    return "router" in key and ("moe" in key or "hyper" in key or "frozen" in key)


_reader = SectionReader(
    SECTION,
    LoadBalancingConfig,
    example='{"scope": "global_batch", "estimate": "running"}',
    expected={
        "aux_loss_coeff": "null or a finite number >= 0",
        "schedule": 'a list of objects such as {"step": 1000, "scope": "micro_batch"}',
    },
    model_at=_model_at,
)
_router_reader = SectionReader(
    ROUTER_SECTION,
    RouterConfig,
    example='{"type": "hyper", "embedding_dim": 64}',
    expected={
        "embedding_dim": "null or an integer >= 1",
        "hidden_dim": "an integer >= 1",
        "init_scale": "null or a finite number > 0",
        "seed": "an integer from 0 to 2^63 - 1",
    },
)


def _refuse_schedule(config: LoadBalancingConfig) -> None:
    before = -1
    for number, entry in enumerate(config.schedule):
        where = f"{SECTION}.schedule[{number}]"
        if entry.step <= before:
            raise ValueError(
                f"{where}.step: got {entry.step} after {before}, expected steps that increase"
            )
        before = entry.step
        if not entry.changes:
            keys = ", ".join(repr(key) for key in ScheduleEntry.model_fields if key != "step")
            raise ValueError(f"{where}: changes nothing, expected one or more of {keys}")
        if "aux_loss_coeff" in entry.changes and config.aux_loss_coeff is None:
            raise ValueError(
                f"{where}.aux_loss_coeff: got {entry.aux_loss_coeff!r}, but the section begins "
                f"with null, where the script adds the loss; begin with a number (0 adds nothing)"
            )


def _refuse_contradictions(config: LoadBalancingConfig, *, is_ever_global: bool) -> None:
    if config.bias_update_rate and config.scope == "none":
        raise ValueError(
            f"{SECTION}: scope 'none' only measures, so bias_update_rate must be 0, got "
            f"{config.bias_update_rate!r}; for the bias alone choose another scope and "
            f"aux_loss_coeff 0"
        )
    if config.bias_update_rate and config.sync_group != "data_parallel":
        raise ValueError(
            f"{SECTION}.bias_update_rate: got {config.bias_update_rate!r} with sync_group "
            f"{config.sync_group!r}, whose ranks would go apart; use sync_group 'data_parallel'"
        )
    if config.micro_batch_weight and config.scope != "global_batch":
        raise ValueError(
            f"{SECTION}.micro_batch_weight: got {config.micro_batch_weight!r}, which adds a share "
            f"of the micro-batch loss to the global-batch loss; with scope {config.scope!r} leave "
            f"it out"
        )
    if config.z_loss_coeff and (config.aux_loss_coeff is None or config.scope == "none"):
        raise ValueError(
            f"{SECTION}.z_loss_coeff: got {config.z_loss_coeff!r}, which needs the plugin to add "
            f"the gradient: a number in aux_loss_coeff (0 for the z-loss alone; got "
            f"{config.aux_loss_coeff!r}) and a scope other than 'none' (got {config.scope!r})"
        )
    if config.scope == "none" and config.aux_loss_coeff:
        raise ValueError(
            f"{SECTION}: scope 'none' only measures, so aux_loss_coeff must be null or 0, "
            f"got {config.aux_loss_coeff!r}; for a loss choose scope 'global_batch'"
        )
    if not is_ever_global:
        for key in ("estimate", "sync_group"):
            default = getattr(LoadBalancingConfig(), key)
            if getattr(config, key) != default:
                raise ValueError(
                    f"{SECTION}.{key}: got {getattr(config, key)!r}, which means something only "
                    f"with scope 'global_batch'; with scope {config.scope!r} leave it out"
                )
