"""Normalized sharpness of tsuzuku2020: the best Gaussian posterior's sharpness over all rescalings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatness.catalogue.balancing import balance
from flatness.catalogue.finite_differences import differenced_diagonals
from flatness.catalogue.measure import LayerView, Measure, NetworkView, Surroundings, Valued
from flatness.catalogue.options import NORMALIZED_LOSS, choice, count, declared, positive, share
from flatness.catalogue.registry import register_measure
from flatness.curvature.sums.folds import clipped_centre, replicates

# A certified relative distance from the minimum above which a value counts as not converged.
_CERTIFIED = 1e-6


def _matrix_normalized(view: LayerView) -> Valued:
    trace = float(view.trace)
    notes = () if trace >= 0 else (f"the trace is negative ({trace:.4g}) and clipped to 0: no minimum",)
    return Valued(math.sqrt(float(view.squared_norm) * max(trace, 0.0)), notes)


def _with_biases(view: NetworkView) -> Valued:
    """The sum over all parameter tensors, a bias being a matrix of its own (footnote 1)."""
    negative = [name for name, trace in view.traces.items() if float(trace) < 0]
    value = sum(
        math.sqrt(float(norm) * max(float(view.traces[name]), 0.0))
        for name, norm in view.squared_norms.items()
    )
    notes = ["biases, norm scales and shifts count as matrices of their own (footnote 1)"]
    if negative:
        notes.append(f"negative traces clipped to 0: {', '.join(negative)}")
    return Valued(value, tuple(notes))


def _matrix_adapted(options: Mapping[str, Any]) -> Measure:
    if not options["biases"]:
        return matrix_normalized_sharpness
    return replace(matrix_normalized_sharpness, network=_with_biases, network_needs=frozenset({"traces"}))


def _minimum(view: LayerView, diagonal: Tensor) -> tuple[float, float]:
    """Σ over groups of min_{x,y} Σ a e^{x+y} + b e^{−x−y}, a the clipped diagonal and b = W²; a lower bound.

    At λ = 1/2. A kernel's taps share the scale of their channel.
    """
    G, d, m = view.W.shape
    shape = (G, d, m // view.taps, view.taps)
    curvature = diagonal.reshape(shape).clamp(min=0).sum(3).numpy()
    squares = view.W.square().reshape(shape).sum(3).numpy()
    solved = [balance(np.ascontiguousarray(curvature[group]), squares[group]) for group in range(G)]
    return sum(part.value for part in solved), sum(part.lower for part in solved)


def _valued(view: LayerView, diagonal: Tensor) -> Valued:
    value, lower = _minimum(view, diagonal)
    clipped = float(diagonal.clamp(max=0).abs().sum() / diagonal.abs().sum().clamp(min=1e-300))
    scale = float(view.options["lambda"])
    gap = (value - lower) / value if value > 0 else 0.0
    notes = [
        f"λ = {scale:g}; negative diagonal clipped: {clipped:.1%} of its mass; "
        f"within {max(gap, 0.0):.1e} of the minimum"
    ]
    if value == 0 and clipped > 0:
        notes.append("no positive curvature anywhere: 0 says that this is no minimum, not that it is flat")
    return Valued(value / math.sqrt(2 * scale), tuple(notes), gap <= _CERTIFIED)


def _normalized(view: LayerView) -> Valued:
    return _valued(view, view.statistics["diagonal"])


def _normalized_adapted(options: Mapping[str, Any]) -> Measure:
    if options["diagonal"] == "auto":
        return normalized_sharpness
    return replace(
        normalized_sharpness,
        needs=frozenset(),
        layer=None,
        explore=_by_finite_differences,
        cost=f"{2 * options['draws']} gradients",
    )


def _by_finite_differences(around: Surroundings) -> dict[str | None, Valued]:
    """Every layer's value from the diagonal of eq. 61, with the standard error of its replicates."""
    draws, radius = int(around.options["draws"]), float(around.options["radius"])
    estimates = differenced_diagonals(
        around.space, around.layers, draws=draws, radius=radius, seed=around.seed
    )
    note = (
        f"diagonal by finite differences of the gradient (eq. 61), {draws} draws, ‖rε‖ = {radius:g}‖W‖; "
        "noise that is clipped at 0 raises the value, fewer draws more"
    )
    values: dict[str | None, Valued] = {}
    for view, parts in zip(around.layers, estimates, strict=True):
        mean, n = parts.mean(0), len(parts)
        found = _valued(view, mean)
        scale = math.sqrt(2 * float(around.options["lambda"]))
        folds = (parts - mean) / math.sqrt(n * (n - 1))
        centre = clipped_centre(mean, folds)
        moved = [_minimum(view, centre + one)[0] / scale - found.value for one in replicates(folds)]
        spread = torch.tensor(moved, dtype=torch.float64, device="cpu").square().mean()
        values[view.name] = replace(
            found,
            notes=(note, *found.notes),
            stderr=math.sqrt(float(spread)),
            method="sampled",
        )
    return values


matrix_normalized_sharpness = register_measure(
    Measure(
        name="matrix_normalized_sharpness",
        symbol="Σ_l √(‖W_l‖² Tr H_l)",
        formula="√(‖W_l‖² Tr H_l), summed over layers; negative traces count as 0",
        source="tsuzuku2020, eq. 13",
        summary="Sharpness at the best scale of the noise for each weight matrix.",
        when="As a fast stand-in for `normalized_sharpness` when only whole layers may be rescaled.",
        misleads=(
            "Rescaling neurons changes it. Negative traces, away from a minimum, count as 0. Biases are left "
            "out unless the option biases=True asks for the sum over all parameters (footnote 1)."
        ),
        levels=("layer", "network"),
        invariances=frozenset({"layerwise"}),
        needs=frozenset({"row_traces"}),
        layer=_matrix_normalized,
        reductions=("sum",),
        **declared({"biases": choice(False, True)}),
        clips="sums",
        adapted=_matrix_adapted,
    )
)

normalized_sharpness = register_measure(
    Measure(
        name="normalized_sharpness",
        symbol="S_λ",
        formula="min over σ, σ′ of Σ_ij ∂²E/∂W_ij² (σ_i σ′_j)² + W_ij²/(2λ (σ_i σ′_j)²), λ = 1/2",
        source="tsuzuku2020, eq. 17",
        summary=(
            "Sharpness at the best scale of the noise for every row and column, on logits of unit spread: "
            "unchanged by rescaling layers, neurons or logits."
        ),
        when=("When networks may differ by any rescaling of layers, neurons or logits: nothing moves it."),
        misleads=(
            "It uses the diagonal of the Hessian with negative entries clipped, and a loss of its own "
            "on logits of unit spread; the share that was clipped is in the notes, and near 1 the "
            "number says little. The option diagonal='finite_differences' is the paper's own estimate (eq. "
            "61), a cross-check for smooth networks: clipping its noise raises the value."
        ),
        levels=("layer", "network"),
        invariances=frozenset({"layerwise", "neuronwise", "output"}),
        needs=frozenset({"diagonal"}),
        layer=_normalized,
        reductions=("sum",),
        **declared(
            {
                "lambda": positive(0.5),
                **NORMALIZED_LOSS,
                "diagonal": choice("auto", "finite_differences"),
                "draws": count(100, 2),
                "radius": share(1e-3, "a share of the weights' norm, between 0 and 1,"),
            }
        ),
        clips="entries",
        adapted=_normalized_adapted,
        loss="normalized_cross_entropy",
    )
)
