"""The standard deviations of the Gaussian posterior of tsuzuku2020, chosen by its second-order expansion.

With the ½ of the expansion that eq. 5 and 10 drop, the noise s_ij = σ_i σ′_j of a weight matrix minimises

    ½ Σ_ij h_ij s_ij² + (1/λ) Σ_ij W_ij² / (2 s_ij²),

by rows and columns (eq. 17) or with one σ for the matrix (eq. 11). The minimiser for λ is the one for λ = 1
with s² divided by √λ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatness.catalogue.balancing import Array, balance
from flatness.catalogue.measure import LayerView

# Entries without curvature would get infinite noise, entries without weight none at all: |W|√h of every entry
# counts as at least this share of its mean. The product does not change when rows or columns are rescaled.
_FLOOR = 1e-2
# log σ² of rows and columns with neither weights nor curvature: any noise is free, next to none is meant.
_SILENT = -40.0


@dataclass(frozen=True)
class NoiseScales:
    """log σ_i² and log σ′_j² of one layer at λ = 1.

    Attributes:
        x: Of the rows (G, d).
        y: Of the input units (G, units); a convolution's kernel shares one.
        taps: Columns of W per input unit.
        count: How many scales were chosen freely: what a hyperprior has to pay for.
    """

    x: Tensor
    y: Tensor
    taps: int
    count: int

    def deviations(self, strength: float = 1.0, precision: torch.dtype = torch.float64) -> Tensor:
        """The deviations s (G, d, m) for λ = `strength`, each σ rounded to a number of that precision."""
        rows = (0.5 * self.x - 0.25 * np.log(strength)).exp()
        columns = (0.5 * self.y).exp()
        rows, columns = (_rounded(values, precision) for values in (rows, columns))
        return rows[:, :, None] * columns.repeat_interleave(self.taps, dim=1)[:, None]


def row_column_scales(view: LayerView) -> NoiseScales:
    """The minimiser by rows and columns, eq. 17; from the diagonal of H and the weights."""
    G, d, m = view.W.shape
    units = m // view.taps
    shape = (G, d, units, view.taps)
    a = view.statistics["diagonal"].reshape(shape).clamp(min=0).sum(3).numpy()
    b = view.W.square().reshape(shape).sum(3).numpy()
    level = float(np.sqrt(a * b).mean())
    floor = (_FLOOR * level) ** 2 if level > 0 else 1.0
    x, y = np.zeros((G, d)), np.zeros((G, units))
    for group in range(G):
        x[group], y[group] = _balanced(a[group], b[group], floor)
    return NoiseScales(torch.from_numpy(x), torch.from_numpy(y), view.taps, G * (d + units))


def _balanced(a: Array, b: Array, floor: float) -> tuple[Array, Array]:
    with np.errstate(divide="ignore"):
        raised_a = np.where(b > 0, np.maximum(a, np.minimum(floor / b, 1e300)), a)
        raised_b = np.where(a > 0, np.maximum(b, np.minimum(floor / a, 1e300)), b)
    # The value is flat at its minimum, the scales are not: they need twice the digits.
    solved = balance(raised_a, raised_b, tolerance=1e-14)
    x, y = solved.x, solved.y
    rows, columns = raised_a.any(1), raised_a.any(0)
    if rows.any():
        # x + c and y − c are the same noise: both are put at the same height.
        shift = (x[rows].mean() - y[columns].mean()) / 2
        x, y = x - shift, y + shift
    return np.where(rows, x, _SILENT), np.where(columns, y, _SILENT)


def matrix_scales(view: LayerView) -> NoiseScales:
    """One σ for the whole matrix, eq. 11: σ² = √(‖W‖²/H), H the trace; without curvature the mean of W²."""
    G, d, m = view.W.shape
    trace, norm = float(view.statistics["diagonal"].sum()), float(view.squared_norm)
    if norm == 0:
        variance = float(np.exp(_SILENT))
    else:
        variance = float(np.sqrt(norm / trace)) if trace > 0 else norm / view.W.numel()
    x = torch.full((G, d), float(np.log(variance)), dtype=torch.float64, device="cpu")
    return NoiseScales(x, torch.zeros(G, m // view.taps, dtype=x.dtype, device="cpu"), view.taps, 1)


def _rounded(values: Tensor, precision: torch.dtype) -> Tensor:
    limits = torch.finfo(precision)
    return values.clamp(limits.tiny, limits.max).to(precision).double()
