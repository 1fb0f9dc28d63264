"""From views of layers to rows of a report: values, reductions over units and layers, and their notes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from flatness.catalogue.measure import SPECTRA, LayerView, Measure, NetworkView, Valued
from flatness.catalogue.registry import reduce_values
from flatness.curvature.operators.spectrum import Spectrum
from flatness.measuring.plan.plan import Plan
from flatness.measuring.rows.views import trace_sources
from flatness.measuring.scatter import Scatter, bias_note, standard_error
from flatness.measuring.walk import Walked
from flatness.report.report import Result


def finalise(
    plan: Plan,
    views: list[LayerView],
    network: NetworkView,
    walked: Walked,
    loss: str,
    scatter: Scatter | None = None,
    remarks: Mapping[str, tuple[str, ...]] | None = None,
) -> list[Result]:
    """All rows of a report, measure by measure, layers in network order.

    Args:
        plan: What was measured, and how.
        views: The layers.
        network: All parameters.
        walked: What took walks of its own.
        loss: Name of the loss.
        scatter: How far sampled statistics scatter.
        remarks: More to say about the curvature of single layers; None as a name stands for the network.
    """
    results: list[Result] = []
    scatter, remarks = scatter or Scatter(), remarks or {}
    for measure in plan.measures:
        template = Result(measure.name, "layer", 0.0, method="exact", loss=loss, curvature=plan.curvature)
        rows = _Rows(measure.clips is not None)
        for view in views:
            view = replace(view, options=plan.options[measure.name])
            curved = bool(measure.needs - SPECTRA)
            method = plan.methods.get(view.name, "exact") if curved else "exact"
            notes = (plan.reasons[view.name], *(remarks.get(view.name, ()) if curved else ()))
            _layer_rows(measure, view, replace(template, notes=notes, method=method), scatter, rows)
        found = walked.values.get(measure.name, {})
        for layer, value in found.items():
            if layer is not None:
                rows.add(_with(replace(template, layer=layer), value))
        results += rows.results
        results += _network_rows(measure, rows, network, plan, walked, template, scatter)
    return results


@dataclass
class _Rows:
    """Rows, and for those that are sampled what each replicate would change about them.

    Attributes:
        clips: Whether the measure clips what is sampled.
        results: The rows.
        deviations: What replicates change, (K,) each; None for a row that is not sampled.
    """

    clips: bool = False
    results: list[Result] = field(default_factory=list)
    deviations: list[Tensor | None] = field(default_factory=list)

    def add(self, row: Result, deviation: Tensor | None = None) -> None:
        """Take one more; its standard error comes from the deviations (K,)."""
        error = standard_error(deviation)
        if deviation is not None and error is not None:
            bent = row.level != "unit" and (self.clips or row.reduction == "max")
            note = bias_note(deviation) if bent else None
            notes = row.notes if note is None else (*row.notes, note)
            row = replace(row, stderr=float(error), method="sampled", notes=notes)
        self.results.append(row)
        self.deviations.append(deviation)


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


def _layer_rows(measure: Measure, view: LayerView, row: Result, scatter: Scatter, rows: _Rows) -> None:
    spectra = [view.spectra[need] for need in sorted(measure.needs & SPECTRA)]
    row = replace(
        row,
        layer=view.name,
        converged=all(spectrum.converged for spectrum in spectra),
        residual=max((float(spectrum.residuals.max()) for spectrum in spectra), default=None),
        notes=(*row.notes, *(note for spectrum in spectra for note in _spectrum_notes(spectrum))),
    )
    if measure.units is None and measure.layer is None:
        return
    if measure.layer is not None and measure.units is None and row.method == "exact":
        value = measure.layer(view)
        rows.add(_with(row, value) if isinstance(value, Valued) else replace(row, value=float(value)))
        return
    values = layer_values(measure, view)
    deviations = None
    if row.method == "sampled":
        deviations = scatter.of_layer(view, partial(layer_values, measure), values, measure.clips)
        # A layer without a residual, all of whose output directions were taken.
        row = row if deviations is not None else replace(row, method="exact")
    columns = [None] * len(values) if deviations is None else list(deviations.T)
    if measure.units is None:
        assert measure.layer is not None
        value = measure.layer(view)
        made = _with(row, value) if isinstance(value, Valued) else replace(row, value=float(value))
        rows.add(made if row.method == "exact" else replace(made, method=row.method), columns[0])
        return
    units = len(values) - len(measure.reductions)
    if "unit" in measure.levels:
        for unit in range(units):
            rows.add(replace(row, level="unit", unit=unit, value=float(values[unit])), columns[unit])
    for name, value, column in zip(measure.reductions, values[units:], columns[units:], strict=True):
        rows.add(replace(row, reduction=name, value=float(value)), column)


def layer_values(measure: Measure, view: LayerView) -> Tensor:
    """All numbers of a layer: of its units and their reductions, or its one value."""
    if measure.units is not None:
        values = measure.units(view).flatten().double()
        return torch.cat([values, *(reduce_values(name, values)[None] for name in measure.reductions)])
    assert measure.layer is not None
    value = measure.layer(view)
    number = value.value if isinstance(value, Valued) else float(value)
    return torch.tensor([number], dtype=torch.float64, device="cpu")


def _network_rows(
    measure: Measure,
    rows: _Rows,
    network: NetworkView,
    plan: Plan,
    walked: Walked,
    template: Result,
    scatter: Scatter,
) -> list[Result]:
    found = _Rows(measure.clips is not None)
    template = replace(template, level="network")
    if measure.network is not None and _available(measure, plan, walked):
        spectrum, options = walked.spectra.get(measure.name), plan.options[measure.name]
        view = replace(network, spectrum=spectrum, options=options)
        value = measure.network(view)
        row = template
        if not (isinstance(value, Valued) and value.notes and value.notes[0].startswith("over ")):
            row = replace(template, notes=("over " + ", ".join(network.squared_norms),))
        row = _with(row, value) if isinstance(value, Valued) else replace(row, value=float(value))
        changes = None
        if "traces" in measure.network_needs:
            changes = scatter.of_network(
                view, trace_sources(plan), partial(_network_value, measure), row.value, measure.clips
            )
        found.add(row, changes)
    if None in walked.values.get(measure.name, {}):
        found.add(_with(template, walked.values[measure.name][None]))
    for reduction in measure.reductions if "network" in measure.levels else ():
        # Units are reduced the same way first: ρ^max is a maximum of maxima, ρ^Σ a sum of sums.
        wanted = reduction if measure.units is not None else None
        parts = [
            (row, deviation)
            for row, deviation in zip(rows.results, rows.deviations, strict=True)
            if row.level == "layer" and row.reduction == wanted
        ]
        if not parts:
            continue
        values = torch.tensor([row.value for row, _ in parts], dtype=torch.float64, device="cpu")
        value = reduce_values(reduction, values)
        aggregate = replace(
            template,
            value=float(value),
            reduction=reduction,
            stderr=_reduced_error(reduction, [row for row, _ in parts]),
            method=next((row.method for row, _ in parts if row.method != "exact"), "exact"),
            converged=all(row.converged for row, _ in parts),
            notes=(f"over the measured layers {', '.join(str(row.layer) for row, _ in parts)}",),
        )
        found.add(aggregate, _reduced(reduction, values, value, [deviation for _, deviation in parts]))
    return found.results


def _network_value(measure: Measure, view: NetworkView) -> float:
    assert measure.network is not None
    value = measure.network(view)
    return value.value if isinstance(value, Valued) else float(value)


def _reduced(reduction: str, values: Tensor, value: Tensor, deviations: list[Tensor | None]) -> Tensor | None:
    """What each replicate would change about an aggregate over layers: (K,)."""
    count = next((len(part) for part in deviations if part is not None), 0)
    if not count:
        return None
    still = torch.zeros(count, dtype=torch.float64, device="cpu")
    moved = values + torch.stack([still if part is None else part for part in deviations], dim=1)
    return torch.stack([reduce_values(reduction, row) for row in moved]) - value


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
