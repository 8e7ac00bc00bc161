"""Windows of any length on a live engine, and their comparison with the fp64 reference."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import deepspeed.comm as dist
import torch

import ds_moe_lb
import reference
from engine_grid import (
    BASE,
    COEFF,
    LEARNING_RATE,
    Batch,
    Cell,
    WindowRecord,
    ds_config,
    full_grad,
    make_batch,
    make_model,
    make_record,
    section_of,
    used_token,
    windows_of,
)
from models import GateRecorder, TinyMoE, moe_param_groups


def ways(**levels: Any) -> list[Cell]:
    """One cell for each mechanism and estimate."""
    return [
        replace(BASE, mechanism=mechanism, estimate=estimate, **levels)
        for mechanism in ("l_aux", "injection")
        for estimate in ("running", "boundary")
    ]


def of_run(results: list[list[Any]], index: int) -> list[Any]:
    """What each rank returned of one of its runs."""
    return [rank_results[index] for rank_results in results]


def batches(cell: Cell, *, window: int, num: int) -> list[Batch]:
    """This rank's micro-batches of one window."""
    return [make_batch(cell, window=window, micro_step=m, rank=dist.get_rank()) for m in range(num)]


class Script:
    """A training script on one engine that leaves only the balancing gradient and records it.

    Args:
        model: a TinyMoE; by default the cell's.
        prepare: called with the model before the gates are recorded.
        section: further keys of our section.
        unscales: take the optimizer's loss scale out of the gradients.
        extra: further entries of the DeepSpeed JSON.
    """

    def __init__(
        self,
        cell: Cell,
        *,
        model: TinyMoE | None = None,
        prepare: Callable[[TinyMoE], None] = lambda model: None,
        lr: float = LEARNING_RATE,
        section: dict[str, Any] | None = None,
        unscales: bool = False,
        **extra: Any,
    ) -> None:
        self.cell = cell
        self.unscales = unscales
        self.model = make_model(cell) if model is None else model
        self.engine = ds_moe_lb.initialize(
            model=self.model,
            optimizer=torch.optim.SGD(moe_param_groups(self.model), lr=lr),
            config=ds_config(cell, section_of(cell) | (section or {})) | extra,
        )[0]
        prepare(self.model)
        self.recorder = GateRecorder(self.model.gates())

    @property
    def counts(self) -> list[list[int]]:
        """Counts of the window in progress on this rank, by layer."""
        return [n.tolist() for n in self.engine.load_balancer.counts().values()]

    def forward(self, batch: Batch) -> torch.Tensor:
        """The micro-step's loss; native ``l_aux`` goes to ``self.l_aux``."""
        dtype = next(self.model.parameters()).dtype
        mask = used_token(batch)
        prediction, losses = self.engine(
            batch.x.to(self.engine.device, dtype),
            None if mask is None else mask.to(self.engine.device),
        )
        losses = [loss for loss in losses if loss is not None]
        self.l_aux.append([loss.item() for loss in losses])
        loss = 0.0 * prediction.sum()
        return loss + COEFF * sum(losses) if self.cell.mechanism == "l_aux" else loss

    def window(
        self,
        window_batches: Sequence[Batch],
        *,
        boundary: str = "engine",
        between: Callable[[int], None] = lambda micro_step: None,
    ) -> WindowRecord:
        """Train one window, step included.

        Args:
            boundary: who decides where it ends: "engine"; "early", by the flag before each
                forward; "accelerate", by the flag between forward and backward, with one step for
                the window; "unmanaged", one step and no flag; "backward", as "engine", with
                ``loss.backward()`` instead of the engine's.
            between: called before each micro-step.
        """
        for block in self.model.blocks:
            block.input_grads.clear()
        self.l_aux: list[list[float]] = []
        weights = [gate.wg.weight.detach().float().tolist() for gate in self.model.gates()]
        scale = float(self.engine.optimizer.loss_scale) if self.unscales else 1.0
        for micro_step, batch in enumerate(window_batches):
            is_last = micro_step == len(window_batches) - 1
            between(micro_step)
            if boundary == "early":
                self.engine.set_gradient_accumulation_boundary(is_last)
            loss = self.forward(batch)
            if boundary == "accelerate":
                self.engine.set_gradient_accumulation_boundary(is_last)
            if boundary == "backward":
                loss.backward()
            else:
                self.engine.backward(loss)
            if is_last:
                grads = [] if boundary == "unmanaged" else self.gate_grads()
                counts = self.counts
            if is_last or boundary not in ("accelerate", "unmanaged"):
                self.engine.step()
        record = make_record(self.recorder, self.model, weights, grads, [], counts)
        if self.unscales:
            record.grads = [grad / scale for grad in record.grads]
            record.input_grads = [[g / scale for g in grads] for grads in record.input_grads]
        return record

    def gate_grads(self) -> list[torch.Tensor]:
        """The gates' gradients as the engine will apply them."""
        return [full_grad(gate.wg.weight) for gate in self.model.gates()]

    def finish(self) -> None:
        """Let go of the engine."""
        self.engine.load_balancer.uninstall()
        self.engine.destroy()


Factor = Callable[[int, int, reference.Window, reference.Window | None], float]


def configured_gas(gas: int) -> Factor:
    """The engine divides by its configured G, however many micro-steps a window has.

    `boundary` takes the window before for what a full one would have been.
    """

    def factor(
        layer: int, number: int, window: reference.Window, previous: reference.Window | None
    ) -> float:
        return (previous or window).num_micro_steps / gas

    return factor


def wrong(
    cell: Cell,
    per_rank: list[list[WindowRecord]],
    *,
    factor: Factor | None = None,
    discarded: Sequence[int] = (),
    tolerance: float = 0.0,
    without_column: int | None = None,
    **terms: Any,
) -> list[str]:
    """Everything in which the engine differs from the reference; empty where they agree.

    Args:
        factor: what the reference's gradients have to be multiplied by; default as the engine
            divides.
        discarded: windows that leave nothing behind and are not compared.
        tolerance: of half-precision runs, relative to the largest gradient.
        terms: further arguments of the reference.
        without_column: a feature whose column of the gate's gradient is not compared.
    """
    factor = factor or configured_gas(cell.gradient_accumulation_steps)
    found: list[str] = []
    for layer in range(len(per_rank[0][0].weights)):
        previous: reference.Window | None = None
        for number, window in enumerate(windows_of(per_rank, layer, cell.top_k)):
            if number in discarded:
                continue
            before = previous if cell.estimate == "boundary" else None
            arguments = {
                "estimate": cell.estimate,
                "previous": previous,
                "coeff": COEFF,
                "gas": cell.gradient_accumulation_steps,
            }
            expected = reference.balance(window, **(arguments | terms))
            scale = factor(layer, number, window, before)
            previous = window
            for rank, records in enumerate(per_rank):
                record, where = records[number], f"layer {layer} window {number} rank {rank}"
                if record.grads:
                    weight_grad = torch.tensor(expected.weight_grad, dtype=torch.float64) * scale
                    grad = record.grads[layer].double()
                    assert weight_grad.abs().max() > 1e-3, f"{where}: tests nothing"
                    if without_column is not None:
                        weight_grad[:, without_column] = grad[:, without_column]
                    _compare(found, f"{where} gate", grad, weight_grad, tolerance)
                for m, grad in enumerate(record.input_grads[layer]):
                    reference_grad = torch.tensor(expected.input_grads[m][rank]).double() * scale
                    what = f"{where} input of micro-step {m}"
                    _compare(found, what, grad.double(), reference_grad, tolerance)
                own = reference.window_counts(window)[rank]
                if record.counts is not None and record.counts[layer] != own:
                    found.append(f"{where}: counts {record.counts[layer]}, expected {own}")
    return found


def _compare(
    found: list[str], what: str, grad: torch.Tensor, ref: torch.Tensor, tolerance: float
) -> None:
    if grad.numel() == ref.numel() == 0:
        return
    difference = (grad - ref).abs()
    allowed = torch.maximum(1e-5 * ref.abs().clamp(min=1e-2), tolerance * ref.abs().max())
    if not (difference <= allowed).all():
        ratio = (grad.norm() / ref.norm()).item()
        found.append(
            f"{what}: off by {difference.max():.2e} of {ref.abs().max():.2e}, x{ratio:.4f}"
        )
