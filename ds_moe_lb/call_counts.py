"""What one call of one layer has counted, and the slope that will follow from it."""

from dataclasses import dataclass

from torch import Tensor

from ds_moe_lb.sync import PendingCounts
from ds_moe_lb.whole_window import WholeWindow
from ds_moe_lb.window import MicroStep


@dataclass(eq=False)
class CallCounts:
    """The counts of one call of one layer, and the finished slope once it was needed.

    Attributes:
        layer: index of the layer.
        micro_step: the forward it belongs to.
        counts: local counts over valid tokens, int64, ``(E,)``; ``(B, E)`` for B sequences that
            are balanced each.
        whole: the complete window that f is taken from; None = this window so far.
        pending: the call's own reduction, where it has one, with its position.
        slope: ``w E f``, fp32, of the shape of the counts.
        token_weight: w, with a z-loss; a scalar, or ``(B,)``.
    """

    layer: int
    micro_step: MicroStep
    counts: Tensor
    whole: WholeWindow | None = None
    pending: tuple[PendingCounts, int] | None = None
    slope: Tensor | None = None
    token_weight: Tensor | None = None
