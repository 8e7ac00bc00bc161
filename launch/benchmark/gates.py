"""The gates alone, forward and backward: in one process with one thread, or on several ranks.

The MoE layers keep their hooks but do nothing after their gate, so what is timed is the gates of
one micro-step, with all that the plugin does for it. Every variant has an engine of its own, all
with the same weights and tokens, and a block is one micro-step of each: what is compared lies
milliseconds apart, whatever the machine's speed does meanwhile.

Shape legend: T tokens, M width, K choices.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

import ds_moe_lb
from launch.benchmark.ablations import taken_out
from launch.benchmark.ranks import any_rank, say
from launch.benchmark.shape import COEFFICIENT, Shape, Variant, make_engine, make_model

_WARM_UP_BLOCKS = 8
_BLOCKS_PER_PAUSE = 32  # from one collection of garbage, and look at the clock, to the next


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
    """Wall and processor seconds of one micro-step's gates for every variant, block by block."""
    shape = replace(shape, ranks=1)  # no expert parallelism: no layer gets as far as its experts
    lanes: dict[str, Iterator[tuple[float, float]]] = {}
    refused: dict[str, str] = {}
    for variant in variants:
        engine = make_engine(Gates(shape), shape, zero_stage=0)
        try:
            if variant.section is not None:
                ds_moe_lb.install(engine, variant.section)
        except ValueError as error:
            refused[variant.name] = str(error)
        else:
            lanes[variant.name] = _micro_steps(engine, variant, _tokens(shape, engine.device))
    gc.freeze()
    order = random.Random(seed)
    wall: dict[str, list[float]] = {name: [] for name in lanes}
    cpu: dict[str, list[float]] = {name: [] for name in lanes}
    begun = time.monotonic()
    gc.disable()
    for block in range(-_WARM_UP_BLOCKS, blocks):
        if block % _BLOCKS_PER_PAUSE == 0:
            gc.collect()
            if block and any_rank(time.monotonic() - begun > seconds):
                break
        for name in order.sample(sorted(lanes), len(lanes)):
            wall_s, cpu_s = next(lanes[name])
            if block >= 0:
                wall[name].append(wall_s)
                cpu[name].append(cpu_s)
    gc.enable()
    say(f"  gates: {len(wall[variants[0].name])} blocks in {time.monotonic() - begun:.0f} s")
    return {"gate_wall_s": wall, "gate_cpu_s": cpu, "refused": refused}


def _tokens(shape: Shape, device: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape.tokens, shape.model_dim, generator=generator).to(device)


def _micro_steps(engine: Any, variant: Variant, x_TM: Tensor) -> Iterator[tuple[float, float]]:
    """Window after window without end: wall and processor seconds of each micro-step's gates."""
    gas = engine.gradient_accumulation_steps()
    while True:
        window: Any = range(gas)
        if variant.section is not None and variant.section["estimate"] == "exact":
            window = engine.load_balancer.window([x_TM] * gas, engine)
        for _ in window:
            leaf_TM = x_TM.detach().requires_grad_()
            with taken_out(variant.without):
                get_accelerator().synchronize()
                wall, cpu = time.perf_counter(), time.process_time()
                # Not through the engine, whose own time is no gate's; the model's hooks run all
                # the same.
                main, l_aux = engine.module(leaf_TM)
                (main if variant.adds_loss else main + COEFFICIENT * l_aux).backward()
                get_accelerator().synchronize()
                times = (time.perf_counter() - wall, time.process_time() - cpu)
            engine.step()
            yield times
