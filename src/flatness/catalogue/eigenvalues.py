"""How the largest eigenvalue of a network's Hessian is reported, for all measures that rest on one."""

from __future__ import annotations

from flatness.catalogue.measure import NetworkView, Valued
from flatness.curvature.operators.network_spectrum import NetworkSpectrum

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
        notes.append(f"no minimum: the eigenvalue of largest size is negative, |λ|_max = {size:.4g}")
    notes += _far_from_a_minimum(spectrum)
    if not spectrum.converged:
        notes.append("not converged: raise max_products or tolerance in options=")
    return Valued(spectrum.largest, tuple(notes), converged=spectrum.converged, residual=spectrum.residual)


def _far_from_a_minimum(spectrum: NetworkSpectrum) -> list[str]:
    """Say so where a step along the gradient would gain much: ‖g‖²/2λ in the quadratic model."""
    norm = spectrum.gradient_norm
    slope = f"far from a minimum: the gradient has length {norm:.2g} in this metric, and "
    if norm > 0 and spectrum.largest <= 0:
        return [slope + "no curvature stops a step along it"]
    if norm > 0 and norm**2 / (2 * spectrum.largest) > _FAR * abs(spectrum.risk):
        gain = f"{norm**2 / (2 * spectrum.largest):.2g}"
        return [slope + f"a step along it would lower the risk of {spectrum.risk:.3g} by about {gain}"]
    return []
