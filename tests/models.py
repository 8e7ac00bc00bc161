"""Tiny native DeepSpeed MoE models for tests, and a recorder of what their gates saw.

The balancing gradient is tested in isolation: with ``isolate`` every MoE layer reads a detached
copy of its input, so that a gate's gradient holds the balancing of its own layer only and not that
of the layers behind it; the main loss times 0 still ties every layer's output to the backward.

Shapes: B sequences, S tokens each, M features, E experts.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MODEL_DIM = 8
NUM_EXPERTS = (8, 12)  # one MoE layer each; different on purpose

CHECKPOINTING = ("off", "reentrant", "non_reentrant")


class Block(nn.Module):
    """x + MoE(x); returns the output and ``l_aux``."""

    def __init__(self, num_experts: int, *, isolate: bool, **moe_arguments) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(MODEL_DIM, MODEL_DIM), nn.Tanh())
        self.moe = MoE(MODEL_DIM, expert, num_experts, **moe_arguments)
        self.isolate = isolate
        self.input_grads: list[Tensor] = []  # (T, M) of the isolated input, one per backward

    def forward(self, x: Tensor, used_token: Tensor | None) -> tuple[Tensor, Tensor]:
        h = x
        if self.isolate:
            h = x.detach().requires_grad_(torch.is_grad_enabled())
            if torch.is_grad_enabled():
                h.register_hook(self._keep_input_grad)
        output, l_aux, _ = self.moe(h, used_token)
        return x + output, l_aux

    def _keep_input_grad(self, grad: Tensor) -> None:
        self.input_grads.append(grad.detach().reshape(-1, MODEL_DIM).cpu().clone())


class TinyMoE(nn.Module):
    """A projection, two MoE blocks with different E, a head.

    Args:
        checkpointing: one of ``CHECKPOINTING``, or one per block.
        gate_scale: the gates' initial weights are multiplied by it, for uneven routing.
    """

    def __init__(
        self,
        *,
        k: int,
        ep_size: int = 1,
        checkpointing: str | Sequence[str] = "off",
        isolate: bool = True,
        num_experts: Sequence[int] = NUM_EXPERTS,
        capacity_factor: float = 1.0,
        min_capacity: int = 0,
        drop_tokens: bool = True,
        noisy_gate_policy: str | None = None,
        use_rts: bool = True,
        top2_2nd_expert_sampling: bool = False,
        gate_scale: float = 2.0,
    ) -> None:
        super().__init__()
        if isinstance(checkpointing, str):
            checkpointing = [checkpointing] * len(num_experts)
        assert set(checkpointing) <= set(CHECKPOINTING)
        self.checkpointing = list(checkpointing)
        self.project = nn.Linear(MODEL_DIM, MODEL_DIM)
        self.blocks = nn.ModuleList(
            Block(
                n,
                isolate=isolate,
                ep_size=ep_size,
                k=k,
                capacity_factor=capacity_factor,
                eval_capacity_factor=capacity_factor,
                min_capacity=min_capacity,
                drop_tokens=drop_tokens,
                noisy_gate_policy=noisy_gate_policy,
                use_rts=use_rts,
                top2_2nd_expert_sampling=top2_2nd_expert_sampling,
            )
            for n in num_experts
        )
        self.head = nn.Linear(MODEL_DIM, 1)
        with torch.no_grad():
            for gate in self.gates():
                gate.wg.weight.mul_(gate_scale)

    def gates(self) -> list[nn.Module]:
        """The routers, in the order of the layers."""
        return [block.moe.deepspeed_moe.gate for block in self.blocks]

    def forward(self, x: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """``(B, S, M)`` -> prediction ``(B, S)`` and the ``l_aux`` of every layer."""
        h = self.project(x)
        losses = []
        for block, mode in zip(self.blocks, self.checkpointing, strict=True):
            if mode == "off":
                h, l_aux = block(h, used_token)
            else:
                h, l_aux = checkpoint(block, h, used_token, use_reentrant=mode == "reentrant")
            losses.append(l_aux)
        return self.head(h).squeeze(-1), losses


def moe_param_groups(model: nn.Module) -> list[dict]:
    """The parameter groups that DeepSpeed's ZeRO wants for an MoE model."""
    groups = {"params": list(model.parameters()), "name": "all"}
    return split_params_into_different_moe_groups_for_optimizer(groups)


@dataclass
class GateCall:
    """What one gate saw in one forward."""

    x: Tensor  # (T, M)
    selections: Tensor  # (T, k), before dropping
    valid_mask: Tensor  # (T,) bool


@dataclass
class GateRecorder:
    """Records every first-pass forward of the gates, with selections from their own fp32 logits.

    Works for gates whose selection has no noise. A recompute inside backward is not recorded, nor
    is anything while :meth:`paused`.
    """

    gates: Sequence[nn.Module]
    calls: list[list[GateCall]] = field(default_factory=list)  # [layer][forward]
    valid_mask: Tensor | None = None  # where the mask does not come as used_token
    is_paused: bool = False

    def __post_init__(self) -> None:
        self.calls = [[] for _ in self.gates]
        for layer, gate in enumerate(self.gates):
            gate.register_forward_pre_hook(
                lambda module, args, layer=layer: self._record(layer, module, *args)
            )

    @contextmanager
    def paused(self):
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def take(self) -> list[list[GateCall]]:
        """The calls since the last take."""
        taken, self.calls = self.calls, [[] for _ in self.gates]
        return taken

    def _record(self, layer, gate, x_TM, used_token=None, *_unused) -> None:
        if self.is_paused or torch._C._current_graph_task_id() != -1:
            return
        if used_token is not None:
            valid_T = used_token.reshape(-1) != 0
        elif self.valid_mask is not None:
            valid_T = self.valid_mask.reshape(-1)
        else:
            valid_T = torch.ones(len(x_TM), dtype=torch.bool)
        with torch.no_grad():
            selections_TK = select(x_TM.detach(), gate.wg.weight, k=gate.k)
        self.calls[layer].append(GateCall(x_TM.detach().clone(), selections_TK, valid_T.clone()))


def select(x_TM: Tensor, weight_EM: Tensor, *, k: int) -> Tensor:
    """The k experts of each token, ``(T, k)``: the largest probabilities of the fp32 logits."""
    probs_TE = functional.linear(x_TM.float(), weight_EM.float()).softmax(dim=1)
    chosen = []
    for _ in range(k):
        best_T = probs_TE.argmax(dim=1, keepdim=True)
        chosen.append(best_T)
        probs_TE = probs_TE.scatter(1, best_T, -1.0)
    return torch.cat(chosen, dim=1)
