"""The exact engine: every statistic of every layer from one streaming pass.

Per sample let ∇²_f ℓ = Σ_k c_k s_k s_kᵀ. One backward pass sends s_k to all layers at once; with δ_k what
arrives at a layer and g_k = δ_k Φᵀ, the Gauss-Newton part of that layer's Hessian is the mean of Σ_k c_k
vec(g_k) vec(g_k)ᵀ. Where the network is piecewise linear after the layer, that is the Hessian. Which layers
qualify was decided by the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatness.curvature.sums.groups import SampleGroups, stepwise
from flatness.curvature.sums.layer_sums import AffineSums, LayerSums, PlainSums, PositionSums, SoftmaxHead
from flatness.curvature.sums.routes import LayerRoute, Routes
from flatness.curvature.sums.signals import input_of, rows_of_features, signals
from flatness.curvature.sums.statistics import Statistics
from flatness.losses import Items
from flatness.network.affine import AffineModule
from flatness.network.recording import Recording
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


def _batch_statistics(
    problem: Problem,
    routes: Routes,
    recording: Recording,
    items: Items,
    heads: dict[str, SoftmaxHead],
    spreads: dict[str, Tensor],
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
    spread: Tensor | None = None,
    predictions: int = 1,
) -> LayerSums:
    """What sums the statistics of a layer or a norm layer over the samples of a micro-batch."""
    if isinstance(to, AffineModule):
        return AffineSums(to, recording.one(to.name).x)
    if to.kind == "separable":
        phi = rows_of_features(to, recording, n, predictions)
        if to.from_squares:
            return PlainSums(to.layer, to.needs, phi, spread)
        return PositionSums(to, phi, len(phi), spread, lambda rows, _: rows[:, None, :, None])
    x = input_of(to, recording)
    if to.plain and to.from_squares:
        return PlainSums(to.layer, to.needs, x.reshape(n, -1), spread)
    return PositionSums(to, x, n, spread, to.layer.features)


def _store(part: Statistics, name: str, sums: dict[str, Tensor]) -> None:
    """Add sums; those of single parameters are a diagonal of their own."""
    for statistic, value in sums.items():
        if statistic in ("weight", "bias"):
            part.add(f"{name}.{statistic}", "diagonal", value)
        else:
            part.add(name, statistic, value)
