"""Does a measure order networks rightly when one hyperparameter changes?

After Jiang et al. 2020 (ψ, Ψ, conditional mutual information) and Dziugaite et al. 2020 (sign error).

A measure can correlate with the gap because both follow one hyperparameter. These statistics look at pairs of
networks that differ in one hyperparameter, or condition on one, so that a confounder cannot carry the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
SEED = "seed"


@dataclass(frozen=True)
class Granulated:
    """What pairs of networks say about one measure.

    Attributes:
        psi: For each axis, Jiang et al.'s ψ: Kendall's τ over the values of that axis, everything else, the
            seed included, held fixed, averaged over what it is held fixed at. NaN where the axis does not
            vary. "seed": over seeds at fixed hyperparameters.
        coefficient: Ψ, the mean of ψ over the axes without the seed.
        sign_error: For each axis, the share of pairs that differ in it alone and that the measure orders
            wrongly; ties count one half.
        information: For each axis, the mutual information of the signs of the differences in measure and
            gap over pairs of networks, given the values of both in this axis, divided by the entropy of the
            gap's sign given the same: 0 to 1. "none": given nothing.
        least_information: The smallest of it over all sets of at most two axes (Jiang et al.'s 𝒦).
    """

    psi: dict[str, float]
    coefficient: float
    sign_error: dict[str, float]
    information: dict[str, float]
    least_information: float

    @property
    def worst_sign_error(self) -> float:
        """The largest sign error over the axes without the seed."""
        return _last([value for axis, value in self.sign_error.items() if axis != SEED], np.nanmax)


def granulated(measure: ArrayLike, gap: ArrayLike, axes: Mapping[str, Sequence[object]]) -> Granulated:
    """All of it for one measure.

    Args:
        measure: One value per network.
        gap: Likewise.
        axes: For each axis, the value that each network has; "seed" is one of them where there are seeds.
    """
    x, g = np.asarray(measure, np.float64), np.asarray(gap, np.float64)
    places = {axis: _codes(values) for axis, values in axes.items()}
    psi = {axis: _psi(x, g, axis, places) for axis in places}
    without_seed = [axis for axis in places if axis != SEED]
    agreement = np.sign(x[:, None] - x[None, :]) * np.sign(g[:, None] - g[None, :])
    errors = {axis: _sign_error(agreement, axis, places) for axis in places}
    decided = _decided(x, g)
    information = {"none": _information(decided, [], places)}
    information |= {axis: _information(decided, [axis], places) for axis in without_seed}
    pairs = [_information(decided, list(two), places) for two in itertools.combinations(without_seed, 2)]
    return Granulated(
        psi,
        _last([psi[axis] for axis in without_seed], np.nanmean),
        errors,
        information,
        _last([*information.values(), *pairs], np.nanmin),
    )


def _last(values: Sequence[float], reduce: object) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(reduce(finite)) if finite else float("nan")  # type: ignore[operator]


def _codes(values: Sequence[object]) -> NDArray[np.int64]:
    known = {value: code for code, value in enumerate(dict.fromkeys(values))}
    return np.array([known[value] for value in values], np.int64)


def _cells(places: dict[str, NDArray[np.int64]], axes: Sequence[str], n: int) -> list[NDArray[np.int64]]:
    """Rows that agree in all of `axes`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in range(n):
        groups.setdefault(tuple(int(places[axis][row]) for axis in axes), []).append(row)
    return [np.array(rows) for rows in groups.values()]


def _psi(x: Array, g: Array, axis: str, places: dict[str, NDArray[np.int64]]) -> float:
    """Mean over cells of τ = Σ_{i≠j} sign(x_i − x_j) sign(g_i − g_j) / (k(k − 1))."""
    others = [other for other in places if other != axis]
    taus = []
    for rows in _cells(places, others, len(x)):
        if len(rows) > 1:
            signs = np.sign(x[rows][:, None] - x[rows]) * np.sign(g[rows][:, None] - g[rows])
            taus.append(signs.sum() / (len(rows) * (len(rows) - 1)))
    return float(np.mean(taus)) if taus else float("nan")


def _sign_error(agreement: Array, axis: str, places: dict[str, NDArray[np.int64]]) -> float:
    """½(1 − mean sign) over pairs that differ in `axis` and in nothing else but the seed."""
    n = len(agreement)
    wanted = ~np.eye(n, dtype=bool)
    for other, codes in places.items():
        same = codes[:, None] == codes[None, :]
        if other == axis:
            wanted &= ~same
        elif other != SEED:
            wanted &= same
    return float(0.5 * (1 - agreement[wanted].mean())) if wanted.any() else float("nan")


def _decided(x: Array, g: Array) -> tuple[NDArray[np.int64], ...]:
    """Ordered pairs of networks without a tie: both places, and the signs of both differences as a number."""
    known = ~np.isnan(x) & ~np.isnan(g)
    first, second = np.nonzero((x[:, None] != x) & (g[:, None] != g) & known[:, None] & known)
    return first, second, 2 * (x[first] > x[second]) + (g[first] > g[second])


def _information(
    decided: tuple[NDArray[np.int64], ...], given: Sequence[str], places: dict[str, NDArray[np.int64]]
) -> float:
    """I(V_x; V_g | U) / H(V_g | U) over ordered pairs of networks, V the sign of a difference.

    U is the values that *both* networks have in the axes `given`, so that whatever those axes tell about the
    order of the gaps does not count for the measure. A value of U weighs by its number of pairs; pairs with a
    tie are left out. NaN where U alone tells the order of all gaps.
    """
    first, second, signs = decided
    which, cells = signs, 1
    if given:
        _, value = np.unique(np.stack([places[axis] for axis in given]), axis=1, return_inverse=True)
        size = int(value.max()) + 1
        which, cells = 4 * (value[first] * size + value[second]) + signs, size**2
    counts = np.bincount(which, minlength=4 * cells).reshape(-1, 2, 2).astype(float)
    of_gap = _entropies(counts.sum(1))
    shared = _entropies(counts.sum(2)) + of_gap - _entropies(counts.reshape(-1, 4))
    return float(shared.sum() / of_gap.sum()) if of_gap.sum() > 0 else float("nan")


def _entropies(counts: Array) -> Array:
    """Entropy in bits of every row of counts, times the row's sum."""
    totals = counts.sum(1, keepdims=True)
    share = np.divide(counts, totals, out=np.ones_like(counts), where=counts > 0)
    return -(counts * np.log2(share)).sum(1)
