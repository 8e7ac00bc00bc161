"""A transformers causal LM from a local folder, dense or MoE, trained on bytes as tokens.

Shape legend: B sequences, S positions, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ds_moe_lb.adapters.selections import Selections
from ds_moe_lb.config import ROUTER_SECTION
from ds_moe_lb.plan.model_facts import facts_of
from ds_moe_lb.training.options import TrainOptions, with_aux_loss_coeff
from ds_moe_lb.training.trainable import NUM_BYTES, Checkpointing, ModelOutput
from ds_moe_lb.training.transformers_export import AUTOEP_FAMILIES, export


@dataclass(frozen=True, kw_only=True)
class TransformersModel:
    """A model folder as `save_pretrained` writes it.

    Attributes:
        model: the folder, absolute, the same on all ranks; a resumed run reads its config again.
        sequence_length: longest input.
        checkpointing: recompute layers in backward instead of keeping their activations.
    """

    model: str
    sequence_length: int = 128
    checkpointing: Checkpointing = "off"

    @property
    def is_trained(self) -> bool:
        return True

    def describe(self) -> dict[str, Any]:
        found = asdict(self)
        try:
            facts = facts_of(self._config().to_dict(), name=self.model)
        except ValueError:  # dense
            return found
        sizes = {"num_layers": facts.num_layers, "num_experts": facts.num_experts}
        return found | sizes | {"top_k": facts.top_k}

    def settle_coefficient(
        self, options: TrainOptions, ds_config: Mapping[str, Any]
    ) -> tuple[dict[str, Any], float]:
        """The flag goes into the config, and nothing is left for the loop to add."""
        if ds_config.get("expert_parallel", {}).get("enabled", False):
            self._check_family()
        router = ds_config.get(ROUTER_SECTION, {}).get("type", "linear")
        if router != "linear":
            raise ValueError(
                f"{ROUTER_SECTION}.type: got {router!r}, expected 'linear' with --model: "
                f"transformers cannot load other routers from what the run saves"
            )
        return with_aux_loss_coeff(options, ds_config), 0.0

    def build(self, *, seed: int) -> "TransformersLanguageModel":
        """Load the weights as fp32; the DeepSpeed config decides what they are trained in.

        Raises:
            ValueError: there is no model in the folder, or it cannot be trained on bytes.
        """
        torch.manual_seed(seed)
        self._check_config()
        try:
            module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                self.model, local_files_only=True, dtype=torch.float32
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {self.model}: {error}") from None
        if self.checkpointing != "off":
            module.gradient_checkpointing_enable(
                {"use_reentrant": self.checkpointing == "reentrant"}
            )
        module.train()  # from_pretrained leaves it in evaluation mode
        return TransformersLanguageModel(module, source=Path(self.model))

    def _check_family(self) -> None:
        family = self._config().model_type
        if family not in AUTOEP_FAMILIES:
            raise ValueError(
                f"--model {self.model}: got a {family} model with expert_parallel, whose layers "
                f"cannot be saved for transformers again, expected one of "
                f"{', '.join(AUTOEP_FAMILIES)}; without that section every rank holds all experts"
            )

    def _config(self) -> Any:
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(
                f"--model {self.model}: expected the folder of a transformers model, but it has "
                f"no config.json"
            )
        return AutoConfig.from_pretrained(self.model, local_files_only=True)

    def _check_config(self) -> None:
        config = self._config().get_text_config()
        if config.vocab_size < NUM_BYTES:
            raise ValueError(
                f"--model {self.model}: got a vocabulary of {config.vocab_size}, expected at "
                f"least {NUM_BYTES}, because the model is trained on bytes as tokens"
            )
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and self.sequence_length > longest:
            raise ValueError(
                f"--sequence-length: got {self.sequence_length}, expected at most {longest}, the "
                f"max_position_embeddings of --model {self.model}"
            )


class TransformersLanguageModel:
    """The loaded model as the trainer uses it."""

    def __init__(self, module: PreTrainedModel, *, source: Path) -> None:
        self.module = module
        self._source = source
        self._selections: Selections | None = None

    def forward(self, engine: Any, tokens_BS: Tensor) -> ModelOutput:
        if self.module.training:
            logits_BSV = _logits(engine, tokens_BS)
            counts_LE = torch.zeros(0, 0, dtype=torch.int64, device=tokens_BS.device)
        else:
            if self._selections is None:  # not before AutoEP had its say
                self._selections = Selections(self.module)
            with self._selections.counted() as counts:
                logits_BSV = _logits(engine, tokens_BS)
                counts_LE = counts()
        return ModelOutput(logits_BSV, logits_BSV.new_zeros(()), counts_LE)

    def export(self, engine: Any, folder: Path) -> None:
        export(self.module, folder, source=self._source)


def _logits(engine: Any, tokens_BS: Tensor) -> Tensor:
    logits_BSV: Tensor = engine(input_ids=tokens_BS, use_cache=False).logits
    return logits_BSV
