"""Every ready recipe in ds_configs/ is valid, and trains on two ranks through the real engine."""

import copy
import json
from pathlib import Path

import pytest
import torch

from ds_moe_lb._configs import config_directory, config_path
from ds_moe_lb.config import parse_config, parse_router_config
from ranks import run_ranks

ALL = sorted(path.stem for path in config_directory().glob("*.json"))
# Those for transformers run with its Trainer, in test_run.py.
RECIPES = [name for name in ALL if not name.startswith("hf_")]
EXPECTED = {
    "zero1_ep2_boundary",
    "zero1_ep2_global_batch",
    "zero1_ep2_hyper_router",
    "zero1_ep2_injected",
    "zero1_ep2_measure_only",
    "zero1_ep2_micro_batch",
    "zero2_ep2_bf16",
    "zero2_ep2_boundary",
    "zero2_ep2_cpu_offload",
    "zero2_ep2_fp16",
    "zero2_ep2_global_batch",
}
# What a name promises of the content.
BALANCING = {
    "global_batch": {"scope": "global_batch", "estimate": "running"},
    "hyper_router": {"scope": "global_batch", "estimate": "running"},
    "boundary": {"scope": "global_batch", "estimate": "boundary"},
    "micro_batch": {"scope": "micro_batch"},
    "injected": {"scope": "global_batch", "estimate": "running", "aux_loss_coeff": 0.01},
    "measure_only": {"scope": "none", "aux_loss_coeff": None},
    "bf16": {"scope": "global_batch", "estimate": "running"},
    "fp16": {"scope": "global_batch", "estimate": "running"},
    "cpu_offload": {"scope": "global_batch", "estimate": "running"},
}
STATIC_LOSS_SCALE = 1024.0


def _read(name: str) -> dict:
    return json.loads((config_directory() / f"{name}.json").read_text())


def test_the_recipes_are_those_that_the_readme_explains() -> None:
    assert set(RECIPES) == EXPECTED
    assert set(ALL) - EXPECTED == {"hf_zero2", "hf_zero3_autoep2"}


@pytest.mark.parametrize("name", ["hf_zero2", "hf_zero3_autoep2"])
def test_recipe_for_trainer_is_valid_and_leaves_its_numbers_to_trainer(name: str) -> None:
    recipe = _read(name)
    assert parse_config(recipe) is not None
    assert recipe["gradient_accumulation_steps"] == "auto"
    assert recipe["zero_optimization"]["stage"] == int(name[len("hf_zero")])


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid_and_says_what_its_name_says(name: str) -> None:
    recipe = _read(name)
    config = parse_config(recipe)
    assert config is not None and config.enabled
    stage, _, balancing = name.split("_", 2)
    assert recipe["zero_optimization"]["stage"] == int(stage.removeprefix("zero"))
    for key, value in BALANCING[balancing].items():
        assert getattr(config, key) == value, key
    for precision in ("bf16", "fp16"):
        assert recipe.get(precision, {}).get("enabled", False) == (balancing == precision)
    offload = recipe["zero_optimization"].get("offload_optimizer", {})
    assert offload.get("device", "none") == ("cpu" if balancing == "cpu_offload" else "none")
    assert recipe["tensorboard"]["job_name"] == name
    assert parse_router_config(recipe).type == (
        "hyper" if balancing == "hyper_router" else "linear"
    )


def test_recipes_that_are_compared_differ_in_nothing_but_their_balancing() -> None:
    """The demo compares two of them: any other difference would be taken for the loss's effect."""
    recipes = [_read(name) for name in RECIPES if name.startswith("zero1")]
    for recipe in recipes:
        del recipe["moe_load_balancing"], recipe["tensorboard"]["job_name"]
        recipe.pop("moe_router", None)
    assert all(recipe == recipes[0] for recipe in recipes)


def test_a_recipe_is_found_by_name_and_a_wrong_name_lists_all() -> None:
    assert config_path("zero1_ep2_boundary") == config_path("zero1_ep2_boundary.json")
    with pytest.raises(ValueError, match=r"no ready config is named 'zero9'.*zero1_ep2_boundary"):
        config_path("zero9")


@pytest.mark.ranks
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_two_steps_on_two_ranks(name: str, tmp_path: Path) -> None:
    recipe = copy.deepcopy(_read(name))
    recipe["tensorboard"]["output_path"] = str(tmp_path)
    reports = run_ranks(_check_two_steps, 2, recipe, timeout_s=180.0)
    assert reports[0] == pytest.approx(reports[1], nan_ok=True)
    # Two layers, top-2, 2 ranks x 8 micro-batches x 2 sequences of 6 tokens.
    assert reports[0]["valid_tokens"] == 2 * 8 * 2 * 6
    if recipe["moe_load_balancing"]["scope"] != "none":
        assert reports[0]["lbl_used"] > 0.0
    assert list((tmp_path / name).glob("events.out.tfevents.*"))


def _check_two_steps(recipe: dict) -> dict[str, float]:
    """Train as a user's script does; returns the metrics of the last report."""
    import ds_moe_lb
    from models import MODEL_DIM, TinyMoE, moe_param_groups

    is_fp16 = "fp16" in recipe
    if is_fp16 and not torch.cuda.is_available():
        # DeepSpeed refuses fp16 on a CPU. The loss scale, which is what fp16 adds to the
        # mathematics, goes through the same code with a fixed scale in fp32.
        del recipe["fp16"]
    model = TinyMoE(k=2, ep_size=2, isolate=False)
    engine, *_ = ds_moe_lb.initialize(
        model=model, model_parameters=moe_param_groups(model), config=recipe
    )
    if is_fp16 and "fp16" not in recipe:
        engine.optimizer.override_loss_scale(STATIC_LOSS_SCALE)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    dtype = before[0].dtype
    assert (dtype == torch.bfloat16) == ("bf16" in recipe)
    for _ in range(2 * engine.gradient_accumulation_steps()):
        x = torch.randn(engine.train_micro_batch_size_per_gpu(), 6, MODEL_DIM, dtype=dtype)
        prediction, losses = engine(x.to(engine.device))
        loss = prediction.float().square().mean() + 0.01 * sum(losses)
        assert torch.isfinite(loss)
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 2
    for name, parameter in engine.module.named_parameters():
        assert torch.isfinite(parameter).all(), name
    moved = {
        name: not torch.equal(old, new)
        for old, (name, new) in zip(before, engine.module.named_parameters(), strict=True)
    }
    trainable = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    assert not any(moved.pop(name) for name in set(moved) - trainable)
    # In bf16 a warm-up step may be smaller than the spacing of the weights.
    assert any(moved.values()) if "bf16" in recipe else all(moved.values()), moved
    return engine.load_balancer.metrics()
