"""The reference grid: cells, engines that run them, and the comparison with the fp64 reference.

One cell = one engine, two accumulation windows (two, so that ``boundary`` has a previous window
and so that a window that is not reset shows). Ranks only record; the parent computes the reference
from what was recorded.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch

import reference
from models import CHECKPOINTING, MODEL_DIM, GateRecorder, TinyMoE, moe_param_groups

COEFF = 0.5  # keeps gradients near 0.1, where 1e-7 absolute is far above fp32 rounding
LEARNING_RATE = 0.1
SEQUENCES = 2
NUM_WINDOWS = 2
STRENGTH = 3  # of the cover that CI runs: every combination of three levels, hence every pair

# What an engine is made with: our section, ours without a section, or plain DeepSpeed (None).
ABSENT = "absent"
Section = dict[str, Any] | str | None

# ------------------------------------------------------------------------------------------------
# The grid


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    world_size: int
    ep_size: int
    zero_stage: int
    gradient_accumulation_steps: int
    top_k: int
    checkpointing: str
    tokens: str
    estimate: str
    mechanism: str

    def __str__(self) -> str:
        return (
            f"world{self.world_size}-ep{self.ep_size}-zero{self.zero_stage}"
            f"-G{self.gradient_accumulation_steps}-k{self.top_k}-{self.checkpointing}"
            f"-{self.tokens}-{self.estimate}-{self.mechanism}"
        )


# A plain cell, of which tests beside the grid vary what they are about.
BASE = Cell(
    world_size=2,
    ep_size=1,
    zero_stage=1,
    gradient_accumulation_steps=2,
    top_k=2,
    checkpointing="off",
    tokens="even",
    estimate="running",
    mechanism="l_aux",
)

LEVELS: dict[str, tuple] = {
    "world_size": (1, 2, 4),
    "ep_size": (1, 2, 4),
    "zero_stage": (0, 1, 2),
    "gradient_accumulation_steps": (1, 2, 4),
    "top_k": (1, 2, 4),
    "checkpointing": CHECKPOINTING,
    "tokens": ("even", "uneven", "masked"),
    "estimate": ("running", "boundary"),
    "mechanism": ("l_aux", "injection"),
}


def why_plain_deepspeed_cannot(cell: Cell) -> str | None:
    """The reason why DeepSpeed itself has no such run, or None where it has."""
    if cell.world_size % cell.ep_size:
        return f"ep_size {cell.ep_size} does not divide {cell.world_size} ranks"
    if cell.tokens == "uneven" and cell.ep_size > 1 and cell.top_k == 1:
        return (
            "unequal token numbers with ep_size > 1: top-1 caps the capacity by the local "
            "tokens, so all-to-all sizes differ (k >= 2 runs, with drop_tokens false)"
        )
    return None


@functools.cache
def all_cells() -> tuple[Cell, ...]:
    return tuple(Cell(*levels) for levels in itertools.product(*LEVELS.values()))


@functools.cache
def runnable_cells() -> tuple[Cell, ...]:
    return tuple(cell for cell in all_cells() if why_plain_deepspeed_cannot(cell) is None)


@functools.cache
def cover(strength: int = STRENGTH) -> tuple[Cell, ...]:
    """A small set of runnable cells with every runnable combination of ``strength`` levels.

    Greedy and deterministic: each cell taken is the first of those that add most.
    """
    numbers: dict[Any, int] = {}
    candidates = {}  # cell -> its combinations as bits
    for cell in runnable_cells():
        candidates[cell] = 0
        for combination in combinations(cell, strength):
            candidates[cell] |= 1 << numbers.setdefault(combination, len(numbers))
    missing = (1 << len(numbers)) - 1
    taken = []
    while missing:
        best = max(candidates, key=lambda cell: (candidates[cell] & missing).bit_count())
        missing &= ~candidates.pop(best)
        taken.append(best)
    return tuple(taken)


def combinations(cell: Cell, strength: int) -> Iterable[tuple]:
    levels = [(name, getattr(cell, name)) for name in LEVELS]
    return itertools.combinations(levels, strength)


# ------------------------------------------------------------------------------------------------
# In a rank: build an engine, run windows, record


@dataclass
class Batch:
    """One rank's micro-batch."""

    x: torch.Tensor  # (B, S, M)
    y: torch.Tensor  # (B, S)
    valid_mask: torch.Tensor | None  # (B, S) bool


def make_batch(cell: Cell, *, window: int, micro_step: int, rank: int) -> Batch:
    """A micro-batch with a domain of its own.

    It depends on its place in the window only, so that one window can be cut into ranks and
    micro-steps in several ways.
    """
    place = micro_step * cell.world_size + rank
    num_places = cell.world_size * cell.gradient_accumulation_steps
    length = 3 + (3 * place + window) % 5 if cell.tokens == "uneven" else 6
    common = torch.randn(MODEL_DIM, generator=_generator(0))  # keeps the routing uneven
    generator = _generator(1_000 * window + place + 1)
    domain = torch.randn(MODEL_DIM, generator=generator)
    x = torch.randn(SEQUENCES, length, MODEL_DIM, generator=generator) + domain + 2.0 * common
    y = torch.randn(SEQUENCES, length, generator=generator)
    valid_mask = None
    if cell.tokens == "masked":
        valid_mask = torch.rand(SEQUENCES, length, generator=generator) < 0.6
        # One micro-batch has no valid token; with one rank nobody has one at that micro-step.
        if place == num_places - 1 and num_places > 1:
            valid_mask[:] = False
    return Batch(x, y, valid_mask)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_model(cell: Cell, **arguments: Any) -> TinyMoE:
    torch.manual_seed(42)
    # Unequal all-to-all sizes are avoided by a capacity that the expert-parallel group agrees on.
    drop_tokens = not (cell.tokens == "uneven" and cell.ep_size > 1)
    arguments = {"drop_tokens": drop_tokens, "checkpointing": cell.checkpointing} | arguments
    return TinyMoE(k=cell.top_k, ep_size=cell.ep_size, **arguments)


def ds_config(cell: Cell, section: Section) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": cell.gradient_accumulation_steps,
        "gradient_clipping": 0,  # the default is 1.0 and hides scale bugs
        "zero_optimization": {"stage": cell.zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    if isinstance(section, dict):
        config["moe_load_balancing"] = section
    return config


def section_of(cell: Cell) -> dict[str, Any]:
    section: dict[str, Any] = {"estimate": cell.estimate}
    if cell.mechanism == "injection":
        section["aux_loss_coeff"] = COEFF
    return section


def make_engine(cell: Cell, model: TinyMoE, section: Section, lr: float = LEARNING_RATE) -> Any:
    """An engine with the plugin, or of plain DeepSpeed where ``section`` is None."""
    arguments = {
        "model": model,
        "optimizer": torch.optim.SGD(moe_param_groups(model), lr=lr),
        "config": ds_config(cell, section),
    }
    if section is None:
        return deepspeed.initialize(**arguments)[0]
    import ds_moe_lb

    return ds_moe_lb.initialize(**arguments)[0]


def used_token(batch: Batch) -> torch.Tensor | None:
    return None if batch.valid_mask is None else batch.valid_mask.reshape(-1).long()


def main_loss(batch: Batch, prediction: torch.Tensor) -> torch.Tensor:
    return (prediction - batch.y).square().mean()


def full_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient as the engine will apply it, after the last backward of a window."""
    return deepspeed.utils.safe_get_full_grad(parameter).detach().float().cpu().clone()


@dataclass
class WindowRecord:
    """One rank's part of one window; ``[layer]`` first, then ``[micro-step]`` where it says so."""

    weights: list[list[list[float]]]
    inputs: list[list[list[list[float]]]]  # [layer][micro-step][token][feature]
    selections: list[list[list[list[int]]]]
    valid: list[list[list[bool]]]
    grads: list[torch.Tensor]
    input_grads: list[list[torch.Tensor]]  # [layer][micro-step]
    l_aux: list[list[float]]
    counts: list[list[int]] | None


def run_window(
    cell: Cell,
    engine: Any,
    recorder: GateRecorder,
    window: int,
    *,
    mask_by: str = "used_token",
    interrupt: Callable[[], None] = lambda: None,
) -> WindowRecord:
    """Run one accumulation window, step included, with only the balancing gradient left.

    Args:
        mask_by: 'used_token', the layer's argument, or 'token_mask', the plugin's.
        interrupt: called before each forward, each backward and each step.
    """
    model: TinyMoE = engine.module
    for block in model.blocks:
        block.input_grads.clear()
    weights = [gate.wg.weight.detach().tolist() for gate in model.gates()]
    l_aux: list[list[float]] = [[] for _ in model.gates()]
    grads, counts = [], None
    for micro_step in range(cell.gradient_accumulation_steps):
        batch = make_batch(cell, window=window, micro_step=micro_step, rank=dist.get_rank())
        interrupt()
        if mask_by == "used_token":
            prediction, losses = engine(batch.x, used_token(batch))
        else:
            recorder.valid_mask = batch.valid_mask
            with engine.load_balancer.token_mask(batch.valid_mask):
                prediction, losses = engine(batch.x)
        for layer, loss in enumerate(losses):
            l_aux[layer].append(loss.item())
        balancing = sum(losses) if cell.mechanism == "l_aux" else 0.0
        interrupt()
        engine.backward(0.0 * main_loss(batch, prediction) + COEFF * balancing)
        interrupt()
        if micro_step == cell.gradient_accumulation_steps - 1:
            grads = [full_grad(gate.wg.weight) for gate in model.gates()]
            if getattr(engine, "load_balancer", None) is not None:
                counts = [n.tolist() for n in engine.load_balancer.counts().values()]
        engine.step()
    return make_record(recorder, model, weights, grads, l_aux, counts)


def make_record(
    recorder: GateRecorder,
    model: TinyMoE,
    weights: list[list[list[float]]],
    grads: list[torch.Tensor],
    l_aux: list[list[float]],
    counts: list[list[int]] | None,
) -> WindowRecord:
    """Put what was read during a window together with what the recorder and the blocks kept."""
    calls = recorder.take()
    return WindowRecord(
        weights=weights,
        inputs=[[call.x.tolist() for call in layer] for layer in calls],
        selections=[[call.selections.tolist() for call in layer] for layer in calls],
        valid=[[call.valid_mask.tolist() for call in layer] for layer in calls],
        grads=grads,
        input_grads=[list(block.input_grads) for block in model.blocks],
        l_aux=l_aux,
        counts=counts,
    )


def run_cell(
    cell: Cell,
    section: Section,
    *,
    mask_by: str = "used_token",
    lr: float = LEARNING_RATE,
    **model_arguments: Any,
) -> list[WindowRecord]:
    """One engine, its windows, and what this rank recorded in each."""
    try:
        model = make_model(cell, **model_arguments)
        engine = make_engine(cell, model, section, lr)
        recorder = GateRecorder(model.gates())
        records = [
            run_window(cell, engine, recorder, window, mask_by=mask_by)
            for window in range(NUM_WINDOWS)
        ]
        finish(engine)
        return records
    except Exception as error:
        raise RuntimeError(f"cell {cell}, section {section}") from error


def finish(engine: Any) -> None:
    """Let go of the plugin's groups and the engine's hooks."""
    if getattr(engine, "load_balancer", None) is not None:
        engine.load_balancer.uninstall()
    engine.destroy()


# ------------------------------------------------------------------------------------------------
# In the parent: the reference and the comparison


def windows_of(
    per_rank: list[list[WindowRecord]], layer: int, top_k: int
) -> list[reference.Window]:
    """The reference's input: one layer, all ranks, one entry per window."""
    windows = []
    for records in zip(*per_rank, strict=True):
        num_steps = len(records[0].inputs[layer])
        steps = range(num_steps)
        windows.append(
            reference.Window(
                weight=records[0].weights[layer],
                inputs=[[record.inputs[layer][m] for record in records] for m in steps],
                selections=[[record.selections[layer][m] for record in records] for m in steps],
                valid=[[record.valid[layer][m] for record in records] for m in steps],
                top_k=top_k,
            )
        )
    return windows


def disagreements(
    cell: Cell,
    per_rank: list[list[WindowRecord]],
    *,
    groups: list[list[int]] | None = None,
    check_l_aux: bool = True,
) -> list[str]:
    """Everything in which the engine differs from the reference; empty where they agree."""
    found = []
    num_layers = len(per_rank[0][0].weights)
    for layer in range(num_layers):
        previous = None
        for number, window in enumerate(windows_of(per_rank, layer, cell.top_k)):
            assert window.num_micro_steps == cell.gradient_accumulation_steps
            expected = reference.balance(
                window, estimate=cell.estimate, previous=previous, groups=groups, coeff=COEFF
            )
            previous = window
            records = [records[number] for records in per_rank]
            where = f"layer {layer} window {number}"
            biggest = max(abs(value) for row in expected.weight_grad for value in row)
            assert biggest > 1e-2, (
                f"{cell} {where}: the cell tests nothing, max |ref| {biggest:.1e}"
            )

            for rank, record in enumerate(records):
                place = f"{where} rank {rank}"
                _compare(found, f"{place} gate gradient", record.grads[layer], expected.weight_grad)
                input_grads = record.input_grads[layer]
                if len(input_grads) != window.num_micro_steps:
                    found.append(f"{place}: {len(input_grads)} gradients of the gate's input")
                for m, grad in enumerate(input_grads):
                    _compare(
                        found,
                        f"{place} micro-step {m} input gradient",
                        grad,
                        expected.input_grads[m][rank],
                    )
                own = reference.window_counts(window)[rank]
                if record.counts is not None and record.counts[layer] != own:
                    found.append(f"{place}: counts {record.counts[layer]}, expected {own}")
                for m, value in enumerate(record.l_aux[layer] if check_l_aux else []):
                    share = expected.shares[m][rank] if cell.mechanism == "l_aux" else 0.0
                    if not abs(value - share) <= 1e-5 * max(1.0, abs(share)):
                        found.append(f"{place} micro-step {m}: l_aux {value}, expected {share}")
    return found


def _compare(found: list[str], what: str, grad: torch.Tensor, expected: list) -> None:
    ref = torch.tensor(expected, dtype=torch.float64)
    difference = (grad.double() - ref).abs()
    is_bad = ~(difference <= 1e-5 * ref.abs().clamp(min=1e-2))  # NaN is bad
    if is_bad.any():
        found.append(
            f"{what}: {int(is_bad.sum())} of {ref.numel()} differ, by at most "
            f"{difference.max().item():.2e} where |ref| reaches {ref.abs().max().item():.2e}; "
            f"ratio of norms {(grad.double().norm() / ref.norm()).item():.6f}"
        )
