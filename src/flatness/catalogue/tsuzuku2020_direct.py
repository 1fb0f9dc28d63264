"""Normalized sharpness without the second-order approximation, tsuzuku2020 eq. 62."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from flatness.catalogue.balancing import Array
from flatness.catalogue.measure import LayerView, Measure, Surroundings, Valued
from flatness.catalogue.noise_scales import NoiseScales, row_column_scales
from flatness.catalogue.options import NORMALIZED_LOSS, count, declared, positive
from flatness.catalogue.registry import register_measure
from flatness.catalogue.weight_matrices import WeightMatrices
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
        self.weights = WeightMatrices(space, layers)
        self.risk = space.risk()
        self.evaluations = 0

    def draws(self, count: int, generator: torch.Generator) -> list[list[Tensor]]:
        """Standard normal matrices for all layers, `count` times."""
        shapes = [view.W.shape for view in self.layers]
        return [
            [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes]
            for _ in range(count)
        ]

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

    def penalty(self, deviations: Sequence[Tensor]) -> list[Tensor]:
        """W²/(2λ s²), entry by entry."""
        pairs = zip(self.layers, deviations, strict=True)
        return [view.W.square() / (2 * self.strength * s.square()) for view, s in pairs]

    def rises(self, deviations: Sequence[Tensor], noise: list[list[Tensor]]) -> Tensor:
        """E(θ ± s∘ε) − E(θ), averaged over the two signs, for each draw: forward passes only."""
        found = []
        for epsilon in noise:
            step = self.weights.place([s * e for s, e in zip(deviations, epsilon, strict=True)])
            found.append((self.space.risk(step) + self.space.risk(-step)) / 2 - self.risk)
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def value_and_gradient(self, z: Array, noise: list[list[Tensor]]) -> tuple[float, Array]:
        """The objective for these draws, and its derivatives with respect to log σ² and log σ′²."""
        self.evaluations += 1
        deviations = [scale.deviations() for scale in self.unpack(z)]
        penalty = self.penalty(deviations)
        # u = log s²: ∂E/∂u = ½ s ε ∂E/∂W, and ∂/∂u of W²/(2λ s²) is its negative
        slopes = [-part for part in penalty]
        value = float(sum(part.sum() for part in penalty)) - self.risk
        share = 1 / (2 * len(noise))
        for epsilon in noise:
            moves = [s * e for s, e in zip(deviations, epsilon, strict=True)]
            for sign in (1.0, -1.0):
                risk, gradient = self.space.gradient(sign * self.weights.place(moves))
                value += share * risk
                for slope, move, g in zip(slopes, moves, self.weights.take(gradient), strict=True):
                    slope += share * 0.5 * sign * move * g
        return value, self._by_scale(slopes)

    def _by_scale(self, slopes: Sequence[Tensor]) -> Array:
        parts = []
        for view, slope in zip(self.layers, slopes, strict=True):
            columns = slope.sum(1)
            parts += [slope.sum(2).flatten(), columns.unflatten(1, (-1, view.taps)).sum(2).flatten()]
        return torch.cat(parts).numpy()


def _direct(around: Surroundings) -> Mapping[str | None, Valued]:
    samples = around.space.problem.samples
    given = around.options["lambda"]
    strength = float(given) if given is not None else float(samples or 1)
    objective = DirectObjective(around.space, around.layers, strength)
    generator = torch.Generator().manual_seed(around.seed)
    count = int(around.options["draws"])
    start = objective.pack([row_column_scales(view) for view in around.layers])
    noise = objective.draws(count, generator)
    course: list[float] = []
    solved = minimize(
        objective.value_and_gradient,
        start,
        args=(noise,),
        jac=True,
        method="L-BFGS-B",
        callback=lambda intermediate_result: course.append(intermediate_result.fun),
        options={"maxfun": int(around.options["evaluations"])},
    )
    deviations = [scale.deviations() for scale in objective.unpack(solved.x)]
    # Fresh draws: the minimum over noise that was optimised against is too low.
    rises = objective.rises(deviations, objective.draws(8 * count, generator))
    distance = float(sum(part.sum() for part in objective.penalty(deviations)))
    stderr = float(rises.std()) / math.sqrt(len(rises))
    settled = bool(solved.success) or (len(course) > 1 and course[-2] - course[-1] <= stderr)
    return {
        None: Valued(
            float(rises.mean()) + distance,
            _notes(around, objective, rises, distance, settled),
            settled,
            stderr,
            "sampled",
        )
    }


def _notes(
    around: Surroundings, objective: DirectObjective, rises: Tensor, distance: float, settled: bool
) -> tuple[str, ...]:
    notes = [
        f"λ = {objective.strength:g}; rise of the risk under the noise {float(rises.mean()):.4g}, weights "
        f"over noise {distance:.4g}",
        f"noise in {', '.join(view.name or 'the model itself' for view in around.layers)}, all at once; "
        "biases and norm scales have none",
        f"{objective.evaluations} evaluations from the scales of eq. 17; not convex: a local minimum, which "
        "bounds the least value from above",
        "the order of networks may change with λ, unlike that of normalized_sharpness",
    ]
    if float(rises.mean()) < 0:
        below = "; the value is negative for it" if float(rises.mean()) + distance < 0 else ""
        notes.append(f"no minimum: the risk falls under the noise{below}")
    if float(rises.mean()) > distance * 10:
        notes.append("the noise has drowned the network (its risk has saturated): raise lambda")
    if not settled:
        notes.append("still falling by more than its standard error: raise evaluations")
    return tuple(notes)


normalized_sharpness_direct = register_measure(
    Measure(
        name="normalized_sharpness_direct",
        symbol="S_λ (62)",
        formula="min over σ, σ′ of E_ε E(θ + σσ′∘ε) − E(θ) + Σ_ij W_ij²/(2λ (σ_i σ′_j)²), λ the sample count",
        source="tsuzuku2020, eq. 62",
        summary=(
            "Normalized sharpness with the risk under noise itself in place of its second-order expansion. "
            "Not convex, so that a local minimum is found, and networks may change places with λ: prefer "
            "normalized_sharpness to compare."
        ),
        when="To check whether the second-order expansion behind `normalized_sharpness` holds.",
        misleads=(
            "Networks may change places with λ, and a local minimum is all that is found. With a small λ "
            "noise without limit is best: the risk saturates, and the value says only how bad chance is; the "
            "notes say so."
        ),
        levels=("network",),
        invariances=frozenset({"layerwise", "neuronwise", "output"}),
        needs=frozenset({"diagonal"}),
        explore=_direct,
        cost="4 gradients for each of at most 15 evaluations, and 32 forward passes",
        **declared(
            {
                "lambda": positive(None, none="for the number of samples", example="1000.0"),
                **NORMALIZED_LOSS,
                "draws": count(2),
                "evaluations": count(15),
            }
        ),
        loss="normalized_cross_entropy",
    )
)
