"""The JSON section `moe_load_balancing`: its keys, their types, and one clear error for what is
wrong.

This is the only file that knows JSON keys. Everything else receives a :class:`LoadBalancingConfig`.
"""

import difflib
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SECTION = "moe_load_balancing"

Scope = Literal["global_batch", "micro_batch", "sequence", "none"]
Estimate = Literal["running", "carry", "boundary", "exact"]
SyncGroupName = Literal["data_parallel", "expert_parallel", "expert_data_parallel"]
ValidTokens = Literal["mask", "labels", "all"]
Detail = Literal["model", "layer", "expert"]
Coefficient = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

# Values in messages: one line, and no more of it than helps.
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class MonitorConfig(_Section):
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


class ScheduleEntry(_Section):
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


class LoadBalancingConfig(_Section):
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
        _refuse_misspelt_section(ds_config)
        return None
    return parse_section(ds_config[SECTION])


def parse_section(section: Any) -> LoadBalancingConfig:
    """Validate the section's content; raises ValueError as :func:`parse_config` does."""
    if not isinstance(section, Mapping):
        raise ValueError(
            f"{SECTION}: got {_brief.repr(section)}, expected an object such as "
            f'{{"scope": "global_batch", "estimate": "running"}}'
        )
    try:
        config = LoadBalancingConfig(**_checked_keys(section))
    except ValidationError as error:
        raise ValueError("\n".join(_explain(item) for item in error.errors())) from None
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


def _checked_keys(section: Mapping[Any, Any]) -> dict[str, Any]:
    """JSON objects have string keys; a dict handed over in Python need not."""
    for key in section:
        if not isinstance(key, str):
            raise ValueError(
                f"{SECTION}: got the key {_brief.repr(key)}, expected one of {_allowed_keys(())}"
            )
    return dict(section)


def _refuse_misspelt_section(ds_config: Mapping[str, Any]) -> None:
    for key in ds_config:
        if not isinstance(key, str):
            continue
        folded = key.lower().replace("-", "_")
        close = difflib.SequenceMatcher(None, folded, SECTION).ratio() >= 0.75
        if close or ("moe" in folded and ("bal" in folded or folded.endswith("_lb"))):
            raise ValueError(
                f"DeepSpeed config: the section {key!r} is unknown; did you mean {SECTION!r}? "
                f"DeepSpeed itself would ignore it in silence."
            )


def _model_at(path: tuple[str | int, ...]) -> type[BaseModel]:
    if path[:1] == ("schedule",) and len(path) > 1:
        return ScheduleEntry
    return MonitorConfig if path[:1] == ("monitor",) else LoadBalancingConfig


def _allowed_keys(path: tuple[str | int, ...]) -> str:
    return ", ".join(repr(name) for name in _model_at(path).model_fields)


def _explain(item: Any) -> str:
    """One pydantic error as one line: section.key: got value, expected what."""
    path: tuple[str | int, ...] = item["loc"]
    where = ".".join([SECTION, *map(_name, path)])
    if item["type"] == "extra_forbidden":
        fields = list(_model_at(path[:-1]).model_fields)
        nearest = difflib.get_close_matches(str(path[-1]), fields, n=1, cutoff=0.5)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        return f"{where}: unknown key.{hint} Allowed keys: {_allowed_keys(path[:-1])}"
    return f"{where}: got {_brief.repr(item['input'])}, expected {_expected(path, item)}"


def _name(key: str | int) -> str:
    """A key as it is, or quoted where it would break the line or could not be printed."""
    return str(key) if isinstance(key, int) or key.isidentifier() else ascii(key)


def _expected(path: tuple[str | int, ...], item: Any) -> str:
    if item["type"] == "literal_error":
        is_inside = path[0] in ("monitor", "schedule")
        field = _model_at(path).model_fields[str(path[-1] if is_inside else path[0])]
        choices = [repr(choice) for choice in get_args(field.annotation)]
        nearest = difflib.get_close_matches(str(item["input"]), get_args(field.annotation), n=1)
        hint = f" (nearest: {nearest[0]!r})" if nearest else ""
        return f"one of {', '.join(choices)}{hint}"
    if path == ("aux_loss_coeff",):
        return "null or a finite number >= 0"
    expected = {
        "float_type": "a finite number >= 0",
        "finite_number": "a finite number >= 0",
        "int_type": "an integer",
        "bool_type": "true or false",
        "list_type": 'a list of objects such as {"step": 1000, "scope": "micro_batch"}',
        "missing": "the key 'step', an integer",
        "dict_type": "an object",
        "model_type": f"an object with the keys {_allowed_keys(path)}",
        "model_attributes_type": f"an object with the keys {_allowed_keys(path)}",
    }
    if item["type"] == "greater_than_equal":
        return f"a number >= {item['ctx']['ge']:g}"
    return expected.get(item["type"], item["msg"])


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
