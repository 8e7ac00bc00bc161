"""What the ranks recorded against what the reference says, and how far apart they may be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_moe_lb.verify.layout import Layout
from ds_moe_lb.verify.reference import Expected, LayerWindow, balance
from ds_moe_lb.verify.session import WindowRecord

KINDS = ("counts", "loss", "gradient")
# fp32: |g - ref| <= 1e-5 * max(|ref|, 1e-2), the gradient taken per unit of the coefficient.
RELATIVE = 1e-5
FLOOR = 1e-2
# Unit roundoff: half of the distance from 1 to the next number.
_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@dataclass
class Verdict:
    """The outcome of one property: per kind the largest deviation, and what failed.

    Attributes:
        deviation: kind to its largest deviation: a difference of counts, or a relative one.
        tolerance: kind to what is allowed.
        failures: in words.
    """

    deviation: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    tolerance: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    failures: list[str] = field(default_factory=list)

    def note(self, kind: str, deviation: float, tolerance: float, where: str) -> None:
        """Take in one comparison; a NaN is as wrong as can be."""
        deviation = math.inf if math.isnan(deviation) else deviation
        self.deviation[kind] = max(self.deviation[kind], deviation)
        self.tolerance[kind] = max(self.tolerance[kind], tolerance)
        if deviation > tolerance:
            self.failures.append(f"{where}: off by {deviation:.3g}, allowed {tolerance:.3g}")


def compare(
    verdict: Verdict,
    records: Sequence[WindowRecord],
    *,
    previous: Sequence[WindowRecord] | None,
    layout: Layout,
    ep_size: int,
    where: str,
) -> None:
    """Compare one window of all ranks with the reference.

    Args:
        verdict: receives the outcome.
        records: of the window, by rank.
        previous: of the window before on the same engine; None = this was the first.
        layout: the layout.
        ep_size: of the engine's MoE layers.
        where: name of the window, for messages.
    """
    for layer in range(len(records[0].weights)):
        expected = balance(
            _layer_window(records, layer),
            estimate=layout.estimate,
            previous=None if previous is None else _layer_window(previous, layer),
            groups=layout.groups(ep_size=ep_size),
            top_k=layout.top_k,
            micro_batch_weight=layout.section.micro_batch_weight,
        )
        place = f"{where}, layer {layer}"
        _compare_counts(verdict, records, layer, expected, place)
        _compare_losses(verdict, records, layer, expected, place, layout=layout)
        _compare_gradients(verdict, records, layer, expected, place, layout=layout)


def _layer_window(records: Sequence[WindowRecord], layer: int) -> LayerWindow:
    num_steps = len(records[0].calls[layer])
    return LayerWindow(
        weight_EM=records[0].weights[layer],
        calls=[[record.calls[layer][m] for record in records] for m in range(num_steps)],
    )


def _compare_counts(
    verdict: Verdict,
    records: Sequence[WindowRecord],
    layer: int,
    expected: Expected,
    place: str,
) -> None:
    for rank, (record, counts_E) in enumerate(zip(records, expected.counts, strict=True)):
        deviation = int((record.counts[layer] - counts_E).abs().max())
        verdict.note("counts", deviation, 0.0, f"{place}, rank {rank}: counts")
    num_tokens = records[0].report[f"valid_tokens/layer_{layer:02d}"]
    verdict.note(
        "counts", abs(num_tokens - expected.num_valid_tokens), 0.0, f"{place}: valid tokens"
    )


def _compare_losses(
    verdict: Verdict,
    records: Sequence[WindowRecord],
    layer: int,
    expected: Expected,
    place: str,
    *,
    layout: Layout,
) -> None:
    """Every value of `l_aux`, and the reported losses.

    Router logits, probabilities and their sums are fp32 in every precision that is covered here,
    and of the very inputs and weights that the reference takes: 1e-5 holds for all of them.
    """
    injects, scope = layout.section.aux_loss_coeff is not None, layout.section.scope

    def note(got: float, reference: float, what: str) -> None:
        deviation = abs(got - reference) / max(1.0, abs(reference))
        verdict.note("loss", deviation, RELATIVE, f"{place}{what}")

    if scope != "none":
        for rank, record in enumerate(records):
            for m, value in enumerate(record.l_aux[layer]):
                share = 0.0 if injects else expected.shares[m][rank]
                note(value, share, f", rank {rank}, micro-step {m}: l_aux")
    report, suffix = records[0].report, f"layer_{layer:02d}"
    note(report[f"lbl_global_batch/{suffix}"], expected.loss_global_batch, ": lbl_global_batch")
    if f"lbl_used/{suffix}" in report:
        note(report[f"lbl_used/{suffix}"], expected.loss_used, ": lbl_used")


def _compare_gradients(
    verdict: Verdict,
    records: Sequence[WindowRecord],
    layer: int,
    expected: Expected,
    place: str,
    *,
    layout: Layout,
) -> None:
    coefficient = layout.coefficient
    for rank, record in enumerate(records):
        # Per unit of the coefficient, so that a small one cannot hide an error under the floor.
        grad_EM = record.grads[layer] / (coefficient or 1.0)
        ref_EM = expected.grad_EM if coefficient else torch.zeros_like(expected.grad_EM)
        if layout.precision == "fp32":
            deviation, tolerance = _relative(grad_EM, ref_EM), RELATIVE
        else:
            num_steps = len(record.calls[layer])
            tolerance = half_precision_tolerance(
                layout.precision, num_ranks=len(records), num_steps=num_steps
            )
            scale = float(expected.magnitude_EM.abs().max()) or 1.0
            deviation = float((grad_EM - ref_EM).abs().max()) / scale
        verdict.note("gradient", deviation, tolerance, f"{place}, rank {rank}: router gradient")


def _relative(grad_EM: Tensor, ref_EM: Tensor) -> float:
    return float(((grad_EM - ref_EM).abs() / ref_EM.abs().clamp(min=FLOOR)).max())


def half_precision_tolerance(precision: str, *, num_ranks: int, num_steps: int) -> float:
    """What may be lost of a router gradient that is stored and summed in half precision.

    Relative to the largest sum of absolute contributions ``sum_mr |g_mr| / (D G)``. Every
    contribution is rounded when it leaves the fp32 router, then with each addition over D ranks
    and G micro-steps and with the division by D: n = D + G + 1 roundings at most (one more for
    fp32's own), each by a factor within 1 +- u. The sum of n roundings is at most n u; for large n
    it stays below 5 sqrt(n) u but with the probability exp(-12) (Higham and Mary 2019, theorem
    2.4), and the smaller one is taken. Overflow and underflow are ruled out by the sizes.
    """
    n = num_ranks + num_steps + 2
    return min(n, 5.0 * math.sqrt(n)) * _ROUNDOFF[precision]
