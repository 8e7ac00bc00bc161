"""The properties, one after the other: which windows are run for each, and on which engine."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import deepspeed.comm as dist

from ds_moe_lb.verify.comparison import Verdict, compare
from ds_moe_lb.verify.layout import Layout
from ds_moe_lb.verify.session import Session, WindowRecord

_TAG = "verify"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table, the same on all ranks.

    Attributes:
        name: the property.
        verdict: None where the property does not apply.
        reason: why it does not.
    """

    name: str
    verdict: Verdict | None = None
    reason: str = ""

    @property
    def has_failed(self) -> bool:
        return self.verdict is not None and bool(self.verdict.failures)


# The windows of a property by rank; None between two of them = the counts before are forgotten.
Recorded = list[list[WindowRecord] | None]
Windows = Callable[[Session], Recorded]


class Verification:
    """Runs all properties of one layout. Collective: every rank runs it.

    Args:
        layout: the layout.
        scratch: a folder that all ranks see, for the checkpoint of the resume check.
    """

    def __init__(self, layout: Layout, *, scratch: Path) -> None:
        self._layout = layout
        self._scratch = scratch
        self._session: Session | None = None

    def run(self) -> list[Line]:
        """All lines in the order of the table.

        Raises:
            RuntimeError: what went wrong while a property was verified, and which one.
        """
        layout = self._layout
        ep_size, gas = layout.ep_size, layout.gas
        alone = "not applicable at this world size" if layout.world_size == 1 else ""
        no_experts = alone or ("not applicable: ep_size is 1" if ep_size == 1 else "")
        no_steps = "not applicable: gradient_accumulation_steps is 1" if gas == 1 else ""
        lines = [
            self._line("data parallel", _plain, reason=alone, ep_size=1, gas=1),
            self._line("expert parallel", _plain, reason=no_experts, ep_size=ep_size, gas=1),
            self._line("accumulation", _plain, reason=no_steps),
            self._line("padding", _padding),
            self._line("reentrant checkpointing", _checkpointing("reentrant")),
            self._line("non-reentrant checkpointing", _checkpointing("non_reentrant")),
            self._line("evaluation", _evaluation),
            self._line("resume", self._resume),
        ]
        self._close()
        return lines

    def _line(
        self,
        name: str,
        windows: Windows,
        *,
        reason: str = "",
        ep_size: int | None = None,
        gas: int | None = None,
    ) -> Line:
        if reason:
            return Line(name=name, reason=reason)
        layout = self._layout
        try:
            session = self._session_for(ep_size or layout.ep_size, gas or layout.gas)
            # A window whose counts the next one may need, or may wrongly still hold. Its own
            # comparison is left to the property that came first on this engine: what spoiled the
            # window before it is not this property's fault.
            is_first = session.last is None
            previous = session.last
            recorded: Recorded = [session.run_window(0), *windows(session)]
        except Exception as error:
            raise RuntimeError(f"ds-moe-lb verify: error while verifying {name!r}") from error
        verdict = Verdict()
        if dist.get_rank() == 0:
            for number, records in enumerate(recorded):
                if records is not None and (number > 0 or is_first):
                    compare(
                        verdict,
                        records,
                        previous=previous,
                        layout=layout,
                        ep_size=session.ep_size,
                        where=f"window {number}",
                    )
                previous = records
        shared = [verdict]
        dist.broadcast_object_list(shared, src=0)
        return Line(name=name, verdict=shared[0])

    def _session_for(self, ep_size: int, gas: int) -> Session:
        session = self._session
        if session is None or (session.ep_size, session.gas) != (ep_size, gas):
            self._close()
            session = self._session = Session(self._layout, ep_size=ep_size, gas=gas)
        return session

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _resume(self, session: Session) -> Recorded:
        """Save, then load into another engine that was already training on something else."""
        folder = [tempfile.mkdtemp(dir=self._scratch) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder, src=0)
        try:
            session.engine.save_checkpoint(folder[0], tag=_TAG)
            resumed = Session(self._layout, ep_size=session.ep_size, gas=session.gas)
            resumed.run_window(9)
            path, _ = resumed.engine.load_checkpoint(folder[0], tag=_TAG)
            if path is None:
                raise RuntimeError(f"the checkpoint just written to {folder[0]} was not found")
            records: Recorded = [resumed.run_window(1), resumed.run_window(2)]
            resumed.close()
        finally:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder[0], ignore_errors=True)
        # A checkpoint holds no counts of smaller groups, which differ from rank to rank.
        return records if self._layout.section.sync_group == "data_parallel" else [None, *records]


def _plain(session: Session) -> Recorded:
    # Two, because a previous window that is never replaced shows only in the third.
    return [session.run_window(1), session.run_window(2)]


def _padding(session: Session) -> Recorded:
    return [
        session.run_window(number, mask_by=mask_by)
        for number, mask_by in enumerate(("used_token", "token_mask"), start=1)
    ]


def _checkpointing(kind: str) -> Windows:
    def run(session: Session) -> Recorded:
        # The mask is out of scope when its forward is recomputed.
        return [
            session.run_window(number, checkpointing=kind, mask_by=mask_by)
            for number, mask_by in enumerate((None, "token_mask"), start=1)
        ]

    return run


def _evaluation(session: Session) -> Recorded:
    def evaluate(how: str) -> Callable[[], None]:
        return lambda: session.evaluate(how=how)

    return [
        session.run_window(number, between=evaluate(how))
        for number, how in enumerate(("eval", "no_grad"), start=1)
    ]
