"""The training loop: engine, micro-batches, validation, checkpoints, logs, a clean stop."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import numpy as np
import torch
from deepspeed.moe.utils import configure_moe_param_groups
from torch import Tensor

import ds_moe_lb
from ds_moe_lb.data.batches import BatchPlan, check_sequence_length, training_micro_batches
from ds_moe_lb.data.corpus import Corpus
from ds_moe_lb.data.domain_weights import DomainWeights
from ds_moe_lb.training.evaluate import evaluate
from ds_moe_lb.training.options import TrainOptions
from ds_moe_lb.training.progress import Progress
from ds_moe_lb.training.run_folder import RunFolder
from ds_moe_lb.training.stop_request import StopRequest
from ds_moe_lb.training.trainable import LanguageModel, ModelKind, language_model_loss

# `LoadBalancer.metrics()` marks the values of single layers so; history.jsonl keeps the means.
_PER_LAYER_MARK = "/"
_WEIGHTS_KEY = "domain_weights"  # in the client state of a checkpoint


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything a run is made of, the same on all ranks."""

    options: TrainOptions
    model: ModelKind
    ds_config: dict[str, Any]
    corpus: Corpus


class Trainer:
    """Trains one model on one corpus. Collective: all ranks construct and run it together."""

    def __init__(self, task: Task, folder: RunFolder) -> None:
        """Build model and engine; nothing is written but DeepSpeed's own logs."""
        check_sequence_length(task.corpus, task.model.sequence_length)
        self.task = task
        self.folder = folder
        ds_config, self._aux_loss_coeff = task.model.settle_coefficient(
            task.options, task.ds_config
        )
        self._domain_weights = _domain_weights(task)
        self._model: LanguageModel = task.model.build(seed=task.options.seed)
        self.engine = _build_engine(
            self._model, ds_config, learning_rate=task.options.learning_rate
        )
        self.plan = BatchPlan(
            sequence_length=task.model.sequence_length,
            micro_batch_size=self.engine.train_micro_batch_size_per_gpu(),
            gradient_accumulation_steps=self.engine.gradient_accumulation_steps(),
            dp_world_size=dist.get_world_size(),
            seed=task.options.seed,
        )

    @property
    def step(self) -> int:
        """Optimizer steps done, over resumed runs."""
        return int(self.engine.global_steps)

    def resume(self) -> None:
        """Load the newest checkpoint and drop later log lines.

        Raises:
            ValueError: when there is none.
        """
        path, client_state = self.engine.load_checkpoint(str(self.folder.checkpoints))
        if path is None:
            raise ValueError(f"--resume: no checkpoint in {self.folder.checkpoints}")
        if self._domain_weights is not None:
            self._domain_weights.load_state_dict(client_state[_WEIGHTS_KEY])
        self.folder.forget_after(self.step)

    def run(self, progress: Progress, stop: StopRequest) -> bool:
        """Train up to `options.steps`.

        Returns:
            True when finished, False when stopped; there is a checkpoint in either case.
        """
        options = self.task.options
        validated = saved = -1
        if self._missed_an_update() or (self.step == 0 and self.task.model.is_trained):
            self._validate(progress)
        while self.step < options.steps:
            stopped = self._train_step(progress, stop)
            if self._is_validation_step() and not stopped:
                self._validate(progress)
                validated = self.step
            if stopped or (options.save_interval and self.step % options.save_interval == 0):
                self._save()
                saved = self.step
            if stopped and self.step < options.steps:
                return False
        if validated != self.step:
            self._validate(progress)
        if saved != self.step:
            self._save()
        self._model.export(self.engine, self.folder.model)
        return True

    def _train_step(self, progress: Progress, stop: StopRequest) -> bool:
        """One optimizer step on all ranks; returns whether any rank was asked to stop."""
        started = time.perf_counter()
        step = self.step
        self._seed_step(step)
        sums = torch.zeros(3, dtype=torch.float64, device=self.engine.device)  # loss, l_aux, stop
        micro_batches = training_micro_batches(
            self.task.corpus,
            self.plan,
            step=step,
            dp_rank=dist.get_rank(),
            weights_D=None if self._domain_weights is None else self._domain_weights.weights_D,
        )
        for tokens in self._window(tokens.to(self.engine.device) for tokens in micro_batches):
            output = self._model.forward(self.engine, tokens[:, :-1])
            lm_loss = language_model_loss(output.logits_BSV, tokens[:, 1:])
            self.engine.backward(lm_loss + self._aux_loss_coeff * output.l_aux)
            self.engine.step()
            sums += (
                torch.stack([lm_loss, output.l_aux, torch.zeros_like(lm_loss)]).detach().double()
            )
        sums[2] = float(stop.received)
        if self.plan.dp_world_size > 1:
            dist.all_reduce(sums, group=dist.get_world_group())
        total_lm, total_aux, stop_votes = sums.tolist()
        number = self.plan.gradient_accumulation_steps * self.plan.dp_world_size
        seconds = time.perf_counter() - started
        record = {
            "step": self.step,
            "lm_loss": total_lm / number,
            "l_aux": total_aux / number,
            "tokens_per_second": self.plan.global_batch_size * self.plan.sequence_length / seconds,
            "seconds": seconds,
            **self._balance(),
        }
        self._write_events({"Train/Samples/lm_loss": record["lm_loss"]})
        self.folder.append_history(record)
        progress.update(self.step, record)
        return stop_votes > 0

    def _window(self, micro_batches: Iterable[Tensor]) -> Iterable[Tensor]:
        """The micro-batches of one step, counted first where the estimate wants it."""
        balancer = self.engine.load_balancer
        if balancer is None:
            return micro_batches
        window: Iterable[Tensor] = balancer.window(
            iter(micro_batches), lambda tokens: self._model.forward(self.engine, tokens[:, :-1])
        )
        return window

    def _seed_step(self, step: int) -> None:
        """Make all draws of a step a function of seed, step and rank, so that resuming is exact."""
        words = np.random.SeedSequence(
            [self.task.options.seed, step, dist.get_rank()]
        ).generate_state(1)
        torch.manual_seed(int(words[0]))

    def _balance(self) -> dict[str, float]:
        balancer = getattr(self.engine, "load_balancer", None)
        if balancer is None:
            return {}
        return {
            key: value for key, value in balancer.metrics().items() if _PER_LAYER_MARK not in key
        }

    def _validate(self, progress: Progress) -> None:
        options = self.task.options
        validation = evaluate(
            self.engine,
            self._model,
            self.task.corpus,
            sequence_length=self.task.model.sequence_length,
            batch_size=options.eval_batch_size,
            max_batches=options.eval_batches,
        )
        record = validation.record(step=self.step, domain_names=self.task.corpus.domain_names)
        if self._domain_weights is not None:
            if self._is_validation_step():
                self._domain_weights.update(validation.loss_D.tolist(), step=self.step)
            record["domain_weights"] = self._domain_weights.by_name
        self.folder.append_validation(record)
        events = {"Validation/Samples/loss": validation.loss}
        events |= {f"Validation/Samples/loss/{k}": v for k, v in record["loss_per_domain"].items()}
        for name, weight in record.get("domain_weights", {}).items():
            events[f"Validation/Samples/domain_weight/{name}"] = weight
        self._write_events(events)
        progress.note(f"step {self.step}: validation loss {validation.loss:.4f} nats per byte")

    def _is_validation_step(self) -> bool:
        interval = self.task.options.eval_interval
        return interval > 0 and self.step > 0 and self.step % interval == 0

    def _missed_an_update(self) -> bool:
        """Whether the run was stopped between a step and the validation that weights follow."""
        weights = self._domain_weights
        if weights is None or not weights.is_dynamic:
            return False
        return self._is_validation_step() and weights.updated_at < self.step

    def _write_events(self, values: Mapping[str, float]) -> None:
        samples = self.engine.global_samples
        if self.engine.monitor.enabled and dist.get_rank() == 0:
            self.engine.monitor.write_events(
                [(tag, value, samples) for tag, value in values.items()]
            )

    def _save(self) -> None:
        client_state = {}
        if self._domain_weights is not None:
            client_state[_WEIGHTS_KEY] = self._domain_weights.state_dict()
        self.engine.save_checkpoint(
            str(self.folder.checkpoints), tag=f"step{self.step:06d}", client_state=client_state
        )


def prepare_ds_config(ds_config: Mapping[str, Any], tensorboard: Path) -> dict[str, Any]:
    """The user's config with the TensorBoard logs, unless they are off, in the run folder."""
    section = {**ds_config.get("tensorboard", {"enabled": True})}
    section |= {"output_path": str(tensorboard), "job_name": ""}
    # DeepSpeed prints a line of its own every ten steps, which would break the progress bar.
    return {**ds_config, "steps_per_print": 1_000_000_000, "tensorboard": section}


def _domain_weights(task: Task) -> DomainWeights | None:
    """None where every domain is sampled equally often for ever."""
    options = task.options
    if options.domain_weights is None and options.reference_losses is None:
        return None
    return DomainWeights(
        task.corpus.domain_names,
        weights=options.domain_weights,
        reference_losses=options.reference_losses,
    )


def _build_engine(model: LanguageModel, ds_config: dict[str, Any], *, learning_rate: float) -> Any:
    def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        groups = configure_moe_param_groups(list(parameters))
        return torch.optim.AdamW(groups, lr=learning_rate)

    # The engine takes the parameters from the model itself, after AutoEP and moe_router replaced
    # some, and makes groups of the experts for an optimizer of its own.
    engine, _, _, _ = ds_moe_lb.initialize(
        model=model.module, optimizer=None if "optimizer" in ds_config else adamw, config=ds_config
    )
    return engine
