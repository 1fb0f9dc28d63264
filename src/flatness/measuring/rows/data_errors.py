"""The other standard error: of a value as an estimate for the distribution that the data were drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from flatness.catalogue.measure import SPECTRA, Measure
from flatness.report.report import Result

_ROUNDING = 1e-12
_GOAL = 0.01


def with_data_errors(
    results: list[Result], left_out: list[list[Result]], measures: Sequence[Measure], samples: int
) -> list[Result]:
    """Results with `data_stderr`, from the same results without one group of samples after the other.

    The jackknife: se² = (B − 1)/B Σ_b (f_b − mean f)². Values that are no function of sums over samples
    (eigenvalues, walks in parameter space) have none.

    Args:
        results: What was measured on all samples.
        left_out: For every group, the same rows without its samples.
        measures: The measures.
        samples: Number of samples.
    """
    sums = {m.name for m in measures if not (m.needs & SPECTRA or "spectrum" in m.network_needs or m.explore)}
    B = len(left_out)
    if B < 2:
        return results
    values = torch.tensor(
        [[row.value for row in rows] for rows in left_out], dtype=torch.float64, device="cpu"
    )
    errors = ((B - 1) / B * (values - values.mean(0)).square().sum(0)).sqrt()
    # What does not depend on the data, such as norms of weights, moves by rounding alone.
    errors = errors.where(errors > _ROUNDING * values.mean(0).abs(), 0.0).tolist()
    return [
        _with(row, error, samples) if row.measure in sums else row
        for row, error in zip(results, errors, strict=True)
    ]


def _with(row: Result, error: float, samples: int) -> Result:
    if not row.value or row.level == "unit":
        return replace(row, data_stderr=error)
    share = error / abs(row.value)
    wanted = math.ceil(samples * (share / _GOAL) ** 2)
    note = (
        f"as an estimate for the distribution of the data: ± {error:.3g} ({share:.1%}); "
        f"1 % would take about {wanted:,} samples"
    )
    return replace(row, data_stderr=error, notes=(*row.notes, note) if error else row.notes)
