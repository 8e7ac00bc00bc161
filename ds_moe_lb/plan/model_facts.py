"""From a transformers config to its MoE layers: which they are, experts, top-k, coefficient.

Only the config's own keys are read, as its JSON spells them, so transformers need not be installed.
A key that a config leaves to the default of its class is an error that names it.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_moe_lb.plan.known_models import KNOWN_MODELS

_NUM_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
# transformers applies the first two; the others belong to models' own code and Megatron-style ones.
_APPLIED_COEFFICIENT = ("router_aux_loss_coef", "aux_loss_coef")
_FOREIGN_COEFFICIENT = ("aux_loss_alpha", "moe_loss_weight")
# Composite models keep the language model's keys in one of these.
_INNER = ("text_config", "llm_config", "language_config", "ffn_config")


@dataclass(frozen=True, kw_only=True)
class MoeFacts:
    """What balancing needs to know of a model.

    Attributes:
        name: as the user gave it.
        num_layers: all layers, dense ones too.
        moe_layers: indices of the layers that route.
        num_experts: E of every MoE layer; routed ones, not shared ones.
        top_k: experts per token.
        coefficient: of the model's own balancing term; None where the config has none.
        coefficient_key: the key it stands under.
        has_own_term: True if transformers adds the term (``output_router_logits``), False if it
            does not, None where the config does not say.
    """

    name: str
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    coefficient: float | None = None
    coefficient_key: str | None = None
    has_own_term: bool | None = None

    @property
    def num_moe_layers(self) -> int:
        """L."""
        return len(self.moe_layers)


def read_model(name: str) -> MoeFacts:
    """Facts of a model by name, or by the path of its config.

    Args:
        name: a ``config.json``, a folder that holds one, or the name of a well-known model in any
            case, with or without the organisation in front.

    Raises:
        ValueError: no such file or model, or a config without MoE layers.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"--model {path}: not JSON ({error})") from None
        if not isinstance(config, dict):
            raise ValueError(f"--model {path}: expected a JSON object, got {type(config).__name__}")
        return facts_of(config, name=name)
    folded = name.rsplit("/", 1)[-1].lower()
    if folded in KNOWN_MODELS:
        return facts_of(KNOWN_MODELS[folded], name=name)
    nearest = difflib.get_close_matches(folded, KNOWN_MODELS, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(
        f"--model: {name!r} is neither a config.json, nor a folder with one, nor a known model."
        f"{hint} Known: {', '.join(KNOWN_MODELS)}"
    )


def facts_of(config: Mapping[str, Any], *, name: str) -> MoeFacts:
    """Facts of a config that was read already.

    Raises:
        ValueError: naming what is missing, or what in the config cannot be planned for.
    """
    if config.get("is_encoder_decoder"):
        raise ValueError(
            f"--model {name}: an encoder-decoder model, whose two stacks route by rules of their "
            f"own; plan covers decoders only"
        )
    flat = _flatten(config)
    num_experts = _integer(flat, _NUM_EXPERTS, name=name, what="the number of experts")
    top_k = _integer(flat, _TOP_K, name=name, what="the experts per token")
    if num_experts < 2 or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"--model {name}: {num_experts} experts, {top_k} per token: nothing to balance"
        )
    num_layers, moe_layers = _layers(flat, name=name)
    if not moe_layers:
        raise ValueError(f"--model {name}: none of its {num_layers} layers has experts")
    keys = [key for key in (*_APPLIED_COEFFICIENT, *_FOREIGN_COEFFICIENT) if _is_number(flat, key)]
    has_own_term = flat.get("output_router_logits") if keys else None
    if keys and keys[0] in _FOREIGN_COEFFICIENT:
        has_own_term = False
    return MoeFacts(
        name=name,
        num_layers=num_layers,
        moe_layers=tuple(moe_layers),
        num_experts=num_experts,
        top_k=top_k,
        coefficient=float(flat[keys[0]]) if keys else None,
        coefficient_key=keys[0] if keys else None,
        has_own_term=has_own_term if isinstance(has_own_term, bool) else None,
    )


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(config)
    for key in _INNER:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            flat |= _flatten(inner)
    return flat


def _is_number(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(config: Mapping[str, Any], keys: Sequence[str], *, name: str, what: str) -> int:
    present = [key for key in keys if config.get(key) is not None]
    if not present:
        raise ValueError(
            f"--model {name}: {what} is missing: none of {', '.join(keys)} is in the config. A "
            f"dense model has nothing to balance; a default of the model's class must be written "
            f"out (config.save_pretrained does)"
        )
    value = config[present[0]]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(
            f"--model {name}: {present[0]} is {value!r}; plan needs one integer for all layers"
        )
    return value


def _layers(config: Mapping[str, Any], *, name: str) -> tuple[int, list[int]]:
    """Number of layers, and which of them route: an explicit list, else what rules leave over."""
    listed = _listed_layers(config, name=name)
    if listed is not None and not any(config.get(key) is not None for key in _NUM_LAYERS):
        num_layers = listed[0]
    else:
        num_layers = _integer(config, _NUM_LAYERS, name=name, what="the number of layers")
    if listed is not None:
        return num_layers, [layer for layer in listed[1] if layer < num_layers]
    dense = _indices(config, "mlp_only_layers", name=name) if config.get("mlp_only_layers") else []
    routed = [layer for layer in range(num_layers) if _routes(config, layer, num_layers)]
    return num_layers, [layer for layer in routed if layer not in dense]


def _listed_layers(config: Mapping[str, Any], *, name: str) -> tuple[int, list[int]] | None:
    """Entries of a list with one word for each layer, and the layers that route by it."""
    # A router of type hash_moe looks its experts up and has nothing to balance.
    for key, routing in (
        ("mlp_layer_types", {"sparse", "moe"}),
        ("layers_block_type", {"moe"}),
        ("hybrid_override_pattern", {"E"}),
        ("moe_layer_freq", {1}),
    ):
        words = config.get(key)
        if isinstance(words, list | str) and routing & set(words):
            return len(words), [layer for layer, word in enumerate(words) if word in routing]
    if config.get("moe_layers") is not None:
        indices = _indices(config, "moe_layers", name=name)
    elif config.get("moe_layers_enum"):
        indices = _indices(config, "moe_layers_enum", name=name)
    else:
        return None
    return max(indices, default=-1) + 1, sorted(indices)


def _indices(config: Mapping[str, Any], key: str, *, name: str) -> list[int]:
    """Layer indices as a list, or as the words of one string."""
    value = config[key]
    words = value.split(",") if isinstance(value, str) else value
    try:
        return [int(word) for word in words]
    except (TypeError, ValueError):
        raise ValueError(
            f"--model {name}: {key} is {value!r}; plan needs a list of layer indices"
        ) from None


def _routes(config: Mapping[str, Any], layer: int, num_layers: int) -> bool:
    """Whether a layer has experts; each family of configs sets some of these keys."""

    def get(key: str, default: int) -> int:
        return int(config[key]) if _is_number(config, key) else default

    last = get("moe_layer_end_index", -1)
    return (
        config.get("enable_moe_block", True) is not False
        and (layer + 1) % (get("decoder_sparse_step", 1) or num_layers + 1) == 0
        and (layer + 1) % (get("interleave_moe_layer_step", 1) or num_layers + 1) == 0
        and layer >= get("first_k_dense_replace", 0)
        and layer >= get("num_dense_layers", 0)
        and layer % max(get("moe_layer_freq", 1), 1) == 0
        and layer % max(get("expert_layer_period", 1), 1) == get("expert_layer_offset", 0)
        and layer >= get("moe_layer_start_index", 0)
        and layer <= (last if last >= 0 else num_layers - 1)
        and (layer + 1) % max(get("moe_layer_interval", 1), 1) == 0
    )
