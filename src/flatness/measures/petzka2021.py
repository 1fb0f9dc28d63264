"""Relative flatness of petzka2021: plain, after unit-spread features, and maximal."""

from __future__ import annotations

from torch import Tensor

from flatness.measures.catalogue import register_measure
from flatness.measures.eigenvalues import EIGENVALUE_OPTIONS, check_eigenvalue_option
from flatness.measures.measure import LayerView, Measure


def _maximal(view: LayerView) -> Tensor:
    rows = view.W.flatten(0, 1).square().sum(1)
    return (rows * view.spectra["row_eigenvalues"].values).sum()


relative_flatness = register_measure(
    Measure(
        name="relative_flatness",
        symbol="κ_Tr^φ",
        formula="Σ_{s,s′} ⟨w_s, w_s′⟩ Tr H_{s,s′}",
        source="petzka2021, Def. 3",
        summary="Loss increase under random changes of the layer's features: the paper's flatness.",
        levels=("layer", "network"),
        invariances=frozenset({"layerwise", "neuronwise except own features"}),
        needs=frozenset({"relative"}),
        layer=lambda view: view.statistics["relative"],
        reductions=("sum",),
    )
)

relative_flatness_normalized = register_measure(
    Measure(
        name="relative_flatness_normalized",
        symbol="κ_Tr^{Vφ}",
        formula="κ_Tr of W V on V⁻¹φ, V the features' standard deviations",
        source="petzka2021, Theorem 4 (with the standard deviation, not the variance)",
        summary="Relative flatness for features of unit spread: no rescaling of neurons changes it.",
        levels=("layer", "network"),
        invariances=frozenset({"layerwise", "neuronwise"}),
        needs=frozenset({"relative_normalized"}),
        layer=lambda view: view.statistics["relative_normalized"],
        reductions=("sum",),
    )
)

maximal_relative_flatness = register_measure(
    Measure(
        name="maximal_relative_flatness",
        symbol="κ^φ",
        formula="Σ_s ‖w_s‖² λ_max(H_{s,s})",
        source="petzka2021, Def. 13",
        summary="Worst-case version of relative flatness: bounds the loss increase under any feature change.",
        levels=("layer", "network"),
        invariances=frozenset({"layerwise", "neuronwise except own features"}),
        needs=frozenset({"row_eigenvalues"}),
        layer=_maximal,
        reductions=("sum",),
        options=EIGENVALUE_OPTIONS,
        check_option=check_eigenvalue_option,
    )
)
