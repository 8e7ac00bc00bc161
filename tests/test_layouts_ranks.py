"""Parallel layouts beside data and expert parallelism, each against the fp64 reference.

Sequence-parallel ranks hold the tokens of one micro-batch together, so the reference sees each of
their groups as one rank; tensor-parallel peers hold the same tokens, and the reference sees one of
them.

DeepSpeed itself does not run:

- native MoE with ZeRO 3, which it refuses; AutoEP is its way;
- PipelineEngine with ZeRO 2 or 3, which it refuses, and with MoE on one stage only and ZeRO 1: the
  stages sum the norm of the gradients a different number of times, and the optimizer step hangs;
- tensor parallelism through an mpu on gloo: gather_tokens hands over a flat buffer, which gloo
  refuses; the tests make it accept that;
- sequence parallelism through mesh_param: gradients are not reduced over the sequence ranks; the
  plugin refuses it;
- deepspeed.runtime.sequence_parallel.parallel_state_sp as the mpu of native MoE: MOELayer takes the
  sequence ranks for tensor-parallel peers and gives each only its part of the other's slots, so
  that the experts' outputs are wrong and the router's gradient is right;
- unequal numbers of tokens with ep_size > 1 and k = 1: top-1 caps the capacity by the local tokens,
  so the sizes of the all-to-all differ;
- Tutel, which needs CUDA.
"""

from dataclasses import dataclass, replace
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
from torch import nn

import ds_moe_lb
from engine_grid import (
    COEFF,
    NUM_WINDOWS,
    Cell,
    WindowRecord,
    disagreements,
    ds_config,
    full_grad,
    main_loss,
    make_batch,
    make_record,
    section_of,
    used_token,
)
from models import Block, GateRecorder, TinyMoE, moe_param_groups
from mpus import let_gloo_gather_tokens, make_mpu
from ranks import run_ranks

pytestmark = pytest.mark.ranks

BASE = Cell(
    world_size=4,
    ep_size=1,
    zero_stage=0,
    gradient_accumulation_steps=2,
    top_k=2,
    checkpointing="off",
    tokens="masked",
    estimate="running",
    mechanism="l_aux",
)
WAYS = [
    (mechanism, estimate)
    for mechanism in ("l_aux", "injection")
    for estimate in ("running", "boundary")
]


def _half_of_all() -> list[Cell]:
    """Every pair of mechanism, estimate and ZeRO stage (with a way of checkpointing)."""
    stages = ((0, "off"), (1, "reentrant"), (2, "non_reentrant"))
    return [
        replace(BASE, mechanism=mechanism, estimate=estimate, zero_stage=stage, checkpointing=mode)
        for at, (mechanism, estimate) in enumerate(WAYS)
        for stage, mode in stages
        if (at + at // 2 + stage) % 2 == 0
    ]


@dataclass(frozen=True)
class Layout:
    """A model and the host's idea of who holds what.

    Attributes:
        layers: arguments of each MoE layer.
        mpu: None, "sequence", "deepspeed_sequence" or "tensor"; pairs of neighbours in a world of
            four.
    """

    layers: tuple[dict[str, Any], ...]
    mpu: str | None = None


class Model(TinyMoE):
    def __init__(self, layout: Layout, checkpointing: str) -> None:
        super().__init__(k=2, num_experts=())
        defaults = {"k": 2, "capacity_factor": 2.0, "min_capacity": 0} | {
            "top2_2nd_expert_sampling": False
        }
        self.blocks = nn.ModuleList(
            Block(isolate=True, **(defaults | layer)) for layer in layout.layers
        )
        self.checkpointing = [checkpointing] * len(self.blocks)
        with torch.no_grad():
            for gate in self.gates():
                gate.wg.weight.mul_(2.0)


def _check_layout(
    layout: Layout, runs: list[tuple[Cell, dict[str, Any]]]
) -> list[list[WindowRecord]]:
    if layout.mpu is not None:
        let_gloo_gather_tokens()
    mpu = make_mpu(layout.mpu)
    return [_run(layout, mpu, cell, section) for cell, section in runs]


def _run(layout: Layout, mpu: Any, cell: Cell, section: dict[str, Any]) -> list[WindowRecord]:
    torch.manual_seed(42)
    model = Model(layout, cell.checkpointing)
    engine = ds_moe_lb.initialize(
        model=model,
        optimizer=torch.optim.SGD(moe_param_groups(model), lr=0.1),
        config=ds_config(cell, section),
        mpu=mpu,
    )[0]
    recorder = GateRecorder(model.gates())
    rank = dist.get_rank() // 2 if layout.mpu == "tensor" else dist.get_rank()
    records = []
    for window in range(NUM_WINDOWS):
        for block in model.blocks:
            block.input_grads.clear()
        weights = [gate.wg.weight.detach().tolist() for gate in model.gates()]
        l_aux: list[list[float]] = [[] for _ in model.gates()]
        for micro_step in range(cell.gradient_accumulation_steps):
            batch = make_batch(cell, window=window, micro_step=micro_step, rank=rank)
            prediction, losses = engine(batch.x, used_token(batch))
            for layer, loss in enumerate(losses):
                l_aux[layer].append(loss.item())
            balancing = sum(losses) if cell.mechanism == "l_aux" else 0.0
            engine.backward(0.0 * main_loss(batch, prediction) + COEFF * balancing)
            if micro_step == cell.gradient_accumulation_steps - 1:
                grads = [full_grad(gate.wg.weight) for gate in model.gates()]
            counts = [n.tolist() for n in engine.load_balancer.counts().values()]
            engine.step()
        records.append(make_record(recorder, model, weights, grads, l_aux, counts))
        # Whoever holds the same tokens as another rank is not counted again.
        num_valid = sum(
            int(make_batch(cell, window=window, micro_step=m, rank=r).valid_mask.sum())
            for m in range(cell.gradient_accumulation_steps)
            for r in range(cell.world_size)
        )
        assert engine.load_balancer.metrics()["valid_tokens"] == num_valid
    engine.load_balancer.uninstall()
    engine.destroy()
    return records


def _only(record: WindowRecord, layer: int) -> WindowRecord:
    return WindowRecord(**{name: [value[layer]] for name, value in vars(record).items()})


def _joined(first: WindowRecord, second: WindowRecord) -> WindowRecord:
    """Two ranks that hold the tokens of one micro-batch, as one rank."""

    def per_step(a, b, join):
        return [[join(x, y) for x, y in zip(m, n, strict=True)] for m, n in zip(a, b, strict=True)]

    for a, b in zip(first.grads, second.grads, strict=True):
        assert torch.equal(a, b)
    return WindowRecord(
        weights=first.weights,
        grads=first.grads,
        inputs=per_step(first.inputs, second.inputs, lambda x, y: x + y),
        selections=per_step(first.selections, second.selections, lambda x, y: x + y),
        valid=per_step(first.valid, second.valid, lambda x, y: x + y),
        input_grads=per_step(first.input_grads, second.input_grads, lambda x, y: torch.cat([x, y])),
        l_aux=per_step(first.l_aux, second.l_aux, lambda x, y: x + y),
        counts=per_step(first.counts, second.counts, lambda x, y: x + y),
    )


def _wrong(
    layout: Layout, cell: Cell, per_rank: list[list[WindowRecord]], groups: Any = None
) -> list[str]:
    """Disagreements with the reference, layer by layer; ``groups`` from a layer's arguments."""
    found = []
    for number, layer in enumerate(layout.layers):
        of_layer = [[_only(record, number) for record in records] for records in per_rank]
        found += disagreements(
            replace(cell, top_k=layer.get("k", 2)),
            of_layer,
            groups=None if groups is None else groups(layer),
        )
    return found


# ------------------------------------------------------------------------------------------------


MIXED = Layout(
    (
        {"num_experts": 8, "ep_size": 1, "k": 1},
        {"num_experts": 12, "ep_size": 2, "k": 2},
        {"num_experts": 16, "ep_size": 4, "k": 4},
    )
)


def _neighbours(layer: dict[str, Any]) -> list[list[int]]:
    size = layer["ep_size"]
    return [list(range(start, start + size)) for start in range(0, 4, size)]


def _strided(layer: dict[str, Any]) -> list[list[int]]:
    size = layer["ep_size"]
    return [list(range(start, 4, size)) for start in range(size)]


def test_layers_with_different_experts_choices_and_expert_parallel_sizes():
    cells = _half_of_all()
    kinds = {"data_parallel": None, "expert_parallel": _neighbours}
    kinds["expert_data_parallel"] = _strided
    runs = [
        (cell, section_of(cell) | {"sync_group": kind})
        for kind in kinds
        for cell in (cells if kind == "data_parallel" else cells[::3])
    ]
    results = run_ranks(_check_layout, 4, MIXED, runs, timeout_s=180)
    for index, (cell, section) in enumerate(runs):
        per_rank = [rank_results[index] for rank_results in results]
        groups = kinds[section["sync_group"]]
        assert _wrong(MIXED, cell, per_rank, groups) == [], (str(cell), section)


@pytest.mark.parametrize("mpu", ["sequence", "deepspeed_sequence"])
def test_ranks_of_one_sequence_count_as_one(mpu):
    """D is data x sequence ranks over the sequence-parallel size; counts are over all of them."""
    ep_size = 2 if mpu == "sequence" else 1
    layout = Layout(({"num_experts": 8, "ep_size": ep_size}, {"num_experts": 12}), mpu)
    cells = _half_of_all()
    runs = [(cell, section_of(cell)) for cell in cells]
    results = run_ranks(_check_layout, 4, layout, runs, timeout_s=180)
    for index, cell in enumerate(cells):
        ranks = [rank_results[index] for rank_results in results]
        per_rank = [
            [_joined(a, b) for a, b in zip(ranks[first], ranks[first + 1], strict=True)]
            for first in (0, 2)
        ]
        assert _wrong(layout, cell, per_rank) == [], str(cell)


@pytest.mark.parametrize("expert_tensor_parallelism", [False, True])
def test_tensor_parallel_peers_count_once(expert_tensor_parallelism):
    arguments = {"enable_expert_tensor_parallelism": expert_tensor_parallelism}
    layout = Layout(
        (
            {"num_experts": 8, "ep_size": 2} | arguments,
            {"num_experts": 12, "ep_size": 1} | arguments,
        ),
        "tensor",
    )
    cells = [
        replace(BASE, world_size=2, mechanism=mechanism, estimate=estimate, zero_stage=stage)
        for at, (mechanism, estimate) in enumerate(WAYS)
        for stage in (0, 1, 2)
        if (at + at // 2 + stage) % 2 == 0
    ]
    runs = [(cell, section_of(cell)) for cell in cells]
    results = run_ranks(_check_layout, 4, layout, runs, timeout_s=180)
    for index, cell in enumerate(cells):
        for peer in (0, 1):
            per_rank = [results[peer][index], results[peer + 2][index]]
            assert _wrong(layout, cell, per_rank) == [], (str(cell), peer)


def test_residual_moe():
    layout = Layout(
        (
            {"num_experts": 8, "ep_size": 2, "use_residual": True},
            {"num_experts": 12, "use_residual": True},
        )
    )
    cells = [
        replace(BASE, world_size=2, mechanism=mechanism, estimate=estimate, zero_stage=stage)
        for mechanism, estimate in WAYS
        for stage in (1, 2)
    ]
    runs = [(cell, section_of(cell)) for cell in cells]
    results = run_ranks(_check_layout, 2, layout, runs, timeout_s=180)
    for index, cell in enumerate(cells):
        per_rank = [rank_results[index] for rank_results in results]
        assert _wrong(layout, cell, per_rank) == [], str(cell)


def _check_own_group():
    for ranks in ([0], [0, 1]):
        dist.new_group(ranks)
    layout = Layout(({"num_experts": 8},))
    return _run(layout, None, BASE, section_of(BASE))


def test_a_scripts_own_group_of_some_ranks_does_not_hang_the_installation():
    """Install hung for ever: a rank's other groups are part of the name of a new one."""
    per_rank = run_ranks(_check_own_group, 4)
    assert _wrong(Layout(({"num_experts": 8},)), BASE, per_rank) == []


def _check_refused_scope(mpu_kind):
    mpu, said = make_mpu(mpu_kind), []
    scheduled = {"schedule": [{"step": 5, "scope": "sequence"}]}
    for section in ({"scope": "sequence"}, scheduled):
        with pytest.raises(ValueError) as caught:
            _run(Layout(({"num_experts": 8},), mpu_kind), mpu, BASE, section)
        said.append(str(caught.value))
    return said


def test_the_loss_of_whole_sequences_is_refused_where_ranks_share_them():
    for mpu_kind in ("sequence", "deepspeed_sequence"):
        for of_rank in run_ranks(_check_refused_scope, 4, mpu_kind):
            for message in of_rank:
                assert message == (
                    "moe_load_balancing.scope: got 'sequence', but with sequence parallelism no "
                    "rank has a whole sequence; use 'global_batch' or 'micro_batch'"
                )
