"""What measures get to see: curvature of layers and of the network, from the sums, weight decay included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatness.catalogue.measure import LayerView, Measure, NetworkView, Valued, squared_norm
from flatness.catalogue.registry import reduce_values
from flatness.curvature.operators.spectrum import Spectrum
from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.kinds import STATISTICS
from flatness.curvature.sums.statistics import Statistics
from flatness.errors import MeasureError
from flatness.measuring.plan.plan import Plan
from flatness.measuring.request import SPECTRUM_PARTS
from flatness.network.layers import Layer
from flatness.problem.problem import Problem


@dataclass(frozen=True)
class LayerOutline:
    """A measured layer, without the network.

    Attributes:
        weight: W (G, d, m).
        taps: Columns of W per input unit.
        needs: The statistics that were summed.
        reason: Why its curvature is what it is, in words.
        layer: The layer itself, where there is one.
    """

    weight: Tensor
    taps: int
    needs: frozenset[str]
    reason: str
    layer: Layer | None = None


@dataclass(frozen=True)
class Outline:
    """What was measured: all that turns sums into rows, and neither the network nor its data.

    Attributes:
        measures: The measures, each as its options make it.
        options: Their options, by measure.
        loss: Name of the loss.
        curvature: "hessian" or "gauss_newton".
        weight_decay: Its coefficient.
        layers: The measured layers by name, in network order.
        network: Whether all parameters of the network were traced.
        norms: ‖·‖² of every parameter; empty when no measure asks for the network.
        sizes: Entries of every parameter.
        layer_sizes: Entries of the weight of every layer, measured or part of the trace.
        sources: The statistics, by owner and name, whose sum is the trace of each parameter.
    """

    measures: list[Measure]
    options: dict[str, dict[str, Any]]
    loss: str
    curvature: str
    weight_decay: float
    layers: dict[str, LayerOutline]
    network: bool
    norms: dict[str, Tensor]
    sizes: dict[str, int]
    layer_sizes: dict[str, int]
    sources: dict[str, list[tuple[str, str]]]

    @classmethod
    def of(cls, problem: Problem, plan: Plan) -> Outline:
        """The outline of a plan."""
        routes = plan.layer_routes
        of_network = any(measure.network is not None for measure in plan.measures)
        parameters = dict(problem.model.named_parameters()) if of_network else {}
        return cls(
            plan.measures,
            plan.request.options,
            plan.loss,
            plan.curvature,
            problem.weight_decay,
            {
                name: LayerOutline(
                    routes[name].layer.matrix(),
                    routes[name].layer.taps,
                    routes[name].needs,
                    plan.treatments[name].reason,
                    routes[name].layer,
                )
                for name in plan.layers
            },
            plan.network,
            {name: squared_norm(value) for name, value in parameters.items()},
            {name: value.numel() for name, value in parameters.items()},
            {name: route.layer.matrix().numel() for name, route in routes.items()},
            trace_sources(plan),
        )


def layer_views(
    outline: Outline,
    statistics: Statistics,
    spectra: Mapping[tuple[str, str], Spectrum],
    spreads: Mapping[str, Tensor],
) -> list[LayerView]:
    """One view per measured layer, in network order."""
    views = []
    decay = outline.weight_decay
    for name, own in outline.layers.items():
        W = own.weight
        V = own.layer.spread_per_column(spreads[name]).cpu() if own.layer and name in spreads else None
        means = {key: statistics.mean(name, key) for key in statistics.sums.get(name, {})}
        # Where nothing was summed no signal arrived: the output does not depend on the layer.
        wanted = means.keys() | own.needs if decay else own.needs - means.keys()
        if wanted:
            means |= _with_decay(means, wanted, Frame(W.double().cpu(), own.taps, V), decay)
        found = {
            need: spectra[name, part].shifted(decay)
            for need, part in SPECTRUM_PARTS.items()
            if (name, part) in spectra
        }
        views.append(LayerView(name, W, means, found, taps=own.taps, layer=own.layer))
    return views


def _with_decay(
    means: Mapping[str, Tensor], names: Iterable[str], frame: Frame, weight_decay: float
) -> dict[str, Tensor]:
    """These statistics of H + λ·1, which E + (λ/2)‖θ‖² makes of every Hessian; H is 0 where none is known."""
    ones = {name: STATISTICS[name].of_identity(frame) for name in names}
    return {name: means.get(name, torch.zeros_like(one)) + weight_decay * one for name, one in ones.items()}


def network_view(outline: Outline, statistics: Statistics) -> NetworkView:
    """The view of all parameters; empty when no measure asks for it."""
    if not outline.network:
        return NetworkView({}, outline.norms)
    traces = {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in outline.sizes}
    for name, sources in outline.sources.items():
        for owner, key in sources:
            if name in traces and key in statistics.sums.get(owner, {}):
                traces[name] = traces[name] + statistics.mean(owner, key).sum()
    for name, size in outline.sizes.items():
        traces[name] = traces[name] + outline.weight_decay * size
    layer_traces = {
        name: statistics.mean(name, "row_traces").sum() + outline.weight_decay * size
        for name, size in outline.layer_sizes.items()
        if "row_traces" in statistics.sums.get(name, {})
    }
    return NetworkView(traces, outline.norms, layer_traces)


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
    return torch.tensor([number_of(measure, measure.layer(view))], dtype=torch.float64, device="cpu")


def number_of(measure: Measure, value: Valued | Tensor | float) -> float:
    """The number that a measure returned, with or without something to say about it.

    Raises:
        MeasureError: When it returned several.
    """
    if isinstance(value, Valued):
        return value.value
    if isinstance(value, Tensor) and value.numel() != 1:
        raise MeasureError(
            f"Expected {measure.name!r} to return one number but got a tensor of shape {tuple(value.shape)}. "
            "Sum it up, or give units= for a value per unit."
        )
    return float(value)
