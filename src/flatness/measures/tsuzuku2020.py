"""Normalized sharpness of tsuzuku2020: the best Gaussian posterior's sharpness over all rescalings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flatness.errors import OptionError
from flatness.measures.balancing import balance
from flatness.measures.catalogue import register_measure
from flatness.measures.measure import LayerView, Measure, Valued

# A certified relative distance from the minimum above which a value counts as not converged.
_CERTIFIED = 1e-6


def _matrix_normalized(view: LayerView) -> Valued:
    trace = float(view.trace)
    notes = () if trace >= 0 else (f"the trace is negative ({trace:.4g}) and clipped to 0: no minimum",)
    return Valued(math.sqrt(float(view.squared_norm) * max(trace, 0.0)), notes)


def _normalized(view: LayerView) -> Valued:
    """Σ over groups of min_{x,y} Σ a e^{x+y} + b e^{−x−y}, a the clipped diagonal of H and b = W²."""
    G, d, m = view.W.shape
    diagonal = view.statistics["diagonal"].reshape(G, d, m // view.taps, view.taps)
    curvature = diagonal.clamp(min=0).sum(3).numpy()
    squares = view.W.square().reshape(diagonal.shape).sum(3).numpy()
    solved = [balance(np.ascontiguousarray(curvature[group]), squares[group]) for group in range(G)]
    value, lower = sum(part.value for part in solved), sum(part.lower for part in solved)
    clipped = float(diagonal.clamp(max=0).abs().sum() / diagonal.abs().sum().clamp(min=1e-300))
    scale = float(view.options["lambda"])
    gap = (value - lower) / value if value > 0 else 0.0
    notes = (
        f"λ = {scale:g}; negative diagonal clipped: {clipped:.1%} of its mass; "
        f"within {max(gap, 0.0):.1e} of the minimum",
    )
    return Valued(value / math.sqrt(2 * scale), notes, gap <= _CERTIFIED)


def _check_option(name: str, value: Any) -> None:
    if name == "lambda" and not (isinstance(value, (int, float)) and value > 0):
        raise OptionError(f"Expected lambda to be a positive number but got {value!r}. For example 0.5.")
    if name == "loss" and value not in ("normalized_cross_entropy", "same"):
        raise OptionError(f"Expected loss to be 'normalized_cross_entropy' or 'same' but got {value!r}.")


matrix_normalized_sharpness = register_measure(
    Measure(
        name="matrix_normalized_sharpness",
        symbol="Σ_l √(‖W_l‖² Tr H_l)",
        formula="√(‖W_l‖² Tr H_l), summed over layers; negative traces count as 0",
        source="tsuzuku2020, eq. 13",
        summary="Sharpness at the best scale of the noise for each weight matrix.",
        when="As a fast stand-in for `normalized_sharpness` when only whole layers may be rescaled.",
        misleads="Rescaling neurons changes it. Negative traces, away from a minimum, count as 0.",
        levels=("layer", "network"),
        invariances=frozenset({"layerwise"}),
        needs=frozenset({"row_traces"}),
        layer=_matrix_normalized,
        reductions=("sum",),
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
            "number says little."
        ),
        levels=("layer", "network"),
        invariances=frozenset({"layerwise", "neuronwise", "output"}),
        needs=frozenset({"diagonal"}),
        layer=_normalized,
        reductions=("sum",),
        options={"lambda": 0.5, "loss": "normalized_cross_entropy"},
        check_option=_check_option,
        loss="normalized_cross_entropy",
    )
)
