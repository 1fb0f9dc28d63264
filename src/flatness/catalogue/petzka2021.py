"""Relative flatness of petzka2021: plain, for features of unit spread or white, maximal, an eigenvalue."""

from __future__ import annotations

from torch import Tensor

from flatness.catalogue.functionals import largest_eigenvalue, trace
from flatness.catalogue.measure import LayerView, Measure
from flatness.catalogue.metrics import RELATIVE, UNIT_SPREAD, WHITENED
from flatness.catalogue.options import EIGENVALUE_OPTIONS, choice, declared


def _maximal(view: LayerView) -> Tensor:
    rows = view.W.flatten(0, 1).square().sum(1)
    return (rows * view.spectra["row_eigenvalues"].values).sum()


relative_flatness = Measure(
    name="relative_flatness",
    symbol="κ_Tr^φ",
    formula="Σ_{s,s′} ⟨w_s, w_s′⟩ Tr H_{s,s′}",
    source="petzka2021, Def. 3",
    summary="Loss increase under random changes of the layer's features: the paper's flatness.",
    when=(
        "The first choice for generalisation: it comes with a theory (how robust features are to "
        "perturbation), and its layer values need one pass."
    ),
    misleads=(
        "Rescaling single features that feed the layer changes it: use `relative_flatness_normalized` for "
        "such comparisons. Its link to generalisation needs representative data and labels that are locally "
        "constant in feature space."
    ),
    levels=("layer", "network"),
    **trace(RELATIVE),
    reductions=("sum",),
)

relative_flatness_normalized = Measure(
    name="relative_flatness_normalized",
    symbol="κ_Tr^{Vφ}",
    formula="κ_Tr of W V on V⁻¹φ, V the features' standard deviations",
    source="petzka2021, Theorem 4 (with the standard deviation, not the variance)",
    summary="Relative flatness for features of unit spread: no rescaling of neurons changes it.",
    when=(
        "Instead of `relative_flatness` when networks may differ in the scale of single features, for "
        "example through regularisers, weight decay or folded batch norm."
    ),
    misleads=(
        "A feature with very little spread is scaled up to unit spread, so directions that the data hardly "
        "use can dominate the value."
    ),
    levels=("layer", "network"),
    **trace(UNIT_SPREAD),
    reductions=("sum",),
)

maximal_relative_flatness = Measure(
    name="maximal_relative_flatness",
    symbol="κ^φ",
    formula="Σ_s ‖w_s‖² λ_max(H_{s,s})",
    source="petzka2021, Def. 13",
    summary="Worst-case version of relative flatness: bounds the loss increase under any feature change.",
    when=(
        "For worst-case statements: it bounds the loss change under the worst perturbation of the "
        "features (petzka2021, Thm 14), up to a factor d."
    ),
    misleads="One eigenvalue per row decides it; needs eigenvalue iterations for every row.",
    levels=("layer", "network"),
    invariances=frozenset({"layerwise", "neuronwise except own features"}),
    needs=frozenset({"row_eigenvalues"}),
    layer=_maximal,
    reductions=("sum",),
    **declared(**EIGENVALUE_OPTIONS),
)

relative_flatness_whitened = Measure(
    name="relative_flatness_whitened",
    symbol="κ_Tr^{C⁻½φ}",
    formula="Σ_{s,s′} (W C Wᵀ)_{s,s′} Tr(C⁺ H_{s,s′}), C = mean φφᵀ",
    source="after petzka2021, Def. 3",
    summary="Relative flatness on white features: no invertible linear map of inputs or outputs changes it.",
    when=(
        "For networks with attention, whose heads can be mixed by any invertible matrix, and "
        "wherever features may have been mixed or merged: folded norms, factorised layers, merged adapters."
    ),
    misleads=(
        "Directions in which features hardly vary count as much as all others, so it needs clearly more "
        "features than input units (the notes give the rank of C). It was the worse predictor of the "
        "generalisation gap on small networks: an invariance is no evidence."
    ),
    levels=("layer", "network"),
    **trace(WHITENED),
    reductions=("sum",),
    on_request=True,
    cost="the shared pass over the data, after a forward pass for C and an eigendecomposition of it",
)


relative_spectral_norm = Measure(
    name="relative_spectral_norm",
    symbol="‖Hess‖_W",
    formula="λ_max(D^½ H_l D^½), D = W Wᵀ ⊗ 1; with whitened=True D = W C Wᵀ ⊗ C⁺",
    source="after petzka2021, Def. 3 and rangamani2019, Def. 3",
    summary="The sharpest direction of a layer, in the metric whose trace is relative flatness.",
    when=(
        "Beside `relative_flatness`, to see how much of it is in one direction; with whitened=True no "
        "invertible map of a layer's inputs or outputs changes it, attention's included."
    ),
    misleads=(
        "One direction decides it, and it takes eigenvalue iterations. Without whitened=True, rescaling the "
        "features that feed the layer changes it."
    ),
    levels=("layer", "network"),
    **largest_eigenvalue(RELATIVE),
    reductions=("max", "sum"),
    adapted=lambda options: largest_eigenvalue(WHITENED if options["whitened"] else RELATIVE),
    **declared(**EIGENVALUE_OPTIONS, whitened=choice(False, True)),
)
