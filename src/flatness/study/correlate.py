"""Correlations with bootstrap intervals and a permutation null, for all resamples at once.

Networks that differ in nothing but the seed are one *setting*. They resemble one another, so that settings,
not networks, are drawn and permuted as units wherever a function takes them.

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
Codes = NDArray[np.int64]
COEFFICIENTS = ("pearson", "spearman", "kendall")
_CHUNK = 50  # permutations at a time, of which all pairs of networks are in memory


@dataclass(frozen=True)
class Correlation:
    """One coefficient with what is known about it.

    Attributes:
        value: The coefficient; NaN when one side is constant.
        low: Lower end of the 95 % percentile bootstrap interval over settings.
        high: Upper end.
    """

    value: float
    low: float
    high: float


def correlation(
    x: ArrayLike,
    y: ArrayLike,
    kind: str = "kendall",
    *,
    settings: ArrayLike | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Correlation:
    """Pearson's r, Spearman's ρ or Kendall's τ_b of two samples.

    Args:
        x: One value per network.
        y: One value per network.
        kind: One of `COEFFICIENTS`.
        settings: The setting of each network, as a number; None where every network is one of its own.
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
        return Correlation(np.nan, np.nan, np.nan)
    value = float(weighted(a, b, np.ones((1, n)), kind)[0])
    codes = units(n, None if settings is None else np.asarray(settings))
    return Correlation(value, *interval(weighted(a, b, counts(codes, resamples, seed), kind, codes)))


def interval(drawn: Array) -> tuple[float, float]:
    """The ends of the 95 % percentile interval of what resamples give, those that give nothing left out."""
    fine = drawn[np.isfinite(drawn)]
    low, high = np.quantile(fine, (0.025, 0.975)) if len(fine) else (np.nan, np.nan)
    return float(low), float(high)


def units(n: int, settings: Codes | None) -> Codes:
    """What is drawn: the setting of each of n networks, numbered from 0.

    Where there is only one setting, or none are told apart, its networks are drawn.
    """
    codes = np.arange(n) if settings is None else np.unique(settings, return_inverse=True)[1]
    return codes if codes.max(initial=0) > 0 else np.arange(n)


def counts(codes: Codes, resamples: int, seed: int = 0) -> Array:
    """How often each resample draws each network, with all of its unit: (resamples, networks)."""
    return _drawn(int(codes.max(initial=-1)) + 1, resamples, seed)[:, codes]


@functools.lru_cache(maxsize=8)
def _drawn(n: int, resamples: int, seed: int) -> Array:
    """How often each resample draws each of n things."""
    # All measures of a study are resampled alike: drawing takes longer than what is done with the draws.
    generator = np.random.default_rng(seed)
    share = np.full(max(n, 1), 1 / max(n, 1))
    found = generator.multinomial(n, share, size=resamples).astype(np.float64)
    found.flags.writeable = False
    return found


def weighted(x: Array, y: Array, counts: Array, kind: str, codes: Codes | None = None) -> Array:
    """The coefficient of every resample, for whole counts (resamples, networks).

    Args:
        x: A value per network.
        y: A value per network.
        counts: How often each resample draws each network.
        kind: One of `COEFFICIENTS`.
        codes: The unit of each network, where units are drawn whole. Kendall's τ does not compare the copies
            of
            a unit with one another: their networks are closer than those of different units.
    """
    if kind == "kendall":
        return _kendall(x, y, counts, np.arange(len(x)) if codes is None else codes)
    if kind == "spearman":
        return _product_moment(_ranks(x, counts), _ranks(y, counts), counts)
    return _product_moment(_standard(x), _standard(y), counts)


def family_null(
    xs: Array, y: Array, permutations: int, generator: np.random.Generator, settings: Codes | None = None
) -> Array:
    """Kendall's τ_b of many measures with the same random orders of y: (measures, permutations).

    The largest size over the measures of one permutation is what the best of so many measures reaches by
    chance. A measure that is not finite for some networks goes by the others.

    Args:
        xs: A row per measure.
        y: A value per network.
        permutations: How many orders.
        generator: Of the orders.
        settings: The setting of each network: y is permuted only within settings, so that all that settings
            tell about y stays as it is. None deals it out among all networks.
    """
    return against(xs, y[orders(len(y), settings, permutations, generator)])


def orders(
    n: int, settings: Codes | None, permutations: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Random orders of n networks, in which each takes the place of one of its setting: (permutations, n)."""
    keys = generator.random((permutations, n))
    if settings is None:
        return np.argsort(keys, axis=1)
    codes = np.unique(settings, return_inverse=True)[1]
    # Sorted by setting, then at random: the k-th is a random member of the k-th network's setting.
    found = np.empty((permutations, n), np.int64)
    found[:, np.argsort(codes, kind="stable")] = np.argsort(codes + keys, axis=1)
    return found


def against(xs: Array, ys: Array) -> Array:
    """Kendall's τ_b of every row of xs with every row of ys: (rows of xs, rows of ys)."""
    first, second = np.triu_indices(xs.shape[1], 1)
    known = np.isfinite(xs)
    both = known[:, first] & known[:, second]
    signs = np.zeros(both.shape, np.float32)
    np.sign(np.subtract(xs[:, first], xs[:, second], where=both, out=np.zeros(both.shape)), out=signs)
    gappy = ~known.all(axis=1)
    # Equal values have equal ranks: that of the first of them.
    ranks = np.stack([np.searchsorted(np.sort(row), row) for row in ys]).astype(np.float32)
    squares = np.empty((len(xs), len(ys)))
    found = []
    for start in range(0, len(ys), _CHUNK):
        shuffled = _pair_signs(ranks[start : start + _CHUNK])
        # Whole numbers, exact in float32 below 2^24. Every pair counts twice, once in either order.
        found.append(2.0 * (signs @ shuffled.T).astype(np.float64))
        squares[:, start : start + _CHUNK] = 2.0 * np.count_nonzero(shuffled, axis=1)
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


def _kendall(x: Array, y: Array, counts: Array, codes: Codes) -> Array:
    """τ_b = Σ_{i,j} w_ij s_x s_y / √(Σ w_ij s_x² · Σ w_ij s_y²), s the sign of a difference.

    w_ij = w_i w_j, and w_i within a unit. Counts and signs are whole numbers, so that no order of summation
    changes a digit, nor does float32 while a resample has fewer than 2^24 networks.
    """
    signs = (_signs(x) * _signs(y)).astype(np.float32)
    agreement = np.einsum("bi,bi->b", counts.astype(np.float32) @ signs, counts)
    first, sizes = np.unique(codes, return_index=True, return_counts=True)[1:]
    copies = counts[:, first] ** 2 - counts[:, first]
    first, second = np.nonzero((codes[:, None] == codes) & (sizes[codes] > 1))
    same = np.bincount(codes[first], signs[first, second], len(sizes))
    pairs = []
    for values in (x, y):
        untied = np.bincount(codes[first], values[first] != values[second], len(sizes))
        pairs.append(_weighted_pairs(values, counts) - copies @ untied)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (agreement - copies @ same) / np.sqrt(pairs[0] * pairs[1])


def _weighted_pairs(values: Array, counts: Array) -> Array:
    """Σ w_i w_j over pairs of networks whose values differ: all pairs without those within a value."""
    order = np.argsort(values, kind="stable")
    starts = np.unique(values[order], return_index=True)[1]
    within = np.add.reduceat(np.take(counts, order, axis=1), starts, axis=1)
    return counts.sum(1) ** 2 - np.einsum("bi,bi->b", within, within)
