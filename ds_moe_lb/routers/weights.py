"""What takes the place of a router's weight: a hypernetwork, or a frozen random matrix.

Everything is drawn on the CPU from a generator of its own, so that it is the same on every rank
and leaves the script's random state alone.

Shape legend: E experts, M features, D width of the embedding, H width of the hidden layer.
"""

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor, nn

from ds_moe_lb.config import RouterConfig


class RouterWeight(nn.Module, ABC):
    """Makes an ``(E, M)`` router weight whenever it is called, so that ZeRO-3 can gather it.

    Attributes:
        made_by: the section that it was made by.
    """

    made_by: RouterConfig

    @abstractmethod
    def forward(self) -> Tensor:
        """The weight, ``(E, M)``."""

    def split_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Those that are trained, and those that never are."""
        parameters = list(self.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return trained, [parameter for parameter in parameters if not parameter.requires_grad]


class HyperRouterWeight(RouterWeight):
    """HyperRouter (arXiv 2312.07035): ``W = A2 relu(A1 e + b1) + b2``, cut into E rows of M.

    Only the embedding e is trained. Where it moves, W moves in a space of at most min(D, H)
    dimensions, the rank of dW/de.

    Args:
        num_experts: E.
        model_dim: M.
        embedding_dim: D.
        hidden_dim: H.
        init_scale: the standard deviation of the entries of W at the start, reached by scaling A2
            and b2; None = they stay as drawn, uniform in +-1/sqrt(inputs) as PyTorch does it.
        generator: of the random numbers, on the CPU.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        model_dim: int,
        embedding_dim: int,
        hidden_dim: int,
        init_scale: float | None,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        num_outputs = num_experts * model_dim
        self.embedding = nn.Parameter(torch.randn(embedding_dim, generator=generator))
        self.hidden_weight = _frozen(_uniform((hidden_dim, embedding_dim), generator))
        self.hidden_bias = _frozen(_uniform((hidden_dim,), generator, fan_in=embedding_dim))
        self.output_weight = _frozen(_uniform((num_outputs, hidden_dim), generator))
        self.output_bias = _frozen(_uniform((num_outputs,), generator, fan_in=hidden_dim))
        with torch.no_grad():
            factor = _factor(self(), init_scale)
            self.output_weight.mul_(factor)
            self.output_bias.mul_(factor)

    def forward(self) -> Tensor:
        with torch.autocast(self.embedding.device.type, enabled=False):
            hidden_H = nn.functional.relu(
                nn.functional.linear(self.embedding, self.hidden_weight, self.hidden_bias)
            )
            flat = nn.functional.linear(hidden_H, self.output_weight, self.output_bias)
        return flat.view(self.num_experts, -1)


class FrozenRouterWeight(RouterWeight):
    """The frozen random router of SMoE-Dropout (arXiv 2303.01610): a W that is never trained.

    Args:
        num_experts: E.
        model_dim: M.
        init_scale: the standard deviation of its entries; None = uniform in +-1/sqrt(M), PyTorch's
            default of a linear layer.
        generator: of the random numbers, on the CPU.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        model_dim: int,
        init_scale: float | None,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        weight_EM = _uniform((num_experts, model_dim), generator)
        self.frozen_weight = _frozen(weight_EM * _factor(weight_EM, init_scale))

    def forward(self) -> Tensor:
        # A copy, so that nobody holds a parameter whose memory ZeRO-3 takes away.
        return self.frozen_weight.clone()


def layer_generator(seed: int, *, stage: int, layer: int) -> torch.Generator:
    """The random numbers of one layer.

    Args:
        seed: of the run.
        stage: of the pipeline; 0 where there is none.
        layer: index among the stage's MoE layers.
    """
    words = np.random.SeedSequence([seed, stage, layer]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]))


def _uniform(
    shape: tuple[int, ...], generator: torch.Generator, *, fan_in: int | None = None
) -> Tensor:
    bound = 1.0 / math.sqrt(fan_in or shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _frozen(values: Tensor) -> nn.Parameter:
    # Not a buffer: DeepSpeed broadcasts and checkpoints parameters, and ZeRO-3 partitions them.
    return nn.Parameter(values, requires_grad=False)


def _factor(weight_EM: Tensor, init_scale: float | None) -> float:
    """What brings the standard deviation of the entries to `init_scale`."""
    if init_scale is None:
        return 1.0
    return init_scale / float(weight_EM.double().std(correction=0))
