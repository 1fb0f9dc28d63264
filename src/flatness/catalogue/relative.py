"""What follows relative flatness: on white features, and the largest eigenvalue in the same metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flatness.catalogue.measure import LayerView, Measure, Valued
from flatness.catalogue.options import EIGENVALUE_OPTIONS, choice, declared


def whitening_notes(view: LayerView) -> Iterator[str]:
    """The rank of C, and what is doubtful about it."""
    found = view.whitening
    if found is None:
        return
    ranks = sorted({*found.ranks})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    per_group = " in every group" if len(found.ranks) > 1 else ""
    yield f"C has rank {rank} of {found.units}{per_group}, from {found.rows} features"
    if found.rows < found.units:
        yield (
            f"fewer features ({found.rows}) than input units ({found.units}): C is what these few happen to "
            "span, and more data will change the value. Measure more samples"
        )


relative_flatness_whitened = Measure(
    name="relative_flatness_whitened",
    symbol="κ_Tr^{C^{-½}φ}",
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
    invariances=frozenset({"layerwise", "neuronwise", "attention"}),
    needs=frozenset({"relative_whitened"}),
    layer=lambda view: Valued(float(view.statistics["relative_whitened"]), tuple(whitening_notes(view))),
    reductions=("sum",),
    on_request=True,
    cost="the shared pass over the data, after a forward pass for C and an eigendecomposition of it",
)


def _largest(view: LayerView) -> Valued:
    (spectrum,) = (view.spectra[need] for need in _NEEDS.values() if need in view.spectra)
    return Valued(float(spectrum.values[0]), tuple(whitening_notes(view)))


_NEEDS = {False: "relative_eigenvalue", True: "whitened_eigenvalue"}


def _in_metric(options: Mapping[str, Any]) -> Measure:
    """The measure with or without white features."""
    if not options["whitened"]:
        return relative_spectral_norm
    return replace(
        relative_spectral_norm,
        needs=frozenset({_NEEDS[True]}),
        invariances=relative_flatness_whitened.invariances,
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
    invariances=frozenset({"layerwise", "neuronwise except own features", "attention q, k, v"}),
    needs=frozenset({_NEEDS[False]}),
    layer=_largest,
    reductions=("max", "sum"),
    adapted=_in_metric,
    **declared({**EIGENVALUE_OPTIONS, "whitened": choice(False, True)}),
)
