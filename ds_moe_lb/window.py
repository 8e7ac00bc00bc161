"""The window: int64 counts up to the optimizer step, and the finished slopes that follow from them.

No collectives and no DeepSpeed here.

Shape legend: L layers on this rank, E experts of one layer, F = sum of E over the layers (flat).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_moe_lb import loss
from ds_moe_lb.counts import CountLayout, to_device


@dataclass
class MicroStep:
    """What one counted forward of the whole model leaves behind.

    Attributes:
        index: m, 1 for the first micro-step of the window.
        counts_F: local counts, int64.
        calls: calls of each layer in this forward.
        global_counts_F: counts of the balance group, as far as they were reduced, int64.
        slopes_F: ``w E f`` of all layers, fp32, where they are made together; None until then.
        prob_sum_F: local sums of valid probabilities, fp32; None in windows without a report.
        used_L: where the values of the balancing terms are summed up, fp64; None likewise.
        has_ended: the forward came to its end.
    """

    index: int
    counts_F: Tensor
    calls: list[int]
    global_counts_F: Tensor
    slopes_F: Tensor | None = None
    prob_sum_F: Tensor | None = None
    used_L: Tensor | None = None
    has_ended: bool = False


@dataclass
class CompleteWindow:
    """Counts of a finished window, summed over the balance group.

    Attributes:
        counts_F: ``(F,)`` int64.
        fullness: each layer's calls over the G of that time: 1, unless the window ended early or
            the model calls the layer more or less often than once per forward.
        num_micro_steps: how many it had.
    """

    counts_F: Tensor
    fullness: list[float]
    num_micro_steps: int

    def slopes(self, layout: CountLayout, *, num_ranks_L: Tensor, gas: int) -> Tensor:
        """``w E f`` of all layers with f over this window, ``w = D G / N``; ``(F,)`` fp32.

        N is what a full window would have had, so that one which ended early does not make the
        next one's balancing stronger.
        """
        tokens_L = layout.num_tokens(self.counts_F)
        fullness_L = to_device(self.fullness, torch.float64, num_ranks_L.device)
        weight_L = loss.token_weight(tokens_L, numerator=num_ranks_L * gas * fullness_L)
        return layout.slopes(self.counts_F, weight_L)


@dataclass(frozen=True)
class Carried:
    """What `carry` puts in the place of the micro-steps to come.

    Attributes:
        window: the last complete one.
        gas: G.
    """

    window: CompleteWindow
    gas: int

    def complete(self, so_far: Tensor, before: Tensor, *, micro_step: int) -> Tensor:
        """``G C_(1..m) + (G - m) C_prev``, int64, with the first G that of the window before.

        So a short one stands for a full one of its kind; beyond G nothing is carried over.

        Args:
            so_far: C_(1..m), int64 counts.
            before: C_prev, of the same shape.
            micro_step: m.
        """
        rest = max(self.gas - micro_step, 0)
        return so_far * max(self.window.num_micro_steps, 1) + before * rest


@dataclass
class Window:
    """Counts since the last optimizer step.

    Attributes:
        layout: the flat layout.
        num_micro_steps: m so far.
        local_F: this rank's counts over finished micro-steps, int64.
        global_F: counts of the balance group as far as they were reduced, int64 (estimates
            `running` and `carry`).
        calls: calls of each layer so far.
    """

    layout: CountLayout
    num_micro_steps: int = 0
    local_F: Tensor = field(init=False)
    global_F: Tensor = field(init=False)
    calls: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.local_F = self.layout.zeros()
        self.global_F = self.layout.zeros()
        self.calls = [0] * len(self.layout.layers)

    def begin_micro_step(self) -> MicroStep:
        """Open the record of the next counted forward; it belongs to the window once it has ended.

        A forward that raises is never heard of again.
        """
        layout = self.layout
        return MicroStep(
            self.num_micro_steps + 1, layout.zeros(), [0] * len(self.calls), layout.zeros()
        )

    def add(self, micro_step: MicroStep, *, layer: int, counts_E: Tensor) -> None:
        """Count one call of one layer on this rank."""
        micro_step.counts_F[self.layout.count_slices[layer]] += counts_E
        micro_step.calls[layer] += 1

    def end_micro_step(self, micro_step: MicroStep) -> None:
        """The model's forward has ended: take its record in."""
        micro_step.has_ended = True
        self.num_micro_steps += 1
        self.calls = [sum(both) for both in zip(self.calls, micro_step.calls, strict=True)]
        self.local_F += micro_step.counts_F
        self.global_F += micro_step.global_counts_F

    def running_slopes(
        self,
        micro_step: MicroStep,
        global_counts_F: Tensor,
        *,
        num_ranks_L: Tensor,
        carried: Carried | None = None,
    ) -> Tensor:
        """Take in a micro-step's reduced counts; ``w E f`` with f over micro-steps 1..m and what is
        carried over, w = D / N_m.

        A layer called c times in one forward makes c terms over shared counts, each over 1/c of
        N_m.
        """
        self.global_F += global_counts_F
        tokens_L = self.layout.num_tokens(global_counts_F)
        weight_L = loss.token_weight(tokens_L, numerator=num_ranks_L)
        if any(calls > 1 for calls in micro_step.calls):
            calls = [max(n, 1) for n in micro_step.calls]
            weight_L = weight_L * to_device(calls, torch.float64, weight_L.device)
        seen_F = self.global_F
        if carried is not None:
            seen_F = carried.complete(seen_F, carried.window.counts_F, micro_step=micro_step.index)
        return self.layout.slopes(seen_F, weight_L)

    def running_slope(
        self,
        micro_step: MicroStep,
        *,
        layer: int,
        global_counts_E: Tensor,
        num_ranks: float,
        carried: Carried | None = None,
    ) -> Tensor:
        """The same for one call of one layer in a forward under way; ``(E,)``."""
        where = self.layout.count_slices[layer]
        micro_step.global_counts_F[where] += global_counts_E
        tokens = global_counts_E.sum().double() / self.layout.layers[layer].top_k
        weight = loss.token_weight(tokens, numerator=num_ranks)
        seen_E = self.global_F[where] + micro_step.global_counts_F[where]
        if carried is not None:
            before_E = carried.window.counts_F[where]
            seen_E = carried.complete(seen_E, before_E, micro_step=micro_step.index)
        return loss.balance_slope(seen_E, token_weight=weight)

    def complete(self, global_counts_F: Tensor, *, gas: int) -> CompleteWindow:
        """The finished window, given its counts summed over the balance group."""
        fullness = [calls / gas for calls in self.calls]
        return CompleteWindow(global_counts_F, fullness, self.num_micro_steps)
