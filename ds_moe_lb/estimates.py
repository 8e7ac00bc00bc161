"""Whose selections f stands for: the counts of a window, their reductions, and the finished slopes.

- `running`: micro-steps 1..m of this window on all ranks (the paper's buffer).
- `carry`: the same and, for the micro-steps to come, a share of the last complete window.
- `boundary`: the last complete window.
- `exact`: this window, counted before its first backward.

Without a complete window `carry` and `boundary` are `running`.

Shape legend: L MoE layers on this rank, E experts of one layer, F = sum of E over the layers
(flat).
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_moe_lb import loss, saved_window
from ds_moe_lb.call_counts import CallCounts
from ds_moe_lb.counts import CountLayout, position
from ds_moe_lb.policy import Policy
from ds_moe_lb.sync import (
    CountReducer,
    ModelPlace,
    PositionCheck,
    check_positions,
)
from ds_moe_lb.whole_window import Arrival, WholeWindow
from ds_moe_lb.window import Carried, MicroStep, Window

# A window that never ends (forwards without a step) must not pile up what is checked at its end.
_MAX_UNCHECKED = 4096
_MAX_UNSETTLED = 64


class BalanceCounts:
    """Counts of the window in progress, and f for every call in it.

    Args:
        layout: the flat layout of this rank's MoE layers.
        reducer: the collectives.
        place: where they stand among the layers of all pipeline stages, which a checkpoint holds.
        sync_group: which ranks the reducer sums over.
        policies: all that may come into force.
    """

    def __init__(
        self,
        layout: CountLayout,
        reducer: CountReducer,
        *,
        place: ModelPlace,
        sync_group: str,
        policies: Sequence[Policy],
    ) -> None:
        self.layout = layout
        self._place = place
        self.reducer = reducer
        self._keeps_previous = any(x.estimate in ("carry", "boundary") for x in policies)
        self._saves_state = sync_group == "data_parallel"
        num_ranks = [group.num_ranks for group in reducer.groups]
        self._num_ranks_L = torch.tensor(num_ranks, dtype=torch.float64, device=layout.device)
        self._checks: list[PositionCheck] = []
        self.previous: WholeWindow | None = None
        self.start_window(gas=1, policy=policies[0])

    def start_window(self, *, gas: int, policy: Policy) -> None:
        """Begin a window with nothing in it; G is the engine's at this moment."""
        self.policy = policy
        self.window = Window(self.layout)
        self._gas = gas
        self._arrivals: deque[tuple[MicroStep, Arrival]] = deque()
        self._counted: WholeWindow | None = None

    def start_counted(self, counted: Window) -> None:
        """Launch the reduction of what the counting pass of this window has counted."""
        arrival = self._start(counted.local_F, counted.num_micro_steps, counted.calls)
        self._counted_F = counted.local_F
        self._counted = WholeWindow(counted.complete(counted.local_F, gas=self._gas), arrival)

    @property
    def has_counted(self) -> bool:
        """This window was counted before its first backward."""
        return self._counted is not None

    @property
    def has_recounted(self) -> bool:
        """As many micro-steps were trained on as counted before."""
        return self._counted is not None and self.window.num_micro_steps == self._gas

    def recount_difference(self) -> float:
        """Share of this rank's selections that the counting pass saw otherwise; waits for the
        device.
        """
        moved = (self.window.local_F - self._counted_F).abs().sum()
        return float(moved / (self.window.local_F + self._counted_F).sum().clamp(min=1))

    @property
    def _whole(self) -> WholeWindow | None:
        """The complete window that f is taken from; None = this window so far."""
        if self.policy.estimate == "exact":
            return self._counted
        return self.previous if self.policy.estimate == "boundary" else None

    @property
    def _carried(self) -> Carried | None:
        if self.policy.estimate != "carry" or self.previous is None:
            return None
        return Carried(self.previous.wait(), self._gas)

    def add_call(self, micro_step: MicroStep, counts: Tensor, *, layer: int) -> CallCounts:
        """Count one call of one layer; launches its own reduction where it has one."""
        counts_E = counts if counts.dim() == 1 else counts.sum(dim=0)
        self.window.add(micro_step, layer=layer, counts_E=counts_E)
        call = CallCounts(layer, micro_step, counts, whole=self._whole)
        if self.policy.reduction == "at_gate" and call.whole is None:
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
        if self.policy.reduction != "after_forward":
            return
        whole = self._whole
        if whole is None:
            arrival = self._start(micro_step.counts_F, micro_step.index, micro_step.calls)
            self._arrivals.append((micro_step, arrival))
            if len(self._arrivals) > _MAX_UNSETTLED:
                self._settle_oldest()
        elif micro_step.used_L is not None:
            self._note_used(micro_step, self._whole_slopes(whole))

    def slope(self, call: CallCounts) -> Tensor:
        """``w E f`` of a counted call, fp32; awaits the counts that it depends on."""
        if call.slope is None:
            call.slope = self._make_slope(call)
            if self.policy.config.z_loss_coeff:
                # f sums to 1
                call.token_weight = call.slope.sum(dim=-1) / call.slope.shape[-1]
            if self.policy.micro_batch_weight:
                call.slope = call.slope + self.local_slope(call)
        return call.slope

    def local_slope(self, call: CallCounts) -> Tensor:
        """The part of the slope that is made of the call's own counts."""
        slope = loss.local_slope(call.counts, top_k=self.layout.layers[call.layer].top_k)
        weight = self.policy.micro_batch_weight
        return weight * slope if weight else slope

    def close_window(self, *, applied: bool) -> WholeWindow | None:
        """The optimizer has stepped: settle this window and keep it where the estimate needs it.

        Args:
            applied: False if the step was skipped for an overflow; such a window is forgotten.

        Returns:
            The window, its counts perhaps still under way, where it was applied and anything needs
            it as a whole.

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
        whole = self._close()
        if applied:
            self.previous = whole if self._keeps_previous else None
            return whole
        if whole is not None:
            whole.wait()
        return None

    def _close(self) -> WholeWindow | None:
        """This window as a whole where anything needs it; a reduction is launched on every rank,
        whatever became of the step, and awaited when its counts are first needed.
        """
        policy, window = self.policy, self.window
        rate = policy.config.bias_update_rate
        if policy.estimate == "exact":
            return self._counted
        if policy.estimate in ("running", "carry"):
            if not self._keeps_previous and not rate:
                return None
            return WholeWindow(window.complete(window.global_F, gas=self._gas))
        if policy.estimate == "boundary" or rate:
            arrival = self._start(window.local_F, window.num_micro_steps, window.calls)
            return WholeWindow(window.complete(window.local_F, gas=self._gas), arrival)
        return None

    def _start(self, counts_F: Tensor, step: int, calls: list[int]) -> Arrival:
        return Arrival(
            self.layout, self.reducer, counts_F, step=step, calls=calls, expect=self.expect
        )

    def expect(self, check: PositionCheck) -> None:
        """Note summed headers for the check at the end of the window."""
        if len(self._checks) < _MAX_UNCHECKED:
            self._checks.append(check)

    def _make_slope(self, call: CallCounts) -> Tensor:
        layer = self.layout.layers[call.layer]
        where = self.layout.count_slices[call.layer]
        if self.policy.reduction == "none":
            return self.local_slope(call)
        if call.whole is not None:
            return self._whole_slopes(call.whole)[where]
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
                carried=self._carried,
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

    def _whole_slopes(self, whole: WholeWindow) -> Tensor:
        return whole.slopes(self.layout, num_ranks_L=self._num_ranks_L, gas=self._gas)

    def _settle_oldest(self) -> None:
        """Await the oldest micro-step under way: f of a later one includes it."""
        micro_step, arrival = self._arrivals.popleft()
        slopes_F = self.window.running_slopes(
            micro_step,
            arrival.wait(),
            num_ranks_L=self._num_ranks_L,
            carried=self._carried,
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
        has_window = self.previous is not None and self._saves_state
        return saved_window.pack(
            self.previous.wait() if self.previous is not None and has_window else None,
            place=self._place,
            micro_steps_begun=self.window.num_micro_steps,
        )

    def load_state_dict(self, state: dict[str, Any] | None) -> str | None:
        """Take up a saved state after `start_window`; None = a checkpoint without one.

        Returns:
            What the user should know about it, or None.
        """
        self.previous = None
        self._checks.clear()
        if state is None:
            return None
        window, news = saved_window.unpack(
            state, place=self._place, device=self.layout.device, gas=self._gas
        )
        if window is not None and self._keeps_previous and self._saves_state:
            self.previous = WholeWindow(window)
        return news
