"""Making a plan: a few samples are looked at, then every layer gets its way, before any data is streamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from torch import Tensor, nn

from flatness.covering import Covered, cover, first_names, refuse_made_weights
from flatness.curvature.exact import BLOCK
from flatness.curvature.layer_operator import kept_bytes_per_sample
from flatness.curvature.network_spectrum import SpectrumRequest
from flatness.curvature.parameter_probes import ParameterRoutes
from flatness.curvature.parameter_products import own_parameter
from flatness.curvature.routes import (
    LayerRoute,
    Routes,
    bytes_per_sample,
    graph_bytes_per_sample,
    positions_of,
    route_kind,
)
from flatness.deciding import AFFORDABLE_PASSES, Decision, decide, most_directions, output_directions, refuse
from flatness.errors import LayerError, NotExactError, OptionError, listed, nearest
from flatness.examine import examine
from flatness.examined import Examined
from flatness.graph import curved_operators
from flatness.hidden_curvature import note_hidden_curvature
from flatness.layers import SUPPORTED, select_layers
from flatness.layers.linear import ProjectionLayer
from flatness.measures.catalogue import resolve_options, select_measures
from flatness.measures.measure import SPECTRA
from flatness.parts import named_modules
from flatness.plan import Plan
from flatness.problem import Problem

# Numbers in a weight used more than once up to which every sample gets a copy of it.
_LARGEST_COPY = 1 << 22
_SPECTRUM_PART = {"layer_eigenvalue": "whole", "row_eigenvalues": "rows"}


def make_plan(
    problem: Problem,
    *,
    measures: str | Iterable[str],
    layers: str | Iterable[str] | None,
    method: str,
    curvature: str,
    options: Mapping[str, Mapping[str, Any]] | None,
    precision: float = 0.01,
    max_passes: int = 100,
) -> Plan:
    """Decide how to measure. The problem must be guarded."""
    _check_choice("method", method, ("auto", "exact", "sampled"))
    _check_choice("curvature", curvature, ("hessian", "gauss_newton", "finite_differences"))
    chosen = select_measures(measures)
    resolved = resolve_options(chosen, options)
    chosen = [item.adapted(resolved[item.name]) if item.adapted else item for item in chosen]
    network = any(measure.network_needs or measure.explore for measure in chosen)
    by_name = any(name == "last" for name, _ in named_modules(problem.model))
    examined = examine(
        problem, last_only=isinstance(layers, str) and layers == "last" and not by_name and not network
    )
    names = _selected(problem, examined, layers)
    of_layers = any(measure.of_layers for measure in chosen)
    if of_layers:
        refuse(examined, names)
    _free_large(problem, examined, curvature)
    if curvature == "finite_differences":
        refuse_made_weights(problem, examined, names)
    most = most_directions(method, max_passes)
    covered = cover(problem, examined, chosen, names, curvature, most if method == "exact" else None)
    needs = frozenset().union(*(measure.needs for measure in chosen))
    wanted = dict.fromkeys(names, needs - SPECTRA)
    if covered is not None:
        wanted = {name: wanted.get(name, frozenset()) for name in covered.layers}
    made = {name: _route(problem, examined, name, asked) for name, asked in wanted.items()}
    closed = {name for name, route in made.items() if route.kind != "passes"}
    decided = partial(
        decide,
        problem,
        examined,
        closed=closed,
        method=method,
        curvature=curvature,
        precision=precision,
        max_passes=max_passes,
    )
    decision = decided(names if of_layers else [])
    if covered is not None:
        try:
            decision = decided([*covered.layers, *covered.affine])
        except NotExactError as error:
            examined.notes.append(f"no trace over the whole network. {error}")
            covered = None
            made = {name: made[name] for name in names}
    routes, sampling, by_parameters = _split(examined, made, decision, covered)
    by_parameters.curvature = curvature
    by_parameters.may_complete = method != "sampled"
    by_parameters.parameters = {
        route.name: own_parameter(problem.model, route.layer) or "" for route in by_parameters.layers
    }
    if covered is not None and sum(covered.rest.values()) <= most:
        by_parameters.complete |= {None}
    rank = output_directions(problem, examined, method)
    if routes.kind("passes") or routes.affine:
        routes.passes = rank
    _watch(problem, examined, unused=layers is None or routes.network)
    block = min(BLOCK, max(1, routes.passes))
    each = bytes_per_sample(routes, examined.records, examined.items, block, problem.dtype.itemsize)
    spectra = {
        measure.name: _spectrum_request(resolved[measure.name])
        for measure in chosen
        if "spectrum" in measure.network_needs
    }
    graph = graph_bytes_per_sample(examined.records, examined.items, problem.dtype.itemsize)
    # Every sample's copy of a weight, its direction, product and what lies between.
    copied = sum(layer.matrix().numel() for layer in sampling.shared.values())
    graph += 6 * copied * problem.dtype.itemsize
    parts = [_SPECTRUM_PART[need] for need in sorted(needs & SPECTRA)]
    walks = bool(spectra) or any(measure.explore is not None for measure in chosen)
    beyond_layers = walks or any(measure.network is not None for measure in chosen)
    heavy = walks or bool(sampling.layers or sampling.affine or by_parameters)
    by_products = {
        name
        for name in names
        if parts
        and (
            name in decision.curved
            or name in decision.by_parameters
            or (rank > AFFORDABLE_PASSES and made[name].kind == "passes")
        )
    }
    heavy = heavy or bool(by_products)
    if curvature == "hessian" and heavy:
        note_hidden_curvature(problem, examined)
    problem.fit_memory(max(each, graph if heavy else 0), backward=routes.backward or heavy)
    measured = Routes([made[name] for name in names if name not in by_products])
    return Plan(
        measures=chosen,
        layers=names,
        routes=routes,
        sampling=sampling,
        by_parameters=by_parameters,
        aliases=first_names(problem.model),
        complete=decision.complete,
        methods={name: decision.method(name) for name in decision.reasons},
        reasons=decision.reasons or dict.fromkeys(names, "of the weights alone"),
        precision=precision,
        max_passes=max_passes,
        rank=rank,
        spectra={name: list(parts) for name in names} if parts else {},
        by_products=frozenset(by_products),
        options=resolved,
        curvature="gauss_newton" if curvature == "gauss_newton" else "hessian",
        differences=curvature == "finite_differences",
        micro_batch=problem.micro_batch,
        notes=list(examined.notes),
        kept_bytes=kept_bytes_per_sample(measured, rank, problem.dtype.itemsize),
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
    kinds = {name: type(module).__name__ for name, module in named_modules(problem.model)}
    if examined.called:
        names = select_layers(examined.layers, examined.called, layers, last=examined.last, modules=kinds)
        return _one_per_weight(problem, examined, names)
    if examined.layers:
        raise LayerError(
            "Expected at least one layer to measure but the forward pass calls none of "
            f"{listed(examined.layers)}. Call them as modules, not through their weights."
        )
    raise LayerError(
        f"Expected at least one supported layer ({SUPPORTED}) but "
        f"{type(problem.model).__name__} has none. Teach the library yours with flatness.register_layer."
    )


def _weight_key(problem: Problem, examined: Examined, name: str) -> object:
    """What layers with one weight have in common."""
    if name in examined.shared:
        return id(examined.shared[name])
    layer = examined.layers[name]
    packed = isinstance(layer, ProjectionLayer)
    return own_parameter(problem.model, layer) if name in examined.loose and not packed else name


def _free_large(problem: Problem, examined: Examined, curvature: str) -> None:
    """Weights used more than once whose copies for every sample are too large go through their parameter."""
    for name, layer in list(examined.shared.items()):
        large = layer.matrix().numel() > _LARGEST_COPY and curvature == "hessian"
        if (large or curvature == "finite_differences") and own_parameter(problem.model, layer) is not None:
            examined.refused.setdefault(name, f"its weight is used {examined.reused[name]} times")
            examined.loose.add(name)


def _one_per_weight(problem: Problem, examined: Examined, names: list[str]) -> list[str]:
    """The names without those whose weight comes under another name already."""
    kept: list[str] = []
    for name in names:
        weight = _weight_key(problem, examined, name)
        same = next((other for other in kept if _weight_key(problem, examined, other) == weight), None)
        if same is None:
            kept.append(name)
        else:
            examined.notes.append(f"{name} has the weight of {same} and is measured under that name")
    return kept


def _route(problem: Problem, examined: Examined, name: str, needs: frozenset[str]) -> LayerRoute:
    record, n = examined.records[name], examined.items.logits.shape[0]
    shared = examined.shared.get(name)
    if shared is not None:
        size = record.x.numel() // n
        return LayerRoute(name, shared, "passes", needs, shared.matrix().shape[2], size)
    layer = examined.layers[name]
    kind = route_kind(layer, record, examined.items, problem.loss, examined.marked.get(name))
    return LayerRoute(name, layer, kind, needs, positions_of(layer, record, n), record.x.numel() // n)


def _split(
    examined: Examined, routes: dict[str, LayerRoute], decision: Decision, covered: Covered | None
) -> tuple[Routes, Routes, ParameterRoutes]:
    """The routes of the exact and of the sampled engine, and what goes through parameters."""
    network = covered is not None
    for route in routes.values():
        # What Gauss-Newton leaves out is said as a share of the trace.
        if network or route.name in decision.curved | decision.by_parameters:
            route.needs = route.needs | {"row_traces"}
    affine = [examined.affine[name] for name in covered.affine] if covered is not None else []
    through = [route for name, route in routes.items() if name in decision.by_parameters]
    routes = {name: route for name, route in routes.items() if name not in decision.by_parameters}
    both = []
    for sampled in (False, True):
        both.append(
            Routes(
                [route for name, route in routes.items() if (name in decision.sampled) == sampled],
                affine=[module for module in affine if (module.name in decision.sampled) == sampled],
                network=network,
                copy_inputs=examined.overwrites,
                curved=decision.curved if sampled else frozenset(),
            )
        )
    rest = list(covered.rest) if covered is not None else []
    return (
        both[0],
        both[1],
        ParameterRoutes(through, rest=rest, complete=frozenset(decision.complete_by_parameters)),
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
