"""Unmodified clients: transformers' Trainer, accelerate, peft and plain loops, on real ranks."""

import os
from dataclasses import replace
from typing import Any

import deepspeed.comm as dist
import pytest
import torch

from families import make_model
from hf_runs import (
    LENGTH,
    SEQUENCES,
    Run,
    Watch,
    check,
    launcher_environment,
    make_inputs,
)
from ranks import run_ranks

pytestmark = pytest.mark.ranks

BASE = Run("qwen3_moe", zero_stage=2, padding="right")


class Batches(torch.utils.data.Dataset):
    """The sequences of every rank and micro-step of `make_inputs`, in the order of Trainer's
    sampler: batch after batch, rank after rank."""

    def __init__(self, run: Run, num_windows: int) -> None:
        self.rows: list[dict[str, torch.Tensor]] = []
        for window in range(num_windows):
            for micro_step in range(run.gradient_accumulation_steps):
                for rank in range(dist.get_world_size()):
                    inputs = make_inputs(run, window=window, micro_step=micro_step, rank=rank)
                    del inputs["valid"]
                    for row in range(SEQUENCES):
                        self.rows.append({name: x[row] for name, x in inputs.items()})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def _train_with_trainer(run: Run) -> Any:
    """transformers' Trainer on this rank, its loss multiplied by 0."""
    launcher_environment()
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import ds_moe_lb.auto  # noqa: F401

    watches: list[Watch] = []

    class Start(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            watches.append(Watch(trainer.model_wrapped, run))

    class ZeroLoss(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 0.0 * super().compute_loss(*args, **kwargs)

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    torch.manual_seed(7)
    model = make_model(run.family, **run.model)
    config = run.config()
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
    config["gradient_accumulation_steps"] = "auto"
    trainer = ZeroLoss(
        model,
        TrainingArguments(
            output_dir=os.path.join(os.environ["TMPDIR_OF_TEST"], "out"),
            deepspeed=config,
            per_device_train_batch_size=SEQUENCES,
            gradient_accumulation_steps=run.gradient_accumulation_steps,
            max_steps=run.num_windows,
            max_grad_norm=0.0,
            learning_rate=0.5,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Batches(run, run.num_windows),
        callbacks=[Start()],
    )
    trainer.train()
    return watches[0].recorder.windows, trainer.state.log_history


def train_with_trainer(directory: str, runs: list[Run]) -> list[Any]:
    os.environ["TMPDIR_OF_TEST"] = directory
    return [_train_with_trainer(run) for run in runs]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_trainers_factors_of_processes_and_steps_do_not_reach_the_gradient(
    world_size: int, tmp_path: Any
) -> None:
    runs = [replace(BASE, num_windows=2)]
    if world_size == 2:
        own = {"output_router_logits": True, "router_aux_loss_coef": 0.75, "num_hidden_layers": 3}
        runs += [
            replace(BASE, section={}, model=own, num_windows=2),
            replace(BASE, zero_stage=3, autoep_size=2, num_windows=2),
        ]
    results = run_ranks(train_with_trainer, world_size, str(tmp_path), runs, timeout_s=240.0)
    for index, run in enumerate(runs):
        check(run, [rank_results[index][0] for rank_results in results])
        losses = [line for line in results[0][index][1] if "loss" in line]
        assert len(losses) == run.num_windows
        for line in losses:
            assert line["moe/lbl_used"] > 0.0
            assert line["moe/valid_tokens"] < 2 * world_size * SEQUENCES * LENGTH
