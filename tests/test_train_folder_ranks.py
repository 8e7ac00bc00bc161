"""transformers models of a folder in the trainer: dense, MoE, AutoEP; what a run leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_moe_lb.data.corpus import Corpus, Document, build_corpus, build_domain
from ranks import run_ranks

STEPS, INTERVAL, LENGTH = 4, 2, 16
EVAL_BATCH = 2
SECTION = {"scope": "global_batch", "estimate": "boundary", "aux_loss_coeff": 0.1}
_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "norm_topk_prob": True,
    },
}


def save_tiny(path: Path, model_type: str) -> Path:
    """A folder with a model of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **MODELS[model_type]})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def make_corpus() -> Corpus:
    """Two domains that share no byte."""
    return build_corpus(
        [
            build_domain(name, [Document(name=str(i), text=name.encode() * 90) for i in range(3)])
            for name in ("abcd", "xyz")
        ]
    )


def _ds_config(zero_stage: int, *, moe: bool, preset: str | None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": zero_stage}
    if zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 1_000_000,
        "gradient_clipping": 0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    if moe:
        config["moe_load_balancing"] = SECTION
    if preset is not None:
        config["expert_parallel"] = {"enabled": True, "autoep_size": 2, "preset_model": preset}
    return config


def _check_run(folder: str, source: str, ds_config: dict[str, Any], stopped_at: int | None) -> None:
    """A whole run, and the same one stopped and resumed; what both leave."""
    import deepspeed.comm as dist

    from ds_moe_lb.training.options import TrainOptions
    from ds_moe_lb.training.progress import Silent
    from ds_moe_lb.training.run_folder import RunFolder
    from ds_moe_lb.training.trainer import Task, Trainer
    from ds_moe_lb.training.transformers_model import TransformersModel

    task = Task(
        options=TrainOptions(
            steps=STEPS,
            eval_interval=INTERVAL,
            eval_batches=1,
            eval_batch_size=EVAL_BATCH,
            reference_losses={"abcd": 4.0, "xyz": 5.0},
        ),
        model=TransformersModel(model=source, sequence_length=LENGTH),
        ds_config=ds_config,
        corpus=make_corpus(),
    )

    def run(name: str, *, stop_at: int | None = None, resume: bool = False) -> None:
        folders = RunFolder(Path(folder) / name, writes=dist.get_rank() == 0)
        trainer = Trainer(task, folders)
        if resume:
            trainer.resume()
        else:
            folders.write_info({})

        class Stop:
            @property
            def received(self) -> bool:
                return trainer.step == stop_at

        assert trainer.run(Silent(), Stop()) == (stop_at is None)  # type: ignore[arg-type]

    run("whole")
    if stopped_at is not None:
        run("stopped", stop_at=stopped_at)
        run("stopped", resume=True)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _held_out_rows(domain: Any, world_size: int) -> torch.Tensor:
    """``(B, S + 1)``: the rows that all ranks validate on, cut here once more."""
    rows = EVAL_BATCH * world_size
    last = len(domain.validation) - LENGTH - 1
    starts = [int(i / (rows - 1) * last) for i in range(rows)]
    return torch.stack(
        [torch.tensor(domain.validation[s : s + LENGTH + 1].astype("int64")) for s in starts]
    )


def _reference_validation(model_folder: Path, world_size: int) -> tuple[list[float], list[Any]]:
    """Loss and counts of each domain by a plain loop over the exported model."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        model_folder, output_loading_info=True, local_files_only=True
    )
    assert {key: list(names) for key, names in info.items() if names} == {}
    model.eval()
    losses, counts_DLE = [], []
    for domain in make_corpus().domains:
        tokens = _held_out_rows(domain, world_size)
        with torch.no_grad():
            is_moe = hasattr(model.config, "num_experts_per_tok")
            extra = {"output_router_logits": True} if is_moe else {}
            output = model(input_ids=tokens[:, :-1], **extra)
        logits = output.logits.double().log_softmax(-1)
        losses.append(float(-logits.gather(-1, tokens[:, 1:, None]).mean()))
        counts_LE = []
        for logits_TE in getattr(output, "router_logits", None) or ():
            chosen = logits_TE.topk(2, dim=-1)[1].flatten().tolist()
            counts_LE.append([chosen.count(expert) for expert in range(4)])
        counts_DLE.append(counts_LE)
    return losses, counts_DLE


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model_type", "zero_stage", "autoep", "stopped_at"),
    [
        ("llama", 1, False, 3),
        ("mixtral", 2, False, 3),  # between two validations
        ("mixtral", 1, True, 2),
        ("qwen3_moe", 3, True, None),
        ("qwen2_moe", 2, True, None),
    ],
)
def test_a_folder_model_trains_resumes_and_comes_back(
    model_type: str, zero_stage: int, autoep: bool, stopped_at: int | None, tmp_path: Path
) -> None:
    """On two ranks: resumed equals never stopped; the exported model has the validated numbers."""
    source = save_tiny(tmp_path / "source", model_type)
    config = _ds_config(
        zero_stage,
        moe=model_type != "llama",
        preset=model_type.replace("qwen2", "qwen3") if autoep else None,
    )
    run_ranks(_check_run, 2, str(tmp_path), str(source), config, stopped_at, timeout_s=120)
    whole = tmp_path / "whole"
    validations = _lines(whole / "validation.jsonl")
    assert [line["step"] for line in validations] == [0, 2, 4]
    # Weights follow the validations of training, not that of the model it starts from.
    weights = [line["domain_weights"]["abcd"] for line in validations]
    assert weights[0] == 0.5 and len(set(weights)) == 3
    for folder, line in ((source, validations[0]), (whole / "model", validations[-1])):
        losses, counts_DLE = _reference_validation(folder, 2)
        assert list(line["loss_per_domain"].values()) == pytest.approx(losses, rel=1e-5)
        for layer, counts_DE in enumerate(line["tokens_per_expert_LDE"]):
            assert counts_DE == [counts_LE[layer] for counts_LE in counts_DLE]
        assert len(line["tokens_per_expert_LDE"]) == (0 if model_type == "llama" else 2)
    assert validations[-1]["loss"] < validations[0]["loss"]
    if stopped_at is not None:
        for file, timed in (("history.jsonl", True), ("validation.jsonl", False)):
            found, expected = (_lines(tmp_path / name / file) for name in ("stopped", "whole"))
            if timed:
                for line in (*found, *expected):
                    del line["seconds"], line["tokens_per_second"]
            assert found == expected
