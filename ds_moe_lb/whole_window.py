"""A complete window that f is taken from, whose counts may still be on their way."""

from collections.abc import Callable

from torch import Tensor

from ds_moe_lb.counts import CountLayout
from ds_moe_lb.sync import CountReducer, PositionCheck
from ds_moe_lb.window import CompleteWindow


class Arrival:
    """A message of all layers under way.

    Args:
        layout: the flat layout.
        reducer: the collectives.
        local_F: this rank's counts, int64.
        step: micro-step of this rank.
        calls: calls of each layer that the counts are of.
        expect: receives the message's headers for the next check, once it is awaited.
    """

    def __init__(
        self,
        layout: CountLayout,
        reducer: CountReducer,
        local_F: Tensor,
        *,
        step: int,
        calls: list[int],
        expect: Callable[[PositionCheck], None],
    ) -> None:
        self._layout = layout
        self._expect = expect
        self._own = layout.positions(micro_step=step, calls=calls)
        self._pending = reducer.start(layout.pack(local_F, self._own, rank=reducer.rank), step=step)

    def wait(self) -> Tensor:
        """Counts summed over the balance group, ``(F,)`` int64."""
        counts_F, headers_L3 = self._layout.unpack(self._pending.wait())
        self._expect(PositionCheck(headers_L3, self._own, range(len(self._own))))
        return counts_F


class WholeWindow:
    """A complete window and what follows from it, each made when it is first asked for.

    Args:
        window: the window; its counts are this rank's own until the arrival is awaited.
        arrival: brings the summed counts; None = the window has them.
    """

    def __init__(self, window: CompleteWindow, arrival: Arrival | None = None) -> None:
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
