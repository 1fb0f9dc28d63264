"""From views of layers to rows of a report: values, reductions over units and layers, and their notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from flatness.catalogue.measure import SPECTRA, LayerView, Measure, NetworkView, Valued
from flatness.catalogue.registry import reduce_values
from flatness.curvature.operators.spectrum import Spectrum
from flatness.measuring.run.exploration import Explored
from flatness.measuring.run.run import Run
from flatness.measuring.scatter import Scatter, bias_note, standard_error
from flatness.measuring.views import Outline, layer_values, layer_views, network_view, number_of
from flatness.report.report import Result

# Changes of a value, relative to its size, that are rounding alone.
_ROUNDING = 1e-12
# The relative error for which a note says how many samples it would take.
_GOAL = 0.01


def report_rows(outline: Outline, run: Run, explored: Explored, views: list[LayerView]) -> list[Result]:
    """All rows of a report, with the standard errors that the data alone cause where those are asked for.

    Args:
        outline: What was measured.
        run: What the engines found.
        explored: What measures found that explore the space of all parameters.
        views: The layers, on all samples.
    """
    network = network_view(outline, run.statistics)
    results = finalise(outline, views, network, explored, run.methods, run.scatter, run.remarks)
    if run.groups is None:
        return results
    left_out = [
        finalise(
            outline,
            layer_views(outline, part, run.spectra, run.spreads),
            network_view(outline, part),
            explored,
            run.methods,
        )
        for part in run.groups.without_each(run.statistics)
    ]
    return _with_data_errors(results, left_out, outline.measures, run.statistics.samples)


def finalise(
    outline: Outline,
    views: list[LayerView],
    network: NetworkView,
    explored: Explored,
    methods: Mapping[str, str],
    scatter: Scatter | None = None,
    remarks: Mapping[str, tuple[str, ...]] | None = None,
) -> list[Result]:
    """All rows of a report, measure by measure, layers in network order.

    Args:
        outline: What was measured.
        views: The layers.
        network: All parameters.
        explored: What measures found that explore the space of all parameters.
        methods: "exact" or "sampled", by layer.
        scatter: How far sampled statistics scatter.
        remarks: More to say about the curvature of single layers.
    """
    results: list[Result] = []
    scatter, remarks = scatter or Scatter(), remarks or {}
    for measure in outline.measures:
        loss, curvature = outline.loss, outline.curvature
        template = Result(measure.name, "layer", 0.0, method="exact", loss=loss, curvature=curvature)
        rows = _Rows(measure.clips is not None)
        curved = bool(measure.needs - SPECTRA)
        for view in views:
            view = replace(view, options=outline.options[measure.name])
            notes = (outline.layers[view.name].reason, *(remarks.get(view.name, ()) if curved else ()))
            method = methods[view.name] if curved else "exact"
            row = replace(template, layer=view.name, notes=notes, method=method)
            _layer_rows(measure, view, row, scatter, rows)
        for layer, value in explored.values.get(measure.name, {}).items():
            if layer is not None:
                rows.add(_with(replace(template, layer=layer), value))
        template = replace(template, level="network")
        results += rows.results
        results += _network_rows(measure, outline, network, explored, template, scatter, rows)
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


def _with(row: Result, value: Valued | Tensor | float) -> Result:
    """The row with a value and what there is to say about it."""
    if not isinstance(value, Valued):
        return replace(row, value=float(value))
    return replace(
        row,
        value=value.value,
        stderr=value.stderr,
        method=value.method,
        converged=row.converged and value.converged,
        residual=row.residual if value.residual is None else value.residual,
        notes=(*row.notes, *value.notes),
        terms=None if value.terms is None else dict(value.terms),
    )


def _layer_rows(measure: Measure, view: LayerView, row: Result, scatter: Scatter, rows: _Rows) -> None:
    """The rows of one layer: of its units and their reductions, or its one value."""
    spectra = [view.spectra[need] for need in sorted(measure.needs & SPECTRA)]
    row = replace(
        row,
        converged=all(spectrum.converged for spectrum in spectra),
        residual=max((float(spectrum.residuals.max()) for spectrum in spectra), default=None),
        notes=(*row.notes, *(note for spectrum in spectra for note in _spectrum_notes(spectrum))),
    )
    if measure.units is not None:
        values = layer_values(measure, view)
        row, columns = _scattered(measure, view, values, row, scatter)
        units = len(values) - len(measure.reductions)
        for unit in range(units) if "unit" in measure.levels else ():
            rows.add(replace(row, level="unit", unit=unit, value=float(values[unit])), columns[unit])
        for name, value, column in zip(measure.reductions, values[units:], columns[units:], strict=True):
            rows.add(replace(row, reduction=name, value=float(value)), column)
    elif measure.layer is not None:
        value = measure.layer(view)
        at = torch.tensor([number_of(measure, value)], dtype=torch.float64, device="cpu")
        row, (column,) = _scattered(measure, view, at, row, scatter)
        rows.add(_with(row, value), column)


def _scattered(
    measure: Measure, view: LayerView, values: Tensor, row: Result, scatter: Scatter
) -> tuple[Result, list[Tensor | None]]:
    """What replicates change about each of the values; the row is exact where that is nothing."""
    moved = None
    if row.method == "sampled":
        moved = scatter.of_layer(view, partial(layer_values, measure), values, measure.clips)
    if moved is None:
        # Also of a sampled layer without a residual, all of whose output directions were taken.
        return replace(row, method="exact"), [None] * len(values)
    return row, list(moved.T)


def _network_rows(
    measure: Measure,
    outline: Outline,
    network: NetworkView,
    explored: Explored,
    template: Result,
    scatter: Scatter,
    rows: _Rows,
) -> list[Result]:
    """The rows of the network: over all parameters, and sums and maxima over the rows of layers."""
    found = _Rows(measure.clips is not None)
    if measure.network is not None and _available(measure, outline, explored):
        spectrum, options = explored.spectra.get(measure.name), outline.options[measure.name]
        view = replace(network, spectrum=spectrum, options=options)
        value = measure.network(view)
        own = value.over if isinstance(value, Valued) else None
        row = _with(replace(template, notes=(f"over {own or ', '.join(network.squared_norms)}",)), value)
        changes = None
        if "traces" in measure.network_needs:
            number = partial(_network_value, measure)
            changes = scatter.of_network(view, outline.sources, number, row.value, measure.clips)
        found.add(row, changes)
    values = explored.values.get(measure.name, {})
    if None in values:
        found.add(_with(template, values[None]))
    for reduction in measure.reductions if "network" in measure.levels else ():
        # Units are reduced the same way first: ρ^max is a maximum of maxima, ρ^Σ a sum of sums.
        wanted = reduction if measure.units is not None else None
        _add_aggregate(reduction, wanted, rows, template, found)
    return found.results


def _network_value(measure: Measure, view: NetworkView) -> float:
    assert measure.network is not None
    return number_of(measure, measure.network(view))


def _add_aggregate(reduction: str, wanted: str | None, rows: _Rows, template: Result, found: _Rows) -> None:
    """The row of a sum or maximum over the measured layers, of their rows with the wanted reduction."""
    pairs = zip(rows.results, rows.deviations, strict=True)
    parts = [pair for pair in pairs if pair[0].level == "layer" and pair[0].reduction == wanted]
    if not parts:
        return
    layers = [row for row, _ in parts]
    values = torch.tensor([row.value for row in layers], dtype=torch.float64, device="cpu")
    value = reduce_values(reduction, values)
    aggregate = replace(
        template,
        value=float(value),
        reduction=reduction,
        stderr=_reduced_error(reduction, layers),
        method=next((row.method for row in layers if row.method != "exact"), "exact"),
        converged=all(row.converged for row in layers),
        notes=(f"over the measured layers {', '.join(str(row.layer) for row in layers)}",),
    )
    found.add(aggregate, _reduced(reduction, values, value, [deviation for _, deviation in parts]))


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


def _available(measure: Measure, outline: Outline, explored: Explored) -> bool:
    """Whether what the network's value needs was found."""
    if "spectrum" in measure.network_needs:
        return measure.name in explored.spectra
    return outline.network or "traces" not in measure.network_needs


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


def _with_data_errors(
    results: list[Result], left_out: list[list[Result]], measures: Sequence[Measure], samples: int
) -> list[Result]:
    """Results with `data_stderr`, from the same results without one group of samples after the other.

    The jackknife: se² = (B − 1)/B Σ_b (f_b − mean f)². Values that are no function of sums over samples
    (eigenvalues, exploration of parameter space) have none.

    Args:
        results: What was measured on all samples.
        left_out: For every group, the same rows without its samples.
        measures: The measures.
        samples: Number of samples.
    """
    sums = {m.name for m in measures if not (m.needs & SPECTRA or "spectrum" in m.network_needs or m.explore)}
    B = len(left_out)
    if B < 2:
        return results
    values = torch.tensor(
        [[row.value for row in rows] for rows in left_out], dtype=torch.float64, device="cpu"
    )
    errors = ((B - 1) / B * (values - values.mean(0)).square().sum(0)).sqrt()
    # What does not depend on the data, such as norms of weights, moves by rounding alone.
    errors = errors.where(errors > _ROUNDING * values.mean(0).abs(), 0.0).tolist()
    return [
        _with_data_error(row, error, samples) if row.measure in sums else row
        for row, error in zip(results, errors, strict=True)
    ]


def _with_data_error(row: Result, error: float, samples: int) -> Result:
    if not row.value or row.level == "unit":
        return replace(row, data_stderr=error)
    share = error / abs(row.value)
    wanted = math.ceil(samples * (share / _GOAL) ** 2)
    note = (
        f"as an estimate for the distribution of the data: ± {error:.3g} ({share:.1%}); "
        f"1 % would take about {wanted:,} samples"
    )
    return replace(row, data_stderr=error, notes=(*row.notes, note) if error else row.notes)
