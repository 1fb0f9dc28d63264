"""Plain curvature and norms: what the invariant measures are compared with."""

from __future__ import annotations

import torch

from flatness.catalogue.measure import Measure, NetworkView, Valued
from flatness.catalogue.options import EIGENVALUE_OPTIONS, declared
from flatness.curvature.spectra import NetworkSpectrum

# A Newton step along the gradient that would lower the risk by more than this share says: no minimum here.
_FAR = 0.1


def largest_of_network(view: NetworkView) -> Valued:
    """The largest eigenvalue of the network's Hessian in the metric, with what makes it doubtful."""
    spectrum = view.spectrum
    assert spectrum is not None
    solver = view.options.get("solver", "lanczos")
    notes = [
        f"{spectrum.products} Hessian products ({solver}), residual {spectrum.residual:.1e}",
    ]
    if spectrum.dropped:
        notes.append(f"zero and without a metric, left out: {', '.join(spectrum.dropped)}")
    if spectrum.smallest == spectrum.smallest:
        notes.append(f"smallest eigenvalue {spectrum.smallest:.4g} ± {spectrum.smallest_residual:.1e}")
    if max(-spectrum.smallest, -spectrum.largest) > max(spectrum.largest, 0.0):
        size = max(abs(spectrum.largest), abs(spectrum.smallest))
        notes.append(f"not a minimum: the eigenvalue of largest size is negative, |λ|_max = {size:.4g}")
    notes += _far_from_a_minimum(spectrum)
    if not spectrum.converged:
        notes.append("not converged: raise max_products or tolerance in options=")
    return Valued(spectrum.largest, tuple(notes), converged=spectrum.converged, residual=spectrum.residual)


def _far_from_a_minimum(spectrum: NetworkSpectrum) -> list[str]:
    """Say so where a step along the gradient would gain much: ‖g‖²/2λ in the quadratic model."""
    norm = spectrum.gradient_norm
    slope = f"far from a minimum: the gradient has length {norm:.2g} in this metric, and "
    if norm > 0 and spectrum.largest <= 0:
        return [slope + "no curvature limits a step along it"]
    if norm > 0 and norm**2 / (2 * spectrum.largest) > _FAR * abs(spectrum.risk):
        gain = f"{norm**2 / (2 * spectrum.largest):.2g}"
        return [slope + f"a step along it would lower the risk of {spectrum.risk:.3g} by about {gain}"]
    return []


hessian_trace = Measure(
    name="hessian_trace",
    symbol="Tr H",
    formula="Tr H_l; network: the sum over all parameters",
    source="tsuzuku2020, eq. 5",
    summary="Sum of all curvatures of the loss. Not invariant: rescaling a ReLU network changes it.",
    when=(
        "As the plain baseline for the invariant measures, or to follow one network during training, where "
        "nothing is rescaled."
    ),
    misleads=(
        "It compares parameterisations, not functions: multiplying one ReLU layer by 5 and "
        "dividing the next by 5 changes it by orders of magnitude."
    ),
    levels=("layer", "network"),
    needs=frozenset({"row_traces"}),
    layer=lambda view: view.trace,
    network=lambda view: torch.stack(list(view.traces.values())).sum(),
    network_needs=frozenset({"traces"}),
)

hessian_top_eigenvalue = Measure(
    name="hessian_top_eigenvalue",
    symbol="λ_max(H)",
    formula="λ_max(H_l); network: of the full Hessian",
    source="rangamani2019, §1",
    summary="The sharpest direction, in a layer's weights or in all parameters. Rescaling changes it.",
    when=(
        "To judge step sizes (gradient descent is stable below 2/λ_max) and as the baseline of "
        "the literature on sharp minima."
    ),
    misleads=(
        "Rescaling changes it, and one outlying direction decides it. Away from a minimum a negative "
        "eigenvalue can be larger in size; a note says so."
    ),
    levels=("layer", "network"),
    needs=frozenset({"layer_eigenvalue"}),
    layer=lambda view: view.spectra["layer_eigenvalue"].values[0],
    network=largest_of_network,
    network_needs=frozenset({"spectrum"}),
    cost="eigenvalue iterations: about 20 to 60 Hessian products",
    **declared(EIGENVALUE_OPTIONS),
)

weight_norm = Measure(
    name="weight_norm",
    symbol="‖W‖²",
    formula="‖W_l‖²_F; network: ‖θ‖² over all parameters",
    source="petzka2021, §6",
    summary="Squared norm of the weights: no curvature at all, but a baseline that costs nothing.",
    when=("As the cheapest baseline: a flatness measure that correlates no better explains nothing."),
    misleads="It ignores the data, and rescaling can give it any value.",
    levels=("layer", "network"),
    layer=lambda view: view.squared_norm,
    network=lambda view: torch.stack(list(view.squared_norms.values())).sum(),
    flatness=False,
)
