"""Converted checkpoints under AutoEP with the experts spread over two ranks."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dense_models import LAYERS, logits, save_dense
from ds_moe_lb.convert.conversion import Conversion
from ds_moe_lb.convert.plan import ConversionOptions
from ranks import run_ranks

FAMILIES = {
    "mixtral": ("llama", {}, {}),
    "qwen2_moe": ("llama", {}, {"num_shared_experts": 2}),
    "qwen3_moe": ("qwen3", {"head_dim": 8}, {}),
}


def _check_logits_and_step(folder: str) -> dict[str, tuple[torch.Tensor, float, float]]:
    """By family: logits, and the loss before and after one optimizer step."""
    import deepspeed
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from transformers import AutoModelForCausalLM

    seen = {}
    for name in FAMILIES:
        config = {
            "train_batch_size": 2,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "expert_parallel": {
                "enabled": True,
                "autoep_size": 2,
                "preset_model": "qwen3_moe" if name == "qwen2_moe" else name,
            },
        }
        model = AutoModelForCausalLM.from_pretrained(os.path.join(folder, name))
        engine, _, _, _ = deepspeed.initialize(model=model, config=config)
        replaced = [m for m in engine.modules() if isinstance(m, AutoEPMoELayer)]
        assert [layer.experts.w1.shape[0] for layer in replaced] == [2] * LAYERS
        engine.eval()
        values = logits(engine)
        engine.train()
        tokens = torch.arange(12)[None]
        losses = []
        for _ in range(2):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        seen[name] = (values, losses[0], losses[1])
    return seen


@pytest.mark.ranks
def test_autoep_computes_the_dense_model_from_converted_experts(tmp_path: Path) -> None:
    expected: dict[str, Any] = {}
    for name, (model_type, fields, options) in FAMILIES.items():
        expected[name] = logits(save_dense(tmp_path / f"dense_{name}", model_type, **fields))
        plan = ConversionOptions(
            num_experts=4,
            top_k=4,
            scale="exact",
            gate_init="zero",
            **options,  # type: ignore[arg-type]
        )
        Conversion(tmp_path / f"dense_{name}", tmp_path / name, plan).run()
    for seen in run_ranks(_check_logits_and_step, 2, str(tmp_path), timeout_s=120):
        for name, (values, first, second) in seen.items():
            # fp32 against fp64, logits up to about 1.5.
            torch.testing.assert_close(values.double(), expected[name], rtol=0, atol=1e-5)
            assert second < first, name
