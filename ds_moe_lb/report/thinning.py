"""Long series cut down to what a screen can show, extremes kept.

Shape legend: N reports, C columns of a picture, R rows (layers or experts).
"""

import numpy as np
from numpy.typing import NDArray

from ds_moe_lb.report.run_log import Series

MAX_POINTS = 800  # of one curve
MAX_COLUMNS = 160  # of one picture over time


def thin(series: Series, *, max_points: int = MAX_POINTS) -> Series:
    """At most `max_points`: of every stretch its lowest and highest point, and both ends."""
    number = len(series.at)
    if number <= max_points:
        return series
    edges = _edges(number, (max_points - 2) // 2)
    low = np.where(np.isfinite(series.values), series.values, np.inf)
    high = np.where(np.isfinite(series.values), series.values, -np.inf)
    kept = {0, number - 1}
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        kept |= {begin + int(low[begin:end].argmin()), begin + int(high[begin:end].argmax())}
    index = np.array(sorted(kept))
    return Series(at=series.at[index], values=series.values[index])


def smoothed(series: Series, *, share: float) -> Series:
    """Centred moving mean of the finite values over `share` of the run; shorter at both ends."""
    half = max(1, int(len(series.at) * share / 2))
    finite = np.isfinite(series.values)
    sums = np.cumsum(np.append(0.0, np.where(finite, series.values, 0.0)))
    numbers = np.cumsum(np.append(0, finite))
    index = np.arange(len(series.at))
    begin, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(index))
    number = numbers[end] - numbers[begin]
    mean = (sums[end] - sums[begin]) / np.maximum(number, 1)
    return Series(at=series.at, values=np.where(number > 0, mean, np.nan))


def columns(
    at: NDArray[np.int64],
    table_RN: NDArray[np.float64],
    *,
    distance_RN: NDArray[np.float64],
    max_columns: int = MAX_COLUMNS,
) -> tuple[tuple[float, float], NDArray[np.float64]]:
    """A picture over time: columns of equal width, each the most distant report of its stretch.

    Args:
        at: ``(N,)`` where the reports were made.
        table_RN: ``(R, N)`` values; NaN where there is none.
        distance_RN: ``(R, N)`` how far from ordinary each value is; the farthest is kept.
        max_columns: more reports than that are put together.

    Returns:
        The left and right edge on the axis, and ``(R, C)`` values.
    """
    number = len(at)
    known = np.where(np.isfinite(table_RN), distance_RN, -np.inf)
    edges = _edges(number, min(number, max_columns))
    chosen = np.stack(
        [
            begin + known[:, begin:end].argmax(axis=1)
            for begin, end in zip(edges[:-1], edges[1:], strict=True)
        ],
        axis=1,
    )
    values_RC = np.take_along_axis(table_RN, chosen, axis=1)
    values_RC = np.where(np.isfinite(values_RC), values_RC, np.nan)
    middles = np.array([at[b:e].mean() for b, e in zip(edges[:-1], edges[1:], strict=True)])
    gaps = np.diff(middles)
    if len(gaps) and gaps.max() > 1.5 * gaps.min():
        # Unequal intervals: a regular grid, each column the report that is nearest.
        grid = np.linspace(middles[0], middles[-1], max_columns)
        right = np.clip(np.searchsorted(middles, grid), 1, len(middles) - 1)
        nearest = right - (grid - middles[right - 1] < middles[right] - grid)
        values_RC, middles = values_RC[:, nearest], grid
    half = (middles[-1] - middles[0]) / max(len(middles) - 1, 1) / 2 or 0.5
    return (float(middles[0] - half), float(middles[-1] + half)), values_RC


def _edges(number: int, parts: int) -> NDArray[np.int64]:
    return np.linspace(0, number, parts + 1).astype(np.int64)
