"""Σ_i (∂ℓ_i/∂θ)², entry by entry: the diagonal of the empirical Fisher matrix, in one backward pass.

A layer's derivative for one sample is g = δ Φᵀ, and the sum of its squares has the form that the engine sums
for the Hessian's diagonal, with one signal: the gradient of the loss. Parameters of other modules take one
backward pass per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flatness.affine import AffineModule
from flatness.curvature.exact import layer_signals, sums_of
from flatness.curvature.parameter_space import ParameterSpace
from flatness.curvature.recording import Recording
from flatness.curvature.routes import LayerRoute, Routes
from flatness.guard import differentiable
from flatness.losses import Items

_NEEDS = frozenset({"diagonal", "bias"})


def squared_gradients(space: ParameterSpace, routes: Routes) -> Tensor:
    """E[(∂_i ℓ)²] for every entry of θ, float64.

    Args:
        space: The parameters, model, data and loss.
        routes: Layers and norm layers that are called once per forward pass; they are the fast ones.
    """
    problem = space.problem
    recorded = _directly_readable(space, routes)
    covered = {_own(name, key) for name in recorded.modules() for key in ("weight", "bias")}
    slow = {name: value for name, value in space.parameters.items() if name not in covered}
    totals = {
        name: torch.zeros(value.shape, dtype=torch.float64, device=value.device)
        for name, value in space.parameters.items()
    }

    with (
        differentiable(problem.model),
        Recording(recorded.modules(), copy_inputs=routes.copy_inputs) as recording,
    ):

        def step(batch: Any) -> None:
            recording.clear()
            items = problem.items(batch)
            found = _fast(space, recorded, recording, items)
            for name, value in _slow(items, problem.loss.values, slow).items():
                found[name] = value
            recording.clear()
            for name, value in found.items():
                if name in totals:
                    totals[name] += value.reshape(totals[name].shape)

        problem.stream(step, "squared gradients", state=totals)
    return space.join(totals) / space.normaliser


def _directly_readable(space: ParameterSpace, routes: Routes) -> Routes:
    """The modules whose derivatives, laid out as the engine has them, are those of their own parameters."""
    layers = []
    for route in routes.layers:
        weight, W = space.parameters.get(_own(route.name, "weight")), route.layer.matrix()
        if weight is None or W.numel() != weight.numel():
            continue
        if W.is_contiguous() and W.data_ptr() == weight.data_ptr():
            layers.append(
                LayerRoute(route.name, route.layer, "passes", _NEEDS, route.positions, route.input_size)
            )
    return Routes(layers, affine=routes.affine, copy_inputs=routes.copy_inputs)


def _own(module: str, key: str) -> str:
    """A parameter's name; a model that is one layer has the empty name."""
    return f"{module}.{key}" if module else key


def _fast(space: ParameterSpace, routes: Routes, recording: Recording, items: Items) -> dict[str, Tensor]:
    n = items.logits.shape[0]
    modules: list[LayerRoute | AffineModule] = [*routes.layers, *routes.affine]
    edges: list[Any] = [recording.one(module.name).z_edge for module in modules]
    values = space.problem.loss.values(items)
    signals = torch.autograd.grad(values.sum(), edges, retain_graph=True, allow_unused=True)
    found: dict[str, Tensor] = {}
    for module, signal in zip(modules, signals, strict=True):
        if signal is None:
            continue
        x = recording.one(module.name).x
        if isinstance(module, LayerRoute):
            sums = sums_of(module, x, n, None)
            sums.add(layer_signals(module, signal.unsqueeze(0), n), None, None)
            squares = sums.sums()
            found[_own(module.name, "weight")] = squares["diagonal"]
            found[_own(module.name, "bias")] = squares["bias"]
        else:
            for name, g in module.gradients(x, signal).items():
                found[name.lstrip(".")] = g.square().sum(0, dtype=torch.float64)
    return found


def _slow(
    items: Items, values: Callable[[Items], Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    if not parameters:
        return {}
    losses = values(items)
    totals = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    for one in losses:
        found = torch.autograd.grad(
            one, list(parameters.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for name, g in zip(parameters, found, strict=True):
            totals[name] += g.double().square()
    return totals
