"""Norms that flatness is compared with: Fisher-Rao, path and spectral norms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatness.catalogue.measure import Measure, Surroundings, Valued
from flatness.catalogue.options import choice, declared


def _fisher_rao(around: Surroundings) -> dict[str | None, Valued]:
    from flatness.catalogue.engines.fisher_rao import mean_square, output_derivatives, radial_derivatives

    if around.options["form"] == "definition":
        return {None: Valued(mean_square(around.space, radial_derivatives, differentiate=True))}
    L = len(around.weights)
    value = (L + 1) * math.sqrt(mean_square(around.space, output_derivatives, differentiate=False))
    note = (
        f"the published script's closed form (L + 1)·√(E⟨f, ∂_f ℓ⟩²) with L = {L} weight layers (6 for "
        "LeNet5): it differs from the definition by the square root, by L + 1 in place of L, and wherever "
        "the network has biases"
    )
    return {None: Valued(value, (note,))}


def _fisher_rao_diagonal(around: Surroundings) -> dict[str | None, Valued]:
    from flatness.curvature.sums.squared_gradients import DRAWS, MOST_POSITIONS

    squares = around.squared_gradients()
    value = float((around.space.theta.square() * squares.means).sum())
    if not squares.sampled:
        return {None: Valued(value)}
    note = f"more than {MOST_POSITIONS} predictions per sample: {DRAWS} draws of random signs of all together"
    return {None: Valued(value, (note,), stderr=squares.stderr, method="sampled")}


def _path_norm(around: Surroundings) -> dict[str | None, Valued]:
    from flatness.catalogue.engines.path_norm import path_norm

    return {None: path_norm(around.space.problem)}


def largest_singular_value(W: Tensor) -> float:
    """The largest σ_max(W_γ) of all groups, W (G, d, m), in float64.

    From the eigenvalues of the smaller of W Wᵀ and WᵀW: a hundred times faster than all singular values of a
    long matrix, and the largest one loses no digits by squaring.
    """
    W = W.detach().double()
    gram = W @ W.mT if W.shape[1] <= W.shape[2] else W.mT @ W
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[:, -1].max())))


def _of_layers(around: Surroundings) -> dict[str | None, Valued]:
    return {view.name: Valued(largest_singular_value(view.weight)) for view in around.layers}


def _product(around: Surroundings) -> dict[str | None, Valued]:
    # In logarithms: the product of a hundred layers may leave the range of floating point on the way.
    norms = {name: largest_singular_value(W) for name, W in around.weights.items()}
    logarithm = sum(math.log(norm) if norm > 0 else -math.inf for norm in norms.values())
    return {None: Valued(math.exp(min(logarithm, 709.0)), (f"over {', '.join(norms)}",), logarithm < 709.0)}


fisher_rao = Measure(
    name="fisher_rao",
    symbol="‖θ‖²_fr",
    formula=(
        "E⟨θ, ∇_θ ℓ⟩² = Σ_i c_i ⟨θ, ∇_θ ℓ_i⟩² / Σ_i c_i; without biases L² E⟨f, ∂_f ℓ⟩², L the number of "
        "weight layers"
    ),
    source="Liang et al. 2019; petzka2021, §6",
    summary=(
        "How fast the loss of each item changes when all parameters grow in proportion. An item is a "
        "sample, or with cross-entropy a prediction (token, pixel); its class weight is its weight c."
    ),
    when=(
        "To compare with capacity measures in the literature, or where a value must not change under any "
        "rescaling and only one pass is affordable."
    ),
    misleads=(
        "It is made of gradients, so it fades as predictions become certain: longer training lowers it "
        "whatever the minimum looks like."
    ),
    levels=("network",),
    invariances=frozenset({"layerwise", "neuronwise", "attention"}),
    explore=_fisher_rao,
    cost="one pass with two backward passes",
    **declared(form=choice("definition", "published_script")),
)

fisher_rao_diagonal = Measure(
    name="fisher_rao_diagonal",
    symbol="Σ θ_i² F_ii",
    formula="Σ_i θ_i² E(∂_i ℓ)², E the weighted mean over items, as for fisher_rao",
    source="tsuzuku2020, eq. 25",
    summary="The Fisher-Rao norm without the terms between different parameters.",
    when="As the parameter-wise form that tsuzuku2020 uses for comparison.",
    misleads=(
        "It drops all terms between parameters, which cancel or add up in the norm itself; the two may rank "
        "networks differently."
    ),
    levels=("network",),
    invariances=frozenset({"layerwise", "neuronwise"}),
    explore=_fisher_rao_diagonal,
    cost="one pass with one backward pass, or with one per prediction of a sample",
)

path_norm = Measure(
    name="path_norm",
    symbol="Σ_paths Π w²",
    formula="Σ_k f_{θ²}(1)_k: the outputs of the network with squared parameters on an input of ones",
    source="Neyshabur et al. 2015; Jiang et al. 2020",
    summary="The sum over all paths from inputs to outputs of the product of squared weights on them.",
    when="As a norm of the function rather than of its parameters: rescaling does not change it.",
    misleads=("It ignores the data, overflows in deep networks, and treats pooling layers as they are."),
    levels=("network",),
    invariances=frozenset({"layerwise", "neuronwise"}),
    explore=_path_norm,
    cost="one forward pass of one sample",
    flatness=False,
)

spectral_norm = Measure(
    name="spectral_norm",
    symbol="‖W_l‖₂",
    formula="σ_max(W_l); a convolution as its d×m matrix, groups: the largest",
    source="Bartlett et al. 2017; Jiang et al. 2020",
    summary="How much a layer can stretch one patch of its input: no curvature, a baseline.",
    when="To see which layer can stretch its input most.",
    misleads=(
        "It ignores the data, and a convolution stretches more than its matrix says where patches overlap."
    ),
    levels=("layer",),
    explore=_of_layers,
    cost="one eigenvalue decomposition per layer; no data",
    flatness=False,
)

spectral_norm_product = Measure(
    name="spectral_norm_product",
    symbol="Π_l ‖W_l‖₂",
    formula="Π_l σ_max(W_l) over all layers",
    source="Bartlett et al. 2017; Jiang et al. 2020",
    summary=(
        "A bound on how much a chain of layers stretches its input, up to the overlap of a convolution's "
        "patches. Where branches meet, rescaling layers changes it."
    ),
    when="As the baseline of margin bounds.",
    misleads=(
        "It grows exponentially with depth, compares only networks of one architecture, and is "
        "unchanged by rescaling in chains of layers only."
    ),
    levels=("network",),
    invariances=frozenset({"layerwise in chains"}),
    explore=_product,
    cost="one eigenvalue decomposition per layer; no data",
    flatness=False,
)
