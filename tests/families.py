"""Tiny transformers MoE models, built from configs; nothing is downloaded.

Each family is named with the score function of its router as its source has it, which the plugin
has to find out by itself.
"""

from typing import Any, NamedTuple

import torch
import transformers

NUM_LAYERS = 2
VOCABULARY = 64


class Family(NamedTuple):
    """A model class, its tiny config and what is known of its routers."""

    model_class: str
    config: dict[str, Any]
    score_function: str


_DENSE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 8}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SIGMOID = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0}
_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}

FAMILIES = {
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _HEADS | _MOE | {"num_experts": 8}, "softmax"),
    "mixtral": Family(
        "MixtralForCausalLM", {"num_experts_per_tok": 2, "num_local_experts": 8}, "softmax"
    ),
    "olmoe": Family("OlmoeForCausalLM", {"num_experts_per_tok": 2, "num_experts": 8}, "softmax"),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _HEADS | {"num_experts_per_tok": 2, "num_local_experts": 8},
        "softmax",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _MOE | {"num_experts": 8, "shared_expert_intermediate_size": 16},
        "softmax",
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM", {"num_experts_per_tok": 2, "num_local_experts": 8}, "softmax"
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        {
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_jitter_noise": 0.0,
            "input_jitter_noise": 0.0,
        },
        "softmax",
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        {"moe_k": 2, "moe_num_experts": 8, "moe_intermediate_size": 16, "moe_layer_start_index": 0},
        "softmax",
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _LATENT | _MOE | _SIGMOID | {"n_group": 1, "topk_group": 1},
        "softmax",
    ),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _LATENT | _MOE | _SIGMOID | _GROUPS, "sigmoid"),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _HEADS | _MOE | _SIGMOID | {"n_group": 1, "topk_group": 1},
        "sigmoid",
    ),
    "dots1": Family(
        "Dots1ForCausalLM", _HEADS | _MOE | _SIGMOID | {"n_group": 1, "topk_group": 1}, "sigmoid"
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        _HEADS | {"num_experts_per_tok": 2, "num_local_experts": 8},
        "sigmoid",
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        _MOE | {"num_experts": 8, "num_dense_layers": 0, "layer_types": ["conv", "full_attention"]},
        "sigmoid",
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        _HEADS
        | {
            "num_experts_per_tok": 1,
            "num_local_experts": 8,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 32,
        },
        "sigmoid",
    ),
    "minimax_m3": Family(
        "MiniMaxM3VLForCausalLM",
        _HEADS
        | {
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "shared_intermediate_size": 16,
            "dense_intermediate_size": 32,
            "rotary_dim": 8,
            "mlp_layer_types": ["sparse", "sparse"],
            "layer_types": ["full_attention", "full_attention"],
        },
        "sigmoid",
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM",
        _HEADS
        | _MOE
        | {
            "num_experts": 8,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["full_attention", "full_attention"],
        },
        "softmax",
    ),
}

# Those that AutoEP of DeepSpeed 0.19.8 can shard.
PRESETS = ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3")


def make_model(family: str, **changes: Any) -> transformers.PreTrainedModel:
    """A tiny fp32 model in training mode; the caller seeds. Routers start with uneven routing."""
    model_class = getattr(transformers, FAMILIES[family].model_class)
    config = model_class.config_class(**_DENSE | FAMILIES[family].config | changes)
    config._attn_implementation = "eager"
    model = model_class(config).float().train()
    with torch.no_grad():
        for router in routers(model).values():
            for name, parameter in router.named_parameters():
                parameter.normal_(std=0.5 if name.endswith("weight") else 0.1)
    return model


def routers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The routers by name, found by the name of their class."""
    ends = ("TopKRouter", "TopkRouter", "TopKGate", "Llama4Router")
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith(ends)
    }
