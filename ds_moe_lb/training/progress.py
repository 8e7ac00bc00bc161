"""What the person at the terminal sees while something long runs. Only rank 0 shows anything."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

_LINES_PER_RUN = 20


class Progress(Protocol):
    """Shows how far a run is."""

    def update(self, step: int, record: Mapping[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


Describe = Callable[[Mapping[str, Any]], str]


def describe_training(record: Mapping[str, Any]) -> str:
    """Loss, speed and balance of one step in one line."""
    text = f"loss {record['lm_loss']:.3f} {record['tokens_per_second']:,.0f} tok/s"
    for key, name in (("lbl_global_batch", "LBL"), ("max_violation_global_batch", "MaxVio")):
        if key in record:
            text += f" {name} {record[key]:.2f}"
    return text


def make_progress(
    *,
    label: str,
    first_step: int,
    steps: int,
    shown: bool = True,
    describe: Describe = describe_training,
    out: TextIO | None = None,
) -> Progress:
    """A bar on a terminal with rich installed, plain lines elsewhere, nothing when not `shown`.

    Args:
        label: what runs.
        first_step: steps done before.
        steps: steps in all.
        shown: False on every rank but one.
        describe: the text behind the bar, from the record of the last step.
        out: where it is shown; None = standard output.
    """
    if not shown:
        return Silent()
    out = out or sys.stdout
    if out.isatty():
        try:
            return Bar(label=label, first_step=first_step, steps=steps, describe=describe, out=out)
        except ModuleNotFoundError:  # rich is an extra
            pass
    return Lines(label=label, steps=steps, describe=describe, out=out)


class Silent:
    """For the other ranks."""

    def update(self, step: int, record: Mapping[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """About twenty lines per run, for logs and pipes."""

    def __init__(self, *, label: str, steps: int, describe: Describe, out: TextIO) -> None:
        self._out = out
        self._label = label
        self._describe = describe
        self._steps = steps
        self._interval = max(1, steps // _LINES_PER_RUN)

    def update(self, step: int, record: Mapping[str, Any]) -> None:
        if step % self._interval == 0 or step == self._steps:
            self.note(f"step {step}/{self._steps}  {self._describe(record)}")

    def note(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self._label}: {text}", file=self._out, flush=True)

    def close(self) -> None:
        pass


class Bar:
    """A rich progress bar with the numbers of the last step behind it."""

    def __init__(
        self, *, label: str, first_step: int, steps: int, describe: Describe, out: TextIO
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        def whole() -> Column:
            return Column(no_wrap=True)

        self._bar = RichProgress(
            TextColumn("[bold]{task.description}", table_column=whole()),
            MofNCompleteColumn(table_column=whole()),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
            TimeRemainingColumn(compact=True, table_column=whole()),
            TextColumn("{task.fields[numbers]}", table_column=whole()),
            console=Console(file=out),
            expand=True,
        )
        self._describe = describe
        self._task = self._bar.add_task(label, total=steps, completed=first_step, numbers="")
        self._bar.start()

    def update(self, step: int, record: Mapping[str, Any]) -> None:
        self._bar.update(self._task, completed=step, numbers=self._describe(record))

    def note(self, text: str) -> None:
        self._bar.console.print(text, highlight=False)

    def close(self) -> None:
        self._bar.stop()
