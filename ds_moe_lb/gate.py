"""The gate of native DeepSpeed MoE layers: the parent's routing, with another loss.

The parent computes everything; its softmax and its choices are observed on the way, so that routing
stays bit-identical and no matrix product or softmax is done twice.

Shape legend: T tokens of this micro-batch on this rank, E experts, K choices per token.
"""

import threading
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.moe import sharded_moe
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_moe_lb import selection_bias
from ds_moe_lb.sites import RouterSite

if TYPE_CHECKING:
    from ds_moe_lb.router import Router
    from ds_moe_lb.router_call import RouterCall

_ROUTER = "lb_router"
_OPEN_CALL = "lb_open_call"


class _RoutingObserver:
    """Sees the probabilities and the selections that the parent computes, and changes neither.

    Attributes:
        probs_TE: softmax of the clean logits: after input jitter, before selection noise.
        lse_T: logsumexp of the clean logits with its graph, where a z-loss needs it.
        logits_TE: the parent's logits, which it may add its noise to after the softmax.
        parent_probs_TE: the very tensor that the parent goes on with.
        chosen_TK: the experts chosen at once, ``(T, K)``; k > 2 with a selection bias.
        choices_T: the first and second choice, each ``(T,)``, before capacity drops any; k <= 2.
    """

    def __init__(self, top_k: int, *, wants_logits: bool) -> None:
        self._top_k = top_k
        self._wants_logits = wants_logits
        self.lse_T: Tensor | None = None
        self.logits_TE: Tensor | None = None
        self.parent_probs_TE: Tensor | None = None
        self.chosen_TK: Tensor | None = None
        self.probs_TE: Tensor | None = None
        self.choices_T: list[Tensor] = []

    def __enter__(self) -> "_RoutingObserver":
        _observed.observer = self
        return self

    def __exit__(self, *exception: object) -> None:
        _observed.observer = None

    def note_softmax(self, logits_TE: Tensor, probs_TE: Tensor) -> None:
        """Take in the parent's first softmax."""
        self.probs_TE = self.parent_probs_TE = probs_TE
        self.logits_TE = logits_TE
        if probs_TE.dtype.itemsize >= 4 and not self._wants_logits:
            return
        with torch.autocast(logits_TE.device.type, enabled=False):
            if probs_TE.dtype.itemsize < 4:  # under autocast; the loss is made in fp32
                self.probs_TE = nn.functional.softmax(logits_TE.float(), dim=1)
            if self._wants_logits:
                # For k = 2 the parent adds its noise to these very logits afterwards.
                clean_TE = logits_TE.clone() if self._top_k == 2 else logits_TE
                self.lse_T = torch.logsumexp(clean_TE.float(), dim=1)

    def require(self) -> Tensor:
        """The probabilities; RuntimeError where the parent did not route as it is known to."""
        expected_choices = self._top_k if self._top_k <= 2 else 0
        if self.probs_TE is None or len(self.choices_T) < expected_choices:
            raise RuntimeError(
                "moe_load_balancing: deepspeed.moe.sharded_moe.TopKGate no longer routes through "
                "softmax and one_hot; this version of DeepSpeed is not supported"
            )
        return self.probs_TE

    def require_probs(self) -> Tensor:
        """The probabilities, asked for while the parent is at work."""
        assert self.probs_TE is not None
        return self.probs_TE

    def select(self) -> Tensor:
        """``(T, K)`` int64: the experts of each token, before capacity drops any."""
        probs_TE = self.require()
        if self.chosen_TK is not None:
            return self.chosen_TK
        if self._top_k > 2:  # no noise there: the same operation on the same numbers
            return torch.topk(probs_TE, k=self._top_k, dim=1)[1]
        return torch.stack(self.choices_T[: self._top_k], dim=1)


class _BiasedSelection(TorchFunctionMode):
    """Has the parent choose by its probabilities plus the bias, and touches nothing else.

    Of what the parent computes only ``argmax(..., dim=1)`` (k <= 2) and ``topk(..., dim=1)``
    (k > 2), which choose experts, give another answer; the values of `topk` stay those of the
    parent's probabilities. Where the parent chooses by logits with noise, or by those less the
    first choice, their softmax is biased. A bias of zeros leaves the parent's own choice.
    """

    def __init__(self, bias_E: Tensor, seen: _RoutingObserver) -> None:
        super().__init__()
        self._bias_E = bias_E
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (kwargs or {}).get("dim") != 1 or func not in (torch.argmax, torch.topk):
            return result
        with torch.no_grad(), torch.autocast(self._bias_E.device.type, enabled=False):
            scores_TE, is_biased = self._scores(args[0]), (self._bias_E != 0).any()
            if func is torch.argmax:
                return torch.where(is_biased, scores_TE.argmax(dim=1), result)
            chosen_TK = scores_TE.topk(result[1].shape[1], dim=1)[1]
            chosen_TK = torch.where(is_biased, chosen_TK, result[1])
        self._seen.chosen_TK = chosen_TK
        return args[0].gather(1, chosen_TK), chosen_TK

    def _scores(self, chosen_by_TE: Tensor) -> Tensor:
        """What the parent chooses by, as probabilities, and the bias."""
        if chosen_by_TE is self._seen.parent_probs_TE:
            return self._seen.require_probs() + self._bias_E
        full_TE = chosen_by_TE
        if self._seen.choices_T:  # the second choice: the logits, the first one at -inf
            assert self._seen.logits_TE is not None
            full_TE = self._seen.logits_TE
        biased_TE = torch.softmax(full_TE.float(), dim=1) + self._bias_E
        return biased_TE.masked_fill(chosen_by_TE == float("-inf"), float("-inf"))


class _ObservedFunctional:
    """`torch.nn.functional` as `deepspeed.moe.sharded_moe` sees it while a gate is balanced.

    Two of its functions show their tensors to the observer of the calling thread (a recompute may
    run on autograd's own); everything else is the original. A `TorchFunctionMode` would see the
    same, at 3 us for each of the 60 operations of a gate.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    @property
    def observer(self) -> _RoutingObserver | None:
        return getattr(self._thread, "observer", None)

    @observer.setter
    def observer(self, observer: _RoutingObserver | None) -> None:
        self._thread.observer = observer

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name)

    def softmax(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        probs_TE = nn.functional.softmax(logits, *args, **kwargs)
        observer = self.observer
        if observer is not None and observer.probs_TE is None:
            observer.note_softmax(logits, probs_TE)
        return probs_TE

    def one_hot(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        observer = self.observer
        if observer is not None:
            observer.choices_T.append(tensor)
        return nn.functional.one_hot(tensor, *args, **kwargs)


_observed = _ObservedFunctional()


class GlobalBatchTopKGate(TopKGate):
    """DeepSpeed's TopKGate with the load-balancing loss of the whole global batch.

    Takes the place of a ``TopKGate`` by class swap when the plugin is installed; parameters,
    state_dict keys, routing, capacity, noise and every output but ``l_aux`` are the parent's, bit
    for bit. A gate that belongs to no :class:`~ds_moe_lb.LoadBalancer` is the parent in everything.
    """

    def forward(
        self,
        input: Tensor,
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> tuple[Tensor, ...]:
        """Route, and put this rank's balancing term in the place of ``l_aux``.

        Args:
            input: ``(T, M)`` local tokens.
            used_token: ``(T,)``, non-zero = the token counts. For k = 1 the parent also drops the
                others.
            sparse_routes: return routes rather than dense masks, as the parent does.
            use_tutel: handed to the parent.

        Returns:
            The parent's 7-tuple (4-tuple without sparse_routes) with the first entry replaced.
        """
        router: Router | None = self.__dict__.get(_ROUTER)
        if router is None:
            return super().forward(input, used_token, sparse_routes, use_tutel)
        self.__dict__.pop(_OPEN_CALL, None)
        bias_E = selection_bias.bias_of(self)
        with _RoutingObserver(self.k, wants_logits=router.wants_logits) as seen:
            biasing = nullcontext() if bias_E is None else _BiasedSelection(bias_E, seen)
            with biasing:
                outputs = list(super().forward(input, used_token, sparse_routes, use_tutel))
        probs_TE, routed_E = seen.require(), outputs[-1]
        call = router.open_call(
            probs_TE,
            routed_counts_E=routed_E,
            used_token=used_token,
            select=seen.select,
            lse_T=seen.lse_T,
        )
        scores_at = 5 if sparse_routes else 1
        outputs[scores_at] = call.inject_into(outputs[scores_at])
        outputs[0] = call.loss_at_gate(outputs[0])
        self.__dict__[_OPEN_CALL] = call
        return tuple(outputs)


def probabilities_of(gate: nn.Module) -> Tensor:
    """``(T, E)`` router probabilities of the pass that a balanced gate has just made.

    For forward hooks of the gate, in training and in evaluation.
    """
    call: RouterCall = gate.__dict__[_OPEN_CALL]
    return call.probs_TE


_attached: weakref.WeakSet[TopKGate] = weakref.WeakSet()


class NativeSite(RouterSite):
    """The gate of a ``deepspeed.moe.layer.MoE``."""

    has_l_aux = True

    def __init__(self, name: str, moe_layer: MOELayer) -> None:
        gate = moe_layer.gate
        super().__init__(
            # MoE keeps its MOELayer as `deepspeed_moe`; users know the layer by the MoE's name.
            name.removesuffix(".deepspeed_moe"),
            gate,
            block=moe_layer,
            num_experts=gate.wg.weight.shape[0],
            top_k=gate.k,
            expert_group_name=moe_layer.ep_group_name,
        )
        self.bias = selection_bias.SelectionBias(gate)
        self._moe_layer = moe_layer
        self._handles: list[Any] = []

    def attach(self, router: "Router") -> None:
        """Make the live TopKGate a GlobalBatchTopKGate of this router."""
        sharded_moe.F = _observed
        _attached.add(self.module)
        self.module.__class__ = GlobalBatchTopKGate
        self.module.__dict__[_ROUTER] = router
        self._handles = [
            self._moe_layer.register_forward_hook(_finish_moe_layer),
            selection_bias.accept_all_checkpoints(self.module),
        ]

    def detach(self) -> None:
        """Give the gate its own class back."""
        for handle in self._handles:
            handle.remove()
        selection_bias.remove_bias(self.module)
        _attached.discard(self.module)
        if not _attached:
            sharded_moe.F = nn.functional
        self.module.__dict__.pop(_ROUTER, None)
        self.forget_call()
        self.module.__class__ = TopKGate

    def forget_call(self) -> None:
        self.module.__dict__.pop(_OPEN_CALL, None)


def _finish_moe_layer(moe_layer: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of MOELayer: the experts are done, so await the counts and set ``l_aux``.

    Runs before ``MoE.forward`` reads the attribute.
    """
    call = moe_layer.gate.__dict__.pop(_OPEN_CALL, None)
    if call is not None:
        moe_layer.l_aux = call.finish(moe_layer.l_aux)
