"""Which MoE family a dense family becomes, and the config of the result.

A target is a model class of transformers whose layers AutoEP of DeepSpeed replaces:

    Llama, Mistral              Mixtral
    Llama, Mistral with shared  Qwen2-MoE, whose attention computes the same without its biases
    Qwen2                       Qwen2-MoE
    Qwen3                       Qwen3-MoE, which has no shared experts
"""

from dataclasses import dataclass
from typing import Any

from ds_moe_lb.convert.plan import ConversionOptions

SOURCES = ("llama", "mistral", "qwen2", "qwen3")
# Qwen2-MoE always has a shared expert. One whose weights are all 0 adds 0 and gets no gradient.
EMPTY_SHARED_SIZE = 8

_COMMON_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A family of MoE models and the names of its tensors in a checkpoint.

    Attributes:
        model_type: as in config.json.
        architecture: the class for causal language modelling.
        block: name of the MoE block in a layer.
        projections: an expert's matrices by the dense FFN's names.
        has_shared: whether its blocks hold a shared expert.
    """

    model_type: str
    architecture: str
    block: str
    projections: dict[str, str]
    has_shared: bool

    def expert(self, layer: int, expert: int, projection: str) -> str:
        name = self.projections[projection]
        return f"model.layers.{layer}.{self.block}.experts.{expert}.{name}.weight"

    def shared(self, layer: int, projection: str) -> str:
        return f"model.layers.{layer}.{self.block}.shared_expert.{projection}.weight"

    def gate(self, layer: int) -> str:
        return f"model.layers.{layer}.{self.block}.gate.weight"

    def shared_gate(self, layer: int) -> str:
        return f"model.layers.{layer}.{self.block}.shared_expert_gate.weight"


_SAME_NAMES = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
MIXTRAL = Target(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    block="block_sparse_moe",
    projections={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    has_shared=False,
)
QWEN2_MOE = Target(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    block="mlp",
    projections=_SAME_NAMES,
    has_shared=True,
)
QWEN3_MOE = Target(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    block="mlp",
    projections=_SAME_NAMES,
    has_shared=False,
)


def target_of(config: Any, *, num_shared_experts: int) -> Target:
    """The family that computes what the dense model of `config` does.

    Raises:
        ValueError: when there is none.
    """
    _refuse_other_mathematics(config)
    if config.model_type == "qwen2":
        return QWEN2_MOE
    if config.model_type in ("llama", "mistral"):
        return QWEN2_MOE if num_shared_experts else MIXTRAL
    if num_shared_experts:
        raise ValueError(
            f"--num-shared-experts: got {num_shared_experts}, expected 0 for a Qwen3 model: no MoE "
            f"family that AutoEP knows has both its attention and shared experts"
        )
    return QWEN3_MOE


def target_config(
    config: Any, target: Target, options: ConversionOptions, *, expert_size: int
) -> Any:
    """The config of the MoE model, a `PreTrainedConfig` of transformers."""
    from transformers import AutoConfig

    fields = {name: getattr(config, name) for name in _COMMON_FIELDS}
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        fields["head_dim"] = head_dim
    fields["num_experts_per_tok"] = options.top_k
    window = getattr(config, "sliding_window", None)
    if target is MIXTRAL:
        fields |= {
            "num_local_experts": options.num_experts,
            "intermediate_size": expert_size,
            "sliding_window": window,
        }
    else:
        fields |= {
            "num_experts": options.num_experts,
            "moe_intermediate_size": expert_size,
            # Of the dense layers, which the result has none of.
            "intermediate_size": config.intermediate_size,
            "norm_topk_prob": True,
        }
    if target is QWEN3_MOE:
        fields["attention_bias"] = config.attention_bias
    if target is QWEN2_MOE:
        layer_types = getattr(config, "layer_types", None)
        if config.model_type == "mistral" and window is not None:
            layer_types = ["sliding_attention"] * config.num_hidden_layers
        fields |= {
            "qkv_bias": config.model_type == "qwen2",
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": layer_types,
            "shared_expert_intermediate_size": options.num_shared_experts * expert_size
            or EMPTY_SHARED_SIZE,
        }
    return AutoConfig.for_model(target.model_type, architectures=[target.architecture], **fields)


def _refuse_other_mathematics(config: Any) -> None:
    """Refuse what the targets cannot express rather than convert something else."""
    if config.model_type not in SOURCES:
        raise ValueError(
            f"model_type in config.json: got {config.model_type!r}, expected one of "
            f"{', '.join(SOURCES)} (dense Llama-family models)"
        )
    if getattr(config, "quantization_config", None):
        raise ValueError(
            "config.json: the checkpoint is quantised, expected float weights; convert the "
            "unquantised model"
        )
    if config.hidden_act != "silu":
        raise ValueError(
            f"hidden_act in config.json: got {config.hidden_act!r}, expected 'silu', the one that "
            f"AutoEP computes for these families"
        )
    for name in ("mlp_bias", "attention_bias"):
        if getattr(config, name, False) and not (
            name == "attention_bias" and config.model_type == "qwen3"
        ):
            raise ValueError(
                f"{name} in config.json: got true, expected false: the MoE family has no such bias"
            )
    if config.model_type == "qwen3" and "sliding_attention" in config.layer_types:
        raise ValueError(
            "layer_types in config.json: got sliding_attention, expected full_attention in every "
            "layer: Qwen3-MoE has one kind of attention for all layers"
        )
