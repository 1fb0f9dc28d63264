"""Correlations with bootstrap intervals and a permutation null, for all resamples at once.

A bootstrap resample is a vector of counts w (how often each network was drawn). Means, mid-ranks and pair
counts of the resample are sums weighted by w, so that all resamples of a coefficient are a few products of
matrices and exactly what one would get from drawing them one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
COEFFICIENTS = ("pearson", "spearman", "kendall")


@dataclass(frozen=True)
class Correlation:
    """One coefficient with what is known about it.

    Attributes:
        value: The coefficient; NaN when one side is constant.
        low: Lower end of the 95 % percentile bootstrap interval over networks.
        high: Upper end.
        p_value: Share of permutations of the gaps with at least its size, the observed one counted:
            (1 + #)/(1 + permutations), two-sided.
        null: Size that 95 % of the permutations stay below.
        n: Number of networks.
    """

    value: float
    low: float
    high: float
    p_value: float
    null: float
    n: int


def correlation(
    x: ArrayLike,
    y: ArrayLike,
    kind: str = "kendall",
    *,
    resamples: int = 2000,
    permutations: int = 2000,
    seed: int = 0,
) -> Correlation:
    """Pearson's r, Spearman's ρ or Kendall's τ_b of two samples.

    Args:
        x: One value per network.
        y: Likewise.
        kind: One of `COEFFICIENTS`.
        resamples: Bootstrap resamples; those in which one side is constant do not count.
        permutations: Permutations of y; 0 for none.
        seed: Of both.

    Example:
        >>> found = correlation([1, 2, 3, 4, 5], [1, 3, 2, 5, 4], "kendall")
        >>> round(found.value, 10)
        0.6
    """
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    n = len(a)
    if n < 3:
        unknown = float("nan")
        return Correlation(unknown, unknown, unknown, unknown, unknown, n)
    generator = np.random.default_rng(seed)
    value = float(weighted(a, b, np.ones((1, n)), kind)[0])
    counts = generator.multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float64)
    drawn = weighted(a, b, counts, kind)
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.quantile(drawn, (0.025, 0.975)) if len(drawn) else (np.nan, np.nan)
    if permutations < 1 or not np.isfinite(value):
        return Correlation(value, float(low), float(high), float("nan"), float("nan"), n)
    shuffled = np.abs(permuted(a, b, kind, permutations, generator))
    p_value = (1 + np.sum(shuffled >= abs(value) - 1e-12)) / (1 + permutations)
    return Correlation(value, float(low), float(high), float(p_value), float(np.quantile(shuffled, 0.95)), n)


def weighted(x: Array, y: Array, counts: Array, kind: str) -> Array:
    """The coefficient of every resample, for counts (resamples, networks)."""
    if kind == "kendall":
        return _kendall(x, y, counts)
    if kind == "spearman":
        return _pearson(_ranks(x, counts), _ranks(y, counts), counts)
    one = np.ones((len(counts), 1))
    # Centring before squaring keeps the digits of values far from zero.
    return _pearson(one * _standard(x), one * _standard(y), counts)


def permuted(x: Array, y: Array, kind: str, permutations: int, generator: np.random.Generator) -> Array:
    """The coefficient of x with `permutations` random orders of y."""
    if kind == "kendall":
        return family_null(x[None], y, permutations, generator)[0]
    one = np.ones((1, len(x)))
    a, b = (_ranks(x, one)[0], _ranks(y, one)[0]) if kind == "spearman" else (x, y)
    return _unit(b)[_orders(len(y), permutations, generator)] @ _unit(a)


def family_null(
    xs: Array, y: Array, permutations: int, generator: np.random.Generator, chunk: int = 50
) -> Array:
    """Kendall's τ_b of many measures with the same random orders of y: (measures, permutations).

    The largest size over the measures of one permutation is what the best of so many measures reaches by
    chance. A measure that is not finite for some networks goes by the others.
    """
    signs = np.stack([_known_signs(x).astype(np.float32).ravel() for x in xs])
    known = np.stack([np.logical_and.outer(fine, fine).ravel() for fine in np.isfinite(xs)])
    gappy = ~known.all(axis=1)
    sy = _signs(y).astype(np.float32)
    squares = np.full((len(xs), permutations), (sy**2).sum(dtype=np.float64))
    orders = _orders(len(y), permutations, generator)
    found = []
    for start in range(0, permutations, chunk):
        part = orders[start : start + chunk]
        shuffled = sy[part[:, :, None], part[:, None, :]].reshape(len(part), -1).T
        found.append(signs @ shuffled)
        if gappy.any():
            squares[gappy, start : start + chunk] = known[gappy].astype(np.float32) @ shuffled**2
    sums = np.concatenate(found, axis=1).astype(np.float64)  # whole numbers, exact in float32 below 2^24
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums / np.sqrt((signs**2).sum(1, dtype=np.float64)[:, None] * squares)


def _orders(n: int, permutations: int, generator: np.random.Generator) -> NDArray[np.int64]:
    return np.argsort(generator.random((permutations, n)), axis=1)


def _unit(values: Array) -> Array:
    """Centred values of length 1; NaN for a constant."""
    centred = values - values.mean()
    length = np.linalg.norm(centred)
    return centred / length if length > 0 else np.full(len(values), np.nan)


def _standard(values: Array) -> Array:
    spread = values.std()
    return (values - values.mean()) / (spread if spread > 0 else 1.0)


def _pearson(a: Array, b: Array, counts: Array) -> Array:
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
    below = (values[:, None] > values[None, :]).astype(np.float64)
    equal = (values[:, None] == values[None, :]).astype(np.float64)
    return counts @ (below + 0.5 * equal).T + 0.5


def _signs(values: Array) -> Array:
    return np.sign(values[:, None] - values[None, :])


def _known_signs(values: Array) -> Array:
    """The same, 0 where one of the two is not finite."""
    fine = np.isfinite(values)
    return np.where(np.logical_and.outer(fine, fine), _signs(np.where(fine, values, 0.0)), 0.0)


def _kendall(x: Array, y: Array, counts: Array) -> Array:
    """τ_b = Σ_{i,j} w_i w_j s_x s_y / √(Σ w_i w_j s_x² · Σ w_i w_j s_y²), s the sign of a difference."""
    sx, sy = _signs(x), _signs(y)
    agreement, pairs_x, pairs_y = (
        np.einsum("bi,bi->b", counts @ matrix, counts) for matrix in (sx * sy, sx * sx, sy * sy)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return agreement / np.sqrt(pairs_x * pairs_y)
