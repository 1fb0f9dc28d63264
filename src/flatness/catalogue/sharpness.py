"""Sharpness: how far the risk rises in a ball, along the optimizer's step, after the best rescaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flatness.catalogue.measure import Measure, NetworkView, Surroundings, Valued, averaged
from flatness.catalogue.options import EIGENVALUE_OPTIONS, Option, choice, count, declared, positive, share
from flatness.curvature.spectra import DIAGONAL_METRICS, SpectrumRequest
from flatness.errors import UndefinedMeasureError

# Radii in units of the parameters. A ball in ℓ2 shares one length among all parameters; the others give each
# parameter that much, so that their numbers are smaller.
_DEFAULT_RHO = {
    ("worst", "l2"): 0.5,
    ("worst", "linf"): 0.01,
    ("average", "l2"): 0.05,
    ("average", "linf"): 0.1,
}
_NODEWISE = SpectrumRequest(metric="nodewise")


def _epsilon_sharpness(around: Surroundings) -> dict[str | None, Valued]:
    options = around.options
    request = SpectrumRequest(metric=options["metric"])
    root = around.metric_root(request)
    if not bool(root.any()):
        raise UndefinedMeasureError(
            f"Expected parameters that have a {options['metric']} metric but all of them are zero. "
            "Pass options={'epsilon_sharpness': {'metric': 'euclidean'}}."
        )
    form = _quadratic if options["form"] == "quadratic" else _ascent
    return {None: form(around, request, root, float(options["epsilon"]))}


def _ascent(around: Surroundings, request: SpectrumRequest, root: Tensor, epsilon: float) -> Valued:
    from flatness.catalogue.engines.ball_ascent import largest_rise

    risk, _ = around.gradient()
    found = largest_rise(around, request, root, epsilon, "l2", f"ε = {epsilon:g}, {request.metric} metric")
    return replace(found, value=found.value / (1 + risk))


def _quadratic(around: Surroundings, request: SpectrumRequest, root: Tensor, epsilon: float) -> Valued:
    risk, slope = around.gradient()
    spectrum = around.spectrum(request)
    linear = epsilon * float((root * slope).norm()) / (1 + risk)
    notes = [
        f"ε = {epsilon:g}, {request.metric} metric; λ_max = {spectrum.largest:.4g}, residual "
        f"{spectrum.residual:.1e}",
        f"holds at a minimum: here the gradient would add {linear:.2g}",
    ]
    if spectrum.largest < 0:
        notes.append("the largest eigenvalue is negative and counts as 0: not a minimum")
    if not spectrum.converged:
        notes.append("the eigenvalue has not converged")
    value = epsilon**2 * max(spectrum.largest, 0.0) / (2 * (1 + risk))
    scale = epsilon**2 / (2 * (1 + risk))
    return Valued(value, tuple(notes), spectrum.converged, residual=scale * spectrum.residual)


def _sam(around: Surroundings) -> dict[str | None, Valued]:
    risk, slope = around.gradient()
    length = float(slope.norm())
    if length == 0:
        raise UndefinedMeasureError(
            "Expected a gradient to step along but it is zero everywhere: sam_sharpness is not defined here. "
            "Use epsilon_sharpness, or check that the outputs depend on the parameters."
        )
    rho = float(around.options["rho"])
    higher = around.space.risk(slope * (rho / length))
    note = f"one step of length {rho:g} along the gradient of all the data, whose length is {length:.3g}"
    return {None: Valued(higher - risk, (note,))}


def _adaptive(around: Surroundings) -> dict[str | None, Valued]:
    options = around.options
    case, norm = options["case"], options["norm"]
    rho = float(_DEFAULT_RHO[case, norm] if options["rho"] is None else options["rho"])
    root = around.metric_root(_NODEWISE)
    if not bool(root.any()):
        raise UndefinedMeasureError(
            "Expected parameters to move in proportion to their size but all of them are zero: "
            "adaptive_sharpness is not defined here. Check that the weights are loaded."
        )
    if case == "worst":
        from flatness.catalogue.engines.ball_ascent import largest_rise

        return {None: largest_rise(around, _NODEWISE, root, rho, norm, f"ρ = {rho:g}, {norm}")}
    return {None: _average(around, root, rho, norm)}


def _average(around: Surroundings, root: Tensor, rho: float, norm: str) -> Valued:
    """The mean over pairs ±u, in which the gradient's noise cancels; u normal (l2) or uniform (linf)."""
    risk, _ = around.gradient()
    generator = torch.Generator().manual_seed(around.seed)
    rises = []
    for _ in range(around.options["draws"]):
        u = _drawn(len(root), norm, generator).to(root.device)
        pair = [around.space.risk(sign * rho * root * u) for sign in (1.0, -1.0)]
        rises.append(sum(pair) / 2 - risk)
    mean, stderr = averaged(rises)
    kind = "normal, standard deviation" if norm == "l2" else "uniform, up to"
    note = f"{len(rises)} pairs ±u of {kind} ρ = {rho:g} of each parameter's size"
    return Valued(mean, (note,), stderr=stderr, method="sampled")


def _drawn(size: int, norm: str, generator: torch.Generator) -> Tensor:
    if norm == "l2":
        return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    return 2 * torch.rand(size, generator=generator, dtype=torch.float64, device="cpu") - 1


def _critical(around: Surroundings) -> dict[str | None, Valued]:
    from flatness.catalogue.engines.step_sharpness import critical_sharpness

    return critical_sharpness(around)


def _directional(around: Surroundings) -> dict[str | None, Valued]:
    from flatness.catalogue.engines.step_sharpness import directional_sharpness

    return directional_sharpness(around)


def _preconditioned(around: Surroundings) -> dict[str | None, Valued]:
    from flatness.catalogue.engines.step_sharpness import preconditioned_sharpness

    return preconditioned_sharpness(around)


# Objects of Python, which neither the command line nor a study file can name.
_PYTHON_ONLY = "from Python; the command line and study files have no way to pass one"
_OPTIMIZER = {
    "optimizer": Option(
        None,
        "an optimizer of torch.optim, as an object, or None",
        lambda value: value is None or hasattr(value, "param_groups"),
        example=f"options={{'critical_sharpness': {{'optimizer': optimizer}}}}, {_PYTHON_ONLY}",
    )
}
_STEP = {
    **_OPTIMIZER,
    "direction": Option(
        None,
        "a tensor, tensors by the names of parameters, a function of gradients by name, or None",
        lambda value: value is None or callable(value) or isinstance(value, (Tensor, Mapping)),
        example=f"{{name: p.grad for name, p in model.named_parameters()}}, {_PYTHON_ONLY}",
    ),
    "update_data": Option(
        None,
        "data as flatness.measure takes them, or None",
        lambda value: not isinstance(value, (str, int, float)),
        example=f"a pair of tensors or a DataLoader, {_PYTHON_ONLY}",
    ),
    "update_loss": Option(
        None,
        "a loss as flatness.measure takes it, or None",
        lambda value: value is None or isinstance(value, str) or callable(value),
        example="'mse'",
    ),
}


def _geodesic(around: Surroundings) -> dict[str | None, Valued]:
    from flatness.catalogue.engines.geodesic import geodesic_sharpness

    return geodesic_sharpness(around)


def _loss_of(options: Mapping[str, Any]) -> str | None:
    """Logits divided by their standard deviation over the classes: the loss of tsuzuku2020."""
    return "normalized_cross_entropy" if options["logit_normalization"] else None


def _minimum(view: NetworkView) -> Valued:
    """The minimum of Σ_l α_l⁻² Tr H_l over Π α_l = 1, where all terms are the traces' geometric mean."""
    traces = {name or "the model itself": float(trace) for name, trace in view.layer_traces.items()}
    L = len(traces)
    over = f"the weights of {', '.join(traces)}; without biases and norm layers"
    low = [name for name, trace in traces.items() if trace <= 0]
    if not traces:  # no signal arrives anywhere: the loss has no curvature on these outputs
        return Valued(0.0, ("no layer has any curvature",), converged=False)
    if low:
        # A trace of 0 makes the infimum 0; below 0 there is none, and the value says no more than that.
        note = f"traces that are not positive count as 0: {', '.join(low)}; no minimum is attained"
        return Valued(0.0, (note,), converged=False, over=over)
    return Valued(L * math.exp(sum(math.log(trace) for trace in traces.values()) / L), over=over)


epsilon_sharpness = Measure(
    name="epsilon_sharpness",
    symbol="S_ε",
    formula="(max_{‖v‖≤ε} E(θ+v) − E)/(1 + E); quadratic form: ε² λ_max/(2(1 + E))",
    source="rangamani2019, Def. 1",
    summary=(
        "The largest rise of the risk within a small ball. With metric='layerwise' or 'nodewise' the ball "
        "scales with the parameters, and rescaling does not change the value."
    ),
    when=("For the worst case at a given distance, where the quadratic approximation may fail."),
    misleads=(
        "The ascent gives a lower bound. In the Euclidean metric, rescaling can give an equivalent network "
        "any value: use metric='layerwise' or 'nodewise' to compare networks."
    ),
    levels=("network",),
    explore=_epsilon_sharpness,
    cost="gradients of all the data: restarts × steps at most, and one eigenvalue for several starts",
    **declared(
        epsilon=positive(1e-3),
        form=choice("ascent", "quadratic"),
        metric=choice(*DIAGONAL_METRICS),
        steps=count(20),
        restarts=count(3),
    ),
)

sam_sharpness = Measure(
    name="sam_sharpness",
    symbol="SAM",
    formula="E(θ + ρ ∇E/‖∇E‖) − E(θ), ρ = 0.05",
    source="Foret et al. 2021",
    summary="How much the risk rises in the ascent step that sharpness-aware minimisation takes.",
    when="To see what sharpness-aware training minimises, on all the data instead of a batch.",
    misleads=(
        "One step along the gradient finds the steepest direction, not the sharpest; near a "
        "minimum it says little, and rescaling changes it."
    ),
    levels=("network",),
    explore=_sam,
    cost="one gradient and one forward pass",
    **declared(rho=positive(0.05)),
)

adaptive_sharpness = Measure(
    name="adaptive_sharpness",
    symbol="S^ρ(θ, |θ|)",
    formula=(
        "max of E(θ+δ) − E over ‖δ/|θ|‖_p ≤ ρ, p = 2 or ∞; average case: the mean of E(θ+δ) − E, "
        "δ_i/|θ_i| normal with deviation ρ (p = 2) or uniform up to ρ (p = ∞)"
    ),
    source="Kwon et al. 2021; Andriushchenko et al. 2023",
    summary="The rise of the risk when every parameter moves in proportion to its size.",
    when="To compare with recent studies of sharpness that is invariant to rescaling neurons.",
    misleads=(
        "Values depend on ρ, the norm and the case, and the worst case is a lower bound: compare "
        "only numbers with the same options."
    ),
    levels=("network",),
    invariances=frozenset({"layerwise", "neuronwise"}),
    explore=_adaptive,
    cost="gradients of all the data: restarts × steps at most; average case: 2 × draws forward passes",
    **declared(
        case=choice("worst", "average"),
        norm=choice("l2", "linf"),
        rho=positive(None, none="for a radius that suits case and norm", example="0.5"),
        steps=count(20),
        restarts=count(1),
        draws=count(20, 2),
        logit_normalization=choice(False, True),
    ),
    loss_of=_loss_of,
)

critical_sharpness = Measure(
    name="critical_sharpness",
    symbol="λ_c",
    formula="2/η_c, η_c the smallest η > 0 with E(θ − ηΔ) > E(θ), Δ the optimizer's step without its rate",
    source="Kalra et al. 2026",
    summary=(
        "The sharpness along the step that an optimizer takes next, from the rate at which that step would "
        "no longer lower the risk; Δᵀ H Δ / Δᵀ∇E on a quadratic."
    ),
    when=(
        "To see how close training is to the edge of stability, at any size and during training: compare it "
        "with 2/η. With update_data or update_loss, Δ comes from other data or another loss."
    ),
    misleads=(
        "It looks along one direction only, and bisection finds one crossing, not always the first. It "
        "depends on the optimizer's state as much as on the network, and rescaling changes it."
    ),
    levels=("network",),
    explore=_critical,
    cost="one gradient and about ten forward passes",
    **declared(**_STEP, width=share(0.01)),
)

directional_sharpness = Measure(
    name="directional_sharpness",
    symbol="S_Δ",
    formula="Δᵀ H Δ / ‖Δ‖², Δ the optimizer's step without its rate",
    source="Pan & Li 2023",
    summary="The curvature of the risk along the step that an optimizer takes next.",
    when="To compare optimizers: which of them steps along flatter directions of the same network.",
    misleads="It looks along one direction only, and rescaling changes it.",
    levels=("network",),
    explore=_directional,
    cost="one gradient and one Hessian product",
    **declared(**_STEP),
)

preconditioned_sharpness = Measure(
    name="preconditioned_sharpness",
    symbol="S_P",
    formula="λ_max(P^-½ H P^-½), P = (1 − β₁^t)(√(ν/(1 − β₂^t)) + ε) from Adam's state; 1 for SGD",
    source="Cohen et al. 2022",
    summary=(
        "The sharpest direction as an adaptive optimizer sees it; the notes give the threshold up to which "
        "the optimizer is stable."
    ),
    when=(
        "To see whether training with Adam, AdamW, RMSprop or SGD with momentum is at the edge of stability. "
        "It needs the optimizer: options={'preconditioned_sharpness': {'optimizer': optimizer}}."
    ),
    misleads=(
        "The threshold is that of full-batch training near a quadratic; in small batches training stays "
        "below it. It says how training behaves, not how well the network generalises."
    ),
    levels=("network",),
    explore=_preconditioned,
    cost="Hessian products of the whole network: about 20 to 60, in step with other eigenvalues",
    **declared(**_OPTIMIZER, **EIGENVALUE_OPTIONS),
)

geodesic_sharpness = Measure(
    name="geodesic_sharpness",
    symbol="S^ρ_geo",
    formula=(
        "mean over batches of max E(θ + ξ − ½Γ(ξ,ξ)) − E over ‖ξ‖ ≤ ρ, ξ horizontal in each head of "
        "attention, ‖ξ‖² its squared length in the heads' metric plus Σ (ξ_i/θ_i)² over the rest"
    ),
    source="da Silva et al. 2025",
    summary=(
        "Adaptive sharpness that mixing the channels of attention's heads does not change; without "
        "attention it is the same number."
    ),
    when=(
        "To compare transformers by a worst case at a given distance: mixing the channels of a head changes "
        "adaptive_sharpness but not this."
    ),
    misleads=(
        "Values depend on ρ and the metric, and are lower bounds: compare only numbers with the same "
        "options. In networks with attention, rescaling the norm layers before it changes the value."
    ),
    levels=("network",),
    invariances=frozenset({"layerwise without attention", "neuronwise without attention", "attention"}),
    explore=_geodesic,
    cost="gradients of all the data: steps at most",
    **declared(metric=choice("mixed", "own"), rho=positive(0.5), steps=count(20), batches=count(1)),
)

minimum_sharpness = Measure(
    name="minimum_sharpness",
    symbol="MS",
    formula="min of Σ_l Tr H_l over layer-wise factors with product 1 = L (Π_l Tr H_l)^{1/L}",
    source="Ibayashi et al. 2021",
    summary=(
        "The trace of the network's Hessian after the best rescaling of its layers. Where branches meet, "
        "factors need not multiply to 1, and rescaling does change it."
    ),
    when="For the trace of a plain chain of layers, independent of the scale of each layer.",
    misleads=(
        "Where branches or norm layers absorb factors, its minimum runs over the wrong rescalings; "
        "rescaling single neurons always changes it."
    ),
    levels=("network",),
    invariances=frozenset({"layerwise in chains"}),
    network=_minimum,
    network_needs=frozenset({"traces"}),
    clips="sums",
)
