"""Normalized sharpness without the second-order approximation, tsuzuku2020 eq. 62."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from flatness.catalogue.engines.balancing import Array
from flatness.catalogue.engines.weight_noise import NoiseScales, WeightNoise, row_column_scales
from flatness.catalogue.measure import LayerView, Surroundings, Valued, averaged
from flatness.curvature.parameters.parameter_space import ParameterSpace


class DirectObjective:
    """(E_ε E(θ + s∘ε) − E(θ)) + Σ W²/(2λ s²) over the logarithms of σ² and σ′², for fixed draws ±ε.

    Args:
        space: The parameters and the risk around them.
        layers: The layers whose weights get noise.
        strength: λ.
    """

    def __init__(self, space: ParameterSpace, layers: Sequence[LayerView], strength: float) -> None:
        self.space, self.layers, self.strength = space, layers, strength
        self.noise = WeightNoise(space, layers)
        self.risk = space.risk()

    def pack(self, scales: Sequence[NoiseScales]) -> Array:
        """All logarithms in one vector, for λ = `strength`."""
        shift = 0.5 * math.log(self.strength)
        parts = [part.flatten() for scale in scales for part in (scale.x - shift, scale.y)]
        return torch.cat(parts).numpy()

    def unpack(self, z: Array) -> list[NoiseScales]:
        """Scales of the layers from one vector."""
        values, scales = torch.from_numpy(np.ascontiguousarray(z, dtype=np.float64)), []
        for view in self.layers:
            G, d, m = view.W.shape
            units = m // view.taps
            x, y, values = values.split([G * d, G * units, len(values) - G * (d + units)])
            scales.append(NoiseScales(x.reshape(G, d), y.reshape(G, units), view.taps, G * (d + units)))
        return scales

    def rises(self, deviations: Sequence[Tensor], draws: Sequence[Sequence[Tensor]]) -> list[float]:
        """E(θ ± s∘ε) − E(θ), averaged over the two signs, for each draw: forward passes only."""
        found = []
        for epsilon in draws:
            step = self.noise.place([s * e for s, e in zip(deviations, epsilon, strict=True)])
            found.append((self.space.risk(step) + self.space.risk(-step)) / 2 - self.risk)
        return found

    def value_and_gradient(self, z: Array, draws: Sequence[Sequence[Tensor]]) -> tuple[float, Array]:
        """The objective for these draws, and its derivatives with respect to log σ² and log σ′²."""
        deviations = [scale.deviations() for scale in self.unpack(z)]
        penalty = self.noise.penalty(deviations, self.strength)
        # u = log s²: ∂E/∂u = ½ s ε ∂E/∂W, and ∂/∂u of W²/(2λ s²) is its negative
        slopes = [-part for part in penalty]
        value = float(sum(part.sum() for part in penalty)) - self.risk
        share = 1 / (2 * len(draws))
        for epsilon in draws:
            moves = [s * e for s, e in zip(deviations, epsilon, strict=True)]
            for sign in (1.0, -1.0):
                risk, gradient = self.space.gradient(sign * self.noise.place(moves))
                value += share * risk
                for slope, move, g in zip(slopes, moves, self.noise.take(gradient), strict=True):
                    slope += share * 0.5 * sign * move * g
        parts = []
        for view, slope in zip(self.layers, slopes, strict=True):
            parts += [slope.sum(2).flatten(), view.per_unit(slope.sum(1, keepdim=True)).flatten()]
        return value, torch.cat(parts).numpy()


def normalized_sharpness_direct(around: Surroundings) -> Valued:
    """The least value that a descent from the scales of eq. 17 finds, with fresh noise."""
    given = around.options["lambda"]
    strength = float(given) if given is not None else float(around.space.samples)
    objective = DirectObjective(around.space, around.layers, strength)
    generator = torch.Generator().manual_seed(around.seed)
    count = int(around.options["draws"])
    course: list[float] = []
    solved = minimize(
        objective.value_and_gradient,
        objective.pack([row_column_scales(view) for view in around.layers]),
        args=([objective.noise.draw(generator) for _ in range(count)],),
        jac=True,
        method="L-BFGS-B",
        callback=lambda intermediate_result: course.append(intermediate_result.fun),
        options={"maxfun": int(around.options["evaluations"])},
    )
    deviations = [scale.deviations() for scale in objective.unpack(solved.x)]
    # Fresh draws: the minimum over noise that was optimised against is too low.
    rises = objective.rises(deviations, [objective.noise.draw(generator) for _ in range(8 * count)])
    rise, stderr = averaged(rises)
    distance = float(sum(part.sum() for part in objective.noise.penalty(deviations, strength)))
    settled = bool(solved.success) or (len(course) > 1 and course[-2] - course[-1] <= stderr)
    notes = _notes(objective, solved.nfev, rise, distance, settled)
    return Valued(rise + distance, notes, settled, stderr, "sampled")


def _notes(
    objective: DirectObjective, evaluations: int, rise: float, distance: float, settled: bool
) -> tuple[str, ...]:
    notes = [
        f"λ = {objective.strength:g}; rise of the risk under the noise {rise:.4g}, weights over noise "
        f"{distance:.4g}",
        f"noise in {', '.join(view.name or 'the model itself' for view in objective.layers)}, all at once; "
        "biases and norm scales have none",
        f"{evaluations} evaluations from the scales of eq. 17; not convex: a local minimum, which "
        "bounds the least value from above",
        "the order of networks may change with λ, unlike that of normalized_sharpness",
    ]
    if rise < 0:
        below = "; the value is negative for it" if rise + distance < 0 else ""
        notes.append(f"not a minimum: the risk falls under the noise{below}")
    if rise > distance * 10:
        notes.append("the noise drowns the network (its risk has saturated); raise lambda")
    if not settled:
        notes.append("still falling by more than its standard error; raise evaluations")
    return tuple(notes)
