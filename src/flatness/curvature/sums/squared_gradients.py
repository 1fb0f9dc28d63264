"""Σ_i c_i (∂ℓ_i/∂θ)², entry by entry: the diagonal of the empirical Fisher matrix.

Items i and their weights c are those of `Loss.items_weighed`. A layer's derivative for one sample is
g = δ Φᵀ, and the sum of its squares has the form that the engine sums for the Hessian's diagonal, with the
gradient of a loss for a signal: one backward pass, or one per position where a sample has several items.
Parameters of other modules take one backward pass per item. Beyond `MOST_POSITIONS` items per sample all of
them get random signs instead, whose mixed terms average out: a pass per draw, for all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.parameters.parameter_space import ParameterSpace, explained
from flatness.curvature.sums.exact import layer_signals, sums_of
from flatness.curvature.sums.routes import LayerRoute, Routes
from flatness.losses.signs import Signs
from flatness.network.affine import AffineModule
from flatness.network.recording import Recording
from flatness.problem.guard import differentiable

_NEEDS = frozenset({"diagonal", "bias"})
_PARTS = (("weight", "diagonal"), ("bias", "bias"))
# Items per sample that get a backward pass each, and random signs of all where there are more.
MOST_POSITIONS, DRAWS = 256, 64


@dataclass(frozen=True)
class SquaredGradients:
    """What was found.

    Attributes:
        means: Σ_i c_i (∂_j ℓ_i)² / Σ_i c_i for every entry of θ, float64.
        stderr: Standard error of Σ_j θ_j² means_j; 0 where nothing is random.
        sampled: Whether anything was.
    """

    means: Tensor
    stderr: float
    sampled: bool


def squared_gradients(space: ParameterSpace, routes: Routes) -> SquaredGradients:
    """E[(∂_j ℓ)²] for every entry of θ.

    Args:
        space: The parameters, model, data and loss.
        routes: Layers and norm layers that are called once per forward pass; they are the fast ones.
    """
    problem = space.problem
    recorded = _directly_readable(space, routes)
    totals = {
        name: torch.zeros(value.shape, dtype=torch.float64, device=value.device)
        for name, value in space.parameters.items()
    }
    squares = {name: value.square().double() for name, value in space.split(space.theta).items()}
    # Σ c, the variance, and whether there were draws.
    counts = torch.zeros(3, dtype=torch.float64, device=problem.device)

    with (
        differentiable(problem.model),
        Recording(recorded.modules(), copy_inputs=routes.copy_inputs) as recording,
    ):

        def step(batch: Any) -> None:
            recording.clear()
            items = problem.items(batch)
            losses, weights = problem.loss.items_weighed(items)
            gradients = _Gradients(space, recorded, recording, losses, weights)
            drawn = losses.shape[1] > MOST_POSITIONS
            if drawn:
                samples = problem.sample_numbers(len(losses))
                found, variance = gradients.sampled(Signs(problem.seed, samples), squares)
            else:
                found, variance = gradients.exact(), 0.0
            recording.clear()
            for name, value in found.items():
                totals[name] += value
            counts.add_(torch.stack([weights.sum(), weights.new_tensor(variance), weights.new_tensor(drawn)]))

        problem.stream(step, "squared gradients")
    weight, variance, drawn = counts.tolist()
    return SquaredGradients(space.join(totals) / weight, math.sqrt(variance) / weight, bool(drawn))


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


class _Gradients:
    """Squared gradients of the items of one micro-batch, by parameter.

    Args:
        space: The parameters, model, data and loss.
        routes: The modules whose derivatives come from signals.
        recording: Their inputs and where signals come back.
        losses: ℓ, (n, T).
        weights: c, (n, T).
    """

    def __init__(
        self, space: ParameterSpace, routes: Routes, recording: Recording, losses: Tensor, weights: Tensor
    ) -> None:
        self._space, self._recording, self._losses, self._weights = space, recording, losses, weights
        self._modules: list[LayerRoute | AffineModule] = [*routes.layers, *routes.affine]
        self._edges: list[Any] = [recording.one(module.name).z_edge for module in self._modules]
        covered = {_own(name, key) for name in routes.modules() for key in ("weight", "bias")}
        self._slow = {name: value for name, value in space.parameters.items() if name not in covered}

    def exact(self) -> dict[str, Tensor]:
        """Position by position, and for other modules item by item."""
        totals = self._zeros()
        roots = self._weights.sqrt().to(self._losses.dtype)
        for t in range(self._losses.shape[1]):
            if not bool(roots[:, t].any()):
                continue
            share = torch.zeros_like(roots)
            share[:, t] = roots[:, t]
            for name, value in self._of_modules(self._sent(share, self._edges)):
                totals[name] += value
        for i, t in self._weights.nonzero().tolist() if self._slow else ():
            share = torch.zeros_like(roots)
            share[i, t] = roots[i, t]
            for name, g in zip(self._slow, self._sent(share, list(self._slow.values())), strict=True):
                if g is not None:
                    totals[name] += g.double().square()
        return totals

    def sampled(self, signs: Signs, squares: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """The mean over draws, and the variance of its sum weighted by `squares`."""
        totals, sums = self._zeros(), []
        for draw in range(DRAWS):
            share = signs.at(draw).like(self._losses) * self._weights.sqrt().to(self._losses.dtype)
            sent = self._sent(share, [*self._edges, *self._slow.values()])
            found = dict(self._of_modules(sent[: len(self._edges)]))
            for name, g in zip(self._slow, sent[len(self._edges) :], strict=True):
                if g is not None:
                    found[name] = g.double().square()
            for name, value in found.items():
                totals[name] += value / DRAWS
            sums.append(torch.stack([(squares[name] * value).sum() for name, value in found.items()]).sum())
        return totals, float(torch.stack(sums).var() / DRAWS)

    def _zeros(self) -> dict[str, Tensor]:
        parameters = self._space.parameters.items()
        return {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters}

    def _sent(self, share: Tensor, to: list[Any]) -> list[Tensor | None]:
        """∂⟨share, ℓ⟩, at edges of the graph or in parameters."""
        if not to:
            return []
        with explained():
            return list(torch.autograd.grad(self._losses, to, share, retain_graph=True, allow_unused=True))

    def _of_modules(self, signals: list[Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """Sums over samples of squared derivatives, by parameter, from what arrived at the modules."""
        n = len(self._losses)
        for module, signal in zip(self._modules, signals, strict=True):
            if signal is None:
                continue
            x = self._recording.one(module.name).x
            if isinstance(module, LayerRoute):
                sums = sums_of(module, x, n, None)
                sums.add(layer_signals(module, signal.unsqueeze(0), n), None, None)
                found = sums.sums()
                squares = {_own(module.name, key): found[of] for key, of in _PARTS}
            else:
                squares = {
                    name.lstrip("."): g.square().sum(0, dtype=torch.float64)
                    for name, g in module.gradients(x, signal).items()
                }
            for name, value in squares.items():
                if name in self._space.parameters:
                    yield name, value.double().reshape(self._space.parameters[name].shape)
