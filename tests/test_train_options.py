"""What the commands refuse before they start, and the model by itself."""

import json
from pathlib import Path

import pytest
import torch

from dense_models import save_dense
from ds_moe_lb.cli import EXIT_USAGE, arguments, main
from ds_moe_lb.cli.compare import scope_configs
from ds_moe_lb.cli.train import load_ds_config
from ds_moe_lb.training.model import ByteMoEModel, ModelConfig, initialise_experts
from ds_moe_lb.training.options import (
    TrainOptions,
    script_aux_loss_coeff,
    with_aux_loss_coeff,
)
from ds_moe_lb.training.transformers_model import TransformersModel


def test_scopes_differ_in_scope_only() -> None:
    config = load_ds_config("zero1_ep2_boundary")
    micro, full = (scope_configs(config)[scope] for scope in ("micro_batch", "global_batch"))
    assert {**micro, "moe_load_balancing": 0} == {**full, "moe_load_balancing": 0}
    micro_section, full_section = micro["moe_load_balancing"], full["moe_load_balancing"]
    assert full_section == {**config["moe_load_balancing"], "enabled": True}
    assert micro_section["scope"] == "micro_batch"
    assert set(full_section) - set(micro_section) == {"estimate"}


def test_coefficient_is_either_in_the_script_or_in_the_json() -> None:
    injected = {"moe_load_balancing": {"aux_loss_coeff": 0.01}}
    assert script_aux_loss_coeff(TrainOptions(), {}) == 0.1
    assert script_aux_loss_coeff(TrainOptions(aux_loss_coeff=0.3), {}) == 0.3
    assert script_aux_loss_coeff(TrainOptions(), injected) == 0.0
    with pytest.raises(ValueError, match=r"--aux-loss-coeff 0\.3: .*Drop the flag"):
        script_aux_loss_coeff(TrainOptions(aux_loss_coeff=0.3), injected)
    injected["moe_load_balancing"]["enabled"] = False
    assert script_aux_loss_coeff(TrainOptions(aux_loss_coeff=0.3), injected) == 0.3


def test_options_out_of_range_name_the_flag() -> None:
    with pytest.raises(ValueError, match=r"--eval-batches: got 0, expected a number >= 1"):
        TrainOptions(eval_batches=0)


def test_config_by_name_by_path_and_wrong(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"train_batch_size": 4}))
    assert load_ds_config(str(file)) == {"train_batch_size": 4}
    assert load_ds_config("zero2_ep2_bf16")["bf16"]["enabled"] is True
    file.write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        load_ds_config(str(file))
    with pytest.raises(ValueError, match="no ready config is named 'nothing'; there are: .*zero1"):
        load_ds_config("nothing")


def test_compare_refuses_a_used_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "micro_batch").mkdir()
    assert main(["compare", "--output", str(tmp_path)]) == EXIT_USAGE
    assert "holds a comparison already" in capsys.readouterr().err


def test_flags_survive_the_way_through_a_command_line() -> None:
    values = {"steps": 7, "aux_loss_coeff": 0.5, "checkpointing": "reentrant"}
    words = arguments.as_flags(values)
    assert words == ["--steps", "7", "--aux-loss-coeff", "0.5", "--checkpointing", "reentrant"]


def test_every_expert_starts_from_weights_of_its_own() -> None:
    """And rank 1 of two holds the second half of what one process holds."""

    def experts(ep_size: int, ep_rank: int) -> list[torch.Tensor]:
        sizes = {"num_layers": 2, "model_dim": 8, "num_heads": 2, "expert_dim": 8, "num_experts": 4}
        model = ByteMoEModel(ModelConfig(**sizes, ep_size=ep_size))
        initialise_experts(model, ep_rank=ep_rank, seed=1)
        return [
            expert.up.weight
            for block in model.blocks
            for expert in block.moe.deepspeed_moe.experts.deepspeed_experts
        ]

    alone = experts(1, 0)
    for first in range(8):
        for second in range(first):
            assert not torch.equal(alone[first], alone[second])
    halves = [experts(2, rank) for rank in (0, 1)]
    expected = [alone[index] for index in (2, 3, 6, 7)]
    assert all(torch.equal(a, b) for a, b in zip(halves[1], expected, strict=True))


def test_the_flag_becomes_the_coefficient_of_the_section_for_a_folder_model() -> None:
    config = {"moe_load_balancing": {"scope": "micro_batch"}, "other": 1}
    assert with_aux_loss_coeff(TrainOptions(aux_loss_coeff=0.3), config) == {
        "moe_load_balancing": {"scope": "micro_batch", "aux_loss_coeff": 0.3},
        "other": 1,
    }
    assert with_aux_loss_coeff(TrainOptions(), config) == config
    with pytest.raises(ValueError, match=r"--aux-loss-coeff 0\.3: .* no section"):
        with_aux_loss_coeff(TrainOptions(aux_loss_coeff=0.3), {})
    config["moe_load_balancing"] = {"aux_loss_coeff": 0.01}
    with pytest.raises(ValueError, match=r"--aux-loss-coeff 0\.3: .*Drop the flag"):
        with_aux_loss_coeff(TrainOptions(aux_loss_coeff=0.3), config)


@pytest.mark.parametrize("flag", ["--num-experts", "--model-dim", "--ep-size"])
def test_a_folder_model_refuses_sizes(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained or written."""
    words = ["compare", "--output", str(tmp_path / "out"), "--model", str(tmp_path), flag, "4"]
    assert main(words) == EXIT_USAGE
    assert f"--model has sizes of its own: drop {flag} (" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_no_model_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--model .*: expected the folder .* no config\.json"):
        TransformersModel(model=str(tmp_path)).build(seed=1)
    save_dense(tmp_path / "small", "llama")
    with pytest.raises(ValueError, match=r"a vocabulary of 64, expected at least 256, .* bytes"):
        TransformersModel(model=str(tmp_path / "small")).build(seed=1)
    save_dense(tmp_path / "bytes", "llama", vocab_size=256)
    with pytest.raises(ValueError, match=r"--sequence-length: got 128, expected at most 64"):
        TransformersModel(model=str(tmp_path / "bytes")).build(seed=1)
    assert "num_experts" not in TransformersModel(model=str(tmp_path / "bytes")).describe()
    hyper = {"moe_router": {"type": "hyper"}}
    with pytest.raises(ValueError, match=r"moe_router\.type: got 'hyper', .* with --model"):
        TransformersModel(model=str(tmp_path / "bytes")).settle_coefficient(TrainOptions(), hyper)
    autoep = {"expert_parallel": {"enabled": True}}
    with pytest.raises(ValueError, match=r"got a llama model with expert_parallel, .* mixtral"):
        TransformersModel(model=str(tmp_path / "bytes")).settle_coefficient(TrainOptions(), autoep)


@pytest.mark.parametrize("command", [["compare"], ["experiment", "methods"]])
def test_output_that_cannot_be_written_is_told_before_training(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*command, "--output", str(tmp_path / "file/runs")]) == EXIT_USAGE
    assert "file/runs cannot be written to (Not a directory)" in capsys.readouterr().err


def test_compare_without_a_model_in_the_folder_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs"
    assert main(["compare", "--model", str(tmp_path), "--output", str(output)]) == EXIT_USAGE
    assert capsys.readouterr().err.count("it has no config.json") == 1
    assert not output.exists()
