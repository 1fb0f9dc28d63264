"""Correlations with bootstrap intervals and a permutation null, for all resamples at once.

A bootstrap resample is a vector of counts w (how often each network was drawn). Means, mid-ranks and pair
counts of the resample are sums weighted by w, so that all resamples of a coefficient are a few products of
matrices and exactly what one would get from drawing them one by one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
COEFFICIENTS = ("pearson", "spearman", "kendall")
_CHUNK = 50  # permutations at a time, of which all pairs of networks are in memory


@dataclass(frozen=True)
class Correlation:
    """One coefficient with what is known about it.

    Attributes:
        value: The coefficient; NaN when one side is constant.
        low: Lower end of the 95 % percentile bootstrap interval over networks.
        high: Upper end.
        n: Number of networks.
    """

    value: float
    low: float
    high: float
    n: int


def correlation(
    x: ArrayLike,
    y: ArrayLike,
    kind: str = "kendall",
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Correlation:
    """Pearson's r, Spearman's ρ or Kendall's τ_b of two samples.

    Args:
        x: One value per network.
        y: Likewise.
        kind: One of `COEFFICIENTS`.
        resamples: Bootstrap resamples; those in which one side is constant do not count.
        seed: Of the resamples.

    Example:
        >>> found = correlation([1, 2, 3, 4, 5], [1, 3, 2, 5, 4], "kendall")
        >>> round(found.value, 10)
        0.6
    """
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    n = len(a)
    if n < 3:
        return Correlation(np.nan, np.nan, np.nan, n)
    value = float(weighted(a, b, np.ones((1, n)), kind)[0])
    drawn = weighted(a, b, _drawn(n, resamples, seed), kind)
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.quantile(drawn, (0.025, 0.975)) if len(drawn) else (np.nan, np.nan)
    return Correlation(value, float(low), float(high), n)


@functools.lru_cache(maxsize=2)
def _drawn(n: int, resamples: int, seed: int) -> Array:
    """How often each resample draws each network."""
    # All measures of a study are resampled alike: drawing takes longer than what is done with the draws.
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float64)
    counts.flags.writeable = False
    return counts


def weighted(x: Array, y: Array, counts: Array, kind: str) -> Array:
    """The coefficient of every resample, for whole counts (resamples, networks)."""
    if kind == "kendall":
        return _kendall(x, y, counts)
    if kind == "spearman":
        return _product_moment(_ranks(x, counts), _ranks(y, counts), counts)
    return _product_moment(_standard(x), _standard(y), counts)


def family_null(xs: Array, y: Array, permutations: int, generator: np.random.Generator) -> Array:
    """Kendall's τ_b of many measures with the same random orders of y: (measures, permutations).

    The largest size over the measures of one permutation is what the best of so many measures reaches by
    chance. A measure that is not finite for some networks goes by the others.
    """
    first, second = np.triu_indices(len(y), 1)
    known = np.isfinite(xs)
    both = known[:, first] & known[:, second]
    signs = np.zeros(both.shape, np.float32)
    np.sign(np.subtract(xs[:, first], xs[:, second], where=both, out=np.zeros(both.shape)), out=signs)
    gappy = ~known.all(axis=1)
    ranks = np.unique(y, return_inverse=True)[1].astype(np.float32)
    untied = _untied(y)
    squares = np.full((len(xs), permutations), untied)
    orders = np.argsort(generator.random((permutations, len(y))), axis=1)
    found = []
    for start in range(0, permutations, _CHUNK):
        shuffled = _pair_signs(ranks[orders[start : start + _CHUNK]])
        # Whole numbers, exact in float32 below 2^24. Every pair counts twice, once in either order.
        found.append(2.0 * (signs @ shuffled.T).astype(np.float64))
        if gappy.any():
            squares[gappy, start : start + _CHUNK] = 2.0 * (both[gappy].astype(np.float32) @ (shuffled**2).T)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.concatenate(found, axis=1) / np.sqrt(
            2.0 * (signs**2).sum(1, dtype=np.float64)[:, None] * squares
        )


def _pair_signs(ranks: NDArray[np.float32]) -> NDArray[np.float32]:
    """Signs of the differences of all pairs i < j, for every row of ranks, in the order of `triu_indices`."""
    rows, n = ranks.shape
    signs = np.empty((rows, n * (n - 1) // 2), np.float32)
    start = 0
    for i in range(n - 1):
        end = start + n - 1 - i
        np.sign(ranks[:, i : i + 1] - ranks[:, i + 1 :], out=signs[:, start:end])
        start = end
    return signs


def _standard(values: Array) -> Array:
    spread = values.std()
    return (values - values.mean()) / (spread if spread > 0 else 1.0)


def _product_moment(a: Array, b: Array, counts: Array) -> Array:
    """Row by row: Σ w (a − ā)(b − b̄) over the roots of the same with squares."""
    total = counts.sum(1, keepdims=True)
    a = a - (counts * a).sum(1, keepdims=True) / total
    b = b - (counts * b).sum(1, keepdims=True) / total
    squares = np.sum(counts * a * a, 1) * np.sum(counts * b * b, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.sum(counts * a * b, 1) / np.sqrt(squares)
    return np.where(squares > 1e-24, np.clip(found, -1, 1), np.nan)


def _ranks(values: Array, counts: Array) -> Array:
    """Mid-ranks within every resample: what lies below, half of what is equal, and a half."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    below = np.zeros((len(counts), len(values) + 1))
    np.cumsum(np.take(counts, order, axis=1), axis=1, out=below[:, 1:])
    start, end = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return 0.5 * (np.take(below, start, axis=1) + np.take(below, end, axis=1)) + 0.5


def _signs(values: Array) -> Array:
    return np.sign(values[:, None] - values[None, :])


def _kendall(x: Array, y: Array, counts: Array) -> Array:
    """τ_b = Σ_{i,j} w_i w_j s_x s_y / √(Σ w_i w_j s_x² · Σ w_i w_j s_y²), s the sign of a difference.

    Counts and signs are whole numbers, so that no order of summation changes a digit, nor does float32 while
    a resample has fewer than 2^24 networks.
    """
    signs = (_signs(x) * _signs(y)).astype(np.float32)
    agreement = np.einsum("bi,bi->b", counts.astype(np.float32) @ signs, counts)
    pairs_x, pairs_y = (_weighted_pairs(values, counts) for values in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        return agreement / np.sqrt(pairs_x * pairs_y)


def _weighted_pairs(values: Array, counts: Array) -> Array:
    """Σ w_i w_j over pairs of networks whose values differ: all pairs without those within a value."""
    order = np.argsort(values, kind="stable")
    starts = np.unique(values[order], return_index=True)[1]
    within = np.add.reduceat(np.take(counts, order, axis=1), starts, axis=1)
    return counts.sum(1) ** 2 - np.einsum("bi,bi->b", within, within)


def _untied(values: Array) -> float:
    """Ordered pairs of networks whose values differ."""
    return float(len(values) ** 2 - np.sum(np.unique(values, return_counts=True)[1] ** 2))
