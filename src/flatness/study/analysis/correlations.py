"""The table of correlations: every measured quantity against the gap, before and after rescaling."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from flatness.study.analysis.granulated import SEED, Pairs, pair_weights
from flatness.study.correlate import (
    COEFFICIENTS,
    Array,
    Codes,
    correlation,
    counts,
    family_null,
    interval,
    units,
    weighted,
)
from flatness.study.table import distinct_columns, in_words
from flatness.study.within import codes_of, partial, shares

if TYPE_CHECKING:
    import pandas

FEWEST = 3
"""Networks that a correlation needs at least."""
# Products of matrices of this size gain little from threads, and wait for one another where cores are busy.
_THREADS = 1
_PAIR_RESAMPLES = 400  # of statistics over pairs, each of which is a table of its own in every resample


def correlation_table(
    kept: pandas.DataFrame,
    axes: Mapping[str, Sequence[str]],
    *,
    resamples: int = 2000,
    permutations: int = 2000,
) -> pandas.DataFrame:
    """How every measure goes with the gap, over the networks of `kept`.

    Networks that differ in nothing but the seed are one setting. Intervals, ending in ``_low`` and ``_high``,
    are 95 % percentile bootstrap intervals from drawing settings.

    Args:
        kept: Networks, a row each, with a column ``gap``.
        axes: The hyperparameters that vary and the columns of each.
        resamples: Bootstrap resamples; at most 400 of them for statistics over pairs.
        permutations: Random orders of the gaps.

    Returns:
        A row per quantity, the largest Kendall coefficient first; one that is the same as another for all
        networks, such as the largest layer's where that is always the same layer, has no row of its own.

        - ``quantity``, its ``name`` in words, and its ``measure``, ``layer`` and ``reduction``;
        - ``n`` networks in ``settings``;
        - ``pearson``, ``spearman`` and ``kendall``, and ``X_rescaled`` for each of the rescaled copies;
        - if gaps are permuted over all networks: ``null_95``, the size of Kendall's τ that 95 %
          of the orders stay below, ``p_value``, two-sided, and ``null_95_family`` and ``p_family`` for the
          best of all these measures;
        - if gaps are permuted within settings: ``within_expected``, the mean τ, which settings alone
          bring about, ``within_low`` and ``within_high``, which hold 95 %, and ``within_p``, two-sided;
        - ``partial_pearson`` and ``partial_kendall``, the coefficients given setting and logarithm of the
          training loss (`partial`), each with ``_null_95``, ``_p``, ``_null_95_family`` and ``_p_family``,
          for the best of the measures that are known for the same networks;
        - ``granulated`` (Ψ), ``psi_AXIS``, ``sign_error_AXIS``, ``information_AXIS`` and
          ``least_information``, with intervals;
        - ``worst_sign_error``, ``high_sign_error`` (90 % are below) and ``median_sign_error`` over
          ``environments``, pairs of settings that differ in one hyperparameter; the same with ``_filtered``
          for pairs of networks weighted by how certain it is that their gaps differ (`pair_weights`).
    """
    import pandas as pd

    columns = [name for name in distinct_columns(kept) if _usable(kept, name)]
    settings = settings_of(kept, axes)
    with threadpool_limits(_THREADS, user_api="blas"):
        rows = [{**_place(name), **_coefficients(kept, name, settings, resamples)} for name in columns]
        table = pd.DataFrame(rows)
        if len(table) == 0:
            return table
        _add_nulls(table, kept, columns, settings, permutations)
        given = partials(kept, columns, settings, resamples, permutations)
        pairs = _pairs(kept, axes, columns, resamples)
        more = [given[name] | pairs[name] for name in columns]
        table = pd.concat([table, pd.DataFrame(more)], axis=1)
    return table.sort_values("kendall", ascending=False, ignore_index=True, na_position="last")


def settings_of(kept: pandas.DataFrame, axes: Mapping[str, Sequence[str]]) -> Codes:
    """The setting of each network: what it has in all columns of the axes but the seed, and its part."""
    names = [name for axis, columns in axes.items() if axis != SEED for name in columns]
    names = [name for name in ("part", *names) if name in kept]
    frame: Any = kept[names]
    return codes_of([tuple(map(str, row)) for row in frame.itertuples(index=False)])


def baseline_table(
    kept: pandas.DataFrame, axes: Mapping[str, Sequence[str]], *, resamples: int = 2000
) -> pandas.DataFrame:
    """How the gap goes with what is known of `kept` without a measure: hyperparameters and training loss.

    Hyperparameters that are numbers and vary, and the training loss; a measure that does no better tells
    nothing about these networks that one would not know without it. Of hyperparameters that vary together
    the first is taken for all.

    Returns:
        A row each, the largest |τ| first: ``quantity``, ``n`` and the columns of `correlation_table` that are
        not about all measures together.
    """
    import pandas as pd

    columns = {name: column for name, column in _known(kept, axes).items() if _usable(kept, column)}
    settings = settings_of(kept, axes)
    with threadpool_limits(_THREADS, user_api="blas"):
        pairs = _pairs(kept, axes, list(columns.values()), resamples)
        rows = [
            {"quantity": name, **_coefficients(kept, column, settings, resamples), **pairs[column]}
            for name, column in columns.items()
        ]
    table = pd.DataFrame(rows, columns=None if rows else ["quantity", "n", *COEFFICIENTS])
    return table.sort_values("kendall", key=abs, ascending=False, ignore_index=True)


def _known(kept: pandas.DataFrame, axes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The columns known without a measure that vary: hyperparameters and training loss."""
    found = {axis: columns[0] for axis, columns in axes.items() if axis != SEED}
    found["train_loss"] = "train_loss"
    return {name: own for name, own in found.items() if own in kept and _numbers_that_vary(kept[own])}


def difference_table(
    kept: pandas.DataFrame,
    axes: Mapping[str, Sequence[str]],
    *,
    quantities: Sequence[str] = (),
    resamples: int = 2000,
) -> pandas.DataFrame:
    """How much further ahead one quantity is than another, over the same networks and the same resamples.

    What is known without a measure is among them: the hyperparameters and the training loss, with the sign
    with which they go with the gap, since nobody would read them the other way round.

    Args:
        kept: Networks, a row each, with a column ``gap``.
        axes: The hyperparameters that vary and the columns of each.
        quantities: The measures to compare.
        resamples: Bootstrap resamples of the settings.

    Returns:
        A row per pair: ``quantity``, ``other``; ``kendall``, the difference of their τ, and
        ``partial_kendall``, that of their τ given setting and training loss, each with ``_low`` and
        ``_high``.
    """
    import pandas as pd

    settings = settings_of(kept, axes)
    known = _known(kept, axes)
    columns = {name: name for name in quantities if name in kept} | known
    frame: Any = kept[[*dict.fromkeys([*columns.values(), "gap", "train_loss"])]].astype(float)
    whole = np.isfinite(frame.to_numpy()).all(axis=1)
    frame, settings = frame[whole], settings[whole]
    if len(frame) < FEWEST:
        return pd.DataFrame(columns=["quantity", "other", "kendall", "partial_kendall"])
    gap, loss = frame["gap"].to_numpy(), np.log(frame["train_loss"].to_numpy())
    codes = units(len(frame), settings)
    drawn = np.vstack([np.ones(len(frame)), counts(codes, resamples)])
    with threadpool_limits(_THREADS, user_api="blas"):
        taus = {
            name: weighted(frame[column].to_numpy(), gap, drawn, "kendall", codes)
            for name, column in columns.items()
        }
        rows = frame[list(columns.values())].to_numpy().T
        given = partial(rows, gap, settings, loss, resamples=resamples, permutations=0)
    own = dict(zip(columns, np.column_stack([given["kendall"], given["kendall_drawn"]]), strict=True))
    for name in known:
        taus[name] = taus[name] * np.sign(taus[name][0])
    pairs = itertools.combinations(columns, 2)
    return pd.DataFrame(
        [
            {"quantity": one, "other": other}
            | _difference("kendall", taus[one] - taus[other])
            | _difference("partial_kendall", own[one] - own[other])
            for one, other in pairs
        ]
    )


def _difference(name: str, values: Array) -> dict[str, float]:
    low, high = interval(values[1:])
    return {name: float(values[0]), f"{name}_low": low, f"{name}_high": high}


def _numbers_that_vary(column: Any) -> bool:
    import pandas as pd

    return pd.api.types.is_numeric_dtype(column) and column.nunique() > 1


def _usable(kept: pandas.DataFrame, name: str) -> bool:
    return int(np.isfinite(kept[name].to_numpy(float)).sum()) >= FEWEST


def _place(name: str) -> dict[str, Any]:
    """What a column is called, taken apart."""
    measure, place, *reduction = name.split(":")
    return {
        "quantity": name,
        "name": in_words(name),
        "measure": measure,
        "layer": None if place == "network" else place,
        "reduction": reduction[0] if reduction else None,
    }


def _coefficients(kept: pandas.DataFrame, name: str, settings: Codes, resamples: int) -> dict[str, Any]:
    """How one column goes with the gap, and its rescaled twin where there is one."""
    x, gap = (kept[column].to_numpy(float) for column in (name, "gap"))
    fine = np.isfinite(x) & np.isfinite(gap)
    row: dict[str, Any] = {"n": int(fine.sum()), "settings": len(np.unique(settings[fine]))}
    sides = {"": (x, fine)}
    if f"{name}:rescaled" in kept:
        moved = kept[f"{name}:rescaled"].to_numpy(float)
        sides["_rescaled"] = (moved, fine & np.isfinite(moved))
    for end, (values, known) in sides.items():
        for kind in COEFFICIENTS:
            found = correlation(
                values[known], gap[known], kind, settings=settings[known], resamples=resamples
            )
            label = f"{kind}{end}"
            row |= {label: found.value, f"{label}_low": found.low, f"{label}_high": found.high}
    return row


def _by_networks(
    kept: pandas.DataFrame, columns: Sequence[str], more: Sequence[str]
) -> dict[bytes, list[str]]:
    """Columns that are known for the same networks, by which these are."""
    fine = np.isfinite(kept[list(more)].to_numpy(float)).all(axis=1)
    found: dict[bytes, list[str]] = {}
    for name in columns:
        found.setdefault((fine & np.isfinite(kept[name].to_numpy(float))).tobytes(), []).append(name)
    return found


def partials(
    kept: pandas.DataFrame, columns: Sequence[str], settings: Codes, resamples: int, permutations: int
) -> dict[str, dict[str, float]]:
    """Columns of the partial correlations, by quantity."""
    found: dict[str, dict[str, float]] = {}
    for mask, names in _by_networks(kept, columns, ("gap", "train_loss")).items():
        known: Any = kept[np.frombuffer(mask, bool)]
        loss = known["train_loss"].to_numpy(float)
        told = partial(
            known[names].to_numpy(float).T,
            known["gap"].to_numpy(float),
            settings[np.frombuffer(mask, bool)],
            np.log(loss) if (loss > 0).all() else loss,
            resamples=resamples,
            permutations=permutations,
        )
        said = {f"partial_{name}": values for name, values in told.items() if not name.endswith("_drawn")}
        for place, name in enumerate(names):
            found[name] = {column: float(values[place]) for column, values in said.items()}
    return found


def _pairs(
    kept: pandas.DataFrame, axes: Mapping[str, Sequence[str]], columns: Sequence[str], resamples: int
) -> dict[str, dict[str, Any]]:
    """Columns of the statistics over pairs of networks, by quantity; none without hyperparameters."""
    found: dict[str, dict[str, Any]] = {name: {} for name in columns}
    if not axes:
        return found
    for mask, names in _by_networks(kept, columns, ("gap",)).items():
        known: Any = kept[np.frombuffer(mask, bool)]
        gap = known["gap"].to_numpy(float)
        places = {
            axis: list(known[list(own)].itertuples(index=False, name=None)) for axis, own in axes.items()
        }
        pairs = Pairs(places, len(known), min(resamples, _PAIR_RESAMPLES))
        noise = _noise(known)
        found |= {name: _about(pairs, known[name].to_numpy(float), gap, noise) for name in names}
    return found


_OUTCOMES = ("gap", "train_error", "test_error", "train_loss", "test_loss", "test_loss_deviation")


def _noise(known: pandas.DataFrame) -> Array | None:
    """The weights of the noise filter, if it is known how much of the study's own gap is noise.

    For a gap of accuracies the number of test samples says so; for one of losses, summed or not, their
    deviation over the samples too, which records of earlier versions do not hold.
    """
    columns = known.reindex(columns=[*_OUTCOMES, "test_samples"]).to_numpy(float).T
    gap, train_error, test_error, train_loss, test_loss, deviations, samples = columns
    if len(gap) == 0 or not np.isfinite(samples).all():
        return None
    if np.allclose(gap, test_error - train_error):
        return pair_weights(gap, int(samples.min()))
    losses = test_loss - train_loss
    fine = np.isfinite(losses).all() and np.isfinite(deviations).all()
    return pair_weights(losses, int(samples.min()), deviations) if fine else None


def _about(pairs: Pairs, x: Array, gap: Array, noise: Array | None) -> dict[str, Any]:
    found = pairs.about(x, gap)
    row: dict[str, Any] = {name: float(values[0]) for name, values in found.items()}
    for name, values in found.items():
        row[f"{name}_low"], row[f"{name}_high"] = interval(values[1:])
    row |= _distribution(pairs.environments(x, gap), "")
    if noise is not None:
        row |= _distribution(pairs.environments(x, gap, noise), "_filtered")
    return row


def _distribution(environments: Mapping[str, Array], end: str) -> dict[str, Any]:
    """How the sign errors of environments lie."""
    errors = np.concatenate([np.empty(0), *environments.values()])
    at = {"worst": 1.0, "high": 0.9, "median": 0.5}
    found = {
        f"{name}_sign_error{end}": float(np.quantile(errors, share))
        for name, share in at.items()
        if len(errors)
    }
    return {
        **dict.fromkeys([f"{name}_sign_error{end}" for name in at], np.nan),
        **found,
        f"environments{end}": len(errors),
    }


def _add_nulls(
    table: pandas.DataFrame,
    kept: pandas.DataFrame,
    columns: Sequence[str],
    settings: Codes,
    permutations: int,
) -> None:
    """Columns of τ if gaps are permuted: over all networks, then within settings, which keeps their effects.

    Every quantity goes by the networks for which it is known.
    """
    known: Any = kept[["gap", *columns]].astype(float)
    whole = np.isfinite(known["gap"].to_numpy())
    ahead = ["p_value", "null_95", "p_family", "null_95_family"]
    within = ["within_expected", "within_low", "within_high", "within_p"]
    if whole.sum() < FEWEST or permutations < 1:
        table[ahead + within] = np.nan
        return
    xs, gap = known[list(columns)].to_numpy()[whole].T, known["gap"].to_numpy()[whole]
    observed = table["kendall"].to_numpy(float)
    sizes = np.abs(family_null(xs, gap, permutations, np.random.default_rng(0)))
    own = np.where(np.isfinite(sizes), sizes, 0.0)
    best = np.broadcast_to(own.max(axis=0), own.shape)
    found = [(shares(np.abs(observed), null), np.quantile(null, 0.95, axis=1)) for null in (own, best)]
    table[ahead] = np.concatenate(found).T
    taus = family_null(xs, gap, permutations, np.random.default_rng(0), settings[whole])
    usual = np.isfinite(taus).all(axis=1) & np.isfinite(observed)
    taus = np.where(np.isfinite(taus), taus, 0.0)
    low, high = np.quantile(taus, (0.025, 0.975), axis=1)
    sides = np.minimum(shares(observed, taus), shares(-observed, -taus))
    found = [taus.mean(axis=1), low, high, np.minimum(2 * sides, 1.0)]
    table[within] = np.where(usual, found, np.nan).T
