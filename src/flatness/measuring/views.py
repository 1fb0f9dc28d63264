"""What measures get to see: curvature of layers and of the network, from the sums, weight decay included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatness.catalogue.measure import LayerView, Measure, NetworkView, Valued, squared_norm
from flatness.catalogue.registry import reduce_values
from flatness.curvature.spectra import LAYER_METRICS, Spectrum
from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.kinds import STATISTICS
from flatness.curvature.sums.routes import LayerRoute
from flatness.curvature.sums.spread import Spread
from flatness.curvature.sums.statistics import Statistics
from flatness.errors import MeasureError
from flatness.measuring.plan.plan import Plan
from flatness.measuring.request import SPECTRUM_PARTS, MeasureRequest
from flatness.network.layers import Layer
from flatness.network.layers.view import parameter_name
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

    @classmethod
    def of(cls, route: LayerRoute, reason: str) -> LayerOutline:
        """The outline of a layer whose statistics go this way, for this reason."""
        return cls(route.layer.matrix(), route.layer.taps, route.needs, reason, route.layer)


@dataclass(frozen=True)
class Outline:
    """What was measured: all that turns sums into rows, and neither the network nor its data.

    Attributes:
        request: What was asked for.
        loss: Name of the loss.
        curvature: "hessian" or "gauss_newton".
        weight_decay: Its coefficient.
        layers: The measured layers by name, in network order.
        norms: ‖·‖² of every parameter; empty when no measure asks for the network.
        sizes: Entries of every parameter.
        layer_sizes: Entries of the weight of every layer, measured or part of the trace.
        sources: The statistics, by owner and name, whose sum is the trace of each parameter; empty when the
            network was not traced.
    """

    request: MeasureRequest
    loss: str
    curvature: str
    weight_decay: float
    layers: dict[str, LayerOutline]
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
            plan.request,
            plan.loss,
            plan.curvature,
            problem.weight_decay,
            {name: LayerOutline.of(routes[name], plan.treatments[name].reason) for name in plan.layers},
            {name: squared_norm(value) for name, value in parameters.items()},
            {name: value.numel() for name, value in parameters.items()},
            {name: route.layer.matrix().numel() for name, route in routes.items()},
            trace_sources(plan) if plan.network else {},
        )


def layer_views(
    outline: Outline,
    statistics: Statistics,
    spectra: Mapping[tuple[str, str], Spectrum],
    spreads: Mapping[str, Spread],
) -> list[LayerView]:
    """One view per measured layer, in network order."""
    views = []
    decay = outline.weight_decay
    for name, own in outline.layers.items():
        W = own.weight
        spread, V, whitening = spreads.get(name), None, None
        if own.layer and spread is not None:
            V = own.layer.spread_per_column(spread.V).cpu()
            whitening = None if spread.whitening is None else spread.whitening.to(V)
        means = {key: statistics.mean(name, key) for key in statistics.sums.get(name, {})}
        # Where nothing was summed no signal arrived: the output does not depend on the layer.
        wanted = means.keys() | own.needs if decay else own.needs - means.keys()
        if wanted:
            means |= _with_decay(means, wanted, Frame(W.double().cpu(), own.taps, V, whitening), decay)
        found = _spectra_of(name, spectra, decay)
        views.append(LayerView(name, W, means, found, taps=own.taps, layer=own.layer, whitening=whitening))
    return views


def _spectra_of(
    name: str, spectra: Mapping[tuple[str, str], Spectrum], weight_decay: float
) -> dict[str, Spectrum]:
    """A layer's spectra by need; in a metric weight decay is no shift, since it is there already."""
    return {
        need: spectra[name, part].shifted(0.0 if part in LAYER_METRICS else weight_decay)
        for need, part in SPECTRUM_PARTS.items()
        if (name, part) in spectra
    }


def _with_decay(
    means: Mapping[str, Tensor], names: Iterable[str], frame: Frame, weight_decay: float
) -> dict[str, Tensor]:
    """These statistics of H + λ·1, which E + (λ/2)‖θ‖² makes of every Hessian; H is 0 where none is known."""
    ones = {name: STATISTICS[name].of_identity(frame) for name in names}
    return {name: means.get(name, torch.zeros_like(one)) + weight_decay * one for name, one in ones.items()}


def network_view(outline: Outline, statistics: Statistics) -> NetworkView:
    """The view of all parameters; empty when no measure asks for it."""
    if not outline.sources:
        return NetworkView({}, outline.norms)

    def trace(sources: Iterable[tuple[str, str]], size: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for owner, key in sources:
            if key in statistics.sums.get(owner, {}):
                total = total + statistics.mean(owner, key).sum()
        return total + outline.weight_decay * size

    return NetworkView(
        {name: trace(outline.sources.get(name, ()), size) for name, size in outline.sizes.items()},
        outline.norms,
        {
            name: trace([(name, "row_traces")], size)
            for name, size in outline.layer_sizes.items()
            if "row_traces" in statistics.sums.get(name, {})
        },
    )


def trace_sources(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """The statistics, by owner and name, whose sum is the trace of each parameter."""
    sources: dict[str, list[tuple[str, str]]] = {}
    for name, treatment in plan.treatments.items():
        if treatment.route is not None:
            layer = treatment.route.layer
            found = {layer.weight_name: (name, "row_traces"), layer.bias_name: (f"{name}.bias", "diagonal")}
        else:
            keys = ("weight", "bias")
            found = {parameter_name(name, key): (f"{name}.{key}", "diagonal") for key in keys}
        for parameter, source in found.items():
            # Several layers can be parts of one parameter: the packed projections of attention.
            sources.setdefault(plan.aliases.get(parameter, parameter), []).append(source)
    return sources | {name: [(name, "trace")] for name in plan.rest}


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
