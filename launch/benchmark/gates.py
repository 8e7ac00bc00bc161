"""The gates alone, forward and backward: in one process with one thread, or on several ranks.

The MoE layers keep their hooks but do nothing after their gate, so what is timed is the gates of
one micro-step, with all that the plugin does for it. The second forward of `exact` is left out;
it shows in whole steps.

Shape legend: T tokens, M width, K choices.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from launch.benchmark.ablations import taken_out
from launch.benchmark.shape import COEFFICIENT, Shape, Variant, make_engine, make_model
from launch.benchmark.side_by_side import Lane, interleave, stopwatch

# In a block, rounded to whole windows: enough beside an installation, few enough for many blocks.
_MICRO_STEPS = 16


class Gates(nn.Module):
    """Every layer routes the same tokens; the main loss is a fixed weighting of the scores."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = make_model(replace(shape, expert_dim=1)).blocks
        for layer in self.layers():
            layer.forward = _gate_only(layer)
        weights_KT = torch.randn(shape.top_k, shape.tokens)
        self.register_buffer("weights_KT", weights_KT, persistent=False)

    def layers(self) -> list[Any]:
        return [block.moe.deepspeed_moe for block in self.blocks]

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor]:
        main, losses = [], []
        for layer in self.layers():
            scores_KT = layer(x_TM, None)
            main.append((scores_KT * self.weights_KT[:, : len(x_TM)]).sum())
            losses.append(layer.l_aux)
        return torch.stack(main).sum(), torch.stack(losses).sum()


def _gate_only(layer: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
    """What `MOELayer.forward` does up to its gate, and the gate's scores."""

    def forward(x_TM: Tensor, used_token: Tensor | None) -> Tensor:
        layer.l_aux, _, _, _, _, scores_KT, layer.exp_counts = layer.gate(
            x_TM, used_token, True, False
        )
        return scores_KT

    return forward


def measure(
    shape: Shape, blocks: int, seconds: float, seed: int, variants: Sequence[Variant]
) -> dict[str, Any]:
    """Wall and processor seconds of the gates of a block's micro-steps. Collective; for JSON."""
    shape = replace(shape, ranks=1)  # no expert parallelism: no layer gets as far as its experts
    generator = torch.Generator().manual_seed(0)
    x_TM = torch.randn(shape.tokens, shape.model_dim, generator=generator)
    measured = interleave(
        "gates",
        variants,
        lambda: make_engine(Gates(shape), shape, zero_stage=0),
        lambda engine, variant: _lane(engine, variant, x_TM.to(engine.device)),
        micro_steps=shape.gas * max(1, _MICRO_STEPS // shape.gas),
        blocks=blocks,
        seconds=seconds,
        seed=seed,
    )
    return {
        "gate_wall_s": measured["wall_s"],
        "gate_cpu_s": measured["cpu_s"],
        "refused": measured["refused"],
    }


def _lane(engine: Any, variant: Variant, x_TM: Tensor) -> Lane:
    lane = _micro_steps(engine, variant, x_TM)
    for _ in range(engine.gradient_accumulation_steps()):
        next(lane)
    return lane


def _micro_steps(engine: Any, variant: Variant, x_TM: Tensor) -> Lane:
    """Window after window without end, whose gates alone are timed."""
    gas = engine.gradient_accumulation_steps()
    while True:
        window: Any = range(gas)
        if variant.has_second_forward:
            window = engine.load_balancer.window([x_TM] * gas, engine)
        for _ in window:
            leaf_TM = x_TM.detach().requires_grad_()
            with taken_out(variant.without), stopwatch() as times:
                # Not through the engine, whose own time is no gate's; the model's hooks run all
                # the same.
                main, l_aux = engine.module(leaf_TM)
                (main if variant.adds_loss else main + COEFFICIENT * l_aux).backward()
            engine.step()
            yield times
