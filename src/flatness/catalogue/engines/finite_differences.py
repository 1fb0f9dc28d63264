"""The diagonal of the Hessian by finite differences of the gradient, as tsuzuku2020 computes it.

    E_ε [ ε ∘ (∇E(θ + rε) − ∇E(θ − rε)) / 2r ],  ε ~ N(0, 1),          (eq. 61)

with r for each weight matrix in proportion to its norm. Noise in one matrix also reaches the gradient of the
others, but with mean 0. A cross-check for smooth networks: a ReLU network has kinks, which a difference sees
and the Hessian does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flatness.catalogue.engines.weight_noise import WeightNoise
from flatness.catalogue.measure import LayerView
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.problem.progress import ProgressBar


def differenced_diagonals(
    space: ParameterSpace,
    layers: Sequence[LayerView],
    *,
    draws: int,
    radius: float,
    seed: int,
    groups: int = 10,
) -> list[Tensor]:
    """Independent estimates of the diagonals of all layers: for each layer (groups, G, d, m), in float64.

    The mean over the first axis is the estimate of eq. 61; the spread along it gives its standard error.

    Args:
        space: The parameters; E and ∇E around them.
        layers: The layers.
        draws: How many ε; each takes two gradients over the data.
        radius: ‖rε‖ in units of ‖W‖ of each matrix.
        seed: Seed of the noise.
        groups: Number of estimates to form, each from draws/groups of the ε.
    """
    noise = WeightNoise(space, layers)
    generator = torch.Generator().manual_seed(seed)
    radii = [_radius(view.W, radius) for view in layers]
    groups = min(groups, draws)
    sums = [torch.zeros(groups, *view.W.shape, dtype=torch.float64, device="cpu") for view in layers]
    with ProgressBar("finite differences", draws, space.problem.progress) as bar:
        for draw in range(draws):
            drawn = noise.draw(generator)
            step = noise.place([r * epsilon for r, epsilon in zip(radii, drawn, strict=True)])
            rise = noise.take(space.gradient(step)[1] - space.gradient(-step)[1])
            for total, r, epsilon, difference in zip(sums, radii, drawn, rise, strict=True):
                total[draw % groups] += epsilon * difference / (2 * r)
            bar.advance()
    counts = torch.bincount(torch.arange(draws, device="cpu") % groups)
    return [total / counts[:, None, None, None] for total in sums]


def _radius(W: Tensor, radius: float) -> float:
    """The r with E‖rε‖² = (radius·‖W‖)²; a matrix of zeros gets the radius itself."""
    return radius * (float(W.norm()) or 1.0) / math.sqrt(W.numel())
