"""A small decoder-only MoE language model on bytes, built from DeepSpeed's MoE layer.

Shape legend: B sequences, S positions, M model width, V = 256 byte values, L layers, E experts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_moe_lb.training.options import TrainOptions, script_aux_loss_coeff
from ds_moe_lb.training.trainable import NUM_BYTES, Checkpointing, ModelOutput


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        num_layers: transformer blocks; every one has an MoE layer.
        model_dim: width.
        num_heads: attention heads.
        expert_dim: hidden width of one expert.
        num_experts: experts per layer, over all ranks.
        top_k: experts per token.
        ep_size: ranks that share one set of experts.
        sequence_length: longest input.
        capacity_factor: slots per expert relative to an even load; 0 = never drop a token.
        checkpointing: recompute blocks in backward instead of keeping their activations.
    """

    num_layers: int = 3
    model_dim: int = 64
    num_heads: int = 4
    expert_dim: int = 128
    num_experts: int = 16
    top_k: int = 2
    ep_size: int = 1
    sequence_length: int = 128
    capacity_factor: float = 0.0
    checkpointing: Checkpointing = "off"

    @property
    def is_trained(self) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def settle_coefficient(
        self, options: TrainOptions, ds_config: Mapping[str, Any]
    ) -> tuple[dict[str, Any], float]:
        """The config as it is, and the factor on `l_aux` in the training loop."""
        return dict(ds_config), script_aux_loss_coeff(options, ds_config)

    def build(self, *, seed: int) -> "ByteMoELanguageModel":
        torch.manual_seed(seed)
        module = ByteMoEModel(self)
        # DeepSpeed's expert-parallel groups are runs of neighbouring ranks.
        initialise_experts(module, ep_rank=dist.get_rank() % self.ep_size, seed=seed)
        return ByteMoELanguageModel(module)


class CausalAttention(nn.Module):
    """Multi-head self-attention without bias."""

    def __init__(self, *, model_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(model_dim, 3 * model_dim, bias=False)
        self.out = nn.Linear(model_dim, model_dim, bias=False)

    def forward(self, x_BSM: Tensor) -> Tensor:
        batch, length, width = x_BSM.shape
        # shape: (B, S, 3M) -> 3 x (B, heads, S, M / heads)
        query, key, value = (
            self.qkv(x_BSM)
            .view(batch, length, 3, self.num_heads, -1)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Expert(nn.Module):
    """One feed-forward network; DeepSpeed copies it once per local expert."""

    def __init__(self, *, model_dim: int, expert_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(model_dim, expert_dim)
        self.down = nn.Linear(expert_dim, model_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm transformer block with an MoE layer for the feed-forward part."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.model_dim)
        self.attention = CausalAttention(model_dim=config.model_dim, num_heads=config.num_heads)
        self.moe_norm = nn.LayerNorm(config.model_dim)
        dropless = config.capacity_factor == 0
        self.moe = MoE(
            hidden_size=config.model_dim,
            expert=Expert(model_dim=config.model_dim, expert_dim=config.expert_dim),
            num_experts=config.num_experts,
            ep_size=config.ep_size,
            k=config.top_k,
            capacity_factor=1.0 if dropless else config.capacity_factor,
            eval_capacity_factor=1.0 if dropless else config.capacity_factor,
            drop_tokens=not dropless,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x_BSM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the new hidden states, the gate's loss and the (E,) selections of this layer."""
        x_BSM = x_BSM + self.attention(self.attention_norm(x_BSM))
        moe_out_BSM, l_aux, tokens_per_expert_E = self.moe(self.moe_norm(x_BSM))
        return x_BSM + moe_out_BSM, l_aux, tokens_per_expert_E


class ByteMoEModel(nn.Module):
    """Bytes in, next-byte logits out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.byte_embedding = nn.Embedding(NUM_BYTES, config.model_dim)
        self.position_embedding = nn.Embedding(config.sequence_length, config.model_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.model_dim)
        self.head = nn.Linear(config.model_dim, NUM_BYTES, bias=False)
        for embedding in (self.byte_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens_BS: Tensor) -> ModelOutput:
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSM = self.byte_embedding(tokens_BS) + self.position_embedding(positions_S)
        l_aux_per_layer: list[Tensor] = []
        counts_per_layer: list[Tensor] = []
        for block in self.blocks:
            if self.config.checkpointing == "off" or not self.training:
                x_BSM, l_aux, tokens_per_expert_E = block(x_BSM)
            else:
                reentrant = self.config.checkpointing == "reentrant"
                x_BSM, l_aux, tokens_per_expert_E = checkpoint(
                    block, x_BSM, use_reentrant=reentrant
                )
            l_aux_per_layer.append(l_aux)
            counts_per_layer.append(tokens_per_expert_E)
        return ModelOutput(
            logits_BSV=self.head(self.final_norm(x_BSM)),
            l_aux=torch.stack(l_aux_per_layer).sum(),
            tokens_per_expert_LE=torch.stack(counts_per_layer),
        )


class ByteMoELanguageModel:
    """:class:`ByteMoEModel` as the trainer uses it."""

    def __init__(self, module: ByteMoEModel) -> None:
        self.module = module

    def forward(self, engine: Any, tokens_BS: Tensor) -> ModelOutput:
        output: ModelOutput = engine(tokens_BS)
        return output

    def export(self, engine: Any, folder: Path) -> None:
        """Nothing: no library but DeepSpeed's checkpoints knows this model."""


def initialise_experts(model: ByteMoEModel, *, ep_rank: int, seed: int) -> None:
    """Give every expert weights of its own; DeepSpeed makes all experts of a layer copies of one.

    The weights depend on seed, layer and global expert alone, so they are the same for every
    expert-parallel size.

    Args:
        model: the model as constructed, before the engine is built.
        ep_rank: this rank in its expert-parallel group, whose experts it holds.
        seed: seed of the run.
    """
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        experts: Any = block.moe.deepspeed_moe.experts.deepspeed_experts
        for local_index, expert in enumerate(experts):
            index = ep_rank * len(experts) + local_index
            generator = torch.Generator().manual_seed(seed + 1_000_003 * (1 + layer) + index)
            for parameter in expert.parameters():
                bound = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.0
                with torch.no_grad():
                    parameter.uniform_(-bound, bound, generator=generator)
