"""Does a measure order networks rightly when one hyperparameter changes?

After Jiang et al. 2020 (ψ, Ψ, conditional mutual information) and Dziugaite et al. 2020 (sign error).

A measure can correlate with the gap because both follow one hyperparameter. These statistics look at pairs of
networks that differ in one hyperparameter, or condition on one, so that a confounder cannot carry the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Codes = NDArray[np.int64]
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
    """What pairs of networks say about one measure.

    Args:
        measure: A value per network.
        gap: A value per network.
        axes: For each axis, the value that each network has; "seed" is one of them where there are seeds.
    """
    x, g = np.asarray(measure, np.float64), np.asarray(gap, np.float64)
    codes = {axis: _codes(values) for axis, values in axes.items()}
    psi = {axis: _psi(x, g, axis, codes) for axis in codes}
    without_seed = [axis for axis in codes if axis != SEED]
    given = [(), *((axis,) for axis in without_seed), *itertools.combinations(without_seed, 2)]
    shares = _information(x, g, given, codes)
    return Granulated(
        psi,
        _last([psi[axis] for axis in without_seed], np.nanmean),
        {axis: _sign_error(x, g, axis, codes) for axis in codes},
        {"none": shares[()]} | {axis: shares[axis,] for axis in without_seed},
        _last(list(shares.values()), np.nanmin),
    )


def _last(values: Sequence[float], reduce: Callable[[Sequence[float]], float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(reduce(finite)) if finite else float("nan")


def _codes(values: Sequence[object]) -> Codes:
    known = {value: code for code, value in enumerate(dict.fromkeys(values))}
    return np.array([known[value] for value in values], np.int64)


def _psi(x: Array, g: Array, axis: str, codes: Mapping[str, Codes]) -> float:
    """Mean of τ = Σ_{i≠j} sign(x_i − x_j) sign(g_i − g_j) / (k(k − 1)) over the sets of k networks.

    A set is more than one network that agree in all other axes.
    """
    cells: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(x)):
        place = tuple(int(own[row]) for name, own in codes.items() if name != axis)
        cells.setdefault(place, []).append(row)
    taus = []
    for rows in cells.values():
        if len(rows) > 1:
            signs = np.sign(x[rows][:, None] - x[rows]) * np.sign(g[rows][:, None] - g[rows])
            taus.append(signs.sum() / (len(rows) * (len(rows) - 1)))
    return float(np.mean(taus)) if taus else float("nan")


def _sign_error(x: Array, g: Array, axis: str, codes: Mapping[str, Codes]) -> float:
    """½(1 − mean sign) over ordered pairs of networks that differ in `axis` and in nothing but the seed."""
    wanted = ~np.eye(len(x), dtype=bool)
    for other, values in codes.items():
        same = values[:, None] == values[None, :]
        if other == axis:
            wanted &= ~same
        elif other != SEED:
            wanted &= same
    first, second = np.nonzero(wanted)
    signs = np.sign(x[first] - x[second]) * np.sign(g[first] - g[second])
    return float(0.5 * (1 - signs.mean())) if len(signs) else float("nan")


def _information(
    x: Array, g: Array, given: Sequence[tuple[str, ...]], codes: Mapping[str, Codes]
) -> dict[tuple[str, ...], float]:
    """I(V_x; V_g | U) / H(V_g | U) over ordered pairs of networks by set of axes, V the sign of a difference.

    U is the values that *both* networks have in the axes `given`, so that whatever those axes tell about the
    order of the gaps does not count for the measure. A value of U weighs by its number of pairs; pairs with a
    tie, or with what is not a number, are left out. NaN where U alone tells the order of all gaps.
    """
    larger_x, larger_g = x[:, None] > x, g[:, None] > g
    # Pairs in which both are larger, and in which only x is: the other two kinds are these from the other
    # side. Numbers of pairs are whole: no order of summation changes a digit.
    kinds = [larger_x & larger_g, larger_x & (g[:, None] < g)]
    tables = [kind.astype(np.float32) for kind in kinds]
    return {names: _share(_counts(tables, [codes[axis] for axis in names])) for names in given}


def _counts(kinds: Sequence[NDArray[np.float32]], given: Sequence[Codes]) -> Array:
    """Pairs by the values of both networks, and the signs of their differences in x and g: (cells, 2, 2)."""
    n = len(kinds[0])
    # Which of the values that occur in all of these axes together each network has.
    place = np.unique(np.stack(given), axis=1, return_inverse=True)[1].ravel() if given else np.zeros(n, int)
    member = np.zeros((n, int(place.max(initial=0)) + 1), np.float32)
    member[np.arange(n), place] = 1
    both, only_x = (member.T.astype(np.float64) @ (kind @ member) for kind in kinds)
    # Smaller in both, larger in the gap alone, larger in x alone, larger in both.
    return np.stack([both.T, only_x.T, only_x, both], axis=-1).reshape(-1, 2, 2)


def _share(counts: Array) -> float:
    of_gap = _entropies(counts.sum(1))
    shared = _entropies(counts.sum(2)) + of_gap - _entropies(counts.reshape(-1, 4))
    return float(shared.sum() / of_gap.sum()) if of_gap.sum() > 0 else float("nan")


def _entropies(counts: Array) -> Array:
    """Entropy in bits of every row of counts, times the row's sum."""
    totals = counts.sum(1, keepdims=True)
    share = np.divide(counts, totals, out=np.ones_like(counts), where=counts > 0)
    return -(counts * np.log2(share)).sum(1)
