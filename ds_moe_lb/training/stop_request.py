"""Ctrl-C and SIGTERM as a wish that all ranks act on together, at the end of an optimizer step."""

import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers that a stop was asked for. As a context manager it owns both signals.

    Repeated signals change nothing: launchers send SIGTERM after the user's Ctrl-C.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True
