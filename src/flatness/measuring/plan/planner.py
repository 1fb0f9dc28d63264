"""Making a plan: a few samples are examined, and every layer gets its treatment before any pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from flatness.curvature.sums.exact import BLOCK
from flatness.curvature.sums.routes import (
    LayerRoute,
    Routes,
    bytes_per_sample,
    graph_bytes_per_sample,
    last_layer_kind,
    skipped_positions,
)
from flatness.errors import DifferentiabilityError, LayerError, NotExactError, listed
from flatness.measuring.examine.examination import examine, repeatable_parameters
from flatness.measuring.examine.examined import Examined, frozen_note
from flatness.measuring.plan.plan import Plan
from flatness.measuring.plan.treatment import Decision, Treatment, output_directions, refuse
from flatness.measuring.plan.watch import Watch
from flatness.measuring.request import LARGEST_BRUTE_FORCE, MeasureRequest
from flatness.network.layers import SUPPORTED, is_layer_word, own_parameter, select_layers
from flatness.network.layers.linear import ProjectionLayer
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem


@dataclass(frozen=True)
class _TraceParts:
    """Everything that has a parameter, each once.

    Attributes:
        layers: Layers whose weight, and bias unless that is among the rest, their own statistics give.
        affine: Norm layers and PReLUs whose weight and bias their own statistics give.
        rest: Number of entries of the parameters that take Hessian products: embeddings, raw parameters of
            parametrisations, biases and norms of modules used more than once, modules of unknown kinds.
    """

    layers: list[str]
    affine: list[str]
    rest: dict[str, int]


def make_plan(problem: Problem, request: MeasureRequest) -> Plan:
    """Decide how to measure. The problem must be guarded."""
    problem.watched_by(None)  # an earlier plan's
    examined = examine(problem, last_only=_last_only(problem, request))
    notes = list(examined.notes)
    names = _selected_layers(problem, examined, request.layers, notes)
    if request.of_layers:
        refuse(examined, names)
    examined = _freed(problem, examined, request)
    if request.differences:
        _refuse_made_weights(problem, examined, names)
    trace, treatments = _treatments(problem, examined, request, names, notes)
    limit = request.enumeration_limit
    plan = Plan(
        request=request,
        layers=names,
        treatments=treatments,
        rank=output_directions(problem, examined, request.method),
        network=trace is not None,
        rest=list(trace.rest) if trace is not None else [],
        rest_complete=trace is not None and sum(trace.rest.values()) <= limit,
        copy_inputs=examined.overwrites,
        gradient_routes=_gradient_routes(problem, examined) if request.beyond_layers else Routes([]),
        called={name: examined.layers[name] for name in examined.called},
        aliases=_first_names(problem.model),
        loss=problem.loss.name,
    )
    if plan.rest and _probes_all_there_is(plan):
        plan = replace(plan, repeated=repeatable_parameters(problem, plan.rest))
    problem.watched_by(
        Watch(
            problem,
            examined,
            linear=[name for name, treatment in treatments.items() if treatment.linear],
            routes=plan.layer_routes.values(),
            unused=examined.unused if request.layers is None or plan.network else (),
        )
    )
    if request.curvature == "hessian" and plan.differentiates_twice:
        from flatness.measuring.examine.second_derivatives import hidden_curvature

        notes += hidden_curvature(problem, examined)
    graph_bytes, sample_bytes = _fit_memory(problem, examined, plan)
    sizes = {"graph_bytes": graph_bytes, "sample_bytes": sample_bytes, "micro_batch": problem.micro_batch}
    return replace(plan, **sizes, notes=tuple(notes))


def _probes_all_there_is(plan: Plan) -> bool:
    """Whether layers are probed, and with all of their Hessian that is asked for.

    Without a curved layer nothing says whether other parameters have more than a Gauss-Newton part.
    """
    wanted = plan.sampling.curved or plan.request.curvature == "gauss_newton"
    return bool(plan.sampling and not plan.complete and not plan.request.differences and wanted)


def _last_only(problem: Problem, request: MeasureRequest) -> bool:
    """Whether nothing but the last layer matters; a module may also go by the name of "last"."""
    by_name = any(name == "last" for name, _ in problem.model.named_modules())
    last = isinstance(request.layers, str) and request.layers == "last"
    # What looks at more of the network than its layers one by one.
    beyond = any(measure.network_needs or measure.explore for measure in request.measures)
    return last and not by_name and not beyond


def _selected_layers(
    problem: Problem, examined: Examined, layers: str | Iterable[str] | None, notes: list[str]
) -> list[str]:
    """The names of the layers to measure, in network order, each weight under one name."""
    if layers != "trainable" or not is_layer_word(layers, examined.layers):
        notes += frozen_note(problem.model)
    kinds = {name: type(module).__name__ for name, module in problem.model.named_modules()}
    if not examined.layers:
        raise LayerError(
            f"Expected at least one supported layer ({SUPPORTED}) but "
            f"{type(problem.model).__name__} has none. Add support for yours with flatness.register_layer."
        )
    if not examined.called:
        raise LayerError(
            "Expected at least one layer to measure but the forward pass calls none of "
            f"{listed(examined.layers)}. Call them as modules, not through their weights."
        )
    kept: dict[object, str] = {}
    chosen = select_layers(examined.layers, examined.called, layers, last=examined.last, modules=kinds)
    for name in chosen:
        shared = examined.records[name].shared
        # A table and the layer it is tied to are measured as the layer.
        called = name if shared is None or not examined.layers[name].chooses else shared.main.name
        same = kept.setdefault(_weight_key(problem, examined, name), called)
        if same != name:
            notes.append(f"{name} shares the weight of {same} and is measured under that name")
    return sorted(kept.values(), key=examined.called.index)


def _weight_key(problem: Problem, examined: Examined, name: str) -> object:
    """What layers with one weight have in common."""
    record, layer = examined.records[name], examined.layers[name]
    if record.shared is not None:
        return id(record.shared)
    packed = isinstance(layer, ProjectionLayer)
    return own_parameter(problem.model, layer) if record.via_parameter and not packed else name


def _freed(problem: Problem, examined: Examined, request: MeasureRequest) -> Examined:
    """For finite differences, weights used more than once go through their parameter."""
    records = dict(examined.records)
    for name in examined.layers if request.differences else ():
        record = records[name]
        if record.shared is not None and own_parameter(problem.model, record.shared) is not None:
            reason = record.refused or record.used_again
            records[name] = replace(record, refused=reason, via_parameter=True)
    return replace(examined, records=records)


def _refuse_made_weights(problem: Problem, examined: Examined, names: list[str]) -> None:
    """Refuse layers that finite differences cannot move: their weight is made from other parameters."""
    curved = [name for name in names if examined.records[name].curved is not None]
    made = [name for name in curved if own_parameter(problem.model, examined.layers[name]) is None]
    if made:
        raise NotExactError(
            "Expected layers whose weight is a parameter, since finite differences move it, but the weight "
            f"of {listed(made)} is made from others. Remove the parametrisation, which keeps the weight "
            "as it is (torch.nn.utils.parametrize.remove_parametrizations), and measure again."
        )


def _treatments(
    problem: Problem, examined: Examined, request: MeasureRequest, names: list[str], notes: list[str]
) -> tuple[_TraceParts | None, dict[str, Treatment]]:
    """Treat all that the network's trace takes, or, with a note, the measured layers alone."""
    trace = None
    if any("traces" in measure.network_needs for measure in request.measures):
        trace, gap = _trace_parts(problem, examined, request, names)
        notes += [f"no trace over the whole network: {gap}"] * (trace is None)
    routes = {
        name: _route(problem, examined, name, request.needs if name in names else frozenset())
        for name in (names if trace is None else trace.layers)
    }
    treated = Decision(problem, examined, request, names if request.of_layers else []).treatments(routes)
    if trace is not None:
        try:
            decision = Decision(problem, examined, request, [*trace.layers, *trace.affine])
            return trace, decision.treatments(routes, traced=True)
        except NotExactError as error:
            notes.append(f"no trace over the whole network. {error}")
    if request.of_layers:
        return None, treated
    return None, {name: _of_weights(name, routes) for name in names}


def _trace_parts(
    problem: Problem, examined: Examined, request: MeasureRequest, names: list[str]
) -> tuple[_TraceParts | None, str]:
    """What the trace over all parameters needs; None, with the reason in words, where it has gaps.

    Args:
        problem: The model, data and loss.
        examined: What a few samples showed.
        request: What is asked for.
        names: The layers that are measured.
    """
    layers = _one_each(examined, names)
    hopeless = [name for name in (*layers, *examined.affine) if examined.records[name].hopeless]
    if hopeless:
        reasons = [f"{name} ({examined.records[name].refused})" for name in hopeless]
        return None, f"not for {listed(reasons, 6)}"
    # Where signals at a norm layer's calls give its curvature.
    affine = [
        name
        for name in examined.affine
        if (record := examined.records[name]).refused is None
        and not (request.differences and record.curved is not None)
    ]
    rest = _rest(problem.model, examined, layers, affine, request.differences)
    gap = _gap(problem, examined, request, rest)
    return (None, gap) if gap else (_TraceParts(layers, affine, rest), "")


def _gap(problem: Problem, examined: Examined, request: MeasureRequest, rest: dict[str, int]) -> str:
    """Why the rest has no trace, in words; empty where it has one."""
    size = sum(rest.values())
    if request.method == "exact" and size > request.enumeration_limit:
        most = LARGEST_BRUTE_FORCE
        return f"{listed(rest, 6)} would take {size} products per batch, more than {most}"
    if rest and not request.differences:
        from flatness.measuring.examine.second_derivatives import check_twice

        parameters = dict(problem.model.named_parameters())
        try:
            with differentiable(problem.model):
                check_twice(examined, [parameters[name] for name in rest])
        except DifferentiabilityError as error:
            return str(error)
    return ""


def _one_each(examined: Examined, names: list[str]) -> list[str]:
    """The layers that ran, one per weight: the measured one where several names have the same."""
    kept: list[str] = []
    for name in [*names, *(name for name in examined.called if name not in names)]:
        mine = examined.layers[name].weight
        others = (examined.layers[other].weight for other in kept)
        if not any(isinstance(mine, nn.Parameter) and mine is other for other in others):
            kept.append(name)
    return [name for name in examined.called if name in kept]


def _rest(
    model: nn.Module, examined: Examined, layers: list[str], affine: list[str], differences: bool
) -> dict[str, int]:
    """Parameters that neither layers nor norm layers account for, with their sizes."""
    aliases = dict(model.named_parameters(remove_duplicate=False))
    known: set[int] = set()
    for name in layers:
        layer, record = examined.layers[name], examined.records[name]
        parts = [layer.weight_name]
        # Signals at one call say nothing about a bias that others share.
        if record.meets_samples_once and not (differences and record.curved):
            parts.append(layer.bias_name)
        known |= {id(aliases[part]) for part in parts if part in aliases}
    for owner in (*affine, *examined.unused):
        known |= {id(value) for value in model.get_submodule(owner).parameters(recurse=False)}
    return {name: value.numel() for name, value in model.named_parameters() if id(value) not in known}


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first name of every parameter, by all of its names."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(value), name) for name, value in named}


def _of_weights(name: str, routes: Mapping[str, LayerRoute]) -> Treatment:
    route = routes[name]
    shape = tuple(route.layer.matrix().shape)
    return Treatment(name, "closed form", "of the weights alone", route=route, shape=shape)


def _gradient_routes(problem: Problem, examined: Examined) -> Routes:
    """All modules that run once and whose rows are samples: their per-sample gradients are cheap."""
    records = [examined.records[name] for name in (*examined.called, *examined.affine)]
    fine = [record for record in records if record.refused is None and record.shared is None]
    names = [record.name for record in fine if record.name in examined.layers and not record.idle]
    return Routes(
        [_route(problem, examined, name, frozenset()) for name in names],
        affine=[examined.affine[record.name] for record in fine if record.name in examined.affine],
        copy_inputs=examined.overwrites,
    )


def _route(problem: Problem, examined: Examined, name: str, needs: frozenset[str]) -> LayerRoute:
    record, call, n = examined.records[name], examined.calls[name], examined.items.logits.shape[0]
    size = call.x.numel() // n
    if record.shared is not None:
        return LayerRoute(name, record.shared, "passes", needs, record.shared.matrix().shape[2], size)
    layer = examined.layers[name]
    positions = max(1, call.z_shape.numel() // max(1, n * layer.output_units))
    skipped = skipped_positions(layer, call, examined.items, record.marked)
    if skipped is None:
        return LayerRoute(name, layer, "passes", needs, positions, size)
    kind = last_layer_kind(layer, examined.items, problem.loss, needs)
    return LayerRoute(name, layer, kind, needs, positions, size, skipped)


def _fit_memory(problem: Problem, examined: Examined, plan: Plan) -> tuple[int, int]:
    """Choose the micro-batch; returns rough sizes of one sample: its graph of first derivatives, and all."""
    size = problem.dtype.itemsize
    block = min(BLOCK, max(1, plan.routes.passes))
    each = bytes_per_sample(plan.routes, examined.calls, examined.items, block, size)
    graph = graph_bytes_per_sample(examined.calls, examined.items, size)
    twice = plan.differentiates_twice
    taken = max(each, graph if twice else 0)
    problem.fit_memory(taken, backward=plan.routes.backward or twice)
    return graph, taken
