"""What a measure says about the gap when setting and training loss are known.

Networks that differ in nothing but the seed are one setting. Whatever batch size, rate and optimizer tell
about the gap is the same for all of them, so that what a measure says *within* settings is its own. How far
each network was trained differs within settings too; the logarithm of the training loss takes that away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flatness.study.correlate import (
    Array,
    Codes,
    against,
    counts,
    interval,
    orders,
    units,
    weighted,
)

KINDS = ("pearson", "kendall")
_FEWEST = 3  # networks beyond one of each setting and the slope
_ROUNDING = 1e-9  # a spread of rounding errors is no spread


@dataclass(frozen=True)
class Residuals:
    """What settings and covariates leave of values: a row per measure, a column per network.

    Attributes:
        values: Residuals of the least-squares fit of a constant per setting and a slope per covariate; NaN
            where nothing is left of a row.
        kept: Which networks they are of: those that are not alone in their setting.
        settings: The settings of these networks.
        directions: An orthonormal basis of what settings leave of the covariates: a row each.
    """

    values: Array
    kept: Codes
    settings: Codes
    directions: Array

    def without(self, values: Array) -> Array:
        """Take the covariates away from rows that sum to 0 within settings."""
        return values - values @ self.directions.T @ self.directions


def residuals(values: Array, settings: Codes, covariates: Array | None = None) -> Residuals:
    """What is left of values when setting and covariates are known.

    Args:
        values: A row per measure; none may be missing.
        settings: The setting of each network.
        covariates: What else is known of each network: one value, or a row for each thing known.
    """
    codes, sizes = np.unique(settings, return_inverse=True, return_counts=True)[1:]
    kept = np.flatnonzero(sizes[codes] > 1)
    codes = np.unique(codes[kept], return_inverse=True)[1]
    left = _centred(values[:, kept], codes)
    known = np.empty((0, len(settings))) if covariates is None else np.atleast_2d(covariates)
    own = _centred(known[:, kept], codes)
    own = own[np.linalg.norm(own, axis=1) > _ROUNDING * np.linalg.norm(known[:, kept], axis=1)]
    found = Residuals(left, kept, codes, np.linalg.qr(own.T)[0].T)
    left = found.without(left)
    whole = np.linalg.norm(values[:, kept], axis=1, keepdims=True)
    left = np.where(np.linalg.norm(left, axis=1, keepdims=True) > _ROUNDING * whole, left, np.nan)
    return Residuals(left, kept, codes, found.directions)


def _centred(values: Array, codes: Codes) -> Array:
    """Rows minus their means within settings."""
    member = np.eye(int(codes.max(initial=-1)) + 1)[codes]
    return values - (values @ member / np.maximum(member.sum(0), 1)) @ member.T


def on_a_line(values: Array) -> Array:
    """Rows of positive numbers as logarithms, others as they are: measures span decades."""
    positive = (values > 0).all(axis=1, keepdims=True)
    return np.where(positive, np.log(np.where(positive, values, 1.0)), values)


def partial(
    measures: Array,
    gap: Array,
    settings: Codes,
    covariates: Array | None = None,
    *,
    resamples: int = 2000,
    permutations: int = 2000,
    seed: int = 0,
) -> dict[str, Array]:
    """Partial correlation of measures with the gap, given the setting and what else is known.

    Measures that are positive throughout go in as logarithms.

    Args:
        measures: A row per measure, a column per network; none may be missing.
        gap: The gap of each network.
        settings: The setting of each network.
        covariates: What else is known of each network, such as the logarithm of its training loss: one value,
            or
            a row for each thing known.
        resamples: Bootstrap resamples of the settings; 0 for no intervals.
        permutations: Of the gaps within settings; 0 for no null.
        seed: Of both.

    Returns:
        An entry per measure of ``pearson``, Pearson's r of the residuals (the partial correlation), and of
        ``kendall``, Kendall's τ of them, each with

        - ``_low`` and ``_high``, the ends of the 95 % interval from drawing settings;
        - ``_p``, two-sided: how often residuals of the gap that are permuted within settings, and freed of
          the covariates again (Freedman and Lane 1983), go with it as closely; ``_p_family``, the same for
          the best of all these measures;
        - ``_null_95``, what 95 % of these stay below; ``_null_95_family``, the same for the best of all;
        - ``_drawn``, the coefficient of each resample: (measures, resamples).

    Example:
        >>> import numpy as np
        >>> gap = np.array([1.0, 2.0, 3.0, 11.0, 12.0, 13.0])  # two settings, far apart
        >>> measure = np.array([[3.0, 2.0, 1.0, 9.0, 8.0, 7.0]])  # follows them, and runs backwards within
        >>> found = partial(np.exp(measure), gap, np.array([0, 0, 0, 1, 1, 1]), permutations=0)
        >>> round(float(found["pearson"][0]), 10)
        -1.0
    """
    rows = residuals(np.vstack([on_a_line(measures), gap]), settings, covariates)
    enough = len(rows.kept) - len(np.unique(rows.settings)) - len(rows.directions) >= _FEWEST
    xs, y = rows.values[:-1], rows.values[-1]
    usable = np.isfinite(xs).all(axis=1) & np.isfinite(y).all() & enough
    n = len(rows.kept)
    codes = units(n, rows.settings)
    draws = np.vstack([np.ones((1, n)), counts(codes, resamples)])
    nulls = _null(rows, xs, y, permutations, seed, bool(usable.any()))
    found: dict[str, Array] = {}
    for kind in KINDS:
        own = [
            weighted(x, y, draws, kind, codes) if fine else np.full(1 + resamples, np.nan)
            for x, fine in zip(xs, usable, strict=True)
        ]
        values = np.reshape(own, (-1, 1 + resamples))
        ends = np.reshape([interval(one[1:]) for one in values], (-1, 2)).T
        found |= {kind: values[:, 0], f"{kind}_low": ends[0], f"{kind}_high": ends[1]}
        best = np.broadcast_to(nulls[kind].max(axis=0, initial=0.0), nulls[kind].shape)
        levels = {"": nulls[kind], "_family": best}
        found |= {f"{kind}_p{end}": shares(np.abs(found[kind]), null) for end, null in levels.items()}
        found |= {f"{kind}_null_95{end}": _height(null) for end, null in levels.items()}
        found[f"{kind}_drawn"] = values[:, 1:]
    return found


def _null(
    rows: Residuals, xs: Array, y: Array, permutations: int, seed: int, possible: bool
) -> dict[str, Array]:
    """Sizes of the coefficients by chance, by kind: (measures, permutations)."""
    if not possible or permutations < 1:
        return {kind: np.empty((len(xs), 0)) for kind in KINDS}
    places = orders(len(y), rows.settings, permutations, np.random.default_rng(seed))
    shuffled = rows.without(y[places])
    lengths = np.linalg.norm(xs, axis=1)[:, None] * np.linalg.norm(shuffled, axis=1)
    with np.errstate(invalid="ignore"):
        sizes = {"pearson": xs @ shuffled.T / lengths, "kendall": against(xs, shuffled)}
    return {kind: np.where(np.isfinite(size), np.abs(size), 0.0) for kind, size in sizes.items()}


def _height(null: Array) -> Array:
    """What 95 % of the null of each measure stay below; NaN without a null."""
    return np.quantile(null, 0.95, axis=1) if null.size else np.full(len(null), np.nan)


def shares(values: Array, null: Array) -> Array:
    """How many of the null's, with the value itself, are at least as large; NaN without a null."""
    if not null.size:
        return np.full(len(values), np.nan)
    reached = (null >= values[:, None] - 1e-9).sum(axis=1)
    return np.where(np.isfinite(values), (1 + reached) / (1 + null.shape[1]), np.nan)


def codes_of(rows: Sequence[tuple[object, ...]]) -> Codes:
    """A number for each different row, in the order in which they come."""
    known = {row: code for code, row in enumerate(dict.fromkeys(rows))}
    return np.array([known[row] for row in rows], np.int64)
