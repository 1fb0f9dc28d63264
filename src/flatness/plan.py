"""The plan: which layers are measured how, and why; made from a few samples before any data is streamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from flatness.curvature.exact import BLOCK
from flatness.curvature.layer_operator import kept_bytes_per_sample
from flatness.curvature.network_spectrum import SpectrumRequest
from flatness.curvature.routes import (
    LayerRoute,
    Routes,
    bytes_per_sample,
    graph_bytes_per_sample,
    positions_of,
    route_kind,
)
from flatness.errors import LayerError, NotExactError, OptionError, listed, nearest
from flatness.examine import Examined, examine
from flatness.graph import curved_operators
from flatness.layers import SUPPORTED, Layer, select_layers
from flatness.measures.catalogue import resolve_options, select_measures
from flatness.measures.measure import SPECTRA, Measure
from flatness.notebook import outline_html
from flatness.problem import Problem

# Backward passes per batch up to which "auto" stays exact.
_AFFORDABLE_PASSES = 256
_SPECTRUM_PART = {"layer_eigenvalue": "whole", "row_eigenvalues": "rows"}


@dataclass
class Plan:
    """What would run, and why. Print it.

    Attributes:
        measures: The measures to compute.
        layers: Names of the layers to measure, in network order.
        routes: How the shared pass treats every layer.
        reasons: For every layer, why its curvature is exact.
        spectra: For every layer, the eigenvalue problems to solve ("whole", "rows").
        options: Options by measure.
        curvature: "hessian" or "gauss_newton".
        notes: What is left out, and why.
        loss: Name of the loss.
        others: Plans for measures that are defined with another loss; each is a pass of its own.
        kept_bytes: Bytes per sample that the eigenvalue iterations keep if they fit.
        network_spectra: Spectra of the network's Hessian to find, by measure.
        gradient_routes: Layers and norm layers whose per-sample gradients come from one backward pass.
        graph_bytes: Rough size of one sample's graph of first derivatives.
        called: Every layer that the forward pass calls, measured or not, by name.
    """

    measures: list[Measure]
    layers: list[str]
    routes: Routes
    reasons: dict[str, str]
    spectra: dict[str, list[str]]
    options: dict[str, dict[str, Any]]
    curvature: str
    micro_batch: int
    notes: list[str] = field(default_factory=list)
    kept_bytes: int = 0
    loss: str = ""
    others: list[Plan] = field(default_factory=list)
    network_spectra: dict[str, SpectrumRequest] = field(default_factory=dict)
    gradient_routes: Routes = field(default_factory=lambda: Routes([]))
    graph_bytes: int = 0
    called: dict[str, Layer] = field(default_factory=dict)

    @property
    def needs_spread(self) -> list[str]:
        """Layers whose feature spreads are needed: one more forward pass."""
        return [route.name for route in self.routes.layers if "relative_normalized" in route.needs]

    @property
    def streams(self) -> bool:
        """Whether the shared pass has anything to compute beyond the risk."""
        return any(route.needs for route in self.routes.layers) or bool(self.routes.affine)

    def __str__(self) -> str:
        """The plan in words."""
        passes = (
            f"1 forward and {self.routes.passes} backward passes" if self.routes.passes else "1 forward pass"
        )
        spread = " after 1 forward pass for the features' spread" if self.needs_spread else ""
        lines = [f"measures: {', '.join(measure.name for measure in self.measures)}"]
        lines.append(f"shared pass: {passes} per micro-batch of {self.micro_batch}{spread}")
        routes = {route.name: route for route in self.routes.layers}
        for name in self.layers:
            route = routes[name]
            W = route.layer.matrix()
            shape = " × ".join(str(size) for size in (W.shape if W.shape[0] > 1 else W.shape[1:]))
            where = f"{route.positions} position{'s' * (route.positions > 1)}"
            label = name or "the model itself"
            lines.append(f"  {label}  W {shape}, {where}: exact, {route.kind}; {self.reasons[name]}")
        if self.spectra:
            named = ((name or "the model itself", parts) for name, parts in self.spectra.items())
            solved = ", ".join(f"{name} ({' and '.join(parts)})" for name, parts in named)
            lines.append(f"eigenvalues by Lanczos, all layers in step: {solved}")
        for name, request in self.network_spectra.items():
            over = "all parameters" if request.parameters == "all" else "all weights"
            lines.append(
                f"{name} over {over}: {request.solver} in the {request.metric} metric, one forward and two "
                "backward passes per product, in step with the others"
            )
        for measure in self.measures:
            if measure.explore is not None:
                lines.append(f"{measure.name}: {measure.cost or 'passes of its own'}")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"and with {other.loss}:\n{other}" for other in self.others]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return outline_html(str(self))


def make_plan(
    problem: Problem,
    *,
    measures: str | Iterable[str],
    layers: str | Iterable[str] | None,
    method: str,
    curvature: str,
    options: Mapping[str, Mapping[str, Any]] | None,
) -> Plan:
    """Decide how to measure. The problem must be guarded."""
    _check_choice("method", method, ("auto", "exact", "sampled"))
    _check_choice("curvature", curvature, ("hessian", "gauss_newton"))
    if method == "sampled":
        raise OptionError(
            "Expected method='exact' or 'auto' but got 'sampled'. The sampled engine is not part of this "
            "version: leave method out."
        )
    chosen = select_measures(measures)
    resolved = resolve_options(chosen, options)
    chosen = [item.adapted(resolved[item.name]) if item.adapted else item for item in chosen]
    network = any(measure.network_needs or measure.explore for measure in chosen)
    by_name = any(name == "last" for name, _ in problem.model.named_modules())
    examined = examine(
        problem, last_only=isinstance(layers, str) and layers == "last" and not by_name and not network
    )
    names = _selected(problem, examined, layers)
    if any(measure.of_layers for measure in chosen):
        _refuse(examined, names, curvature)
    needs = frozenset().union(*(measure.needs for measure in chosen))
    routes = Routes(
        [_route(problem, examined, name, needs - SPECTRA) for name in names], copy_inputs=examined.overwrites
    )
    if any("traces" in measure.network_needs for measure in chosen):
        _cover_network(problem, examined, routes, curvature)
    _count_passes(problem, examined, routes, method)
    _watch(problem, examined, unused=layers is None or routes.network)
    block = min(BLOCK, max(1, routes.passes))
    each = bytes_per_sample(routes, examined.records, examined.items, block, problem.dtype.itemsize)
    spectra = {
        measure.name: _spectrum_request(resolved[measure.name])
        for measure in chosen
        if "spectrum" in measure.network_needs
    }
    graph = graph_bytes_per_sample(examined.records, examined.items, problem.dtype.itemsize)
    walks = bool(spectra) or any(measure.explore is not None for measure in chosen)
    problem.fit_memory(max(each, graph if walks else 0), backward=routes.backward or walks)
    beyond_layers = walks or any(measure.network is not None for measure in chosen)
    parts = [_SPECTRUM_PART[need] for need in sorted(needs & SPECTRA)]
    rank = problem.loss.rank(examined.items) * examined.items.logits.shape[1]
    return Plan(
        measures=chosen,
        layers=names,
        routes=routes,
        reasons={name: _reason(examined, name, curvature) for name in names},
        spectra={name: list(parts) for name in names} if parts else {},
        options=resolved,
        curvature=curvature,
        micro_batch=problem.micro_batch,
        notes=list(examined.notes),
        kept_bytes=kept_bytes_per_sample(routes, rank, problem.dtype.itemsize),
        loss=problem.loss.name,
        network_spectra=spectra,
        gradient_routes=_gradient_routes(problem, examined) if beyond_layers else Routes([]),
        graph_bytes=graph,
        called={name: examined.layers[name] for name in examined.called},
    )


def _spectrum_request(options: Mapping[str, Any]) -> SpectrumRequest:
    known = {item.name for item in fields(SpectrumRequest)}
    return SpectrumRequest(**{key: value for key, value in options.items() if key in known})


def _gradient_routes(problem: Problem, examined: Examined) -> Routes:
    """All modules that run once and whose rows are samples: their per-sample gradients are cheap."""
    odd = {*examined.refused, *examined.idle, *examined.shared}
    fine = [name for name in examined.called if name not in odd]
    affine = [module for name, module in examined.affine.items() if name not in examined.refused]
    return Routes(
        [_route(problem, examined, name, frozenset()) for name in fine],
        affine=affine,
        copy_inputs=examined.overwrites,
    )


def _selected(problem: Problem, examined: Examined, layers: str | Iterable[str] | None) -> list[str]:
    kinds = {name: type(module).__name__ for name, module in problem.model.named_modules()}
    if examined.called:
        names = select_layers(examined.layers, examined.called, layers, last=examined.last, modules=kinds)
        return _one_per_weight(examined, names)
    if examined.layers:
        raise LayerError(
            "Expected at least one layer to measure but the forward pass calls none of "
            f"{listed(examined.layers)}. Call them as modules, not through their weights."
        )
    raise LayerError(
        f"Expected at least one supported layer ({SUPPORTED}) but "
        f"{type(problem.model).__name__} has none. Teach the library yours with flatness.register_layer."
    )


def _one_per_weight(examined: Examined, names: list[str]) -> list[str]:
    """The names without those whose weight comes under another name already."""
    kept: list[str] = []
    for name in names:
        shared = examined.shared.get(name)
        same = next((other for other in kept if shared and examined.shared.get(other) is shared), None)
        if same is None:
            kept.append(name)
        else:
            examined.notes.append(f"{name} has the weight of {same} and is measured under that name")
    return kept


def _why_not(examined: Examined, name: str, curvature: str) -> str | None:
    """Why a layer's curvature is not exact; None when it is."""
    if name in examined.refused:
        return examined.refused[name]
    if name in examined.shared and curvature == "hessian":
        return f"its weight is used {examined.reused[name]} times"
    operators = examined.graph.curved.get(name, [])
    return f"{listed(operators, 4)} after it" if operators and curvature == "hessian" else None


def _reason(examined: Examined, name: str, curvature: str) -> str:
    if name in examined.idle:
        return "the output does not depend on it: no curvature"
    if curvature == "gauss_newton":
        return "Gauss-Newton part, as asked"
    if name == examined.last:
        return "last layer: the output is linear in its weight"
    return "the network is piecewise linear after it"


def _refuse(examined: Examined, names: list[str], curvature: str) -> None:
    why_not = {name: _why_not(examined, name, curvature) for name in names}
    refused = {name: reason for name, reason in why_not.items() if reason is not None}
    if not refused:
        return
    reasons = "; ".join(
        f"{name or 'the model itself'}: {reason}" for name, reason in list(refused.items())[:12]
    )
    more = f" and {len(refused) - 12} more" if len(refused) > 12 else ""
    fine = [name for name in examined.called if _why_not(examined, name, curvature) is None]
    advice = []
    if fine:
        advice.append(
            f"layers={fine!r}"
            if len(fine) <= 4
            else "layers='last'"
            if examined.last in fine
            else "other layers"
        )
    if curvature == "hessian" and not set(refused) & set(examined.refused):
        advice.append("curvature='gauss_newton' for that part of the Hessian")
    instead = f": pass {', or '.join(advice)}." if advice else "."
    raise NotExactError(
        "Expected layers whose Hessian is exact, which needs a network that is piecewise linear after the "
        f"layer and uses its weight once, but got {reasons}{more}. Estimates for such layers are not part of "
        f"this version{instead}"
    )


def _route(problem: Problem, examined: Examined, name: str, needs: frozenset[str]) -> LayerRoute:
    record, n = examined.records[name], examined.items.logits.shape[0]
    shared = examined.shared.get(name)
    if shared is not None:
        size = record.x.numel() // n
        return LayerRoute(name, shared, "passes", needs, shared.matrix().shape[2], size)
    layer = examined.layers[name]
    kind = route_kind(layer, record, examined.items, problem.loss, examined.marked.get(name))
    return LayerRoute(name, layer, kind, needs, positions_of(layer, record, n), record.x.numel() // n)


def _cover_network(problem: Problem, examined: Examined, routes: Routes, curvature: str) -> None:
    """Add what the trace over all parameters needs, or say why there is none."""
    covered = [*examined.called, *examined.affine]
    reasons = {name: _why_not(examined, name, curvature) for name in covered}
    reasons |= {name: f"its weight is used {count} times" for name, count in examined.reused.items()}
    missing = [f"{name} ({reason})" for name, reason in reasons.items() if reason is not None]
    shared = {use.name for layer in examined.shared.values() for use in layer.uses}
    parts = {examined.layers[name].weight_name for name in examined.called}
    parts |= {examined.layers[name].bias_name for name in examined.called}
    for name, _ in problem.model.named_parameters():
        owner = name.rpartition(".")[0]
        known = name in parts or owner in examined.affine or owner in examined.silent
        if not known and owner not in shared:
            missing.append(name)
    if missing:
        examined.notes.append(f"no trace over the whole network: not exact for {listed(missing, 6)}")
        return
    routes.network = True
    routes.affine = list(examined.affine.values())
    selected = {route.name: route for route in routes.layers}
    for route in routes.layers:
        route.needs = route.needs | {"row_traces"}
    routes.layers = [
        selected.get(name) or _route(problem, examined, name, frozenset({"row_traces"}))
        for name in examined.called
    ]


def _count_passes(problem: Problem, examined: Examined, routes: Routes, method: str) -> None:
    rank, T = problem.loss.rank(examined.items), examined.items.logits.shape[1]
    if routes.kind("passes") or routes.affine:
        routes.passes = rank * T
        what = (
            f"{rank} per prediction × {T} predictions per sample"
            if T > 1
            else f"{rank}, one per output direction"
        )
        if method == "auto" and routes.passes > _AFFORDABLE_PASSES:
            raise NotExactError(
                f"Expected at most {_AFFORDABLE_PASSES} backward passes per batch but exact curvature of "
                f"hidden layers takes {routes.passes} ({what}). Pass method='exact' to do it anyway, or "
                "layers='last' with layer-level measures, which need none."
            )


def _watch(problem: Problem, examined: Examined, *, unused: bool) -> None:
    """Have later batches checked for taking another path through the network than the samples looked at.

    Hooks set here are removed with everything else that the guard sets back.
    """

    def check(output: Tensor) -> None:
        new = curved_operators(output) - examined.graph.operators
        if new:
            raise NotExactError(
                "Expected every batch to take the same path through the network but a later one meets "
                f"{listed(sorted(new))}, which the first samples did not. Exact curvature needs a path that "
                "does not depend on the data."
            )

    def refuse(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            raise LayerError(
                "Expected every batch to take the same path through the network but a later one calls "
                f"{name!r}, which the first samples did not. Name the layers to measure with layers=, "
                "without those used now and then."
            )

        return hook

    problem.watch = check
    for name in examined.silent if unused else ():
        problem.model.get_submodule(name).register_forward_pre_hook(refuse(name))


def _check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(
            f"Expected {argument} to be one of {listed(choices)} but got {value!r}.{nearest(value, choices)} "
            f"The default is {choices[0]!r}."
        )
