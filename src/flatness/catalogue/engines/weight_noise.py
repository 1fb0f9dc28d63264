"""Gaussian noise on the weight matrices of layers, by the scales that tsuzuku2020 chooses.

With the ½ of the expansion that eq. 5 and 10 drop, the noise s_ij = σ_i σ′_j of a weight matrix minimises

    ½ Σ_ij h_ij s_ij² + (1/λ) Σ_ij W_ij² / (2 s_ij²),

by rows and columns (eq. 17) or with one σ for the matrix (eq. 11). The minimiser for λ is the one for λ = 1
with s² divided by √λ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from flatness.catalogue.engines.balancing import Array, balance
from flatness.catalogue.measure import LayerView
from flatness.curvature.parameters.parameter_products import entries_of
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import UndefinedMeasureError
from flatness.network.layers import own_parameter

# Entries without curvature would get infinite noise, entries without weight none at all: |W|√h of every entry
# counts as at least this share of its mean. The product does not change when rows or columns are rescaled.
_FLOOR = 1e-2
# log σ² of rows and columns with neither weights nor curvature: any noise is free, next to none is meant.
_SILENT = -40.0


class WeightNoise:
    """Noise as matrices (G, d, m), one per layer, and as vectors over all parameters.

    Args:
        space: The parameters as one vector.
        layers: The layers whose weights get noise.

    Attributes:
        count: Number of weights.
    """

    def __init__(self, space: ParameterSpace, layers: Sequence[LayerView]) -> None:
        self.space, self.layers = space, layers
        self.count = sum(view.weight.numel() for view in layers)
        sizes = [parameter.numel() for parameter in space.parameters.values()]
        starts = dict(zip(space.parameters, accumulate(sizes, initial=0), strict=False))
        self._entries = []
        for view in layers:
            assert view.layer is not None
            name = own_parameter(space.problem.model, view.layer)
            if name is None:
                raise UndefinedMeasureError(
                    f"Expected the weight of {view.name!r} to be a parameter, as this puts noise on it, but "
                    "it is made from others. Remove the parametrisation, or leave the layer out with layers=."
                )
            self._entries.append(starts[name] + entries_of(view.layer, space.parameters[name]))

    def draw(self, generator: torch.Generator) -> list[Tensor]:
        """Standard normal matrices, in float64 on the host."""
        return [
            torch.randn(view.weight.shape, generator=generator, dtype=torch.float64, device="cpu")
            for view in self.layers
        ]

    def place(self, matrices: Sequence[Tensor]) -> Tensor:
        """A float64 vector over all parameters: the matrices where the weights are, 0 elsewhere."""
        theta = self.space.theta
        vector = torch.zeros_like(theta)
        for entries, matrix in zip(self._entries, matrices, strict=True):
            vector[entries] = matrix.to(theta)
        return vector

    def take(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector that belong to the weights, as matrices in float64 on the host."""
        return [vector[entries].double().cpu() for entries in self._entries]

    def penalty(self, deviations: Sequence[Tensor], strength: float = 1.0) -> list[Tensor]:
        """W²/(2λ s²), entry by entry, for λ = `strength`."""
        pairs = zip(self.layers, deviations, strict=True)
        return [view.W.square() / (2 * strength * s.square()) for view, s in pairs]


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
        limits = torch.finfo(precision)
        rows, columns = (
            values.exp().clamp(limits.tiny, limits.max).to(precision).double()
            for values in (0.5 * self.x - 0.25 * np.log(strength), 0.5 * self.y)
        )
        return rows[:, :, None] * columns.repeat_interleave(self.taps, dim=1)[:, None]


def row_column_scales(view: LayerView) -> NoiseScales:
    """The minimiser by rows and columns, eq. 17; from the diagonal of H and the weights."""
    a = view.per_unit(view.statistics["diagonal"].clamp(min=0)).numpy()
    b = view.per_unit(view.W.square()).numpy()
    G, d, units = a.shape
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
