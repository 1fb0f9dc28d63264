"""Normalized sharpness of tsuzuku2020: the best Gaussian posterior's sharpness over all rescalings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from flatness.catalogue.measure import LayerView, Measure, NetworkView, Surroundings, Valued
from flatness.catalogue.options import NORMALIZED_LOSS, choice, count, declared, positive, share

# A certified relative distance from the minimum above which a value counts as not converged.
_CERTIFIED = 1e-6
# What gaps are told to: below, they are rounding, which differs from one processor to the next.
_ROUNDING = 1e-12


def _matrix_normalized(view: LayerView) -> Valued:
    trace = float(view.trace)
    notes = () if trace >= 0 else (f"the trace is negative ({trace:.4g}) and clipped to 0: not a minimum",)
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


def _matrix_adapted(options: Mapping[str, Any]) -> dict[str, Any]:
    found = {"network": _with_biases, "network_needs": frozenset({"traces"})}
    return found if options["biases"] else {}


def _minimum(view: LayerView, diagonal: Tensor) -> tuple[float, float]:
    """Σ over groups of min_{x,y} Σ a e^{x+y} + b e^{−x−y}, a the clipped diagonal and b = W²; a lower bound.

    At λ = 1/2. A kernel's taps share the scale of their channel.
    """
    from flatness.catalogue.engines.balancing import balance

    curvature = view.per_unit(diagonal.clamp(min=0)).numpy()
    squares = view.per_unit(view.W.square()).numpy()
    solved = [balance(np.ascontiguousarray(a), b) for a, b in zip(curvature, squares, strict=True)]
    return sum(part.value for part in solved), sum(part.lower for part in solved)


def _normalized(view: LayerView, diagonal: Tensor) -> Valued:
    value, lower = _minimum(view, diagonal)
    clipped = float(diagonal.clamp(max=0).abs().sum() / diagonal.abs().sum().clamp(min=1e-300))
    scale = float(view.options["lambda"])
    gap = (value - lower) / value if value > 0 else 0.0
    notes = [
        f"λ = {scale:g}; negative diagonal clipped: {clipped:.1%} of its mass; "
        f"within {max(gap, _ROUNDING):.0e} of the minimum"
    ]
    if value == 0 and clipped > 0:
        notes.append(
            "no positive curvature anywhere: 0 means that this is not a minimum, not that it is flat"
        )
    return Valued(value / math.sqrt(2 * scale), tuple(notes), gap <= _CERTIFIED)


def _normalized_adapted(options: Mapping[str, Any]) -> dict[str, Any]:
    if options["diagonal"] == "auto":
        return {}
    cost = f"{2 * options['draws']} gradients"
    return {"needs": frozenset(), "layer": None, "explore": _by_finite_differences, "cost": cost}


def _by_finite_differences(around: Surroundings) -> dict[str | None, Valued]:
    """Every layer's value from the diagonal of eq. 61, with the standard error of its replicates."""
    from flatness.catalogue.engines.finite_differences import differenced_diagonals
    from flatness.curvature.sums.folds import clipped_centre, replicates

    draws, radius = int(around.options["draws"]), float(around.options["radius"])
    estimates = differenced_diagonals(
        around.space, around.layers, draws=draws, radius=radius, seed=around.seed
    )
    note = (
        f"diagonal by finite differences of the gradient (eq. 61), {draws} draws, ‖rε‖ = {radius:g}‖W‖; "
        "noise that is clipped at 0 raises the value, fewer draws more"
    )
    scale = math.sqrt(2 * float(around.options["lambda"]))
    values: dict[str | None, Valued] = {}
    for view, parts in zip(around.layers, estimates, strict=True):
        mean, n = parts.mean(0), len(parts)
        found = _normalized(view, mean)
        folds = (parts - mean) / math.sqrt(n * (n - 1))
        centre = clipped_centre(mean, folds)
        moved = [_minimum(view, centre + one)[0] / scale - found.value for one in replicates(folds)]
        stderr = math.sqrt(sum(change**2 for change in moved) / len(moved))
        values[view.name] = replace(found, notes=(note, *found.notes), stderr=stderr, method="sampled")
    return values


def _pac_bayes_bound(around: Surroundings) -> dict[str | None, Valued]:
    from flatness.catalogue.engines.pac_bayes_bound import pac_bayes_bound

    return {None: pac_bayes_bound(around)}


def _direct(around: Surroundings) -> dict[str | None, Valued]:
    from flatness.catalogue.engines.direct_descent import normalized_sharpness_direct

    return {None: normalized_sharpness_direct(around)}


matrix_normalized_sharpness = Measure(
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
    **declared(biases=choice(False, True)),
    clips="sums",
    adapted=_matrix_adapted,
)

normalized_sharpness = Measure(
    name="normalized_sharpness",
    symbol="S_λ",
    formula="min over σ, σ′ of Σ_ij ∂²E/∂W_ij² (σ_i σ′_j)² + W_ij²/(2λ (σ_i σ′_j)²), λ = 1/2",
    source="tsuzuku2020, eq. 17",
    summary=(
        "Sharpness at the best scale of the noise for every row and column, on logits of unit spread: "
        "unchanged by rescaling layers, neurons or logits."
    ),
    when=(
        "When networks may differ by any rescaling of layers, neurons or logits: none of these changes it."
    ),
    misleads=(
        "It uses the diagonal of the Hessian with negative entries clipped, and a loss of its own "
        "on logits of unit spread; the share that was clipped is in the notes, and near 1 the "
        "number says little. The option diagonal='finite_differences' is the paper's own estimate (eq. "
        "61), a cross-check for smooth networks: clipping its noise raises the value."
    ),
    levels=("layer", "network"),
    invariances=frozenset({"layerwise", "neuronwise", "output"}),
    needs=frozenset({"diagonal"}),
    layer=lambda view: _normalized(view, view.statistics["diagonal"]),
    reductions=("sum",),
    **declared(
        **{"lambda": positive(0.5)},
        **NORMALIZED_LOSS,
        diagonal=choice("auto", "finite_differences"),
        draws=count(100, 2),
        radius=share(1e-3, "a share of the weights' norm, between 0 and 1,"),
    ),
    clips="entries",
    adapted=_normalized_adapted,
    loss="normalized_cross_entropy",
)

pac_bayes_bound = Measure(
    name="pac_bayes_bound",
    symbol="L_D(Q)",
    formula="L_S(Q) + (1/λ)(Σ W²/2σ² + ln(choices of σ and λ) + ln(1/δ) + λ²/2m), σ from eq. 17 or 11",
    source="tsuzuku2020, eq. 1–4",
    summary=(
        "An upper bound of the test error of the network with noise on its weights, every term counted; "
        "above 1 for most networks. `flatness.pac_bayes_bound` prints the terms."
    ),
    when=(
        "To see which part of a PAC-Bayes argument is large: the distance of the weights, the number of "
        "scales, the samples, or the error under noise."
    ),
    misleads=(
        "Above 1 it says nothing, and a smaller value is then no better. Below 1 it bounds the network with "
        "noise: the term (A) that relates it to the network itself cannot be computed. "
        "Measure all layers, on all training data: every parameter outside them costs 22 nats (float32)."
    ),
    levels=("network",),
    invariances=frozenset({"layerwise", "neuronwise", "output"}),
    needs=frozenset({"diagonal"}),
    explore=_pac_bayes_bound,
    cost="a few forward passes for each λ that can be the best, and 20 for the chosen one",
    flatness=False,
    **declared(
        sigma=choice("rows_and_columns", "matrices"),
        delta=share(0.05, "a probability between 0 and 1"),
        draws=count(20, 2),
        hyperprior=choice("float32", "float64", "float16", "bfloat16"),
        psi=choice("paper", "hoeffding"),
        **NORMALIZED_LOSS,
    ),
    loss="normalized_cross_entropy",
)

normalized_sharpness_direct = Measure(
    name="normalized_sharpness_direct",
    symbol="S_λ (62)",
    formula="min over σ, σ′ of E_ε E(θ + σσ′∘ε) − E(θ) + Σ_ij W_ij²/(2λ (σ_i σ′_j)²), λ the sample count",
    source="tsuzuku2020, eq. 62",
    summary=(
        "Normalized sharpness with the risk under noise itself in place of its second-order expansion. "
        "It is not convex, so only a local minimum is found, and the order of networks may depend on λ: "
        "prefer normalized_sharpness for comparisons."
    ),
    when="To check whether the second-order expansion behind `normalized_sharpness` holds.",
    misleads=(
        "The order of networks may depend on λ, and only a local minimum is found. With a small λ unlimited "
        "noise is best: the risk saturates, and the value only says how bad guessing is; a note says so."
    ),
    levels=("network",),
    invariances=frozenset({"layerwise", "neuronwise", "output"}),
    needs=frozenset({"diagonal"}),
    explore=_direct,
    cost="4 gradients for each of at most 15 evaluations, and 32 forward passes",
    **declared(
        **{"lambda": positive(None, none="for the number of samples", example="1000.0")},
        **NORMALIZED_LOSS,
        draws=count(2),
        evaluations=count(15),
    ),
    loss="normalized_cross_entropy",
)
