"""From views of layers to rows of a report: values, reductions over units and layers, and their notes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from flatness.curvature.spectrum import Spectrum
from flatness.measures.catalogue import reduce_values
from flatness.measures.measure import SPECTRA, LayerView, Measure, NetworkView, Valued
from flatness.plan import Plan
from flatness.result import Result
from flatness.walking import Walked


def finalise(
    plan: Plan, views: list[LayerView], network: NetworkView, walked: Walked, loss: str
) -> list[Result]:
    """All rows of a report, measure by measure, layers in network order."""
    results: list[Result] = []
    for measure in plan.measures:
        template = Result(measure.name, "layer", 0.0, method="exact", loss=loss, curvature=plan.curvature)
        per_layer: list[Result] = []
        for view in views:
            view = replace(view, options=plan.options[measure.name])
            per_layer += _layer_rows(measure, view, plan.reasons[view.name], template)
        found = walked.values.get(measure.name, {})
        per_layer += [
            _with(replace(template, layer=layer), value)
            for layer, value in found.items()
            if layer is not None
        ]
        results += per_layer
        results += _network_rows(measure, per_layer, network, plan, walked, template)
    return results


def _with(row: Result, valued: Valued) -> Result:
    """The row with a value and what there is to say about it."""
    return replace(
        row,
        value=valued.value,
        stderr=valued.stderr,
        method=valued.method,
        converged=row.converged and valued.converged,
        residual=row.residual if valued.residual is None else valued.residual,
        notes=(*row.notes, *valued.notes),
        terms=None if valued.terms is None else dict(valued.terms),
    )


def _layer_rows(measure: Measure, view: LayerView, reason: str, template: Result) -> list[Result]:
    spectra = [view.spectra[need] for need in sorted(measure.needs & SPECTRA)]
    row = replace(
        template,
        layer=view.name,
        converged=all(spectrum.converged for spectrum in spectra),
        residual=max((float(spectrum.residuals.max()) for spectrum in spectra), default=None),
        notes=(reason, *(note for spectrum in spectra for note in _spectrum_notes(spectrum))),
    )
    if measure.units is not None:
        values = measure.units(view).flatten().double()
        rows = [
            replace(row, level="unit", unit=unit, value=value) for unit, value in enumerate(values.tolist())
        ]
        rows += [
            replace(row, reduction=name, value=float(reduce_values(name, values)))
            for name in measure.reductions
        ]
        return rows if "unit" in measure.levels else rows[len(values) :]
    if measure.layer is None:
        return []
    value = measure.layer(view)
    return [_with(row, value) if isinstance(value, Valued) else replace(row, value=float(value))]


def _network_rows(
    measure: Measure,
    rows: list[Result],
    network: NetworkView,
    plan: Plan,
    walked: Walked,
    template: Result,
) -> list[Result]:
    results: list[Result] = []
    template = replace(template, level="network")
    if measure.network is not None and _available(measure, plan, walked):
        spectrum, options = walked.spectra.get(measure.name), plan.options[measure.name]
        value = measure.network(replace(network, spectrum=spectrum, options=options))
        row = replace(template, notes=("over " + ", ".join(network.squared_norms),))
        results.append(_with(row, value) if isinstance(value, Valued) else replace(row, value=float(value)))
    if None in walked.values.get(measure.name, {}):
        results.append(_with(template, walked.values[measure.name][None]))
    for reduction in measure.reductions if "network" in measure.levels else ():
        # Units are reduced the same way first: ρ^max is a maximum of maxima, ρ^Σ a sum of sums.
        wanted = reduction if measure.units is not None else None
        parts = [row for row in rows if row.level == "layer" and row.reduction == wanted]
        if not parts:
            continue
        values = torch.tensor([row.value for row in parts], dtype=torch.float64, device="cpu")
        aggregate = replace(
            template,
            value=float(reduce_values(reduction, values)),
            reduction=reduction,
            stderr=_reduced_error(reduction, parts),
            method=next((row.method for row in parts if row.method != "exact"), "exact"),
            converged=all(row.converged for row in parts),
            notes=(f"over the measured layers {', '.join(str(row.layer) for row in parts)}",),
        )
        results.append(aggregate)
    return results


def _reduced_error(reduction: str, parts: list[Result]) -> float:
    """Standard error of an aggregate over layers whose errors are independent."""
    if reduction == "max":
        return max(parts, key=lambda row: row.value).stderr
    return math.hypot(*(row.stderr for row in parts))


def _available(measure: Measure, plan: Plan, walked: Walked) -> bool:
    """Whether what the network's value needs was found."""
    if "spectrum" in measure.network_needs:
        return measure.name in walked.spectra
    return plan.routes.network or "traces" not in measure.network_needs


def _spectrum_notes(spectrum: Spectrum) -> list[str]:
    notes = [f"{spectrum.products} Hessian products, residual {float(spectrum.residuals.max()):.1e}"]
    smallest = float(spectrum.smallest.min())
    if smallest < -float(spectrum.values.max()):
        notes.append(
            f"no minimum: the most negative curvature, about {smallest:.4g}, is larger in size than the "
            "largest"
        )
    if not spectrum.converged:
        notes.append("not converged: raise max_products or tolerance in options=")
    return notes
