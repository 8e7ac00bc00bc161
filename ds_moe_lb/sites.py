"""What the plugin needs of a router, whichever library wrote it; one site stands for one layer."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ds_moe_lb.router import Router


class RouterSite(ABC):
    """A router in the engine's model that can be balanced.

    Attributes:
        name: of the layer, as users know it in the model.
        num_experts: E, over all expert-parallel ranks.
        top_k: experts per token.
        module: the router itself.
        expert_group_name: DeepSpeed's name of the layer's expert groups; None where every rank
            holds all experts.
        has_l_aux: the layer hands a loss to the script, which may add it.
    """

    has_l_aux = False

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        num_experts: int,
        top_k: int,
        expert_group_name: str | None,
    ) -> None:
        self.name = name
        self.module = module
        self.num_experts = num_experts
        self.top_k = top_k
        self.expert_group_name = expert_group_name

    @property
    def is_trainable(self) -> bool:
        """Whether the router takes a gradient at all; it does not under most of LoRA."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @abstractmethod
    def attach(self, router: "Router") -> None:
        """Let every call of the router go through `router`."""

    @abstractmethod
    def detach(self) -> None:
        """Give the layer back as it was."""

    def forget_call(self) -> None:  # noqa: B027, not every site has one
        """Drop what a recompute that stopped early left behind; it would keep its graph alive."""
