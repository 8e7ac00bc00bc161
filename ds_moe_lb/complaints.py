"""What is said once about a run in which balancing cannot do what it is meant to."""

import logging
from collections.abc import Sequence

from deepspeed.utils import log_dist, logger
from torch import Tensor

from ds_moe_lb.counts import RouterLayer

# Half-precision kernels may decide a near tie otherwise the second time.
_MAX_RECOUNT_DIFFERENCE = 0.01


class Complaints:
    """Warnings of one engine, each said once, on rank 0 unless ranks differ in it."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._l_aux_had_gradient = False

    def watch_gradient(self, l_aux: Tensor) -> None:
        """In the first window with an `l_aux` of ours, note whether the script makes use of it."""
        if "unused" not in self._said and l_aux.requires_grad:
            l_aux.register_hook(self._note_gradient)

    def _note_gradient(self, grad: Tensor) -> None:
        self._l_aux_had_gradient = True

    def step_with_l_aux(self) -> None:
        """The first window with an `l_aux` of ours is over; say so if nobody used it."""
        if "unused" in self._said:
            return
        self._said.add("unused")
        if not self._l_aux_had_gradient:
            _warn(
                "no l_aux received a gradient in the first window, so nothing "
                "balances the experts. Add coefficient * l_aux of every MoE layer to the loss (and "
                "return l_aux from checkpointed blocks), or set moe_load_balancing.aux_loss_coeff."
            )

    def step_without_forward(self) -> None:
        """The engine stepped, and nothing had been seen."""
        if "unseen" in self._said:
            return
        self._said.add("unseen")
        _warn(
            "an optimizer step without any training forward of the engine's "
            "model; nothing was balanced or measured. Only what runs through engine(...), that is "
            "the forward of the root module with grad enabled, is seen."
        )

    def recount(self, difference: float) -> None:
        """Say so if the counting pass saw too large a share of the selections otherwise."""
        if difference <= _MAX_RECOUNT_DIFFERENCE or "recount" in self._said:
            return
        self._said.add("recount")
        logger.warning(
            f"moe_load_balancing: {difference:.1%} of this rank's selections differ between the "
            f"counting pass and training; train on the batches that window(...) yields, with the "
            f"same forward, and draw no random numbers between its forwards"
        )

    def first_forward(self, layers: Sequence[RouterLayer], calls: Sequence[int]) -> None:
        """Routers that are observed from outside may have been replaced by something else.

        Args:
            layers: the layers.
            calls: how often each was called in a whole forward.

        Raises:
            RuntimeError: none was called.
        """
        if "forward" in self._said:
            return
        self._said.add("forward")
        missing = [layer.name for layer, number in zip(layers, calls, strict=True) if not number]
        if missing and len(missing) == len(calls):
            raise RuntimeError(
                f"moe_load_balancing: the model's forward called none of its {len(missing)} "
                f"routers ({missing[0]!r}, ...), so nothing can be counted: something else, such "
                f"as a kernel from the hub, took the place of the MoE blocks. Load the model "
                f"without kernels (use_kernels=False), or remove the section"
            )
        if missing:
            _warn(
                f"the first forward did not call the routers of {', '.join(missing)}; what is not "
                f"called is neither balanced nor measured."
            )


def _warn(message: str) -> None:
    log_dist(f"moe_load_balancing: {message}", ranks=[0], level=logging.WARNING)
