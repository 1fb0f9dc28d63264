"""From views of layers to rows of a report: values, reductions over units and layers, and their notes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatness.catalogue.measure import SPECTRA, LayerView, Measure, NetworkView, Valued
from flatness.catalogue.registry import reduce_values
from flatness.curvature.spectra import Spectrum
from flatness.errors import listed
from flatness.measuring.run.run import Explored, Run
from flatness.measuring.views import Outline, layer_values, layer_views, network_view, number_of
from flatness.report.report import Address, Result, address

# Changes of a value, relative to its size, that are rounding alone.
_ROUNDING = 1e-12
# More probes than this share of the limit have used it up: a step to the next number may be too large.
_USED_UP = 0.8
# The relative error for which a note says how many samples it would take.
_GOAL = 0.01


def report_rows(outline: Outline, run: Run) -> list[Result]:
    """All rows of a report, with the standard errors that the data alone cause where those are asked for.

    Args:
        outline: What was measured.
        run: What the engines found.
    """
    results = finalise(outline, run)
    if run.groups is None:
        return results
    left_out = [
        finalise(outline, replace(run, statistics=part, scatter=None))
        for part in run.groups.without_each(run.statistics)
    ]
    return _with_data_errors(results, left_out, outline.request.measures, run)


def finalise(outline: Outline, run: Run) -> list[Result]:
    """All rows of a report, measure by measure, layers in network order; see `report_rows`."""
    views = layer_views(outline, run.statistics, run.spectra, run.spreads)
    network = network_view(outline, run.statistics)
    results: list[Result] = []
    for measure in outline.request.measures:
        rows = _Rows(measure, outline, run)
        for view in views:
            rows.add_layer(view)
        values = run.explored.values.get(measure.name, {})
        for layer in [layer for layer in values if layer is not None]:
            rows.add(rows.row("layer", layer=layer), values[layer])
        rows.add_network(network)
        if None in values:
            rows.add(rows.row("network"), values[None])
        for reduction in measure.reductions if "network" in measure.levels else ():
            rows.add_aggregate(reduction)
        results += [row for row, _ in rows.found]
    return results


class _Rows:
    """The rows of one measure.

    Args:
        measure: The measure.
        outline: What was measured.
        run: What the engines found.

    Attributes:
        found: Each row with what replicates change about it, (K,); None for a row that is not sampled.
    """

    def __init__(self, measure: Measure, outline: Outline, run: Run) -> None:
        self.found: list[tuple[Result, Tensor | None]] = []
        self._measure, self._outline, self._run = measure, outline, run
        self._options = outline.request.options[measure.name]

    def row(self, level: str, **known: Any) -> Result:
        """A row that has no value yet."""
        loss, curvature = self._outline.loss, self._outline.curvature
        return Result(self._measure.name, level, 0.0, loss=loss, curvature=curvature, **known)

    def add(self, row: Result, value: Valued | Tensor | float, changes: Tensor | None = None) -> None:
        """Take one more, with its value; its standard error comes from what replicates change (K,)."""
        valued = value if isinstance(value, Valued) else Valued(float(value))
        if changes is not None:
            from flatness.measuring.scatter import bias_note, standard_error

            bent = row.level != "unit" and (self._measure.clips is not None or row.reduction == "max")
            notes = (*valued.notes, *(bias_note(changes) if bent else ()))
            valued = replace(valued, stderr=float(standard_error(changes)), method="sampled", notes=notes)
        row = replace(
            row,
            value=valued.value,
            stderr=valued.stderr,
            method=valued.method,
            converged=row.converged and valued.converged,
            residual=row.residual if valued.residual is None else valued.residual,
            notes=(*row.notes, *valued.notes),
            terms=None if valued.terms is None else dict(valued.terms),
        )
        self.found.append((row, changes))

    def add_layer(self, view: LayerView) -> None:
        """The rows of one layer: of its units and their reductions, or its one value."""
        measure, view, row = self._measure, replace(view, options=self._options), self._layer_row(view)
        if measure.units is not None:
            values = layer_values(measure, view)
            changes = self._changes(view, values)
            units = len(values) - len(measure.reductions)
            for unit in range(units) if "unit" in measure.levels else ():
                self.add(replace(row, level="unit", unit=unit), values[unit], changes[unit])
            for k, name in enumerate(measure.reductions, units):
                self.add(replace(row, reduction=name), values[k], changes[k])
        elif measure.layer is not None:
            value = measure.layer(view)
            at = torch.tensor([number_of(measure, value)], dtype=torch.float64, device="cpu")
            self.add(row, value, self._changes(view, at)[0])

    def _layer_row(self, view: LayerView) -> Result:
        """A row of one layer, with what there is to say about its curvature."""
        spectra = [view.spectra[need] for need in sorted(self._measure.needs & SPECTRA)]
        remarks = self._run.remarks.get(view.name, ()) if self._measure.needs - SPECTRA else ()
        told = [note for spectrum in spectra for note in _spectrum_notes(spectrum)]
        return self.row(
            "layer",
            layer=view.name,
            converged=all(spectrum.converged for spectrum in spectra),
            residual=max((float(spectrum.residuals.max()) for spectrum in spectra), default=None),
            notes=(self._outline.layers[view.name].reason, *remarks, *told),
        )

    def _changes(self, view: LayerView, values: Tensor) -> list[Tensor | None]:
        """What replicates change about each value of a layer; nothing where all directions were taken."""
        moved, scatter = None, self._run.scatter
        if scatter and self._measure.needs - SPECTRA and self._run.methods[view.name] == "sampled":
            number = partial(layer_values, self._measure)
            moved = scatter.of_layer(view, number, values, self._measure.clips)
        return [None] * len(values) if moved is None else list(moved.T)

    def add_network(self, network: NetworkView) -> None:
        """The row over all parameters, where the measure has one and what it needs was found."""
        measure, sources = self._measure, self._outline.sources
        spectrum, traced = self._run.explored.spectra.get(measure.name), "traces" in measure.network_needs
        missing = (traced and not sources) or ("spectrum" in measure.network_needs and spectrum is None)
        if measure.network is None or missing:
            return
        view = replace(network, spectrum=spectrum, options=self._options)
        value = measure.network(view)
        over = value.over if isinstance(value, Valued) else None
        changes, scatter = None, self._run.scatter
        if traced and scatter:
            number, at = partial(_network_value, measure), number_of(measure, value)
            changes = scatter.of_network(view, sources, number, at, measure.clips)
        notes = (f"over {over or ', '.join(network.squared_norms)}",)
        self.add(self.row("network", notes=notes), value, changes)

    def add_aggregate(self, reduction: str) -> None:
        """The row of a sum or maximum over the measured layers."""
        # Units are reduced the same way first: ρ^max is a maximum of maxima, ρ^Σ a sum of sums.
        wanted = reduction if self._measure.units is not None else None
        parts = [one for one in self.found if one[0].level == "layer" and one[0].reduction == wanted]
        if not parts:
            return
        layers = [row for row, _ in parts]
        changes = _reduced(reduction, layers, [moved for _, moved in parts])
        self.add(self.row("network", reduction=reduction), _aggregate(reduction, layers), changes)


def _network_value(measure: Measure, view: NetworkView) -> Tensor:
    assert measure.network is not None
    return torch.tensor(number_of(measure, measure.network(view)), dtype=torch.float64, device="cpu")


def _aggregate(reduction: str, layers: list[Result]) -> Valued:
    """A sum or maximum over layers, whose errors are taken for independent."""
    largest = max(layers, key=lambda row: row.value)
    return Valued(
        float(reduce_values(reduction, _values(layers))),
        (f"over the measured layers {', '.join(str(row.layer) for row in layers)}",),
        converged=all(row.converged for row in layers),
        stderr=largest.stderr if reduction == "max" else math.hypot(*(row.stderr for row in layers)),
        method=next((row.method for row in layers if row.method != "exact"), "exact"),
    )


def _reduced(reduction: str, layers: list[Result], changes: list[Tensor | None]) -> Tensor | None:
    """What each replicate would change about an aggregate over layers: (K,)."""
    count = max(0 if change is None else len(change) for change in changes)
    if not count:
        return None
    values = _values(layers)
    still = values.new_zeros(count)
    moved = values + torch.stack([still if change is None else change for change in changes], dim=1)
    return torch.stack([reduce_values(reduction, row) for row in moved]) - reduce_values(reduction, values)


def _values(rows: list[Result]) -> Tensor:
    return torch.tensor([row.value for row in rows], dtype=torch.float64, device="cpu")


def row_notes(outline: Outline, run: Run, results: list[Result]) -> list[str]:
    """What to say about the rows together: the precision that was missed, layers without any curvature."""
    return [*missed_precision(outline, run, results), *_silent_layers(outline, results)]


def _silent_layers(outline: Outline, results: list[Result]) -> list[str]:
    """A note on layers whose curvature is exactly 0 in a network that has some."""
    curved = {measure.name for measure in outline.request.measures if measure.of_layers and measure.flatness}
    rows = [row for row in results if row.layer is not None and row.measure in curved]
    largest: dict[Any, float] = {}
    for row in rows:
        largest[row.layer] = max(largest.get(row.layer, 0.0), abs(row.value), row.stderr)
    silent = [layer for layer, value in largest.items() if value == 0]
    if not silent or len(silent) == len(largest):
        return []
    return [
        f"0 at {len(silent)} of {len(largest)} layers ({listed(silent, 4)}): their output does not "
        "reach the loss, as behind a norm layer whose weight is 0 (residual blocks are often initialised "
        "that way), or units that are inactive for every sample"
    ]


def relative_error(outline: Outline, run: Run, results: list[Result]) -> float:
    """The largest standard error of a layer's value, relative to it or to its Gauss-Newton part."""
    layers = _sampled_layers(results)
    sizes = _sizes(outline, run, layers)
    return max((row.stderr / max(sizes[address(row)], 1e-300) for row in layers), default=0.0)


def _sampled_layers(results: list[Result]) -> list[Result]:
    return [row for row in results if row.level == "layer" and row.method == "sampled" and row.stderr]


def missed_precision(outline: Outline, run: Run, results: list[Result]) -> list[str]:
    """What to say when sampled values of layers did not reach the precision asked for."""
    precision, most = outline.request.precision, outline.request.max_passes
    layers = _sampled_layers(results)
    if all(row.stderr <= 1.25 * precision * abs(row.value) for row in layers):
        return []
    sizes = _sizes(outline, run, layers)
    missed = [row for row in layers if row.stderr > 1.25 * precision * sizes[address(row)]]
    if not missed:
        return []
    worst = max(missed, key=lambda row: row.stderr / max(sizes[address(row)], 1e-300))
    size = sizes[address(worst)]
    reached = f"{worst.stderr / size:.2g}" if size else "a value of 0"
    part = "" if run.gauss_newton is None else " (or of its Gauss-Newton part, if that is larger)"
    used_up = run.probes > _USED_UP * most
    advice = "The pilot run underestimated the noise: ask for a smaller precision"
    if run.groups is not None and run.groups.population is not None:
        used_up, advice = False, f"Raise samples, now {run.statistics.samples}, or pass samples='enough'"
    return [
        f"aimed at a standard error of {precision:.2g} of each layer's value{part}, but {len(missed)} of "
        f"{len(layers)} values exceed it; the worst is {worst.measure} of {worst.subject()}, at {reached}. "
        f"{f'Raise max_passes, now {most}' if used_up else advice}"
    ]


def _sizes(outline: Outline, run: Run, layers: list[Result]) -> dict[Address, float]:
    """What errors are relative to: the value, or that of the Gauss-Newton part where it is larger."""
    sizes = {address(row): abs(row.value) for row in layers}
    if run.gauss_newton is not None:
        alone = replace(run, statistics=run.gauss_newton, scatter=None, explored=Explored())
        for row in finalise(outline, alone):
            if address(row) in sizes:
                sizes[address(row)] = max(sizes[address(row)], abs(row.value))
    return sizes


def _spectrum_notes(spectrum: Spectrum) -> list[str]:
    notes = [f"{spectrum.products} Hessian products, residual {float(spectrum.residuals.max()):.1e}"]
    smallest = float(spectrum.smallest.min())
    if smallest < -float(spectrum.values.max()):
        notes.append(
            f"not a minimum: the most negative curvature, about {smallest:.4g}, is larger in size than the "
            "largest"
        )
    if not spectrum.converged:
        notes.append("not converged: raise max_products or tolerance in options=")
    return notes


def _with_data_errors(
    results: list[Result], left_out: list[list[Result]], measures: list[Measure], run: Run
) -> list[Result]:
    """Results with the errors that their samples cause, from results without one group after the other.

    The jackknife: se² = (B − 1)/B Σ_b (f_b − mean f)². Values that are not functions of sums over samples
    (eigenvalues, exploration of parameter space) have none.

    Args:
        results: What was measured on all samples.
        left_out: For every group, the same rows without its samples.
        measures: The measures.
        run: What the engines found.
    """
    assert run.groups is not None
    sums = {measure.name for measure in measures if measure.of_sums}
    B = len(left_out)
    if B < 2:
        return results
    values = torch.stack([_values(rows) for rows in left_out])
    errors = ((B - 1) / B * (values - values.mean(0)).square().sum(0)).sqrt()
    # What does not depend on the data, such as norms of weights, moves by rounding alone.
    errors = errors.where(errors > _ROUNDING * values.mean(0).abs(), 0.0).tolist()
    samples, population = run.statistics.samples, run.groups.population
    found = []
    for row, error in zip(results, errors, strict=True):
        known = row.measure in sums
        of_all = row if population is None else _of_population(row, error, 1 - samples / population, known)
        distributed = known and run.groups.distribution
        found.append(_with_data_error(of_all, error, samples) if distributed else of_all)
    return found


def _of_population(row: Result, error: float, left: float, known: bool) -> Result:
    """A row whose value is an estimate for all the samples that those measured were drawn from.

    Groups of samples scatter by their probes, too, so that the jackknife's error holds both. What the choice
    of samples adds shrinks with the share of samples that are left out, and is 0 where there are none.

    Args:
        row: What was measured on some samples.
        error: The jackknife's standard error.
        left: The share of the samples that are left out.
        known: Whether the row is a function of sums over samples.
    """
    if not known:
        return replace(row, notes=(*row.notes, "for these samples only; the choice of samples adds no error"))
    chosen = left * max(0.0, error**2 - row.stderr**2)
    method = "sampled" if chosen else row.method
    return replace(row, stderr=math.sqrt(row.stderr**2 + chosen), method=method)


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
