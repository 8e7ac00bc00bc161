"""The toy on which all experiments run, and one run of it as plain data with a key.

The global batch (sequences of an optimizer step), steps, learning rate, text and its order are the
same in all runs of a seed: micro-batches are slices of one global batch, however it is cut.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds_moe_lb.training.options import SECTION, TrainOptions

if TYPE_CHECKING:
    from ds_moe_lb.training.model import ModelConfig

NUM_RANKS = 2
REPORT_INTERVAL = 5  # optimizer steps from one point of the recorded curves to the next


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes that all runs of an experiment share.

    Attributes:
        steps: optimizer steps.
        global_batch_size: sequences of one optimizer step.
        micro_batch_size: sequences of one forward of one rank, where a run asks for no other.
        learning_rate: at its highest; the first tenth of the steps rises to it, the rest falls to
            zero.
        aux_loss_coeff: weight of the balancing loss of each layer.
        bias_update_rate: of auxiliary-loss-free balancing.
        hybrid_weight: of the micro-batch loss beside the global one.
        model: fields of `ModelConfig` that differ from its defaults.
        eval_batches: validation batches per domain.
    """

    steps: int = 150
    global_batch_size: int = 32
    micro_batch_size: int = 2
    learning_rate: float = 3e-3
    aux_loss_coeff: float = 0.1
    bias_update_rate: float = 0.003
    hybrid_weight: float = 0.01
    model: Mapping[str, Any] = field(
        default_factory=lambda: {"num_layers": 2, "sequence_length": 64}
    )
    eval_batches: int = 4

    def run(
        self,
        *,
        seed: int,
        section: Mapping[str, Any],
        micro_batch_size: int | None = None,
        router: Mapping[str, Any] | None = None,
        shuffled: bool = False,
    ) -> "RunSpec":
        """One run.

        Args:
            seed: weights, data order and every other random draw.
            section: of `moe_load_balancing`, its monitor left out.
            micro_batch_size: sequences of one forward of one rank; None = that of the setting.
            router: the section `moe_router`; None = none.
            shuffled: f is that of a random sample of the global batch (the paper's control).
        """
        micro = micro_batch_size or self.micro_batch_size
        gas, rest = divmod(self.global_batch_size, micro * NUM_RANKS)
        if rest or not gas:
            raise ValueError(
                f"micro_batch_size: got {micro}, expected a divisor of "
                f"{self.global_batch_size // NUM_RANKS}, the sequences of a rank in one step"
            )
        ds_config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": gas,
            "gradient_clipping": 1.0,
            "steps_per_print": 1_000_000_000,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": self.learning_rate,
                    "betas": [0.9, 0.95],
                    "eps": 1e-8,
                    "weight_decay": 0.1,
                    "torch_adam": True,
                },
            },
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": self.steps,
                    "warmup_num_steps": max(self.steps // 10, 2),
                    "warmup_min_ratio": 0.1,
                    "cos_min_ratio": 0.02,
                },
            },
            "zero_optimization": {"stage": 1},
            SECTION: {
                **section,
                "monitor": {"interval": min(REPORT_INTERVAL, self.steps), "detail": "model"},
            },
        }
        if router is not None:
            ds_config["moe_router"] = dict(router)
        return RunSpec(
            seed=seed,
            steps=self.steps,
            eval_batches=self.eval_batches,
            model=dict(self.model),
            ds_config=ds_config,
            shuffled=shuffled,
        )


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that decides the numbers of one run, but for the text and the versions.

    Attributes:
        seed: weights, data order and every other random draw.
        steps: optimizer steps.
        eval_batches: validation batches per domain.
        model: fields of `ModelConfig` that differ from its defaults.
        ds_config: the whole DeepSpeed config.
        shuffled: f is that of a random sample of the global batch.
    """

    seed: int
    steps: int
    eval_batches: int
    model: dict[str, Any]
    ds_config: dict[str, Any]
    shuffled: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """All but the seed, as plain data."""
        return {
            "steps": self.steps,
            "eval_batches": self.eval_batches,
            "num_ranks": NUM_RANKS,
            "model": self.model,
            "ds_config": self.ds_config,
            "shuffled": self.shuffled,
        }

    def key(self, corpus_sha256: str) -> str:
        """What a recorded run is found by: config, seed and text, whichever experiment asks."""
        content = {"config": self.config, "seed": self.seed, "corpus": corpus_sha256}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def model_config(self) -> "ModelConfig":
        """The model, its experts spread over the ranks."""
        from ds_moe_lb.training.model import ModelConfig  # torch: too heavy for a --help

        return ModelConfig(**{**self.model, "ep_size": NUM_RANKS})

    def options(self) -> TrainOptions:
        """Of the training loop; validated once, at the end."""
        return TrainOptions(
            steps=self.steps, seed=self.seed, eval_interval=0, eval_batches=self.eval_batches
        )
