"""What the plugin needs of a router, whichever library wrote it; one site stands for one layer."""

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ds_moe_lb.selection_bias import SelectionBias

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
        block: the module around it, whose input is that of the layer, ``(B, S, M)`` as a rule.
        sequences: ``(B, S)`` of the block's last input where it is watched; None = it had none.
        has_logits: what it computes first are logits, and not probabilities.
        bias: of its selection; None where it takes none.
        has_l_aux: the layer hands a loss to the script, which may add it.
    """

    has_l_aux = False
    has_logits = True
    bias: SelectionBias | None = None
    sequences: tuple[int, int] | None = None

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        block: nn.Module,
        num_experts: int,
        top_k: int,
        expert_group_name: str | None,
    ) -> None:
        self.name = name
        self.module = module
        self.block = block
        self.num_experts = num_experts
        self.top_k = top_k
        self.expert_group_name = expert_group_name

    @property
    def is_trainable(self) -> bool:
        """Whether the router takes a gradient at all; it does not under most of LoRA."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def watch_sequences(self) -> Any:
        """Note ``(B, S)`` of everything that enters the block; returns the handle of the hook."""

        def before_block(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            shape = tensors[0].shape if tensors else ()
            self.sequences = (shape[0], math.prod(shape[1:-1])) if len(shape) > 2 else None

        return self.block.register_forward_pre_hook(before_block, with_kwargs=True)

    @abstractmethod
    def attach(self, router: "Router") -> None:
        """Let every call of the router go through `router`."""

    @abstractmethod
    def detach(self) -> None:
        """Give the layer back as it was."""

    def forget_call(self) -> None:  # noqa: B027, not every site has one
        """Drop what a recompute that stopped early left behind; it would keep its graph alive."""
