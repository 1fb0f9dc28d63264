"""The exact engine: every statistic of every layer from one streaming pass.

Per sample let ∇²_f ℓ = Σ_k c_k s_k s_kᵀ. One backward pass sends s_k to all layers at once; with δ_k what
arrives at a layer and g_k = δ_k Φᵀ, the Gauss-Newton part of that layer's Hessian is the mean of Σ_k c_k
vec(g_k) vec(g_k)ᵀ. Where the network is piecewise linear after the layer, that is the Hessian. Which layers
qualify was decided by the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.sums.groups import SampleGroups, stepwise
from flatness.curvature.sums.layer_sums import LayerSums, PlainSums, PositionSums, SoftmaxHead
from flatness.curvature.sums.routes import LayerRoute, Routes
from flatness.curvature.sums.statistics import Statistics
from flatness.losses import Items
from flatness.network.affine import AffineModule
from flatness.network.layers.shared import SharedLayer, Use
from flatness.network.recording import Record, Recording
from flatness.problem.problem import Problem


def exact_statistics(
    problem: Problem, routes: Routes, spreads: dict[str, Tensor], groups: SampleGroups | None = None
) -> Statistics:
    """All statistics that the routes ask for, summed over the data.

    Args:
        problem: The model, data and loss, already guarded.
        routes: How each layer is to be measured.
        spreads: V per input unit of the layers that need `relative_normalized`.
        groups: Filled with the statistics of groups of samples, where that is asked for.
    """
    total = Statistics()
    traced = frozenset({"bias"}) if routes.network else frozenset()
    heads = {
        route.name: SoftmaxHead(route.layer, route.needs | traced, spreads.get(route.name))
        for route in routes.kind("softmax head")
    }
    with Recording(routes.modules(), edges=routes.backward, copy_inputs=routes.copy_inputs) as recording:

        def found(batch: Any, samples: Tensor) -> Statistics:
            recording.clear()
            with torch.set_grad_enabled(routes.backward):
                items = problem.items(batch)
            part = _batch_statistics(problem, routes, recording, items, heads, spreads)
            recording.clear()
            return part

        with problem.ranks.stage():
            problem.stream(stepwise(problem, groups, found, total.merge), "curvature")
            if not bool(total.to_host().risk.isfinite()):
                problem.locate_bad_loss()
    return total.all_reduce(problem.ranks)


# Output directions whose signals are held at once. Blocks make small matrix products large; memory grows with
# them.
BLOCK = 16


def signals(
    problem: Problem, items: Items, edges: list[Any]
) -> Iterator[tuple[list[Tensor | None], Tensor | None]]:
    """Backward passes in blocks: what arrives at each edge, (R, *shape), and signed weights (n, R) or None.

    With T predictions per sample that meet on their way back, each needs a pass of its own: T passes per
    direction.
    """
    T = items.logits.shape[1]
    block: list[Tensor] = []
    weights: list[Tensor] = []
    for s, c in problem.loss.factors(items):
        for t in range(T):
            block.append(s if T == 1 else _only(s, t))
            if c is not None:
                weights.append(c[:, t].to(s.dtype))
            if len(block) == BLOCK:
                yield _sent_back(items.logits, edges, block), torch.stack(weights, dim=1) if weights else None
                block, weights = [], []
    if block:
        yield _sent_back(items.logits, edges, block), torch.stack(weights, dim=1) if weights else None


def _sent_back(output: Tensor, edges: list[Any], block: list[Tensor]) -> list[Tensor | None]:
    """One block of directions through the network: what arrives at each edge, (R, *shape) or None.

    One pass after another: run as one batched program they take the same time once a micro-batch fills the
    device, and not every operator can be batched.
    """
    passes = [
        list(torch.autograd.grad(output, edges, s, retain_graph=True, allow_unused=True)) for s in block
    ]
    arrived: list[Tensor | None] = []
    for _ in edges:
        # Taken off the lists one edge at a time: signals and their stack do not all exist twice.
        column = [one.pop(0) for one in passes]
        # Samples first in memory: that is how sums over directions read them.
        arrived.append(None if column[0] is None else torch.stack(column, dim=1).transpose(0, 1))
    return arrived


def separable_signals(problem: Problem, items: Items, edge: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Signals at a layer whose positions are the predictions: all T at once, one weight per prediction."""
    for s, c in problem.loss.factors(items):
        (arrived,) = torch.autograd.grad(items.logits, [edge], s, retain_graph=True)
        yield arrived, None if c is None else c.flatten().to(s.dtype)


def input_of(route: LayerRoute, recording: Recording) -> Tensor:
    """What a layer was given; of a shared one, by its first call."""
    if isinstance(route.layer, SharedLayer):
        return recording.calls[route.name][0].x
    return recording.one(route.name).x


def layer_edges(routes: list[LayerRoute], recording: Recording) -> list[Any]:
    """Where signals come back, route by route; a shared layer has an edge per call."""
    return [call.z_edge for route in routes for _, call in _calls(route, recording)]


def at_layers(
    routes: list[LayerRoute], recording: Recording, arrived: list[Tensor | None], n: int
) -> list[Tensor | None]:
    """One tensor per route from what arrived at `layer_edges`: for a shared layer its derivative g."""
    found, pending = [], list(arrived)
    for route in routes:
        calls = _calls(route, recording)
        own, pending = pending[: len(calls)], pending[len(calls) :]
        if isinstance(route.layer, SharedLayer):
            used = [(use, call.x, dz) for (use, call), dz in zip(calls, own, strict=True) if use is not None]
            found.append(route.layer.gradient(used, n))
        else:
            found.append(own[0])
    return found


def _calls(route: LayerRoute, recording: Recording) -> list[tuple[Use | None, Record]]:
    if not isinstance(route.layer, SharedLayer):
        return [(None, recording.one(route.name))]
    return [(use, call) for use in route.layer.uses for call in recording.calls.get(use.name, [])]


def layer_signals(route: LayerRoute, stacked: Tensor, n: int) -> Tensor:
    """δ (n, G, R, d, P) from derivatives (R, *shape of the layer's output)."""
    R = stacked.shape[0]
    if stacked.shape[1] == n:
        delta = route.layer.signals(stacked.transpose(0, 1).flatten(0, 1), n * R)
        return delta.unflatten(0, (n, R)).transpose(1, 2)
    delta = route.layer.signals(stacked.flatten(0, 1), R * n)
    return delta.unflatten(0, (R, n)).permute(1, 2, 0, 3, 4)


def rows_of_features(route: LayerRoute, x: Tensor, n: int) -> Tensor:
    """Φ with every position a row of its own: (n·P, m)."""
    Phi = route.layer.features(x, n)
    return Phi[:, 0].transpose(1, 2).reshape(-1, Phi.shape[2])


def _batch_statistics(
    problem: Problem,
    routes: Routes,
    recording: Recording,
    items: Items,
    heads: dict[str, SoftmaxHead],
    spreads: dict[str, Tensor],
) -> Statistics:
    part = Statistics()
    n = items.logits.shape[0]
    for route in routes.kind("softmax head"):
        a = problem.loss.softmax_weight(items)
        if a is None:
            raise AssertionError(f"{problem.loss.name} has no softmax form")
        phi = rows_of_features(route, recording.one(route.name).x, n)
        logits = items.logits.detach().flatten(0, 1)
        _store(part, route, heads[route.name].sums(phi, logits, a.flatten()))
    with torch.no_grad():
        part.count(n, problem.loss.normaliser(items), problem.loss.values(items).sum(dtype=torch.float64))
    for route in routes.kind("separable"):
        record = recording.one(route.name)
        sums = PlainSums(
            route.layer, route.needs, rows_of_features(route, record.x, n), spreads.get(route.name)
        )
        for arrived, c in separable_signals(problem, items, record.z_edge):
            delta = route.layer.signals(arrived, n)[:, 0].transpose(1, 2)
            delta = delta.reshape(-1, 1, 1, delta.shape[2], 1)
            sums.add(delta, None, None if c is None else c[:, None])
        _store(part, route, sums.sums())
    _add_passes(problem, routes, recording, items, spreads, part)
    return part


def _add_passes(
    problem: Problem,
    routes: Routes,
    recording: Recording,
    items: Items,
    spreads: dict[str, Tensor],
    part: Statistics,
) -> None:
    layers, affine = routes.kind("passes"), routes.affine
    if not layers and not affine:
        return
    n = items.logits.shape[0]
    sums = [sums_of(route, input_of(route, recording), n, spreads.get(route.name)) for route in layers]
    edges: list[Any] = layer_edges(layers, recording)
    of_layers = len(edges)
    edges += [recording.one(module.name).z_edge for module in affine]
    asking = [index for index, route in enumerate(layers) if route.needs_input_signal]
    edges += [recording.one(layers[index].name).x_edge for index in asking]
    traces: dict[str, Tensor] = {}
    for block, c in signals(problem, items, edges):
        arrived = [*at_layers(layers, recording, block[:of_layers], n), *block[of_layers:]]
        at_inputs = dict(zip(asking, arrived[len(layers) + len(affine) :], strict=True))
        for index, (route, layer_sums) in enumerate(zip(layers, sums, strict=True)):
            dz = arrived[index]
            if dz is not None:
                layer_sums.add(layer_signals(route, dz, n), at_inputs.get(index), c)
        for module, dz in zip(affine, arrived[len(layers) : len(layers) + len(affine)], strict=True):
            if dz is not None:
                _add_affine(traces, module, recording.one(module.name).x, dz, c)
    for route, layer_sums in zip(layers, sums, strict=True):
        _store(part, route, layer_sums.sums())
    for name, diagonal in traces.items():
        part.add(name, "diagonal", diagonal)


def sums_of(route: LayerRoute, x: Tensor, n: int, spread: Tensor | None) -> LayerSums:
    """What sums a layer's statistics over the samples of a micro-batch."""
    if route.plain:
        return PlainSums(route.layer, route.needs, x.reshape(n, -1), spread)
    return PositionSums(route.layer, route.needs, x, n, spread)


def _add_affine(
    traces: dict[str, Tensor], module: AffineModule, x: Tensor, dz: Tensor, c: Tensor | None
) -> None:
    for k in range(dz.shape[0]):
        for name, g in module.gradients(x, dz[k]).items():
            squares = (g.square() if c is None else g.square() * c[:, k : k + 1]).sum(0, dtype=torch.float64)
            traces[name] = traces[name] + squares if name in traces else squares


def _store(part: Statistics, route: LayerRoute, sums: dict[str, Tensor]) -> None:
    for statistic, value in sums.items():
        if statistic == "bias":
            if route.layer.bias is not None:
                part.add(f"{route.name}.bias", "diagonal", value)
        else:
            part.add(route.name, statistic, value)


def _only(s: Tensor, t: int) -> Tensor:
    kept = torch.zeros_like(s)
    kept[:, t] = s[:, t]
    return kept
