"""Whose selections f stands for: the counts of a window, their reductions, and the finished slopes.

- `running`: micro-steps 1..m of this window on all ranks (the paper's buffer).
- `boundary`: the last complete window; `running` while there is none.

Shape legend: L MoE layers on this rank, E experts of one layer, F = sum of E over the layers
(flat).
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ds_moe_lb import loss
from ds_moe_lb.counts import CompleteWindow, CountLayout, MicroStep, Window, position
from ds_moe_lb.sync import (
    CountReducer,
    ModelPlace,
    PendingCounts,
    PositionCheck,
    check_positions,
)

# When f is reduced: for each layer at its gate, for all layers when the forward has ended, or
# never.
Reduction = Literal["at_gate", "after_forward", "none"]

_STATE_VERSION = 1
# A window that never ends (forwards without a step) must not pile up what is checked at its end.
_MAX_UNCHECKED = 4096
_MAX_UNSETTLED = 64


@dataclass(eq=False)
class CallCounts:
    """The counts of one call of one layer, and the finished slope once it was needed.

    Attributes:
        layer: index of the layer.
        micro_step: the forward it belongs to.
        counts_E: local counts over valid tokens, int64.
        previous: the window that f is taken from; None = this window so far.
        pending: the call's own reduction, where it has one, with its position.
        slope_E: ``w E f``, fp32.
    """

    layer: int
    micro_step: MicroStep
    counts_E: Tensor
    previous: "PreviousWindow | None" = None
    pending: tuple[PendingCounts, int] | None = None
    slope_E: Tensor | None = None


class PreviousWindow:
    """The last complete window; its counts may still be on their way when it is first asked."""

    def __init__(self, window: CompleteWindow, arrival: "Arrival | None" = None) -> None:
        self._window = window
        self._arrival = arrival
        self._slopes: dict[int, Tensor] = {}

    def wait(self) -> CompleteWindow:
        """The window with its counts summed."""
        if self._arrival is not None:
            self._window.counts_F = self._arrival.wait()
            self._arrival = None
        return self._window

    def slopes(self, layout: CountLayout, *, num_ranks_L: Tensor, gas: int) -> Tensor:
        """``w E f`` of all layers, ``(F,)``, made once for each G."""
        if gas not in self._slopes:
            self._slopes[gas] = self.wait().slopes(layout, num_ranks_L=num_ranks_L, gas=gas)
        return self._slopes[gas]


class Arrival:
    """A message of all layers under way; once awaited its headers are noted for the next check."""

    def __init__(
        self, counts: "BalanceCounts", local_F: Tensor, *, step: int, calls: list[int]
    ) -> None:
        self._counts = counts
        self._own = counts.layout.positions(micro_step=step, calls=calls)
        message = counts.layout.pack(local_F, self._own, rank=counts.reducer.rank)
        self._pending = counts.reducer.start(message, step=step)

    def wait(self) -> Tensor:
        """Counts summed over the balance group, ``(F,)`` int64."""
        counts_F, headers_L3 = self._counts.layout.unpack(self._pending.wait())
        self._counts.expect(PositionCheck(headers_L3, self._own, range(len(self._own))))
        return counts_F


class BalanceCounts:
    """Counts of the window in progress, and f for every call in it.

    Args:
        layout: the flat layout of this rank's MoE layers.
        reducer: the collectives.
        place: where they stand among the layers of all pipeline stages, which a checkpoint holds.
        estimate: `running` or `boundary`.
        sync_group: which ranks the reducer sums over.
        reduction: when this window's own counts are reduced; "none" keeps every count local, and
            the slopes are those of the micro-batch loss.
    """

    def __init__(
        self,
        layout: CountLayout,
        reducer: CountReducer,
        *,
        place: ModelPlace,
        estimate: str,
        sync_group: str,
        reduction: Reduction,
    ) -> None:
        self.layout = layout
        self._place = place
        self.reducer = reducer
        self.reduction = reduction
        self._keeps_previous = estimate == "boundary" and reduction != "none"
        self._saves_state = sync_group == "data_parallel"
        num_ranks = [group.num_ranks for group in reducer.groups]
        self._num_ranks_L = torch.tensor(num_ranks, dtype=torch.float64, device=layout.device)
        self._checks: list[PositionCheck] = []
        self.previous: PreviousWindow | None = None
        self.start_window(gas=1)

    def start_window(self, *, gas: int) -> None:
        """Begin a window with nothing in it; G is the engine's at this moment."""
        self.window = Window(self.layout)
        self._gas = gas
        self._arrivals: deque[tuple[MicroStep, Arrival]] = deque()

    def add_call(self, micro_step: MicroStep, counts_E: Tensor, *, layer: int) -> CallCounts:
        """Count one call of one layer; launches its own reduction where it has one."""
        self.window.add(micro_step, layer=layer, counts_E=counts_E)
        call = CallCounts(layer, micro_step, counts_E, previous=self.previous)
        if self.reduction == "at_gate" and self.previous is None:
            x = position(
                micro_step=micro_step.index,
                call=micro_step.calls[layer],
                layer=layer,
                num_layers=len(self.layout.layers),
            )
            message = self.layout.pack_layer(counts_E, x, rank=self.reducer.rank)
            pending = self.reducer.start_layer(message, layer=layer, step=micro_step.index)
            call.pending = (pending, x)
        return call

    def end_micro_step(self, micro_step: MicroStep) -> None:
        """The model's forward has ended: launch the reduction of all its counts, if it has one."""
        self.window.end_micro_step(micro_step)
        if self.reduction != "after_forward":
            return
        if self.previous is None:
            arrival = Arrival(
                self, micro_step.counts_F, step=micro_step.index, calls=micro_step.calls
            )
            self._arrivals.append((micro_step, arrival))
            if len(self._arrivals) > _MAX_UNSETTLED:
                self._settle_oldest()
        elif micro_step.used_L is not None:
            self._note_used(micro_step, self._previous_slopes(self.previous))

    def slope(self, call: CallCounts) -> Tensor:
        """``w E f`` of a counted call, ``(E,)`` fp32; awaits the counts that it depends on."""
        if call.slope_E is None:
            call.slope_E = self._make_slope(call)
        return call.slope_E

    def close_window(self, *, applied: bool) -> None:
        """The optimizer has stepped: settle this window and keep it where the estimate needs it.

        Args:
            applied: False if the step was skipped for an overflow; such a window is forgotten.

        Raises:
            RuntimeError: if the ranks did not run the same calls; names rank and layer.
        """
        while self._arrivals:
            self._settle_oldest()
        check_positions(
            self._checks,
            rank=self.reducer.rank,
            groups=self.reducer.groups,
            layers=self.layout.layers,
        )
        self._checks.clear()
        if self._keeps_previous:
            # Launched on every rank whatever became of the step; awaited when first needed.
            window = self.window
            arrival = Arrival(self, window.local_F, step=window.num_micro_steps, calls=window.calls)
            if applied:
                self.previous = PreviousWindow(
                    window.complete(window.local_F, gas=self._gas), arrival
                )
            else:
                arrival.wait()

    def expect(self, check: PositionCheck) -> None:
        """Note summed headers for the check at the end of the window."""
        if len(self._checks) < _MAX_UNCHECKED:
            self._checks.append(check)

    def _make_slope(self, call: CallCounts) -> Tensor:
        layer = self.layout.layers[call.layer]
        where = self.layout.count_slices[call.layer]
        if self.reduction == "none":
            return loss.local_slope(call.counts_E, top_k=layer.top_k)
        if call.previous is not None:
            return self._previous_slopes(call.previous)[where]
        if call.pending is not None:
            pending, x = call.pending
            message = pending.wait()
            header_13 = message[layer.num_experts :].unsqueeze(0)
            self.expect(PositionCheck(header_13, [x], [call.layer]))
            return self.window.running_slope(
                call.micro_step,
                layer=call.layer,
                global_counts_E=message[: layer.num_experts],
                num_ranks=self.reducer.groups[call.layer].num_ranks,
            )
        while call.micro_step.slopes_F is None:
            if not self._arrivals:
                raise RuntimeError(
                    f"moe_load_balancing: backward reached layer {layer.name!r} before the model's "
                    f"forward had ended, when its counts were not reduced yet; call backward after "
                    f"forward, or set aux_loss_coeff to null and add coefficient * l_aux yourself"
                )
            self._settle_oldest()
        return call.micro_step.slopes_F[where]

    def _previous_slopes(self, previous: PreviousWindow) -> Tensor:
        return previous.slopes(self.layout, num_ranks_L=self._num_ranks_L, gas=self._gas)

    def _settle_oldest(self) -> None:
        """Await the oldest micro-step under way: f of a later one includes it."""
        micro_step, arrival = self._arrivals.popleft()
        slopes_F = self.window.running_slopes(
            micro_step, arrival.wait(), num_ranks_L=self._num_ranks_L
        )
        micro_step.slopes_F = slopes_F
        self._note_used(micro_step, slopes_F)

    def _note_used(self, micro_step: MicroStep, slopes_F: Tensor) -> None:
        if micro_step.used_L is not None and micro_step.prob_sum_F is not None:
            micro_step.used_L += self.layout.per_layer_sum(slopes_F * micro_step.prob_sum_F)

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, on the CPU: the previous window of all stages, if there is one.

        Counts of a smaller group than data parallel differ from rank to rank, while DeepSpeed saves
        one client state: they are not saved, and training resumes with `running` for one window.
        Collective over the pipeline.
        """
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "layers": _signature(self._place.layout),
            "micro_steps_begun": self.window.num_micro_steps,
        }
        if self.previous is not None and self._saves_state:
            window, place = self.previous.wait(), self._place
            fullness_L = torch.tensor(window.fullness, dtype=torch.float64)
            fullness_L = place.gather(place.embed_layers(fullness_L.to(self.layout.device)))
            state["previous_counts"] = place.gather(place.embed_counts(window.counts_F)).cpu()
            state["previous_fullness"] = fullness_L.tolist()
        return state

    def load_state_dict(self, state: dict[str, Any] | None) -> str | None:
        """Take up a saved state after `start_window`; None = a checkpoint without one.

        Returns:
            What the user should know about it, or None.
        """
        self.previous = None
        self._checks.clear()
        if state is None:
            return None
        if state["version"] != _STATE_VERSION or state["layers"] != _signature(self._place.layout):
            return (
                "the checkpoint's balancing state belongs to another model and was left alone; the "
                "first window uses estimate 'running'"
            )
        if "previous_counts" in state and self._keeps_previous and self._saves_state:
            counts_F = state["previous_counts"][self._place.counts].to(self.layout.device)
            fullness = state["previous_fullness"][self._place.layers]
            self.previous = PreviousWindow(CompleteWindow(counts_F, fullness))
        if state["micro_steps_begun"]:
            return (
                f"the checkpoint was saved {state['micro_steps_begun']} micro-steps into an "
                f"accumulation window, whose gradients and counts DeepSpeed does not save; a new "
                f"window begins"
            )
        return None


def _signature(layout: CountLayout) -> list[tuple[str, int, int]]:
    return [(layer.name, layer.num_experts, layer.top_k) for layer in layout.layers]
