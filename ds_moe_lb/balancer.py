"""The LoadBalancer: the handle that users hold, and what follows an engine's forwards and steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from deepspeed.utils.logging import print_dist
from torch import Tensor

from ds_moe_lb import _compat
from ds_moe_lb.complaints import Complaints
from ds_moe_lb.config import LoadBalancingConfig
from ds_moe_lb.counting_pass import count_window, require_counted
from ds_moe_lb.counts import CountLayout
from ds_moe_lb.estimates import BalanceCounts
from ds_moe_lb.monitor import BalanceMonitor
from ds_moe_lb.policy import Policies, policy_at
from ds_moe_lb.process_groups import CountGroup
from ds_moe_lb.router import Router
from ds_moe_lb.router_call import Masks
from ds_moe_lb.selection_bias import (
    SelectionBias,
    masters_of,
    move_biases,
    restore_masters,
)
from ds_moe_lb.sync import CountReducer, ModelPlace
from ds_moe_lb.window import MicroStep, Window

_Batch = TypeVar("_Batch")


class LoadBalancer:
    """The plugin on one engine: ``engine.load_balancer``.

    Made by :func:`ds_moe_lb.initialize` or :func:`ds_moe_lb.install`; not by hand. Of use to a
    script are :meth:`metrics`, :meth:`counts`, :meth:`token_mask` and :meth:`uninstall`.

    Attributes:
        config: the validated JSON section.
        micro_step: the counted forward under way; None outside of one.
        policy: what is done in this window.
        counting: the counts of the counting pass under way (estimate `exact`); else None.
        current_masks: masks of the forward under way, by name: that of the :meth:`token_mask` block
            around it, and the model's own.
        gradient_scale: from slope to gradient, coefficient left out: 1/G and loss scale.
        balance: counts and slopes.
        complaints: warnings about what cannot work.
    """

    def __init__(
        self,
        engine: Any,
        config: LoadBalancingConfig,
        *,
        layout: CountLayout,
        reducer: CountReducer,
        place: ModelPlace,
        report_group: CountGroup,
        policies: Policies,
    ) -> None:
        self.engine = engine
        self.config = config
        self.micro_step: MicroStep | None = None
        self._outer: list[tuple[MicroStep | None, bool]] = []
        self._has_grad = False
        self._policies = policies
        self.policy = policy_at(policies, step=engine.global_steps)
        self.counting: Window | None = None
        self.current_masks: Masks = ()
        self.gradient_scale: Tensor | float = 0.0
        self.layout = layout
        self.place = place
        self.balance = BalanceCounts(
            layout,
            reducer,
            place=place,
            sync_group=config.sync_group,
            policies=[policy for _, policy in policies],
        )
        self.monitor = BalanceMonitor(
            layout,
            config.monitor,
            place=place,
            count_group=report_group,
        )
        self._routers: Sequence[Router] = ()
        self._biases: Sequence[SelectionBias | None] = ()
        self._uninstall: Callable[[], None] = _nothing
        self._forget_calls: Callable[[], None] = _nothing
        self.complaints = Complaints()
        self.start_window()

    # what scripts call

    def metrics(self) -> dict[str, float]:
        """The last report: ``name`` (mean over layers) or ``name/layer_NN`` to value; no
        collective.

        Equal on all data-parallel ranks. Empty before the first report, which is made by the
        optimizer step that ends a window; see ``monitor.interval``.
        """
        return dict(self.monitor.last_report)

    def counts(self) -> dict[str, Tensor]:
        """Selections of the window in progress on *this* rank: layer name to ``(E,)`` int64 on the
        CPU.

        Over valid tokens, before capacity drops any; zeros right after an optimizer step. Waits
        for the device; no collective.
        """
        local_F = self.balance.window.local_F.cpu()
        return {
            layer.name: local_F[where].clone()
            for layer, where in zip(self.layout.layers, self.layout.count_slices, strict=True)
        }

    @contextmanager
    def token_mask(self, valid_mask: Tensor) -> Iterator[None]:
        """Say which tokens count in the forwards inside the block; kept for their recompute.

        Args:
            valid_mask: bool, True = the token counts, one entry for each token that the routers
                get on this rank, in any shape (``(B, S)`` as a rule).

        Raises:
            ValueError: if it is not a bool tensor; at the router, if its size does not fit.
        """
        if not isinstance(valid_mask, Tensor) or valid_mask.dtype != torch.bool:
            got = valid_mask.dtype if isinstance(valid_mask, Tensor) else type(valid_mask).__name__
            raise ValueError(
                f"LoadBalancer.token_mask: got {got}, expected a bool tensor (True = counts)"
            )
        if self.config.valid_tokens == "all":
            raise ValueError(
                "LoadBalancer.token_mask: moe_load_balancing.valid_tokens is 'all', which counts "
                "every token; set it to 'mask' or do without the block"
            )
        before = self.current_masks
        around = tuple(named for named in before if named[0] != "token_mask")
        self.current_masks = (*around, ("token_mask", valid_mask))
        try:
            yield
        finally:
            self.current_masks = before

    def window(
        self, batches: Iterable[_Batch], forward: Callable[[_Batch], Any]
    ) -> Iterator[_Batch]:
        """The batches of one accumulation window, counted first if the estimate is `exact`.

        ``for batch in engine.load_balancer.window(batches, forward):`` around forward, backward and
        step. With another estimate the batches come back and nothing else happens. Leaving the loop
        early changes nothing: f stays that of all these batches until the optimizer steps.

        Args:
            batches: the G = gradient_accumulation_steps micro-batches of this rank, or an iterator,
                from which the next G are taken; they are kept until they were trained on.
            forward: runs the engine's forward on a batch as training does. Called once for each
                batch, without grad and in training mode, then the random state is restored; so
                the same dropout and noise come again in training if nothing but its forwards draws
                random numbers. Buffers that a training forward updates are updated twice.

        Raises:
            ValueError: not G batches.
            RuntimeError: in the middle of a window, in evaluation mode, or `forward` does not run
                the engine once.
        """
        return iter(count_window(self, batches, forward))

    def uninstall(self) -> None:
        """Take the plugin off the engine: built-in losses, methods and checkpoints as they were."""
        self._uninstall()

    # what the installation wires up

    def wire(
        self,
        routers: Sequence[Router],
        *,
        forget_calls: Callable[[], None],
        uninstall: Callable[[], None],
    ) -> None:
        """Connect the layers' routers and the way back.

        Args:
            routers: one for each layer of the layout.
            forget_calls: drops what recomputes that stopped early left at the gates.
            uninstall: undoes the installation.
        """
        self._routers = routers
        self._biases = [router.bias for router in routers]
        self._forget_calls = forget_calls
        self._uninstall = uninstall

    def before_forward(self, *, training: bool) -> None:
        """The root module's forward begins; decides whether it is a micro-step.

        A model that calls itself inside its forward goes on with the micro-step under way, or,
        without grad, is left out of it.
        """
        self._outer.append((self.micro_step, self._has_grad))
        self._has_grad = torch.is_grad_enabled()
        is_outermost = len(self._outer) == 1
        if self.counting is not None and training:
            if is_outermost:
                self._forget_calls()
                self.micro_step = self.counting.begin_micro_step()
        elif not training or not torch.is_grad_enabled() or _compat.in_backward():
            self.micro_step = None
        elif is_outermost:
            self._begin_micro_step()

    def _begin_micro_step(self) -> None:
        self._forget_calls()
        self.close_window_if_stepped()
        require_counted(self)
        for router in self._routers:
            router.retire()
        self.micro_step = self.balance.window.begin_micro_step()
        self.monitor.begin_micro_step(self.micro_step)
        if self.policy.injects:
            gas = self.engine.gradient_accumulation_steps()
            self.gradient_scale = _compat.loss_scale(self.engine) / gas

    def after_forward(self) -> None:
        """The root module's forward has ended; not called where it raised."""
        if self.micro_step is None or len(self._outer) > 1:
            return
        if self.counting is not None:
            self.counting.end_micro_step(self.micro_step)
            return
        if not any(router.is_native for router in self._routers):
            self.complaints.first_forward(self.layout.layers, self.micro_step.calls)
        self.balance.end_micro_step(self.micro_step)
        self.monitor.end_micro_step(self.micro_step)

    def leave_forward(self) -> None:
        """The root module's forward is over, whether it ended or raised."""
        if self._outer:
            self.micro_step, self._has_grad = self._outer.pop()

    @property
    def may_recompute(self) -> bool:
        """Whether a backward can follow the forward under way, however its blocks turn grad off."""
        return self._has_grad if self._outer else torch.is_grad_enabled()

    def close_window_if_stepped(self) -> None:
        """End the window if the engine took, or skipped, an optimizer step since it began.

        Collective: every rank comes here after the same step. Windows are told apart by
        `global_steps` and nothing else, which is right whoever decides on the accumulation
        boundary.
        """
        if self.engine.global_steps == self._first_step:
            return
        if self.balance.window.num_micro_steps == 0:
            self.complaints.step_without_forward()
        else:
            applied = self.engine.skipped_steps == self._first_skipped
            whole = self.balance.close_window(applied=applied)
            rate = self.policy.config.bias_update_rate
            if whole is not None and rate:
                move_biases(self._biases, whole.wait().counts_F, self.layout, rate=rate)
            self.monitor.close_window(self.balance.window, engine=self.engine)
            if self.policy.offers_l_aux:
                self.complaints.step_with_l_aux()
            if self.balance.has_recounted:
                self.complaints.recount(self.balance.recount_difference())
        self.start_window()

    def state_dict(self) -> dict[str, Any]:
        """What rides in a checkpoint, on the CPU. Collective over the pipeline."""
        masters = masters_of(self._biases, self.layout)
        return self.balance.state_dict() | ({"bias_masters": masters} if masters else {})

    def load_state_dict(self, state: dict[str, Any] | None) -> str | None:
        """Take up what rode in one, if it did; returns what the user should know about it."""
        restore_masters(self._biases, self.layout, (state or {}).get("bias_masters", {}))
        return self.balance.load_state_dict(state)

    def start_window(self) -> None:
        """Begin a window with nothing in it: after an optimizer step, or a loaded checkpoint."""
        self._first_step: int = self.engine.global_steps
        policy = policy_at(self._policies, step=self._first_step)
        if policy is not self.policy:
            self.policy = policy
            now = policy.describe()
            print_dist(f"moe_load_balancing: from step {self._first_step} on {now}", ranks=[0])
        self._first_skipped: int = self.engine.skipped_steps
        self.balance.start_window(gas=self.engine.gradient_accumulation_steps(), policy=self.policy)
        self.monitor.begin_window(next_step=self._first_step + 1, uses_loss=self.policy.uses_loss)
        for router in self._routers:
            router.forget_all()


def _nothing() -> None:
    """Before the installation has wired anything up."""
