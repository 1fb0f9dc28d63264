"""The table of correlations: every measured quantity against the gap, before and after rescaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from flatness.study.analysis.granulated import SEED, granulated
from flatness.study.correlate import COEFFICIENTS, correlation, family_null
from flatness.study.table import measure_columns

if TYPE_CHECKING:
    import pandas

FEWEST = 3
"""Networks that a correlation needs at least."""
# Products of matrices of this size gain little from threads, and wait for one another where cores are busy.
_THREADS = 1


def correlation_table(
    kept: pandas.DataFrame,
    axes: Mapping[str, Sequence[str]],
    *,
    resamples: int = 2000,
    permutations: int = 2000,
) -> pandas.DataFrame:
    """How every measure goes with the gap, over the networks of `kept`.

    Args:
        kept: Networks, a row each, with a column ``gap``.
        axes: The hyperparameters that vary and the columns of each.
        resamples: Bootstrap resamples.
        permutations: Random orders of the gaps.

    Returns:
        A row per quantity, the largest Kendall coefficient first. ``n``; ``pearson``, ``spearman`` and
        ``kendall``, each with ``_low`` and ``_high``, its 95 % bootstrap interval; ``null_95``, the size of
        Kendall's τ that 95 % of the permutations stay below; ``p_value``, two-sided; ``p_family``, the same
        for the best of all these measures by chance; ``granulated`` (Ψ), ``psi_AXIS``,
        ``sign_error_AXIS``, ``worst_sign_error``, ``information_AXIS`` and ``least_information``;
        ``X_rescaled`` for each coefficient of the rescaled copies.
    """
    import pandas as pd

    columns = [name for name in measure_columns(kept) if _usable(kept, name)]
    with threadpool_limits(_THREADS, user_api="blas"):
        table = pd.DataFrame(
            [{**_place(name), **_coefficients(kept, name, axes, resamples)} for name in columns]
        )
        if len(table) == 0:
            return table
        _add_null(table, kept, columns, permutations)
    return table.sort_values("kendall", ascending=False, ignore_index=True, na_position="last")


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

    names = {axis: columns[0] for axis, columns in axes.items() if axis != SEED} | {
        "train_loss": "train_loss"
    }
    with threadpool_limits(_THREADS, user_api="blas"):
        rows = [
            {"quantity": name, **_coefficients(kept, column, axes, resamples)}
            for name, column in names.items()
            if column in kept and _numbers_that_vary(kept[column]) and _usable(kept, column)
        ]
    table = pd.DataFrame(rows, columns=None if rows else ["quantity", "n", *COEFFICIENTS])
    return table.sort_values("kendall", key=abs, ascending=False, ignore_index=True)


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
        "measure": measure,
        "layer": None if place == "network" else place,
        "reduction": reduction[0] if reduction else None,
    }


def _coefficients(
    kept: pandas.DataFrame, name: str, axes: Mapping[str, Sequence[str]], resamples: int
) -> dict[str, Any]:
    """How one column goes with the gap, and its rescaled twin where there is one."""
    x, gap = (kept[column].to_numpy(float) for column in (name, "gap"))
    fine = np.isfinite(x) & np.isfinite(gap)
    row: dict[str, Any] = {"n": int(fine.sum())}
    sides = {"": (x, fine)}
    if f"{name}:rescaled" in kept:
        moved = kept[f"{name}:rescaled"].to_numpy(float)
        sides["_rescaled"] = (moved, fine & np.isfinite(moved))
    for end, (values, known) in sides.items():
        for kind in COEFFICIENTS:
            found = correlation(values[known], gap[known], kind, resamples=resamples)
            label = f"{kind}{end}"
            row |= {label: found.value, f"{label}_low": found.low, f"{label}_high": found.high}
    return row | _pairs(kept, axes, x, fine) if axes else row


def _pairs(
    kept: pandas.DataFrame, axes: Mapping[str, Sequence[str]], x: np.ndarray, fine: np.ndarray
) -> dict[str, Any]:
    """Columns of the statistics over pairs of networks."""
    known: Any = kept[fine]
    places = {
        axis: list(known[list(columns)].itertuples(index=False, name=None)) for axis, columns in axes.items()
    }
    found = granulated(x[fine], known["gap"].to_numpy(float), places)
    row: dict[str, Any] = {"granulated": found.coefficient}
    row |= {f"psi_{axis}": value for axis, value in found.psi.items()}
    row |= {"worst_sign_error": found.worst_sign_error}
    row |= {f"sign_error_{axis}": value for axis, value in found.sign_error.items()}
    row |= {"least_information": found.least_information}
    return row | {f"information_{axis}": value for axis, value in found.information.items()}


def _add_null(
    table: pandas.DataFrame, kept: pandas.DataFrame, columns: Sequence[str], permutations: int
) -> None:
    """Columns of the permutation null; every quantity goes by the networks for which it is known."""
    known: Any = kept[["gap", *columns]].astype(float)
    whole = known[np.isfinite(known["gap"])]
    if len(whole) < FEWEST or permutations < 1:
        table[["p_value", "null_95", "p_family", "null_95_family"]] = np.nan
        return
    xs, gap = whole[list(columns)].to_numpy().T, whole["gap"].to_numpy()
    sizes = np.abs(family_null(xs, gap, permutations, np.random.default_rng(0)))
    own = np.where(np.isfinite(sizes), sizes, 0.0)
    best = np.broadcast_to(own.max(axis=0), own.shape)
    observed = np.abs(table["kendall"].to_numpy(float))
    for share, height, null in (("p_value", "null_95", own), ("p_family", "null_95_family", best)):
        reached = (null >= observed[:, None] - 1e-9).sum(axis=1)
        table[share] = np.where(np.isfinite(observed), (1 + reached) / (1 + permutations), np.nan)
        table[height] = np.quantile(null, 0.95, axis=1)
