"""The small MoE model and the batches that verification runs on.

Every MoE layer reads a detached copy of its input and the main loss is multiplied by 0, so that a
router's gradient holds the balancing of its own layer and nothing else.

Shape legend: B sequences, S tokens each, M width, E experts.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MODEL_DIM = 16
SEQUENCES = 2
_SHORTEST = 6
# Keeps router gradients near 0.1, far above the floor of the tolerance and not so large that fp32
# rounding, which is in proportion to them, comes near it.
_SPREAD = 0.5
_SEED = 42


class Block(nn.Module):
    """x + MoE(x)."""

    def __init__(self, num_experts: int, *, ep_size: int, top_k: int, drop_tokens: bool) -> None:
        super().__init__()
        self.moe = MoE(
            MODEL_DIM,
            nn.Sequential(nn.Linear(MODEL_DIM, MODEL_DIM), nn.Tanh()),
            num_experts,
            ep_size=ep_size,
            k=top_k,
            capacity_factor=1.0,
            eval_capacity_factor=1.0,
            min_capacity=0,
            drop_tokens=drop_tokens,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x_BSM: Tensor, used_token: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the sum and the layer's ``l_aux``."""
        output_BSM, l_aux, _ = self.moe(x_BSM.detach(), used_token)
        return x_BSM + output_BSM, l_aux


class SmallMoE(nn.Module):
    """A projection, two MoE blocks with different E, a head, and a probe.

    Attributes:
        checkpointing: off, reentrant or non_reentrant; may be changed between windows.
        probe: has gradient 1 in every micro-step; what the engine makes of it is the scale that
            the balancing gradient must have too (1/G, loss scale).
    """

    def __init__(self, *, ep_size: int, top_k: int) -> None:
        super().__init__()
        self.checkpointing = "off"
        self.project = nn.Linear(MODEL_DIM, MODEL_DIM)
        # The first layer drops what exceeds its capacity: counts are those before dropping.
        self.blocks = nn.ModuleList(
            Block(num_experts, ep_size=ep_size, top_k=top_k, drop_tokens=layer == 0)
            for layer, num_experts in enumerate(_experts_per_layer(ep_size))
        )
        self.head = nn.Linear(MODEL_DIM, 1)
        self.probe = nn.Parameter(torch.zeros(MODEL_DIM))
        with torch.no_grad():
            for gate in self.gates():
                gate.wg.weight.mul_(2.0)  # routes unevenly

    def gates(self) -> list[Any]:
        """The routers, in the order of the layers."""
        blocks: Any = self.blocks
        return [block.moe.deepspeed_moe.gate for block in blocks]

    def forward(self, x_BSM: Tensor, used_token: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Returns the script's main loss, a scalar, and the ``l_aux`` of every layer."""
        h_BSM = self.project(x_BSM)
        losses = []
        for block in self.blocks:
            if self.checkpointing == "off":
                h_BSM, l_aux = block(h_BSM, used_token)
            else:
                h_BSM, l_aux = checkpoint(
                    block, h_BSM, used_token, use_reentrant=self.checkpointing == "reentrant"
                )
            losses.append(l_aux)
        return 0.0 * self.head(h_BSM).float().mean() + self.probe.float().sum(), losses


def make_model(*, ep_size: int, top_k: int) -> SmallMoE:
    """The model with the same weights on every rank."""
    torch.manual_seed(_SEED)
    return SmallMoE(ep_size=ep_size, top_k=top_k)


def _experts_per_layer(ep_size: int) -> tuple[int, int]:
    first = ep_size * math.ceil(8 / ep_size)
    return first, first + ep_size * math.ceil(4 / ep_size)


@dataclass(frozen=True)
class Batch:
    """One rank's micro-batch.

    Attributes:
        x_BSM: fp32, on the CPU.
        valid_mask_BS: bool; None = no padding.
    """

    x_BSM: Tensor
    valid_mask_BS: Tensor | None


def make_batch(*, window: int, micro_step: int, rank: int, is_last: bool, is_padded: bool) -> Batch:
    """A micro-batch with a domain of its own; micro-steps differ in length, ranks do not.

    Args:
        window: number of the window; with micro_step and rank it decides the content.
        micro_step: from 0.
        rank: global rank.
        is_last: whether this is the last micro-step of the last of several places; when padded,
            it has no valid token at all.
        is_padded: whether tokens are masked at random.
    """
    common_M = torch.randn(MODEL_DIM, generator=_generator(0))  # keeps the routing uneven
    generator = _generator(1 + rank + 10_007 * (micro_step + 1_009 * window))
    length = _SHORTEST + (micro_step + window) % 4
    domain_M = torch.randn(MODEL_DIM, generator=generator)
    noise_BSM = torch.randn(SEQUENCES, length, MODEL_DIM, generator=generator)
    valid_mask_BS = None
    if is_padded:
        valid_mask_BS = torch.rand(SEQUENCES, length, generator=generator) < 0.6
        valid_mask_BS &= not is_last
    return Batch(_SPREAD * (noise_BSM + domain_M + common_M), valid_mask_BS)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
