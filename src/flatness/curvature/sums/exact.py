"""The exact engine: every statistic of every layer from one streaming pass.

Per sample let ∇²_f ℓ = Σ_k c_k s_k s_kᵀ. One backward pass sends s_k to all layers at once; with δ_k what
arrives at a layer and g_k = δ_k Φᵀ, the Gauss-Newton part of that layer's Hessian is the mean of Σ_k c_k
vec(g_k) vec(g_k)ᵀ. Where the network is piecewise linear after the layer, that is the Hessian. Which layers
qualify was decided by the plan.

Several directions are held at once. They go back one pass after another: run as one batched program they take
the same time once a micro-batch fills the device, and not every operator can be batched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.sums.layer_sums import AffineSums, LayerSums, PlainSums, PositionSums, SoftmaxHead
from flatness.curvature.sums.routes import LayerRoute, Routes
from flatness.curvature.sums.spread import Spread
from flatness.curvature.sums.statistics import SampleGroups, Statistics, streamed
from flatness.losses import Items
from flatness.network.affine import AffineModule
from flatness.network.layers.shared import SharedLayer
from flatness.network.layers.view import Features
from flatness.network.recording import Recording
from flatness.problem.problem import Problem

# Output directions whose signals are held at once. Blocks make small matrix products large; memory grows with
# them.
BLOCK = 16


def exact_statistics(
    problem: Problem, routes: Routes, spreads: dict[str, Spread], groups: SampleGroups | None = None
) -> Statistics:
    """All statistics that the routes ask for, summed over the data.

    Args:
        problem: The model, data and loss, already guarded.
        routes: How each layer is to be measured.
        spreads: How the features spread of layers whose statistics need that.
        groups: Filled with the statistics of groups of samples, where that is asked for.
    """
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
            total = streamed(problem, found, "curvature", groups)
    return total.all_reduce(problem.ranks)


def _batch_statistics(
    problem: Problem,
    routes: Routes,
    recording: Recording,
    items: Items,
    heads: dict[str, SoftmaxHead],
    spreads: dict[str, Spread],
) -> Statistics:
    part, n = Statistics(), items.logits.shape[0]
    for route in routes.kind("softmax head"):
        a = problem.loss.softmax_weight(items)
        assert a is not None  # or this would be no such route
        phi = rows_of_features(route, recording, n, items.logits.shape[1])
        logits = items.logits.detach().flatten(0, 1)
        _store(part, route.name, heads[route.name].sums(phi, logits, a.flatten()))
    with torch.no_grad():
        part.count(n, problem.loss.normaliser(items), problem.loss.values(items).sum(dtype=torch.float64))
    others = [*routes.kind("separable"), *routes.kind("passes"), *routes.affine]
    T = items.logits.shape[1]
    sums = {to.name: sums_of(to, recording, n, spreads.get(to.name), T) for to in others}
    for signal in signals(problem, items, recording, routes):
        sums[signal.to.name].add(signal.value, signal.dx, signal.c)
    for name, own in sums.items():
        _store(part, name, own.sums())
    return part


def sums_of(
    to: LayerRoute | AffineModule,
    recording: Recording,
    n: int,
    spread: Spread | None = None,
    predictions: int = 1,
) -> LayerSums:
    """What sums the statistics of a layer or a norm layer over the samples of a micro-batch."""
    if isinstance(to, AffineModule):
        return AffineSums(to, recording.one(to.name).x)
    if to.kind == "separable":
        phi = rows_of_features(to, recording, n, predictions)
        if to.from_squares:
            return PlainSums(to.layer, to.needs, phi, spread)
        return PositionSums(to, phi, len(phi), spread, lambda rows, _: Features(rows[:, None, :, None]))
    x = input_of(to, recording)
    if to.plain and to.from_squares:
        return PlainSums(to.layer, to.needs, x.reshape(n, -1), spread)
    return PositionSums(to, x, n, spread, to.layer.seen)


def _store(part: Statistics, name: str, sums: dict[str, Tensor]) -> None:
    """Add sums; those of single parameters are a diagonal of their own."""
    for statistic, value in sums.items():
        if statistic in ("weight", "bias"):
            part.add(f"{name}.{statistic}", "diagonal", value)
        else:
            part.add(name, statistic, value)


@dataclass(frozen=True)
class Signal:
    """What R directions send back to a layer or a norm layer.

    Attributes:
        to: Where it arrives.
        value: δ (n, G, R, d, P) at a layer, dz (R, *shape of the output) at a norm layer. A last layer whose
            positions are the predictions counts each of them as a sample.
        dx: Derivatives (R, *shape of the input) at the layer's input, where they are used.
        c: Signed weights (n, R), or None for +1.
    """

    to: LayerRoute | AffineModule
    value: Tensor
    dx: Tensor | None
    c: Tensor | None


def signals(problem: Problem, items: Items, recording: Recording, routes: Routes) -> Iterator[Signal]:
    """Send all output directions of a micro-batch back, and say what arrives, block by block."""
    n = items.logits.shape[0]
    for route in routes.kind("separable"):
        yield from _at_predictions(problem, items, recording, route)
    targets = [*routes.kind("passes"), *routes.affine]
    edges = [_edges(target, recording) for target in targets]
    if not targets:
        return
    for arrived, c in _blocks(problem, items, [edge for own in edges for edge in own]):
        pending = iter(arrived)
        for target, own in zip(targets, edges, strict=True):
            value, dx = _combined(target, recording, [next(pending) for _ in own], n)
            if value is not None:
                yield Signal(target, laid_out(target, value, n), dx, c)


def _at_predictions(
    problem: Problem, items: Items, recording: Recording, route: LayerRoute
) -> Iterator[Signal]:
    """Signals at a last layer whose positions are the predictions: all positions at once."""
    edges: list[Any] = [recording.one(route.name).z_edge]
    for s, c in problem.loss.factors(items):
        (arrived,) = torch.autograd.grad(items.logits, edges, s, retain_graph=True)
        delta = _at(route, route.layer.signals(arrived, len(s)), s.shape[1])
        yield Signal(
            route, delta[:, None, None, :, None], None, None if c is None else c.reshape(-1, 1).to(s.dtype)
        )


def laid_out(target: LayerRoute | AffineModule, stacked: Tensor, n: int) -> Tensor:
    """δ (n, G, R, d, P) from derivatives (R, *shape of a layer's output); of a norm layer they stay."""
    if isinstance(target, AffineModule):
        return stacked
    R = stacked.shape[0]
    if stacked.shape[1] == n:
        delta = target.layer.signals(stacked.transpose(0, 1).flatten(0, 1), n * R)
        return delta.unflatten(0, (n, R)).transpose(1, 2)
    delta = target.layer.signals(stacked.flatten(0, 1), R * n)
    return delta.unflatten(0, (R, n)).permute(1, 2, 0, 3, 4)


def input_of(route: LayerRoute, recording: Recording) -> Tensor:
    """What a layer was given; of a shared one, by its first call."""
    if isinstance(route.layer, SharedLayer):
        return recording.calls[route.name][0].x
    return recording.one(route.name).x


def rows_of_features(route: LayerRoute, recording: Recording, n: int, predictions: int) -> Tensor:
    """Φ of a last layer with every prediction a row of its own: (n·T, m)."""
    return _at(route, route.layer.features(recording.one(route.name).x, n), predictions)


def _at(route: LayerRoute, values: Tensor, predictions: int) -> Tensor:
    """Of values (n, 1, ·, P) of a last layer those at predictions, each a row of its own: (n·T, ·)."""
    places = route.predictions(values.shape[3], predictions)
    return values[:, 0, :, places].transpose(1, 2).flatten(0, 1)


def _edges(target: LayerRoute | AffineModule, recording: Recording) -> list[Any]:
    """Where signals come back: at a module's output and, if that is used, its input; or at every call."""
    if isinstance(target, LayerRoute) and isinstance(target.layer, SharedLayer):
        return [call.z_edge for _, call in target.layer.calls(recording)]
    record = recording.one(target.name)
    at_input = isinstance(target, LayerRoute) and target.needs_input_signal
    return [record.z_edge, record.x_edge] if at_input else [record.z_edge]


def _combined(
    target: LayerRoute | AffineModule, recording: Recording, found: list[Tensor | None], n: int
) -> tuple[Tensor | None, Tensor | None]:
    """What arrived at the output and at the input; for a shared layer its derivative g from all calls."""
    if isinstance(target, LayerRoute) and isinstance(target.layer, SharedLayer):
        calls = zip(target.layer.calls(recording), found, strict=True)
        return target.layer.gradient([(use, call.x, dz) for (use, call), dz in calls], n), None
    return found[0], found[1] if len(found) > 1 else None


def _blocks(
    problem: Problem, items: Items, edges: list[Any]
) -> Iterator[tuple[list[Tensor | None], Tensor | None]]:
    """Backward passes in blocks: what arrives at each edge, (R, *shape), and weights (n, R) or None."""
    directions = _directions(problem, items)
    while block := list(islice(directions, BLOCK)):
        weights = [c for _, c in block if c is not None]
        yield (
            _sent_back(items.logits, edges, [s for s, _ in block]),
            torch.stack(weights, 1) if weights else None,
        )


def _directions(problem: Problem, items: Items) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Directions (n, T, K) with their weights (n,).

    T predictions per sample meet on their way back, so that each needs a pass of its own.
    """
    T = items.logits.shape[1]
    for s, c in problem.loss.factors(items):
        for t in range(T):
            alone = s
            if T > 1:
                alone = torch.zeros_like(s)
                alone[:, t] = s[:, t]
            yield alone, None if c is None else c[:, t].to(s.dtype)


def _sent_back(output: Tensor, edges: list[Any], block: list[Tensor]) -> list[Tensor | None]:
    """One block of directions through the network: what arrives at each edge, (R, *shape) or None."""
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
