"""Does a measure order networks rightly when one hyperparameter changes?

After Jiang et al. 2020 (ψ, Ψ, conditional mutual information) and Dziugaite et al. 2020 (sign error).

A measure can correlate with the gap because both follow one hyperparameter. These statistics look at pairs of
networks that differ in one hyperparameter, or condition on one, so that a confounder cannot carry the rest.

Networks that differ in nothing but the seed are one setting. Which pairs there are depends on the settings
alone, so that what settings drawn anew say is a product of matrices: weights of pairs times signs of pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import erf

from flatness.study.correlate import Array, Codes
from flatness.study.within import codes_of

SEED = "seed"
_LEAST_WEIGHT, _LEAST_SAMPLES = 0.5, 12.0  # Dziugaite et al., as in their code


def pair_weights(gaps: Array, samples: int, deviations: Array | None = None) -> Array:
    """How certain it is that two networks differ in their generalisation gap: (networks, networks), 0 to ½.

    The noise filter of Dziugaite et al.: the chance that both gaps are known to half of their difference Δ,
    minus one half, and at least 0. For accuracies that is Hoeffding's bound, (1 − 2 exp(−n Δ²/2))². A mean
    loss has no bound and is taken as normal: erf(√n Δ/(√8 s₁)) erf(√n Δ/(√8 s₂)).

    Args:
        gaps: The gap of each network, between two accuracies or two mean losses.
        samples: The number n of test samples.
        deviations: The standard deviation s of each network's loss over the test samples; None for
            accuracies.

    Example:
        >>> import numpy as np
        >>> pair_weights(np.array([0.0, 0.01, 0.1]), 10_000)[0].round(3)
        array([0. , 0. , 0.5])
    """
    apart = np.abs(gaps[:, None] - gaps[None, :])
    if deviations is None:
        sure = np.maximum(0.0, 1 - 2 * np.exp(-samples * apart**2 / 2)) ** 2
    else:
        known = erf(np.sqrt(samples / 8) * apart / np.maximum(deviations, 1e-300)[:, None])
        sure = known * known.T
    return np.maximum(sure - _LEAST_WEIGHT, 0.0)


class Pairs:
    """The pairs of networks of a study, and how often resamples draw each.

    Args:
        axes: For each axis, the value that each network has.
        n: How many networks there are.
        resamples: Bootstrap resamples of the settings.
        seed: Of the resamples.
    """

    def __init__(
        self, axes: Mapping[str, Sequence[object]], n: int, resamples: int = 0, seed: int = 0
    ) -> None:
        self.codes = {axis: codes_of([(value,) for value in values]) for axis, values in axes.items()}
        self.axes = [axis for axis in axes if axis != SEED]
        own = [self.codes[axis] for axis in self.axes]
        self.settings = codes_of(list(zip(*own, strict=True))) if own else np.zeros(n, np.int64)
        count = int(self.settings.max(initial=-1)) + 1
        drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / max(count, 1)), resamples)
        self.draws = np.vstack([np.ones((1, count)), drawn])  # the first is all settings as they are
        self._cells = {axis: self._cells_of(axis) for axis in self.codes}
        self._neighbours = {axis: self._neighbours_of(axis) for axis in self.axes}
        self._given = self._places()

    def about(self, x: Array, g: Array) -> dict[str, Array]:
        """What the pairs say about one measure: statistics by name, over all settings, then by resample.

        - ``psi_AXIS``: Jiang et al.'s ψ: Kendall's τ over the values of that axis, everything else, the seed
          included, held fixed, averaged over what it is held fixed at. NaN where the axis does not vary.
          ``psi_seed``: over seeds at fixed hyperparameters.
        - ``granulated``: Ψ, the mean of ψ over the axes without the seed.
        - ``sign_error_AXIS``: the share of pairs that differ in the axis alone and that the measure orders
          wrongly; ties count one half.
        - ``information_AXIS``: the mutual information of the signs of the differences in measure and gap over
          pairs of networks, given the values of both in this axis, divided by the entropy of the gap's sign
          given the same: 0 to 1. ``information_none``: given nothing.
        - ``least_information``: the smallest of it over all sets of at most two axes (Jiang et al.'s 𝒦).

        Args:
            x: A value per network.
            g: The gap of each network.
        """
        signs = np.sign(x[:, None] - x) * np.sign(g[:, None] - g)
        psi = {axis: self._psi(signs, axis) for axis in self.codes}
        information = self._information(x, g)
        with np.errstate(invalid="ignore"):
            own = np.array([psi[axis] for axis in self.axes]).reshape(-1, len(self.draws))
            found = {"granulated": np.nansum(own, axis=0) / np.isfinite(own).sum(0)}
        found |= {f"psi_{axis}": value for axis, value in psi.items()}
        found |= {f"sign_error_{axis}": self._sign_error(signs, axis) for axis in self.codes}
        found |= {
            "least_information": _least(list(information.values())),
            "information_none": information[()],
        }
        return found | {f"information_{axis}": information[axis,] for axis in self.axes}

    def _cells_of(self, axis: str) -> tuple[Codes, Codes, Array]:
        """Pairs that agree in all axes but one, the seed included, and the weight of each by resample.

        ψ is the mean over cells of the mean sign of their pairs; the cells of the seed are settings, which
        count as often as they are drawn.
        """
        others = [codes for name, codes in self.codes.items() if name != axis]
        cells = codes_of(list(zip(*others, strict=True))) if others else np.zeros(len(self.settings), int)
        first, second = np.nonzero(np.triu(cells[:, None] == cells[None, :], 1))
        drawn = self.draws[:, self.settings[first]] * self.draws[:, self.settings[second]]
        totals = drawn @ np.eye(int(cells.max(initial=-1)) + 1)[cells[first]]
        often = (totals > 0).astype(float)
        if axis == SEED:
            setting = np.zeros(totals.shape[1], np.int64)
            setting[cells] = self.settings
            often *= self.draws[:, setting]
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(totals > 0, often / totals, 0.0) / often.sum(1, keepdims=True)
        return first, second, drawn * share[:, cells[first]]

    def _psi(self, signs: Array, axis: str) -> Array:
        first, second, weight = self._cells[axis]
        return weight @ signs[first, second] if len(first) else np.full(len(self.draws), np.nan)

    def _neighbours_of(self, axis: str) -> tuple[Codes, Codes]:
        """Pairs of settings that differ in one axis alone."""
        count = self.draws.shape[1]
        any_of = np.zeros(count, np.int64)
        any_of[self.settings] = np.arange(len(self.settings))
        wanted = np.ones((count, count), bool)
        for name in self.axes:
            same = self.codes[name][any_of][:, None] == self.codes[name][any_of][None, :]
            wanted &= ~same if name == axis else same
        first, second = np.nonzero(np.triu(wanted, 1))
        return first, second

    def _sums(self, values: Array) -> Array:
        """Sums of pairs of networks over pairs of settings."""
        member = np.eye(self.draws.shape[1])[self.settings]
        return member.T @ values @ member

    def _sign_error(self, signs: Array, axis: str) -> Array:
        """½(1 − mean sign) over pairs of networks that differ in one axis and in nothing but the seed."""
        sums, sizes = self._sums(signs), self._sums(1.0 - np.eye(len(signs)))
        if axis == SEED:
            first = second = np.arange(len(sums))
            drawn = self.draws
        else:
            first, second = self._neighbours[axis]
            drawn = self.draws[:, first] * self.draws[:, second]
        with np.errstate(invalid="ignore"):
            return 0.5 * (1 - drawn @ sums[first, second] / (drawn @ sizes[first, second]))

    def environments(self, x: Array, g: Array, noise: Array | None = None) -> dict[str, Array]:
        """The sign error of each pair of settings that differ in one axis, axis by axis.

        These are Dziugaite et al.'s environments; the worst of them is their robust sign error.

        Args:
            x: A value per network.
            g: The gap of each network.
            noise: The weight of each pair of networks, as `pair_weights` gives it: environments are left out
                whose pairs weigh less than 12 of equal weight would.
        """
        wrong = 0.5 * (1 - np.sign(x[:, None] - x) * np.sign(g[:, None] - g))
        weights = np.ones_like(wrong) if noise is None else noise
        least = 0.0 if noise is None else _LEAST_SAMPLES
        errors, total, squares = (self._sums(one) for one in (wrong * weights, weights, weights**2))
        found = {}
        for axis, pairs in self._neighbours.items():
            fine = (total[pairs] > 0) & (total[pairs] ** 2 >= least * squares[pairs])
            found[axis] = errors[pairs][fine] / total[pairs][fine]
        return found

    def _places(self) -> dict[tuple[str, ...], Codes]:
        """For each set of at most two axes, which of the values that occur together each setting has."""
        sets = [(), *((axis,) for axis in self.axes), *itertools.combinations(self.axes, 2)]
        found = {}
        for names in sets:
            rows = [tuple(self.codes[name][i] for name in names) for i in range(len(self.settings))]
            places = np.zeros(self.draws.shape[1], np.int64)
            places[self.settings] = codes_of(rows)
            found[names] = places
        return found

    def _information(self, x: Array, g: Array) -> dict[tuple[str, ...], Array]:
        """I(V_x; V_g | U) / H(V_g | U) over ordered pairs by set of axes, V the sign of a difference.

        U is the values that *both* networks have in the axes `given`, so that whatever those axes tell about
        the order of the gaps does not count for the measure. A value of U weighs by its number of pairs;
        pairs with a tie, or with what is not a number, are left out. NaN where U alone tells the order of all
        gaps.
        """
        larger_x, larger_g = x[:, None] > x, g[:, None] > g
        # Pairs in which both are larger, and in which only x is: the other two kinds are these from the other
        # side. Numbers of pairs are whole: no order of summation changes a digit.
        kinds = [larger_x & larger_g, larger_x & (g[:, None] < g)]
        sums = [self._sums(kind.astype(np.float64)) for kind in kinds]
        return {names: self._shares(sums, places) for names, places in self._given.items()}

    def _shares(self, sums: Sequence[Array], places: Codes) -> Array:
        """The share in each resample, by where each setting is."""
        member = np.eye(int(places.max(initial=-1)) + 1)[places]
        drawn = member * self.draws[:, :, None]
        # Within a setting pairs count as often as it is drawn: its copies are not compared with one another.
        copies = self.draws - self.draws**2
        both, only_x = (
            drawn.transpose(0, 2, 1) @ (one @ drawn)
            + member.T @ (np.eye(len(one)) * (copies * one.diagonal())[:, :, None]) @ member
            for one in sums
        )
        # Smaller in both, larger in the gap alone, larger in x alone, larger in both.
        kinds = [both.transpose(0, 2, 1), only_x.transpose(0, 2, 1), only_x, both]
        table = np.stack(kinds, axis=-1).reshape(len(drawn), -1, 2, 2)
        of_gap = _entropies(table.sum(2)).sum(1)
        alone = _entropies(table.sum(3)).sum(1)
        together = _entropies(table.reshape(len(drawn), -1, 4)).sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(of_gap > 0, (alone + of_gap - together) / of_gap, np.nan)


def _least(found: Sequence[Array]) -> Array:
    """The smallest in each resample of what is a number."""
    smallest = np.min(np.where(np.isfinite(found), found, np.inf), axis=0)
    return np.where(np.isfinite(smallest), smallest, np.nan)


def _entropies(counts: Array) -> Array:
    """Entropy in bits over the last axis, times its sum."""
    totals = counts.sum(-1, keepdims=True)
    share = np.divide(counts, totals, out=np.ones_like(counts), where=counts > 0)
    return -(counts * np.log2(share)).sum(-1)
