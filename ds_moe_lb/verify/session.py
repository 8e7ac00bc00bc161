"""One engine under verification: runs accumulation windows and gathers what the ranks saw.

Shape legend: T tokens of one micro-batch on one rank, E experts, K choices, M width.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

import ds_moe_lb
from ds_moe_lb.verify.layout import Layout
from ds_moe_lb.verify.model import Batch, SmallMoE, make_batch, make_model
from ds_moe_lb.verify.reference import Call

_LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class WindowRecord:
    """One rank's part of one window; everything on the CPU, ``[layer]`` first.

    Attributes:
        weights: the routers' weights during the window, ``(E, M)`` fp64.
        calls: ``[layer][micro-step]``, what the router saw.
        l_aux: ``[layer][micro-step]``.
        counts: of `LoadBalancer.counts()` before the step, ``(E,)`` int64.
        grads: the routers' gradients before the step, at the scale of the main loss, ``(E, M)``
            fp64.
        report: of `LoadBalancer.metrics()` after the step.
    """

    weights: list[Tensor]
    calls: list[list[Call]]
    l_aux: list[list[float]]
    counts: list[Tensor]
    grads: list[Tensor]
    report: dict[str, float]


def _nothing() -> None:
    """Between the phases of a window, where nothing is asked for."""


class Session:
    """An engine with the plugin, and what was recorded last.

    Attributes:
        last: the records of the last window by rank; None before the first.
    """

    def __init__(self, layout: Layout, *, ep_size: int, gas: int) -> None:
        """Build model and engine. Collective."""
        self.layout, self.ep_size, self.gas = layout, ep_size, gas
        self.last: list[WindowRecord] | None = None
        model = make_model(ep_size=ep_size, top_k=layout.top_k)
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "parameters"}
        )
        self.engine, _, _, _ = ds_moe_lb.initialize(
            model=model,
            optimizer=torch.optim.SGD(groups, lr=_LEARNING_RATE),
            config=layout.engine_config(gas=gas),
        )
        self.model: SmallMoE = self.engine.module
        self._recorder = _Recorder(self.model.gates())

    def run_window(
        self,
        number: int,
        *,
        mask_by: str | None = None,
        checkpointing: str = "off",
        between: Callable[[], None] = _nothing,
    ) -> list[WindowRecord]:
        """Run one accumulation window, step included. Collective.

        Args:
            number: decides the data.
            mask_by: how the layers learn of padding: `used_token`, `token_mask`; None = none is
                there.
            checkpointing: off, reentrant or non_reentrant.
            between: called before each forward, each backward and each step.

        Returns:
            The records of all ranks.
        """
        gates = self.model.gates()
        self.model.checkpointing = checkpointing
        weights = [gate.wg.weight.detach().double().cpu() for gate in gates]
        l_aux: list[list[float]] = [[] for _ in gates]
        counts, grads = [], []
        batches = [self._batch(number, m, is_padded=mask_by is not None) for m in range(self.gas)]

        def count(batch: Batch) -> None:
            self._forward(batch, mask_by=mask_by, is_recorded=False)

        counted = self.engine.load_balancer.window(batches, count)
        for micro_step, batch in enumerate(counted):
            between()
            main_loss, losses = self._forward(batch, mask_by=mask_by)
            for layer, loss in enumerate(losses):
                l_aux[layer].append(float(loss.detach()))
            if self.layout.section.aux_loss_coeff is None:
                main_loss = main_loss + self.layout.coefficient * torch.stack(losses).sum()
            between()
            self.engine.backward(main_loss)
            between()
            if micro_step == self.gas - 1:
                counts = [n.clone() for n in self.engine.load_balancer.counts().values()]
                grads = self._router_grads()
            self.engine.step()
        record = WindowRecord(
            weights=weights,
            calls=self._recorder.take(),
            l_aux=l_aux,
            counts=counts,
            grads=grads,
            report=self.engine.load_balancer.metrics(),
        )
        everyone: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(everyone, record)
        self.last = everyone
        return everyone

    def evaluate(self, *, how: str) -> None:
        """A forward on other data that must not count: in `eval` mode, or `no_grad` in training."""
        batch = self._batch(77_777, 0, is_padded=False)
        if how == "eval":
            self.engine.eval()
        with torch.no_grad():
            self.engine(self._to_device(batch.x_BSM), None)
        self.engine.train()

    def close(self) -> None:
        """Take the plugin off and let go of the engine."""
        self.engine.load_balancer.uninstall()
        self._recorder.remove()
        self.engine.destroy()

    def _forward(
        self, batch: Batch, *, mask_by: str | None, is_recorded: bool = True
    ) -> tuple[Tensor, list[Tensor]]:
        valid_mask_BS = batch.valid_mask_BS
        used_token: Tensor | None = None
        masking: AbstractContextManager[None] = nullcontext()
        if valid_mask_BS is not None and mask_by == "used_token":
            used_token = valid_mask_BS.reshape(-1).long().to(self.engine.device)
        elif valid_mask_BS is not None:
            masking = self.engine.load_balancer.token_mask(valid_mask_BS.to(self.engine.device))
        # What counts is decided here and not by the plugin.
        counted_BS = torch.ones(batch.x_BSM.shape[:2], dtype=torch.bool)
        if valid_mask_BS is not None and self.layout.section.valid_tokens != "all":
            counted_BS = valid_mask_BS
        recording: AbstractContextManager[None] = nullcontext()
        if is_recorded:
            recording = self._recorder.recording(counted_BS.reshape(-1))
        with masking, recording:
            main_loss, losses = self.engine(self._to_device(batch.x_BSM), used_token)
        return main_loss, losses

    def _batch(self, number: int, micro_step: int, *, is_padded: bool) -> Batch:
        rank, world_size = dist.get_rank(), self.layout.world_size
        is_last = (micro_step, rank) == (self.gas - 1, world_size - 1)
        return make_batch(
            window=number,
            micro_step=micro_step,
            rank=rank,
            is_last=is_last and self.gas * world_size > 1,
            is_padded=is_padded,
        )

    def _to_device(self, x_BSM: Tensor) -> Tensor:
        return x_BSM.to(self.engine.device, self.model.project.weight.dtype)

    def _router_grads(self) -> list[Tensor]:
        """As the engine will apply them, at the scale of the main loss; collective.

        The probe's gradient is 1 but for what the engine does to the main loss, as a rule nothing
        or a power of two (loss scaling), which is taken exactly.
        """
        scale = float(_full_grad(self.model.probe).mean())
        nearest = 2.0 ** round(math.log2(scale)) if scale > 0 else scale
        scale = nearest if abs(scale - nearest) <= 0.05 * nearest else scale
        return [_full_grad(gate.wg.weight) / scale for gate in self.model.gates()]


def _full_grad(parameter: nn.Parameter) -> Tensor:
    gradient = safe_get_full_grad(parameter)
    if gradient is None:
        return torch.zeros(parameter.shape, dtype=torch.float64)
    return gradient.detach().double().cpu()


class _Recorder:
    """Keeps what the routers see in the forwards that it is told to record, and in no other."""

    def __init__(self, gates: list[Any]) -> None:
        self._calls: list[list[Call]] = [[] for _ in gates]
        self._valid_T: Tensor | None = None
        self._handles = [
            gate.register_forward_hook(
                lambda module, args, outputs, layer=layer: self._record(
                    layer, module, args[0], outputs
                )
            )
            for layer, gate in enumerate(gates)
        ]

    def recording(self, valid_T: Tensor) -> AbstractContextManager[None]:
        """Record the forward inside the block, with these tokens counting."""
        return _Recording(self, valid_T)

    def take(self) -> list[list[Call]]:
        """``[layer][micro-step]`` since the last take."""
        taken, self._calls = self._calls, [[] for _ in self._calls]
        return taken

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, layer: int, gate: Any, x_TM: Tensor, outputs: Any) -> None:
        if self._valid_T is None:
            return
        with torch.no_grad():
            # Routes that capacity or used_token evicted are -1; those are found again as the host
            # found them, by the same operations on the same numbers.
            routed_TK = outputs[3].T.long()
            chosen_TK = _choose(x_TM, gate.wg.weight, top_k=gate.k)
            selections_TK = torch.where(routed_TK >= 0, routed_TK, chosen_TK)
        self._calls[layer].append(
            Call(
                x_TM=x_TM.detach().double().cpu(),
                selections_TK=selections_TK.cpu(),
                valid_T=self._valid_T,
            )
        )


class _Recording(AbstractContextManager[None]):
    def __init__(self, recorder: _Recorder, valid_T: Tensor) -> None:
        self._recorder, self._valid_T = recorder, valid_T

    def __enter__(self) -> None:
        self._recorder._valid_T = self._valid_T

    def __exit__(self, *_: object) -> None:
        self._recorder._valid_T = None


def _choose(x_TM: Tensor, weight_EM: Tensor, *, top_k: int) -> Tensor:
    """The experts of each token, ``(T, K)``, in the order in which DeepSpeed chooses them."""
    logits_TE = nn.functional.linear(x_TM.float(), weight_EM.float())
    probs_TE = logits_TE.softmax(dim=1)
    if top_k > 2:
        return probs_TE.topk(top_k, dim=1).indices
    first_T1 = probs_TE.argmax(dim=1, keepdim=True)
    if top_k == 1:
        return first_T1
    second_T1 = logits_TE.scatter(1, first_T1, float("-inf")).argmax(dim=1, keepdim=True)
    return torch.cat([first_T1, second_T1], dim=1)
