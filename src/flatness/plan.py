"""The plan: which layers are measured how, and why; made from a few samples before any data is streamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flatness.affine import find_affine
from flatness.curvature.exact import BLOCK
from flatness.curvature.layer_operator import kept_bytes_per_sample
from flatness.curvature.recording import Record, Recording
from flatness.curvature.routes import LayerRoute, Routes, bytes_per_sample, positions_of, route_kind
from flatness.errors import LayerError, NotExactError, OptionError, listed, nearest
from flatness.graph import InPlaceOperators, curved_operators
from flatness.layers import Layer, find_layers, select_layers
from flatness.losses import Items
from flatness.measures.catalogue import SPECTRA, Measure, resolve_options, select_measures
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
        kept_bytes: Bytes per sample that the eigenvalue iterations keep if they fit.
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
        passes = f"1 forward and {self.routes.passes} backward passes" if self.routes.passes else "1 forward pass"
        spread = " after 1 forward pass for the features' spread" if self.needs_spread else ""
        lines = [f"measures: {', '.join(measure.name for measure in self.measures)}"]
        lines.append(f"shared pass: {passes} per micro-batch of {self.micro_batch}{spread}")
        routes = {route.name: route for route in self.routes.layers}
        for name in self.layers:
            route = routes[name]
            W = route.layer.matrix()
            shape = " × ".join(str(size) for size in (W.shape if W.shape[0] > 1 else W.shape[1:]))
            lines.append(f"  {name}  W {shape}, {route.positions} position{'s' * (route.positions > 1)}: exact, {route.kind}; {self.reasons[name]}")
        if self.spectra:
            solved = ", ".join(f"{name} ({' and '.join(parts)})" for name, parts in self.spectra.items())
            lines.append(f"eigenvalues by Lanczos, all layers in step: {solved}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__


def make_plan(
    problem: Problem,
    *,
    measures: str | Iterable[str],
    layers: str | list[str] | None,
    method: str,
    curvature: str,
    options: Mapping[str, Mapping[str, Any]] | None,
) -> Plan:
    """Decide how to measure. The problem must be guarded."""
    _check_choice("method", method, ("auto", "exact", "sampled"))
    _check_choice("curvature", curvature, ("hessian", "gauss_newton"))
    if method == "sampled":
        raise OptionError("Expected method='exact' or 'auto' but got 'sampled': the sampled engine is not part of this version.")
    chosen = select_measures(measures)
    resolved = resolve_options(chosen, options)
    example = problem.example()
    problem.probe(example)
    examined = _examine(problem, example)
    notes = list(examined.notes)
    names = select_layers(examined.available, examined.called, layers)
    if not names:
        raise LayerError(_no_layers(problem.model, examined.available))
    reasons = {name: _reason(problem, examined, name, curvature) for name in names}
    _refuse_curved({name: reason.why_not for name, reason in reasons.items()}, examined.called, curvature)
    needs = frozenset().union(*(measure.needs for measure in chosen))
    routes = _routes(problem, examined, names, needs - SPECTRA)
    if any(measure.network_needs for measure in chosen):
        _cover_network(problem, examined, routes, curvature, notes)
    _count_passes(problem, examined, routes, method)
    block = min(BLOCK, max(1, routes.passes))
    each = bytes_per_sample(routes, examined.records, examined.items, block, problem.dtype.itemsize)
    problem.fit_memory(each, backward=routes.backward)
    parts = [_SPECTRUM_PART[need] for need in sorted(needs & SPECTRA)]
    rank = problem.loss.rank(examined.items) * examined.items.logits.shape[1]
    return Plan(
        measures=chosen,
        layers=names,
        routes=routes,
        reasons={name: reason.why for name, reason in reasons.items()},
        spectra={name: list(parts) for name in names} if parts else {},
        options=resolved,
        curvature=curvature,
        micro_batch=problem.micro_batch,
        notes=notes,
        kept_bytes=kept_bytes_per_sample(routes, rank, problem.dtype.itemsize),
    )


@dataclass
class _Examined:
    """What one recorded forward pass of a few samples tells about the network."""

    items: Items
    available: dict[str, Layer]
    called: list[str]
    records: dict[str, Record]
    uses: dict[str, int]
    curved: dict[str, list[str]]
    affine: dict[str, Any]
    overwrites: bool
    notes: list[str]


@dataclass
class _Reason:
    why: str
    why_not: str | None = None


def _examine(problem: Problem, example: Any) -> _Examined:
    available, affine = find_layers(problem.model), find_affine(problem.model)
    modules: dict[str, nn.Module] = {name: layer.module for name, layer in available.items()}
    modules |= {name: module.module for name, module in affine.items()}
    with Recording(modules) as recording:
        with InPlaceOperators() as in_place:
            items = problem.items(example)
        n = items.logits.shape[0]
        records = {name: calls[-1] for name, calls in recording.calls.items()}
        uses = {name: len(calls) for name, calls in recording.calls.items()}
        called = [name for name in recording.calls if name in available]
        edges = {name: record.z_edge for name, record in records.items() if record.z_edge is not None}
        curved = curved_operators(
            items.logits, edges, final_log_softmax=problem.loss.shift_invariant, linear_in_place=in_place.linear
        )
        overwrites = bool(recording.overwritten())
        for name in called:
            if records[name].x.shape[0] % n:
                raise LayerError(
                    f"Expected the input of {name!r} to have one row per sample, {n} here, but it has shape {list(records[name].x.shape)}. "
                    "Samples must come first (batch_first=True), or leave the layer out with layers=."
                )
    notes = []
    silent = [name for name in available if name not in uses]
    if silent:
        notes.append(f"never called in the forward pass and left out: {listed(silent)}")
    _note_unsupported(problem.model, available, affine, notes)
    _add_tied(problem.model, uses)
    return _Examined(items, available, called, records, uses, curved, affine, overwrites, notes)


def _note_unsupported(model: nn.Module, available: dict[str, Layer], affine: dict[str, Any], notes: list[str]) -> None:
    unknown = [
        f"{name or type(module).__name__} ({type(module).__name__})"
        for name, module in model.named_modules()
        if name not in available and name not in affine and next(module.parameters(recurse=False), None) is not None
    ]
    if unknown:
        notes.append(f"not a supported layer and left out: {listed(unknown)}; flatness.register_layer can teach it")


def _add_tied(model: nn.Module, uses: dict[str, int]) -> None:
    """Count a parameter that several modules share as one use for each of them."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        distinct = {name for name in names if name in uses}
        for name in distinct:
            uses[name] = max(uses[name], len(names))


def _reason(problem: Problem, examined: _Examined, name: str, curvature: str) -> _Reason:
    if examined.uses[name] > 1:
        return _Reason("", f"its weight is used {examined.uses[name]} times")
    if curvature == "gauss_newton":
        return _Reason("Gauss-Newton part, as asked")
    operators = examined.curved[name]
    if operators:
        return _Reason("", f"{listed(operators, 4)} after it")
    if name == examined.called[-1]:
        return _Reason("last layer: the output is linear in its weight")
    return _Reason("the network is piecewise linear after it")


def _refuse_curved(why_not: dict[str, str | None], called: list[str], curvature: str) -> None:
    refused = {name: reason for name, reason in why_not.items() if reason is not None}
    if not refused:
        return
    reasons = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:12])
    more = f" and {len(refused) - 12} more" if len(refused) > 12 else ""
    fine = [name for name, reason in why_not.items() if reason is None]
    instead = f"layers={fine!r}" if fine and len(fine) <= 4 else "layers='last'"
    if called and why_not.get(called[-1], None) is not None:
        instead = "other layers"
    shared = any("used" in reason for reason in refused.values())
    alternative = "" if curvature == "gauss_newton" or shared else ", or curvature='gauss_newton' for that part of the Hessian"
    raise NotExactError(
        "Expected layers whose Hessian is exact, which needs a network that is piecewise linear after the layer and uses its weight once, "
        f"but got {reasons}{more}. Estimates for such layers are not part of this version: pass {instead}{alternative}."
    )


def _routes(problem: Problem, examined: _Examined, names: list[str], needs: frozenset[str]) -> Routes:
    return Routes([_route(problem, examined, name, needs) for name in names], copy_inputs=examined.overwrites)


def _route(problem: Problem, examined: _Examined, name: str, needs: frozenset[str]) -> LayerRoute:
    layer, record = examined.available[name], examined.records[name]
    n = examined.items.logits.shape[0]
    kind = route_kind(layer, record, examined.items, problem.loss)
    return LayerRoute(name, layer, kind, needs, positions_of(layer, record, n), record.x.numel() // n)


def _cover_network(problem: Problem, examined: _Examined, routes: Routes, curvature: str, notes: list[str]) -> None:
    """Add what the trace over all parameters needs, or say why there is none."""
    covered: set[str] = set()
    problems: list[str] = []
    for name in examined.called:
        covered |= {f"{name}.{key}" for key, _ in examined.available[name].module.named_parameters(recurse=False)}
    used_affine = [module for name, module in examined.affine.items() if name in examined.uses]
    for module in used_affine:
        covered |= set(module.parameter_names())
    for name in [*examined.called, *(module.name for module in used_affine)]:
        why_not = _reason(problem, examined, name, curvature).why_not
        if why_not is not None:
            problems.append(f"{name} ({why_not})")
    silent = {name for name in examined.available if name not in examined.uses} | {name for name in examined.affine if name not in examined.uses}
    parameters = [name for name, _ in problem.model.named_parameters()]
    missing = [name for name in parameters if name not in covered and name.rpartition(".")[0] not in silent]
    if problems or missing:
        notes.append(f"no trace over the whole network: not exact for {listed([*problems, *missing], 6)}")
        return
    routes.network = True
    routes.affine = used_affine
    selected = {route.name: route for route in routes.layers}
    for route in routes.layers:
        route.needs = route.needs | {"row_traces"}
    routes.layers = [
        selected.get(name) or _route(problem, examined, name, frozenset({"row_traces"})) for name in examined.called
    ]


def _count_passes(problem: Problem, examined: _Examined, routes: Routes, method: str) -> None:
    rank, T = problem.loss.rank(examined.items), examined.items.logits.shape[1]
    if routes.kind("passes") or routes.affine:
        routes.passes = rank * T
        what = f"{rank} per prediction × {T} predictions per sample" if T > 1 else f"{rank}, one per output direction"
        if method == "auto" and routes.passes > _AFFORDABLE_PASSES:
            raise NotExactError(
                f"Expected at most {_AFFORDABLE_PASSES} backward passes per batch but exact curvature of hidden layers takes {routes.passes} ({what}). "
                "Pass method='exact' to do it anyway, or layers='last' with layer-level measures, which need none."
            )


def _no_layers(model: nn.Module, available: dict[str, Layer]) -> str:
    if available:
        return f"Expected at least one layer to measure but the forward pass calls none of {listed(available)}."
    return (
        f"Expected at least one supported layer (Linear, Conv1d, Conv2d, Conv3d) but {type(model).__name__} has none. "
        "Teach the library yours with flatness.register_layer."
    )


def _check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"Expected {argument} to be one of {listed(choices)} but got {value!r}.{nearest(value, choices)}")


