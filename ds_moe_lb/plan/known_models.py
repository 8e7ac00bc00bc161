"""Configs of well-known MoE models: the keys that `ds-moe-lb plan` reads, under their own names.

Each is an excerpt of the ``config.json`` that the model's authors published with its weights; the
numbers were compared with quotations of those files in other public repositories. A coefficient is
given only where such a quotation has it.
"""

from typing import Any

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 60,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "aux_loss_alpha": 0.001,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "aux_loss_alpha": 0.001,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    },
    "glm-4.5": {
        "model_type": "glm4_moe",
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "n_routed_experts": 160,
        "num_experts_per_tok": 8,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "num_hidden_layers": 46,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.9,
        "output_router_logits": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.9,
        "output_router_logits": False,
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "num_hidden_layers": 62,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    "mixtral-8x22b": {
        "model_type": "mixtral",
        "num_hidden_layers": 56,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
        "output_router_logits": False,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "num_hidden_layers": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01,
    },
    "phi-3.5-moe": {
        "model_type": "phimoe",
        "num_hidden_layers": 32,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 24,
        "decoder_sparse_step": 1,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    },
}
