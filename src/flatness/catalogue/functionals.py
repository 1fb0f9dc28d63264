"""What measures take of the spectrum of D^½ H D^½, as fields of their declarations.

A measure is a metric times a functional: ``Measure(name=..., **trace(RELATIVE))`` is relative flatness. The
density of the spectrum is `flatness.landscape.density`, and a functional of that is `soft_rank`;
`normalized_sharpness` is the least trace over all metrics of row and column scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flatness.catalogue.measure import LayerView, NetworkView, Valued
from flatness.catalogue.metrics import Metric
from flatness.curvature.spectra import LAYER_METRICS, NetworkSpectrum

# A Newton step along the gradient that would lower the risk by more than this share says: no minimum here.
_FAR = 0.1


def trace(metric: Metric) -> dict[str, Any]:
    """Tr DH of a layer."""
    return _of_layers(metric, metric.statistic, lambda view: _total(view.statistics[metric.statistic]))


def _total(statistic: Tensor) -> Tensor:
    return statistic.sum() if statistic.dim() else statistic


def largest_eigenvalue(metric: Metric) -> dict[str, Any]:
    """λ_max(D^½ H D^½) of a layer."""
    return _of_layers(metric, metric.spectrum, lambda view: view.spectra[metric.spectrum].values[0])


def _of_layers(metric: Metric, need: str, value: Callable[[LayerView], Tensor]) -> dict[str, Any]:
    """The declaration of a value that may still lack the number that D is."""

    def layer(view: LayerView) -> Tensor | Valued:
        found = value(view) if metric.factor is None else metric.factor(view) * value(view)
        notes = tuple(metric.notes(view))
        return Valued(float(found), notes) if notes else found

    return {"needs": frozenset({need}), "layer": layer, "invariances": metric.unchanged}


def largest_of_network(view: NetworkView) -> Valued:
    """The largest eigenvalue of the network's Hessian in the metric, with what makes it doubtful."""
    spectrum = view.spectrum
    assert spectrum is not None
    solver = view.options.get("solver", "lanczos")
    notes = [
        f"{spectrum.products} Hessian products ({solver}), residual {spectrum.residual:.1e}",
    ]
    if spectrum.dropped:
        why = "no weight of a layer" if view.options.get("metric") in LAYER_METRICS else "zero"
        notes.append(f"{why} and without a metric, left out: {', '.join(spectrum.dropped)}")
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
