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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatness.curvature.parameters.parameter_space import ParameterSpace, explained
from flatness.curvature.sums.exact import laid_out, sums_of
from flatness.curvature.sums.layer_sums import add_to
from flatness.curvature.sums.routes import LayerRoute, Routes
from flatness.losses.signs import Signs
from flatness.network.affine import AffineModule
from flatness.network.layers.view import parameter_name
from flatness.network.recording import Recording
from flatness.problem.guard import differentiable

_NEEDS = frozenset({"diagonal", "bias"})
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
    totals = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in space.parameters.items()}
    # Samples of other processes have the same numbers.
    own = [problem.ranks.rank] if problem.ranks.count > 1 else []
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
            signs = Signs(problem.seed, problem.sample_numbers(len(losses)), own)
            found, variance = gradients.sampled(signs) if drawn else (gradients.exact(), 0.0)
            recording.clear()
            for name, value in found.items():
                totals[name] += value
            counts.add_(torch.stack([weights.sum(), weights.new_tensor(variance), weights.new_tensor(drawn)]))

        with problem.ranks.stage():
            problem.stream(step, "squared gradients")
    *sums, counts = problem.ranks.summed([*totals.values(), counts])
    totals = dict(zip(totals, sums, strict=True))
    weight, variance, drawn = counts.tolist()
    return SquaredGradients(space.join(totals) / weight, math.sqrt(variance) / weight, bool(drawn))


def _directly_readable(space: ParameterSpace, routes: Routes) -> Routes:
    """The modules whose derivatives, laid out as the engine has them, are those of their own parameters."""

    def readable(route: LayerRoute) -> bool:
        weight, W = space.parameters.get(parameter_name(route.name, "weight")), route.layer.matrix()
        same = weight is not None and W.numel() == weight.numel() and W.data_ptr() == weight.data_ptr()
        return same and W.is_contiguous()

    layers = [replace(route, kind="passes", needs=_NEEDS) for route in routes.layers if readable(route)]
    return replace(routes, layers=layers)


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
        self._parameters, self._recording, self._losses = space.parameters, recording, losses
        self._roots = weights.sqrt().to(losses.dtype)
        self._modules: list[LayerRoute | AffineModule] = [*routes.layers, *routes.affine]
        covered = {parameter_name(name, key) for name in routes.modules() for key in ("weight", "bias")}
        self._rest = {name: value for name, value in space.parameters.items() if name not in covered}

    def exact(self) -> dict[str, Tensor]:
        """Position by position, and for other modules item by item."""
        found: dict[str, Tensor] = {}
        positions = [(slice(None), t) for t in self._roots.any(0).nonzero()[:, 0].tolist()]
        for place in positions if self._modules else ():
            add_to(found, self._squares(self._only(place), self._modules, {}))
        for place in map(tuple, self._roots.nonzero().tolist()) if self._rest else ():
            add_to(found, self._squares(self._only(place), [], self._rest))
        return found

    def sampled(self, signs: Signs) -> tuple[dict[str, Tensor], float]:
        """The mean over draws, and the variance of its sum weighted by θ²."""
        totals: dict[str, Tensor] = {}
        sums = []
        for draw in range(DRAWS):
            share = signs.at(draw).like(self._losses) * self._roots
            found = {name: g / DRAWS for name, g in self._squares(share, self._modules, self._rest)}
            add_to(totals, found.items())
            theta = {name: self._parameters[name].detach().double() for name in found}
            sums.append(torch.stack([(theta[name].square() * g).sum() for name, g in found.items()]).sum())
        return totals, float(torch.stack(sums).var() * DRAWS)

    def _only(self, place: tuple[Any, ...]) -> Tensor:
        share = torch.zeros_like(self._roots)
        share[place] = self._roots[place]
        return share

    def _squares(
        self, share: Tensor, modules: list[LayerRoute | AffineModule], rest: dict[str, nn.Parameter]
    ) -> Iterator[tuple[str, Tensor]]:
        """Squares of ∂⟨share, ℓ⟩: of modules sample by sample, added up; of the rest as it is."""
        n, edges = len(self._losses), [self._recording.one(module.name).z_edge for module in modules]
        to: list[Any] = [*edges, *rest.values()]
        with explained():
            sent = iter(torch.autograd.grad(self._losses, to, share, retain_graph=True, allow_unused=True))
        for module, signal in zip(modules, sent):  # noqa: B905 (the rest follows)
            if signal is None:
                continue
            sums = sums_of(module, self._recording, n)
            sums.add(laid_out(module, signal[None], n), None, None)
            for statistic, value in sums.sums().items():
                name = parameter_name(module.name, "bias" if statistic == "bias" else "weight")
                if name in self._parameters:
                    yield name, value.double().reshape(self._parameters[name].shape)
        for name, g in zip(rest, sent, strict=True):
            if g is not None:
                yield name, g.double().square()
