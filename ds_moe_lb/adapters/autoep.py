"""Routers of DeepSpeed's AutoEP, which shards the experts of transformers models.

Shape legend: T tokens of this micro-batch on this rank, E experts, K choices per token.
"""

from typing import TYPE_CHECKING, Any

from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch import Tensor

from ds_moe_lb.adapters.observing import observe
from ds_moe_lb.config import SECTION
from ds_moe_lb.selection_bias import (
    NAME,
    SelectionBias,
    accept_all_checkpoints,
    bias_of,
    remove_bias,
)
from ds_moe_lb.sites import RouterSite

if TYPE_CHECKING:
    from ds_moe_lb.router import Router

_ROUTER = "lb_router"


class GlobalBatchTopKRouter(TokenChoiceTopKRouter):
    """AutoEP's router with the global-batch load-balancing gradient on its logits.

    Takes the place of a ``TokenChoiceTopKRouter`` by class swap when the plugin is installed;
    parameters, state_dict keys, routing and every value returned are the parent's, bit for bit. A
    router that belongs to no :class:`~ds_moe_lb.LoadBalancer` is the parent in everything.
    """

    def forward(
        self, x: Tensor, expert_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Route, and count what was chosen.

        Args:
            x: ``(T, M)`` local tokens.
            expert_bias: ``(E,)`` added to the scores for selection only, by the parent.

        Returns:
            The parent's ``(top_scores (T, K), selected_experts (T, K), tokens_per_expert (E,))``.
        """
        router: Router | None = self.__dict__.get(_ROUTER)
        if router is None:
            return super().forward(x, expert_bias)
        bias_E = bias_of(self)
        if bias_E is not None:
            expert_bias = bias_E if expert_bias is None else expert_bias + bias_E
        seen: list[Tensor] = []
        # The parent does not return its logits, and the gate's weight may be gone after the call
        # (ZeRO-3), so they are taken as they are made.
        handle = self.gate.register_forward_hook(lambda gate, args, logits: seen.append(logits))
        try:
            top_scores_TK, selected_TK, counts_E = super().forward(x, expert_bias)
        finally:
            handle.remove()
        top_scores_TK = observe(
            router,
            top_scores_TK,
            logits_TE=seen[0],
            selected_TK=selected_TK,
            score_function=self.score_func,
        )
        return top_scores_TK, selected_TK, counts_E


class AutoEPSite(RouterSite):
    """The router of an ``AutoEPMoELayer``."""

    def __init__(self, name: str, moe_layer: AutoEPMoELayer) -> None:
        router = moe_layer.router
        if type(router) is not TokenChoiceTopKRouter:
            raise ValueError(
                f"{SECTION}: the router of AutoEP layer {name!r} is a "
                f"{type(router).__qualname__}; only deepspeed.moe.ep_router.TokenChoiceTopKRouter "
                f"itself can be balanced"
            )
        folding = moe_layer.folding_group_handles
        if folding is not None and folding.spec.tp_size > 1:
            raise ValueError(
                f"{SECTION}: AutoEP with tensor parallelism (tensor_parallel.autotp_size "
                f"{folding.spec.tp_size}) is not supported; set autotp_size to 1 or remove the "
                f"section"
            )
        super().__init__(
            name,
            router,
            block=moe_layer,
            num_experts=router.num_experts,
            top_k=router.top_k,
            expert_group_name=moe_layer.ep_group_name,
        )
        has_own = router.e_score_correction_bias is not None
        self.bias = SelectionBias(router, "e_score_correction_bias" if has_own else NAME)

    @property
    def is_trainable(self) -> bool:
        # The router's correction bias is a parameter too, of no use to this loss.
        gate = self.module.get_submodule("gate")
        return any(parameter.requires_grad for parameter in gate.parameters())

    def attach(self, router: "Router") -> None:
        self.module.__class__ = GlobalBatchTopKRouter
        self.module.__dict__[_ROUTER] = router
        self._loading = accept_all_checkpoints(self.module)

    def detach(self) -> None:
        self._loading.remove()
        remove_bias(self.module)
        self.module.__dict__.pop(_ROUTER, None)
        self.module.__class__ = TokenChoiceTopKRouter


def find_autoep_sites(modules: list[tuple[str, Any]]) -> list[RouterSite]:
    """The AutoEP layers among a model's named modules."""
    return [
        AutoEPSite(name, module) for name, module in modules if isinstance(module, AutoEPMoELayer)
    ]
