"""Tiny dense checkpoints of transformers, built from configs; nothing is downloaded."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 64
NEURONS = 48
LAYERS = 2
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": NEURONS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def save_dense(path: Path, model_type: str, *, shard_size: str = "1GB", **fields: Any) -> Any:
    """Save a model with large random weights, and return it in fp64 and ready to evaluate.

    The weights are drawn as fp32 with a standard deviation of 0.3, so that every FFN matters.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**_SHAPE, **fields})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    model.save_pretrained(path, max_shard_size=shard_size)
    return model.double().eval()


def load_moe(path: Path) -> Any:
    """Load in fp64 and check that names in file and model are the same."""
    from transformers import AutoModelForCausalLM

    # The default kernel for experts has no fp64.
    model, info = AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, experts_implementation="eager"
    )
    wrong = {key: list(names) for key, names in info.items() if names}
    assert wrong == {}
    return model.double().eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """``(2, 12, V)`` of fixed tokens; longer than the sliding windows of the tests."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (2, 12), generator=generator)
    result: torch.Tensor = model(input_ids=tokens).logits
    return result
