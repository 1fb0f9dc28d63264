"""Making a plan: a few samples are looked at, then every layer gets its way, before any data is streamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flatness.curvature.operators.layer_operator import kept_bytes_per_sample
from flatness.curvature.parameters.parameter_products import own_parameter
from flatness.curvature.sums.exact import BLOCK
from flatness.curvature.sums.parameter_probes import ParameterRoutes
from flatness.curvature.sums.routes import (
    LayerRoute,
    Routes,
    bytes_per_sample,
    graph_bytes_per_sample,
    positions_of,
    route_kind,
)
from flatness.errors import NotExactError
from flatness.measuring.examine.examination import examine
from flatness.measuring.examine.examined import Examined
from flatness.measuring.examine.hidden_curvature import note_hidden_curvature
from flatness.measuring.plan.coverage import Covered, cover, first_names, refuse_made_weights
from flatness.measuring.plan.decision import (
    AFFORDABLE_PASSES,
    Decision,
    decide,
    output_directions,
    refuse,
)
from flatness.measuring.plan.plan import Plan
from flatness.measuring.plan.selection import selected_layers
from flatness.measuring.plan.watch import watch_path
from flatness.measuring.request import Asked, asked_for
from flatness.network.parts import named_modules
from flatness.problem.problem import Problem

# Numbers in a weight used more than once up to which every sample gets a copy of it.
_LARGEST_COPY = 1 << 22


@dataclass(frozen=True)
class _Ways:
    """How everything gets its curvature.

    Attributes:
        names: The layers that are measured.
        made: The route of every layer, measured or only part of the network's trace.
        decision: Which are exact, which sampled, and why.
        routes: What the exact engine does.
        sampling: What the sampled engine does.
        by_parameters: What takes products with the Hessian of a parameter.
        by_products: Layers whose eigenvalues take Hessian products by two backward passes each.
        rank: Output directions per sample.
        heavy: Whether anything differentiates twice, so that a sample's graph must fit into memory.
    """

    names: list[str]
    made: dict[str, LayerRoute]
    decision: Decision
    routes: Routes
    sampling: Routes
    by_parameters: ParameterRoutes
    by_products: frozenset[str]
    rank: int
    heavy: bool


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
    asked = asked_for(
        measures,
        options,
        layers=layers,
        method=method,
        curvature=curvature,
        precision=precision,
        max_passes=max_passes,
    )
    problem.watch = None  # an earlier plan's
    examined = examine(problem, last_only=_last_only(problem, asked))
    names = selected_layers(problem, examined, layers)
    if asked.of_layers:
        refuse(examined, names)
    _free_large(problem, examined, curvature)
    if asked.differences:
        refuse_made_weights(problem, examined, names)
    ways = _ways(problem, examined, asked, names)
    watch_path(
        problem,
        examined,
        linear=_linear(examined, ways.decision) if curvature != "gauss_newton" else [],
        routes=ways.made.values(),
        unused=layers is None or ways.routes.network,
    )
    if curvature == "hessian" and ways.heavy:
        note_hidden_curvature(problem, examined)
    graph_bytes = _fit_memory(problem, examined, ways)
    return _plan(problem, examined, asked, ways, graph_bytes)


def _linear(examined: Examined, decision: Decision) -> list[str]:
    """Layers and norm layers whose Hessian is taken for its Gauss-Newton part."""
    through = {*decision.curved, *decision.by_parameters, *examined.idle}
    return [name for name in decision.reasons if name not in through]


def _last_only(problem: Problem, asked: Asked) -> bool:
    """Whether nothing but the last layer matters; a module may also go by the name of "last"."""
    by_name = any(name == "last" for name, _ in named_modules(problem.model))
    return isinstance(asked.layers, str) and asked.layers == "last" and not by_name and not asked.of_network


def _ways(problem: Problem, examined: Examined, asked: Asked, names: list[str]) -> _Ways:
    """Find a way for everything that is measured, and for what the trace over the network takes beside."""
    most = asked.most_directions if asked.method == "exact" else None
    covered = cover(problem, examined, asked.measures, names, asked.curvature, most)
    wanted = dict.fromkeys(names, asked.needs)
    if covered is not None:
        wanted = {name: wanted.get(name, frozenset()) for name in covered.layers}
    made = {name: _route(problem, examined, name, needs) for name, needs in wanted.items()}
    covered, decision = _decided(problem, examined, asked, names, made, covered)
    if covered is None:
        made = {name: made[name] for name in names}
    for route in made.values():
        # What Gauss-Newton leaves out is said as a share of the trace.
        if covered is not None or route.name in decision.curved | decision.by_parameters:
            route.needs = route.needs | {"row_traces"}
    routes, sampling = (
        _engine_routes(examined, made, decision, covered, sampled=sampled) for sampled in (False, True)
    )
    rank = output_directions(problem, examined, asked.method)
    if routes.kind("passes") or routes.affine:
        routes.passes = rank
    by_parameters = _parameter_routes(problem, asked, made, decision, covered)
    by_products = _by_products(names, made, decision, rank) if asked.layer_spectra else frozenset()
    sampled = sampling.layers or sampling.affine or by_parameters
    heavy = bool(asked.walks or sampled or by_products)
    return _Ways(names, made, decision, routes, sampling, by_parameters, by_products, rank, heavy)


def _decided(
    problem: Problem,
    examined: Examined,
    asked: Asked,
    names: list[str],
    made: dict[str, LayerRoute],
    covered: Covered | None,
) -> tuple[Covered | None, Decision]:
    """Decide for all that the network's trace takes, or, with a note, for the measured layers alone."""
    decided = partial(
        decide,
        problem,
        examined,
        closed={name for name, route in made.items() if route.kind != "passes"},
        method=asked.method,
        curvature=asked.curvature,
        precision=asked.precision,
        max_passes=asked.max_passes,
    )
    decision = decided(names if asked.of_layers else [])
    if covered is not None:
        try:
            return covered, decided([*covered.layers, *covered.affine])
        except NotExactError as error:
            examined.notes.append(f"no trace over the whole network. {error}")
    return None, decision


def _engine_routes(
    examined: Examined,
    made: dict[str, LayerRoute],
    decision: Decision,
    covered: Covered | None,
    *,
    sampled: bool,
) -> Routes:
    """The routes of the sampled engine, or of the exact one."""
    own = [route for name, route in made.items() if name not in decision.by_parameters]
    affine = [examined.affine[name] for name in covered.affine] if covered is not None else []
    return Routes(
        [route for route in own if (route.name in decision.sampled) == sampled],
        affine=[module for module in affine if (module.name in decision.sampled) == sampled],
        network=covered is not None,
        copy_inputs=examined.overwrites,
        curved=decision.curved if sampled else frozenset(),
    )


def _parameter_routes(
    problem: Problem,
    asked: Asked,
    made: dict[str, LayerRoute],
    decision: Decision,
    covered: Covered | None,
) -> ParameterRoutes:
    """What takes products with the Hessian of a parameter."""
    layers = [route for name, route in made.items() if name in decision.by_parameters]
    rest = covered.rest if covered is not None else {}
    all_of_rest = covered is not None and sum(rest.values()) <= asked.most_directions
    return ParameterRoutes(
        layers,
        parameters={route.name: own_parameter(problem.model, route.layer) or "" for route in layers},
        rest=list(rest),
        curvature=asked.curvature,
        complete=decision.complete_by_parameters | ({None} if all_of_rest else set()),
        may_complete=asked.method != "sampled",
    )


def _by_products(
    names: list[str], made: dict[str, LayerRoute], decision: Decision, rank: int
) -> frozenset[str]:
    """Layers whose eigenvalues take products with the Hessian: it is more than few output directions say."""
    many = rank > AFFORDABLE_PASSES
    through = decision.curved | decision.by_parameters
    return frozenset(name for name in names if name in through or (many and made[name].kind == "passes"))


def _fit_memory(problem: Problem, examined: Examined, ways: _Ways) -> int:
    """Choose the micro-batch; returns the rough size of one sample's graph of first derivatives."""
    size = problem.dtype.itemsize
    block = min(BLOCK, max(1, ways.routes.passes))
    each = bytes_per_sample(ways.routes, examined.records, examined.items, block, size)
    graph = graph_bytes_per_sample(examined.records, examined.items, size)
    # Every sample's copy of a weight, its direction, product and what lies between.
    copied = sum(layer.matrix().numel() for layer in ways.sampling.shared.values())
    graph += 6 * copied * size
    backward = ways.routes.backward or ways.heavy
    problem.fit_memory(max(each, graph if ways.heavy else 0), backward=backward)
    return graph


def _plan(problem: Problem, examined: Examined, asked: Asked, ways: _Ways, graph_bytes: int) -> Plan:
    """Write down what was decided."""
    names, decision, parts = ways.names, ways.decision, asked.layer_spectra
    kept = Routes([ways.made[name] for name in names if name not in ways.by_products])
    return Plan(
        measures=asked.measures,
        layers=names,
        routes=ways.routes,
        sampling=ways.sampling,
        by_parameters=ways.by_parameters,
        aliases=first_names(problem.model),
        complete=decision.complete,
        methods={name: decision.method(name) for name in decision.reasons},
        reasons=decision.reasons or dict.fromkeys(names, "of the weights alone"),
        precision=asked.precision,
        max_passes=asked.max_passes,
        rank=ways.rank,
        spectra={name: list(parts) for name in names} if parts else {},
        by_products=ways.by_products,
        options=asked.options,
        curvature="gauss_newton" if asked.curvature == "gauss_newton" else "hessian",
        differences=asked.differences,
        micro_batch=problem.micro_batch,
        notes=list(examined.notes),
        kept_bytes=kept_bytes_per_sample(kept, ways.rank, problem.dtype.itemsize),
        loss=problem.loss.name,
        network_spectra=asked.network_spectra,
        gradient_routes=_gradient_routes(problem, examined) if asked.beyond_layers else Routes([]),
        graph_bytes=graph_bytes,
        called={name: examined.layers[name] for name in examined.called},
        shapes={name: tuple(ways.made[name].layer.matrix().shape) for name in names},
    )


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


def _route(problem: Problem, examined: Examined, name: str, needs: frozenset[str]) -> LayerRoute:
    record, n = examined.records[name], examined.items.logits.shape[0]
    shared = examined.shared.get(name)
    if shared is not None:
        size = record.x.numel() // n
        return LayerRoute(name, shared, "passes", needs, shared.matrix().shape[2], size)
    layer = examined.layers[name]
    kind = route_kind(layer, record, examined.items, problem.loss, examined.marked.get(name), needs)
    return LayerRoute(name, layer, kind, needs, positions_of(layer, record, n), record.x.numel() // n)


def _free_large(problem: Problem, examined: Examined, curvature: str) -> None:
    """Weights used more than once whose copies for every sample are too large go through their parameter."""
    for name, layer in list(examined.shared.items()):
        large = layer.matrix().numel() > _LARGEST_COPY and curvature == "hessian"
        if (large or curvature == "finite_differences") and own_parameter(problem.model, layer) is not None:
            examined.refused.setdefault(name, f"its weight is used {examined.reused[name]} times")
            examined.loose.add(name)
