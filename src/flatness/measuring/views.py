"""What measures get to see: curvature of layers and of the network, from the sums, weight decay included."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flatness.catalogue.measure import LayerView, Measure, NetworkView, Valued, squared_norm
from flatness.catalogue.registry import reduce_values
from flatness.curvature.operators.penalty import (
    empty_statistic,
    penalised_spectrum,
    penalised_statistics,
)
from flatness.curvature.operators.spectrum import Spectrum
from flatness.curvature.sums.statistics import Statistics
from flatness.measuring.plan.plan import Plan
from flatness.measuring.request import SPECTRUM_PARTS
from flatness.problem.problem import Problem


def layer_views(
    problem: Problem,
    plan: Plan,
    statistics: Statistics,
    spectra: Mapping[tuple[str, str], Spectrum],
    spreads: Mapping[str, Tensor],
) -> list[LayerView]:
    """One view per measured layer, in network order."""
    views = []
    routes = plan.layer_routes
    for name in plan.layers:
        layer = routes[name].layer
        W = layer.matrix()
        means = {key: statistics.mean(name, key) for key in statistics.sums.get(name, {})}
        for key in routes[name].needs - set(means):
            # A layer that the output does not depend on: no signal arrived, its curvature is zero.
            means[key] = empty_statistic(key, W, layer.taps)
        V = layer.spread_per_column(spreads[name]).cpu() if name in spreads else None
        if problem.weight_decay:
            means = penalised_statistics(means, W.double().cpu(), layer.taps, V, problem.weight_decay)
        found = {
            need: penalised_spectrum(spectra[name, part], problem.weight_decay)
            for need, part in SPECTRUM_PARTS.items()
            if (name, part) in spectra
        }
        views.append(LayerView(name, W, means, found, taps=layer.taps, layer=layer))
    return views


def network_view(problem: Problem, plan: Plan, statistics: Statistics) -> NetworkView:
    """The view of all parameters; empty when no measure asks for it."""
    if all(measure.network is None for measure in plan.measures):
        return NetworkView({}, {})
    parameters = dict(problem.model.named_parameters())
    norms = {name: squared_norm(value) for name, value in parameters.items()}
    if not plan.network:
        return NetworkView({}, norms)
    traces = {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in parameters}
    for name, sources in trace_sources(plan).items():
        for owner, key in sources:
            if name in traces and key in statistics.sums.get(owner, {}):
                traces[name] = traces[name] + statistics.mean(owner, key).sum()
    for name, value in parameters.items():
        traces[name] = traces[name] + problem.weight_decay * value.numel()
    layer_traces = {
        route.name: statistics.mean(route.name, "row_traces").sum()
        + problem.weight_decay * route.layer.matrix().numel()
        for route in plan.layer_routes.values()
        if "row_traces" in statistics.sums.get(route.name, {})
    }
    return NetworkView(traces, norms, layer_traces)


def trace_sources(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """The statistics, by owner and name, whose sum is the trace of each parameter."""
    sources: dict[str, list[tuple[str, str]]] = {}
    for route in plan.layer_routes.values():
        # Several layers can be parts of one parameter: the packed projections of attention.
        weight, bias = (
            plan.aliases.get(name, name) for name in (route.layer.weight_name, route.layer.bias_name)
        )
        sources.setdefault(weight, []).append((route.name, "row_traces"))
        if bias is not None:
            sources.setdefault(bias, []).append((f"{route.name}.bias", "diagonal"))
    for name in plan.rest:
        sources[name] = [(name, "trace")]
    for module in [t.module for t in plan.treatments.values() if t.module is not None]:
        for key in ("weight", "bias"):
            # A model that is one module has the empty name, and its bias is kept as ".bias".
            owner = f"{module.name}.{key}"
            sources.setdefault(owner.lstrip("."), []).append((owner, "diagonal"))
    return sources


def layer_values(measure: Measure, view: LayerView) -> Tensor:
    """All numbers of a layer: of its units and their reductions, or its one value."""
    if measure.units is not None:
        values = measure.units(view).flatten().double()
        return torch.cat([values, *(reduce_values(name, values)[None] for name in measure.reductions)])
    assert measure.layer is not None
    return torch.tensor([number_of(measure.layer(view))], dtype=torch.float64, device="cpu")


def number_of(value: Valued | Tensor | float) -> float:
    """The number that a measure returned, with or without something to say about it."""
    return value.value if isinstance(value, Valued) else float(value)
