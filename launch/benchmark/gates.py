"""The gates alone, forward and backward: in one process with one thread, or on several ranks.

The MoE layers keep their hooks but do nothing after their gate, so what is timed is the gates of
one micro-step, with all that the plugin does for it.

Shape legend: T tokens, M width, K choices.
"""

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from launch.benchmark.ranks import any_rank, say
from launch.benchmark.shape import (
    AGAIN,
    COEFFICIENT,
    PLAIN,
    Shape,
    Variant,
    accepted,
    installed,
    make_engine,
    make_model,
    plugin_variants,
)

WARM_UP_TOKENS = 64


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
    shape: Shape, blocks: int, seconds: float, seed: int, estimates: Sequence[str]
) -> dict[str, Any]:
    """Wall and processor seconds of one micro-step's gates for every variant, block by block."""
    shape = replace(shape, ranks=1)  # no expert parallelism: no layer gets as far as its experts
    engine = make_engine(Gates(shape), shape, zero_stage=0)
    variants, refused = accepted(engine, plugin_variants(estimates))
    variants = [PLAIN, AGAIN, *variants]
    x_TM = torch.randn(shape.tokens, shape.model_dim, device=engine.device)
    gc.freeze()
    order = random.Random(seed)
    wall: dict[str, list[float]] = {variant.name: [] for variant in variants}
    cpu: dict[str, list[float]] = {variant.name: [] for variant in variants}
    begun = time.monotonic()
    _visit(engine, PLAIN, x_TM)
    for block in range(blocks):
        if block and any_rank(time.monotonic() - begun > seconds):
            break
        for variant in order.sample(variants, len(variants)):
            wall_s, cpu_s = _visit(engine, variant, x_TM)
            wall[variant.name].append(wall_s)
            cpu[variant.name].append(cpu_s)
    say(f"  gates: {len(wall[PLAIN.name])} blocks in {time.monotonic() - begun:.0f} s")
    return {"gate_wall_s": wall, "gate_cpu_s": cpu, "refused": refused}


def _visit(engine: Any, variant: Variant, x_TM: Tensor) -> tuple[float, float]:
    """Install, make a window of few tokens, and take the medians of the next one's micro-steps.

    Short visits, so that variants are compared within a second: the machine's speed drifts.
    """
    with installed(engine, variant):
        _window(engine, variant, x_TM[:WARM_UP_TOKENS])
        gc.collect()
        gc.disable()
        times = _window(engine, variant, x_TM)
        gc.enable()
    return median(wall for wall, _ in times), median(cpu for _, cpu in times)


def _window(engine: Any, variant: Variant, x_TM: Tensor) -> list[tuple[float, float]]:
    gas = engine.gradient_accumulation_steps()
    micro_steps: Any = range(gas)
    if variant.section is not None and variant.section["estimate"] == "exact":
        micro_steps = engine.load_balancer.window([x_TM] * gas, engine)
    times = []
    for _ in micro_steps:
        leaf_TM = x_TM.detach().requires_grad_()
        get_accelerator().synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        # Not through the engine, whose own time is no gate's; the model's hooks run all the same.
        main, l_aux = engine.module(leaf_TM)
        (main if variant.adds_loss else main + COEFFICIENT * l_aux).backward()
        get_accelerator().synchronize()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
        engine.step()
    return times
