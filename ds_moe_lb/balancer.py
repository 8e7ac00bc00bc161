"""The LoadBalancer: the handle that users hold, and what follows an engine's forwards and steps."""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.utils import log_dist
from torch import Tensor, nn

from ds_moe_lb import _compat
from ds_moe_lb.config import LoadBalancingConfig
from ds_moe_lb.counts import CountLayout
from ds_moe_lb.estimates import BalanceCounts
from ds_moe_lb.monitor import BalanceMonitor
from ds_moe_lb.policy import make_policy
from ds_moe_lb.process_groups import CountGroup
from ds_moe_lb.router import Masks, Router
from ds_moe_lb.sync import CountReducer, ModelPlace
from ds_moe_lb.window import MicroStep


class LoadBalancer:
    """The plugin on one engine: ``engine.load_balancer``.

    Made by :func:`ds_moe_lb.initialize` or :func:`ds_moe_lb.install`; not by hand. Of use to a
    script are :meth:`metrics`, :meth:`counts`, :meth:`token_mask` and :meth:`uninstall`.

    Attributes:
        config: the validated JSON section.
        micro_step: the counted forward under way; None outside of one.
        policy: what is done in this window.
        current_masks: masks of the forward under way, by name: that of the :meth:`token_mask` block
            around it, and the model's own.
        gradient_scale: from slope to gradient, coefficient left out: 1/G and loss scale.
        balance: counts and slopes.
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
        coefficients: Sequence[float] | None,
    ) -> None:
        self.engine = engine
        self.config = config
        self.micro_step: MicroStep | None = None
        self._outer: list[tuple[MicroStep | None, bool]] = []
        self._has_grad = False
        self.policy = make_policy(config, coefficients)
        self.current_masks: Masks = ()
        self.gradient_scale: Tensor | float = 0.0
        self.layout = layout
        self.place = place
        self.balance = BalanceCounts(
            layout,
            reducer,
            place=place,
            sync_group=config.sync_group,
            policies=[self.policy],
        )
        self.monitor = BalanceMonitor(
            layout,
            config.monitor,
            place=place,
            count_group=report_group,
            used=self._used_loss(),
        )
        self._routers: Sequence[Router] = ()
        self._uninstall: Callable[[], None] = _nothing
        self._forget_calls: Callable[[], None] = _nothing
        self._watches_gradient = self.policy.replaces_l_aux and coefficients is None
        self._l_aux_had_gradient = False
        self._is_unseen_reported = False
        self._is_first_forward_checked = False
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
        if not training or not torch.is_grad_enabled() or _compat.in_backward():
            self.micro_step = None
        elif is_outermost:
            self._begin_micro_step()

    def _begin_micro_step(self) -> None:
        self._forget_calls()
        self.close_window_if_stepped()
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
        if not self._is_first_forward_checked:
            self._check_routers_called(self.micro_step)
        self.balance.end_micro_step(self.micro_step)
        self.monitor.end_micro_step(self.micro_step)

    def _check_routers_called(self, micro_step: MicroStep) -> None:
        """Routers that are observed from outside may have been replaced by something else."""
        self._is_first_forward_checked = True
        if any(router.is_native for router in self._routers):
            return
        missing = [
            layer.name
            for layer, calls in zip(self.layout.layers, micro_step.calls, strict=True)
            if not calls
        ]
        if not missing:
            return
        if len(missing) == len(micro_step.calls):
            raise RuntimeError(
                f"moe_load_balancing: the model's forward called none of its {len(missing)} "
                f"routers ({missing[0]!r}, ...), so nothing can be counted: something else, such "
                f"as a kernel from the hub, took the place of the MoE blocks. Load the model "
                f"without kernels (use_kernels=False), or remove the section"
            )
        log_dist(
            f"moe_load_balancing: the first forward did not call the routers of "
            f"{', '.join(missing)}; what is not called is neither balanced nor measured.",
            ranks=[0],
            level=logging.WARNING,
        )

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
            self._warn_if_unseen()
        else:
            self.balance.close_window(applied=self.engine.skipped_steps == self._first_skipped)
            self.monitor.close_window(self.balance.window, engine=self.engine)
            self._warn_if_unused()
        self.start_window()

    def start_window(self) -> None:
        """Begin a window with nothing in it: after an optimizer step, or a loaded checkpoint."""
        self._first_step: int = self.engine.global_steps
        self._first_skipped: int = self.engine.skipped_steps
        self.balance.start_window(gas=self.engine.gradient_accumulation_steps(), policy=self.policy)
        self.monitor.begin_window(next_step=self._first_step + 1)
        for router in self._routers:
            router.forget_all()

    def watch_gradient(self, l_aux: Tensor) -> None:
        """In the first window, note whether the script makes any use of ``l_aux``."""
        if self._watches_gradient and l_aux.requires_grad:
            l_aux.register_hook(self._note_gradient)

    def _note_gradient(self, grad: Tensor) -> None:
        self._l_aux_had_gradient = True

    def _used_loss(self) -> str | None:
        if not self.policy.uses_loss:
            return None
        if self.config.scope == "micro_batch" and self.policy.injects:
            return "micro_batch"
        return "own"

    def _warn_if_unseen(self) -> None:
        if self._is_unseen_reported:
            return
        self._is_unseen_reported = True
        log_dist(
            "moe_load_balancing: an optimizer step without any training forward of the engine's "
            "model; nothing was balanced or measured. Only what runs through engine(...), that is "
            "the forward of the root module with grad enabled, is seen.",
            ranks=[0],
            level=logging.WARNING,
        )

    def _warn_if_unused(self) -> None:
        if self._watches_gradient and not self._l_aux_had_gradient:
            log_dist(
                "moe_load_balancing: no l_aux received a gradient in the first window, so nothing "
                "balances the experts. Add coefficient * l_aux of every MoE layer to the loss (and "
                "return l_aux from checkpointed blocks), or set moe_load_balancing.aux_loss_coeff.",
                ranks=[0],
                level=logging.WARNING,
            )
        self._watches_gradient = False


def _nothing() -> None:
    """Before the installation has wired anything up."""


_of_model: weakref.WeakKeyDictionary[nn.Module, weakref.ref[LoadBalancer]]
_of_model = weakref.WeakKeyDictionary()


def remember(model: nn.Module, balancer: LoadBalancer) -> None:
    """Note whose model this is, for those who are handed the model and not its engine."""
    _of_model[model] = weakref.ref(balancer)


def load_balancer_of(model: nn.Module) -> LoadBalancer | None:
    """The handle of the engine that trains the model; None without the plugin."""
    reference = _of_model.get(model)
    balancer = reference() if reference is not None else None
    is_on = balancer is not None and balancer.engine.__dict__.get("load_balancer") is balancer
    return balancer if is_on else None
