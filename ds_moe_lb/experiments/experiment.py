"""What an experiment is: a question, and variants of one run that answer it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_moe_lb.experiments.setting import RunSpec, Setting


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of an experiment; it is run once for every seed.

    Attributes:
        name: unique in the experiment; in tables and figures.
        section: of `moe_load_balancing`, its monitor left out.
        micro_batch_size: None = that of the setting.
        router: the section `moe_router`, if any; its seed is that of the run.
        shuffled: the paper's control.
        baseline: name of the variant that it is compared with, seed by seed; "" = none.
        paper_lowers_loss: whether the paper found a lower loss than the baseline's; None = it has
            nothing of the kind.
        group: lines of a figure that belong together.
        at: its place on the figure's axis, where there is one.
    """

    name: str
    section: Mapping[str, Any]
    micro_batch_size: int | None = None
    router: Mapping[str, Any] | None = None
    shuffled: bool = False
    baseline: str = ""
    paper_lowers_loss: bool | None = None
    group: str = ""
    at: float | None = None

    def run(self, setting: Setting, *, seed: int) -> RunSpec:
        """This variant with one seed."""
        return setting.run(
            seed=seed,
            section=self.section,
            micro_batch_size=self.micro_batch_size,
            router=None if self.router is None else {**self.router, "seed": seed},
            shuffled=self.shuffled,
        )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question and the runs that answer it.

    Attributes:
        name: on the command line.
        question: in one sentence.
        source: who asks it.
        variants: made from the setting.
        also_against: a second variant that all are compared with; "" = none.
    """

    name: str
    question: str
    source: str
    variants: Callable[[Setting], Sequence[Variant]]
    also_against: str = ""
