"""What the trainer needs of a model, whoever wrote it.

Shape legend: B sequences, S positions, V vocabulary, L MoE layers, E experts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional

from ds_moe_lb.training.options import TrainOptions

NUM_BYTES = 256
Checkpointing = Literal["off", "reentrant", "non_reentrant"]


class ModelOutput(NamedTuple):
    """What one forward returns.

    Attributes:
        logits_BSV: next-byte logits.
        l_aux: sum over layers of the gate's loss, as DeepSpeed hands it out; a scalar, 0 where the
            plugin adds the loss.
        tokens_per_expert_LE: local int64 selections per layer and expert, before dropping; always
            there in evaluation mode, with L = 0 in a dense model.
    """

    logits_BSV: Tensor
    l_aux: Tensor
    tokens_per_expert_LE: Tensor


class LanguageModel(Protocol):
    """A model that was built, and what is done with it around the engine."""

    @property
    def module(self) -> nn.Module:
        """What the engine is built from."""

    def forward(self, engine: Any, tokens_BS: Tensor) -> ModelOutput:
        """One forward of the engine on bytes, as its mode is."""

    def export(self, engine: Any, folder: Path) -> None:
        """Write the trained weights as other programs read them. Collective."""


class ModelKind(Protocol):
    """Which model to train: plain data, a frozen dataclass that is the same on all ranks."""

    @property
    def sequence_length(self) -> int:
        """Bytes that are predicted per sequence."""

    @property
    def is_trained(self) -> bool:
        """Whether the weights that training starts from are worth a validation."""

    def describe(self) -> dict[str, Any]:
        """What run.json holds: its fields; `num_layers`, `num_experts` and `top_k` if it is MoE."""

    def settle_coefficient(
        self, options: TrainOptions, ds_config: Mapping[str, Any]
    ) -> tuple[dict[str, Any], float]:
        """Who applies the balancing loss.

        Returns:
            The DeepSpeed config to build the engine with, and the factor on `l_aux` in the loop.

        Raises:
            ValueError: the flag and the config do not fit.
        """

    def build(self, *, seed: int) -> LanguageModel:
        """The model on this rank; all random draws come from the seed."""


def language_model_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, computed in fp32."""
    return functional.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())
