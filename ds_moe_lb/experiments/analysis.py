"""Numbers from recorded runs: intervals, differences paired by seed, frontiers. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

# 97.5% quantiles of Student's t by degrees of freedom, from 1 on.
_T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)

BySeed = Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over seeds and its 95% interval (Student's t).

    Attributes:
        mean: over seeds.
        half_width: of the interval; infinite for a single seed.
        number: of seeds.
    """

    mean: float
    half_width: float
    number: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def sign(self) -> int:
        """-1 or 1 where the interval lies on one side of zero, else 0: nothing is claimed."""
        return (self.low > 0) - (self.high < 0)


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95% interval.

    Raises:
        ValueError: no value, or more than the table of quantiles has room for.
    """
    number = len(values)
    if not 1 <= number <= len(_T_975) + 1:
        raise ValueError(f"interval: got {number} values, expected 1 to {len(_T_975) + 1}")
    half_width = math.inf
    if number > 1:
        half_width = _T_975[number - 2] * stdev(values) / math.sqrt(number)
    return Interval(mean=fmean(values), half_width=half_width, number=number)


def paired_difference(values: BySeed, baseline: BySeed) -> Interval | None:
    """Mean and interval of `values - baseline` over the seeds that both have; None without any."""
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        return None
    return interval([values[seed] - baseline[seed] for seed in seeds])


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """One seed's runs of one method over its weights, ascending in weight.

    Attributes:
        weights: > 0.
        violations: MaxVio of each.
        losses: validation loss of each.
        information: mutual information of each.
    """

    weights: Sequence[float]
    violations: Sequence[float]
    losses: Sequence[float]
    information: Sequence[float]

    def at_violation(self, violation: float, values: Sequence[float]) -> float:
        """One of the frontier's columns where MaxVio has the given value.

        MaxVio is made monotone in the weight (it falls, but for noise), the weight is found by
        linear interpolation in its logarithm, and then the column at that weight likewise.

        Raises:
            ValueError: the runs do not reach this MaxVio.
        """
        falling = _falling(self.violations)
        if not falling[-1] <= violation <= falling[0]:
            raise ValueError(
                f"MaxVio {violation:.3g}: expected a number between {falling[-1]:.3g} and "
                f"{falling[0]:.3g}, which the runs reach"
            )
        logs = np.log(np.asarray(self.weights, dtype=float))
        log_weight = np.interp(violation, falling[::-1], logs[::-1])
        return float(np.interp(log_weight, logs, values))


def _falling(values: Sequence[float]) -> NDArray[np.float64]:
    """The nearest non-increasing sequence (least squares): neighbours in the wrong order are
    replaced by their mean until none are left.
    """
    blocks: list[list[float]] = []  # [mean, size]
    for value in values:
        blocks.append([float(value), 1])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            mean, size = blocks.pop()
            before = blocks[-1]
            before[0] = (before[0] * before[1] + mean * size) / (before[1] + size)
            before[1] += size
    return np.repeat([mean for mean, _ in blocks], [int(size) for _, size in blocks])


def common_violations(frontiers: Sequence[Frontier], *, number: int) -> list[float]:
    """MaxVios that all frontiers reach, evenly spaced in the logarithm; empty without any."""
    falling = [_falling(frontier.violations) for frontier in frontiers]
    low = max(float(values[-1]) for values in falling)
    high = min(float(values[0]) for values in falling)
    if not 0 < low < high:
        return []
    return [float(value) for value in np.geomspace(low, high, number)]


def at_equal_violation(
    frontiers: Mapping[int, Frontier],
    baseline: Mapping[int, Frontier],
    violation: float,
    column: str,
) -> Interval | None:
    """Difference of two methods at one MaxVio, paired by seed.

    Args:
        frontiers: by seed.
        baseline: by seed.
        violation: reached by all of them.
        column: "losses" or "information".
    """

    def values(of: Mapping[int, Frontier]) -> dict[int, float]:
        return {
            seed: frontier.at_violation(violation, getattr(frontier, column))
            for seed, frontier in of.items()
        }

    return paired_difference(values(frontiers), values(baseline))


def best(losses: Mapping[str, BySeed]) -> str:
    """The name with the lowest mean loss over the seeds that all have."""
    seeds = set.intersection(*(set(by_seed) for by_seed in losses.values()))
    return min(losses, key=lambda name: fmean(losses[name][seed] for seed in seeds))
