"""Medians of paired ratios with distribution-free intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A median and its interval.

    Attributes:
        median: of the values.
        low: lower end of the interval; None where there are too few values for one.
        high: upper end.
        number: how many values.
    """

    median: float
    low: float | None
    high: float | None
    number: int

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def __str__(self) -> str:
        if self.half_width is None:
            return f"{self.median:.4f} (n {self.number}: no interval)"
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """The median, and the interval between two order statistics that covers it in 95% of cases.

    The sign test turned round: the number of values below the true median is binomial with 1/2,
    whatever the distribution of the values. They must be independent of each other, which is why a
    benchmark's block is all that lies between two dealings of the engines.
    """
    ordered, number = sorted(values), len(values)
    outside = _outermost(number)
    if outside is None:
        return Estimate(median(ordered), None, None, number)
    return Estimate(median(ordered), ordered[outside], ordered[number - 1 - outside], number)


def _outermost(number: int) -> int | None:
    """How many values may be left out at either end; None if even all of them cover too little."""
    tail, outside = 0.0, None
    for k in range(number // 2 + 1):
        tail += math.comb(number, k) / 2**number
        if 2 * tail > 1 - CONFIDENCE:
            break
        outside = k
    return outside
