"""From what the user asks for to directions in the parameter space of a network.

    layer    V_i · ‖W_i‖ / ‖V_i‖ for every parameter tensor W_i               (rangamani2019, §4.2)
    filter   the same for every filter: the incoming weights of one output    (Li et al. 2018, §4)

V has independent standard normal entries, in units of the network's own weights; what is zero does not move.
Directions with a meaning are the top eigenvectors of the Hessian, and W·A, which perturbs features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatness.curvature.operators.lanczos import TopEigenvalues
from flatness.curvature.operators.spectrum import default_tolerance
from flatness.curvature.parameters.hessian_operator import HessianOperator
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import LayerError, OptionError, listed, nearest
from flatness.generalization.kernels import kernel_of
from flatness.generalization.matrices import random_directions
from flatness.landscape.arguments import digest
from flatness.landscape.networks import (
    by_name,
    given_direction,
    own_weights,
    parameter_names,
    without_weight,
)
from flatness.network.layers import find_layers, select_layers
from flatness.network.layers.convolution import ConvolutionLayer, TransposedConvolutionLayer
from flatness.network.layers.linear import LinearLayer, TransposedLinearLayer
from flatness.network.layers.view import Layer
from flatness.problem.batches import describe
from flatness.problem.problem import Problem

KINDS = ("layer", "filter", "eigenvectors", "relative_flatness")
"""Directions by name."""
_PARAMETERS = ("all", "weights")
_BASIS = 48
_MOST_PRODUCTS = 300


@dataclass(frozen=True)
class Asked:
    """What a call asks for.

    Attributes:
        directions: A kind, or the directions themselves.
        count: How many, of a kind.
        parameters: "all", "weights", or None for what the kind usually moves.
        layers: Only parameters of these layers move; None for all.
        seed: Seed of random directions.
    """

    directions: Any
    count: int
    parameters: str | None = None
    layers: str | list[str] | None = None
    seed: int = 0

    @property
    def kind(self) -> str:
        """One of `KINDS`, or "given"."""
        return self.directions if isinstance(self.directions, str) else "given"

    @property
    def identity(self) -> str:
        """What tells the directions from others."""
        return f"given {digest(self.directions)}" if self.kind == "given" else self.kind


@dataclass(frozen=True)
class Chosen:
    """Directions, and what is known about them.

    Attributes:
        vectors: A change of parameters each, by name.
        labels: What to call each.
        notes: What the user should know.
        facts: Numbers to keep: eigenvalues, and their residuals.
    """

    vectors: list[dict[str, Tensor]]
    labels: list[str]
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def check_asked(asked: Asked) -> None:
    """Refuse what no network has directions for."""
    if isinstance(asked.directions, str) and asked.directions not in KINDS:
        raise OptionError(
            f"Expected directions to be one of {', '.join(KINDS)}, or the directions themselves, but got "
            f"{asked.directions!r}.{nearest(asked.directions, KINDS)}"
        )
    if asked.parameters not in (None, *_PARAMETERS):
        raise OptionError(
            f"Expected parameters to be 'all', 'weights' or None but got {asked.parameters!r}. None takes "
            "what the kind of direction usually moves."
        )


def choose_directions(problem: Problem, asked: Asked, number: int) -> Chosen:
    """The directions for one network, inside its guard.

    Args:
        problem: The model, data and loss.
        asked: What was asked for.
        number: The network's place in its group: networks in the same place draw the same random numbers.
    """
    if asked.kind == "given":
        vectors = given_directions(problem.model, asked.directions)
        return Chosen(vectors, _numbered("direction", len(vectors)))
    generator = torch.Generator().manual_seed((asked.seed + 1_000_003 * number) % 2**63)
    if asked.kind == "relative_flatness":
        return _feature_directions(problem.model, asked, generator)
    names = _moving(problem.model, asked)
    if asked.kind == "eigenvectors":
        found = top_eigenvectors(problem, names, asked.count)
        notes = [] if found.converged else ["eigenvectors not converged: their residuals are in the meta"]
        notes += _notes(problem.model, found.directions[0])
        facts = {"eigenvalues": found.values, "residuals": found.residuals}
        labels = [f"eigenvector {place} (λ = {value:.4g})" for place, value in enumerate(found.values, 1)]
        return Chosen(found.directions, labels, notes, facts)
    draw = layer_normalized if asked.kind == "layer" else filter_normalized
    vectors = [draw(problem.model, names, generator) for _ in range(asked.count)]
    return Chosen(vectors, _numbered("direction", asked.count), _notes(problem.model, vectors[0]))


def _numbered(word: str, count: int) -> list[str]:
    return [f"{word} {place}" for place in range(1, count + 1)]


def _notes(model: nn.Module, direction: Mapping[str, Tensor]) -> list[str]:
    """What stays where it is, and what moves though training would not move it."""
    parameters = dict(model.named_parameters())
    moved = [name for name in parameters if name in direction and bool(direction[name].any())]
    still = [name for name in parameters if name not in moved]
    frozen = [name for name in moved if not parameters[name].requires_grad]
    notes = [f"not moved: {listed(still)}"] if still else []
    if frozen:
        notes.append(f"frozen (requires_grad=False) and moved like all others: {listed(frozen, 4)}")
    return notes


def _moving(model: nn.Module, asked: Asked) -> list[str]:
    """Names of the parameters that move.

    Li et al. leave biases and norm parameters where they are; rangamani2019's metric includes them.
    """
    parameters = dict(model.named_parameters())
    which = asked.parameters or ("weights" if asked.kind == "filter" else "all")
    names = [name for name, value in parameters.items() if which == "all" or value.dim() >= 2]
    if asked.layers is not None:
        available = find_layers(model)
        chosen = [available[name] for name in _layers(model, asked)]
        weights, without = own_weights(model, chosen)
        if without:
            raise without_weight(without)
        biases = {parameter_names(model).get(layer.bias_name) for layer in chosen}
        own = {*weights.values(), *biases}
        names = [name for name in names if name in own]
    if not names:
        raise LayerError(
            f"Expected parameters that can move but there are none with parameters={which!r} and "
            f"layers={asked.layers!r}. Pass parameters='all', or leave layers out."
        )
    return names


def _layers(model: nn.Module, asked: Asked) -> list[str]:
    available = find_layers(model)
    return select_layers(available, list(available), asked.layers)


def _feature_directions(model: nn.Module, asked: Asked, generator: torch.Generator) -> Chosen:
    available = find_layers(model)
    names = _layers(model, asked)
    weights, _ = own_weights(model, [available[name] for name in names])
    layers = {
        weight: available[name]
        for name, weight in weights.items()
        if takes_feature_directions(available[name])
    }
    if not layers:
        raise LayerError(
            "Expected a Linear or convolution layer to perturb the features of but got "
            f"{listed(names) or 'none'}. Use directions='layer'."
        )
    vectors = [feature_directions(layers, generator) for _ in range(asked.count)]
    return Chosen(vectors, _numbered("W·A", asked.count), _notes(model, vectors[0]))


def given_directions(model: nn.Module, given: Any) -> list[dict[str, Tensor]]:
    """A user's directions, each as tensors by parameter name.

    One direction is a dict of tensors by parameter name (what is missing stays), a list of tensors shaped
    like the parameters, or one flat vector; several are a list of such, or a matrix of flat vectors.
    """
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    size = sum(value.numel() for value in parameters.values())
    if isinstance(given, Tensor) and given.dim() == 2 and given.shape[1] == size:
        given = list(given)
    if isinstance(given, (Mapping, Tensor)) or _shapes(given) == _shapes(parameters.values()):
        given = [given]
    if not isinstance(given, (list, tuple)) or not given:
        raise OptionError(
            f"Expected directions to be one of {', '.join(KINDS)}, a dict of tensors by parameter name, a "
            f"vector of {size} numbers, or a list of these but got {describe(given)}. For example "
            "directions='layer'."
        )
    rows = [isinstance(part, (list, tuple)) and len(part) == len(parameters) for part in given]
    named = [
        dict(zip(parameters, part, strict=True)) if row else part
        for part, row in zip(given, rows, strict=True)
    ]
    return [given_direction(parameters, part) for part in named]


def _shapes(tensors: Any) -> list[torch.Size] | None:
    """Of a list of tensors; None for anything else."""
    parts: list[Any] = [] if isinstance(tensors, str) or not isinstance(tensors, Iterable) else list(tensors)
    tensors_only = bool(parts) and all(isinstance(part, Tensor) for part in parts)
    return [part.shape for part in parts] if tensors_only else None


def layer_normalized(model: nn.Module, names: Iterable[str], generator: torch.Generator) -> dict[str, Tensor]:
    """A random direction with the length of each parameter tensor, biases and norm parameters included."""
    parameters = dict(model.named_parameters())
    direction = {}
    for name in names:
        W = parameters[name].detach().double()
        V = _normal(W, generator)
        direction[name] = V * _ratio(W.norm(), V.norm())
    return direction


def filter_normalized(
    model: nn.Module, names: Iterable[str], generator: torch.Generator
) -> dict[str, Tensor]:
    """A random direction with the length of each filter.

    A filter is what one output unit or channel sees: a row of a linear weight, a slice of a convolution's.
    Of a parameter with one number per unit (a bias, a norm's scale or shift) every entry is a filter of its
    own and moves by its own size, up or down.
    """
    parameters = dict(model.named_parameters())
    views = {layer.weight_name: layer for layer in find_layers(model).values()}
    direction = {}
    for name in names:
        W = parameters[name].detach().double()
        V = _normal(W, generator)
        if W.dim() < 2:
            direction[name] = V.sign() * W.abs()
            continue
        filters = _filters(W, views.get(name))
        lengths = _filters(V, views.get(name)).flatten(1).norm(dim=1)
        ratios = _ratio(filters.flatten(1).norm(dim=1), lengths)
        direction[name] = V * _spread(ratios, W, views.get(name))
    return direction


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(like.device)


def _ratio(wanted: Tensor, drawn: Tensor) -> Tensor:
    return torch.where(drawn > 0, wanted / drawn.clamp(min=1e-300), 0.0)


def _filters(W: Tensor, layer: Layer | None) -> Tensor:
    """A parameter with its filters first."""
    if isinstance(layer, TransposedLinearLayer):
        return W.transpose(0, 1)
    if isinstance(layer, TransposedConvolutionLayer):
        # (in, out / G, …): each group of inputs has outputs of its own.
        return W.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
    return W


def _spread(ratios: Tensor, W: Tensor, layer: Layer | None) -> Tensor:
    """One number per filter, for every entry of the parameter."""
    if isinstance(layer, TransposedLinearLayer):
        return ratios.expand(W.shape)
    if isinstance(layer, TransposedConvolutionLayer):
        per_group = ratios.unflatten(0, (layer.groups, 1, -1))
        full = per_group.expand(-1, W.shape[0] // layer.groups, -1).flatten(0, 1)
        return full.reshape(*full.shape, *[1] * (W.dim() - 2)).expand(W.shape)
    return ratios.reshape(-1, *[1] * (W.dim() - 1)).expand(W.shape)


@dataclass(frozen=True)
class Eigenvectors:
    """Directions of the largest eigenvalues.

    Attributes:
        directions: Of unit length.
        values: The eigenvalues, largest first.
        residuals: ‖Hv − λv‖ of each.
        converged: Whether every iteration met its tolerance.
    """

    directions: list[dict[str, Tensor]]
    values: list[float]
    residuals: list[float]
    converged: bool


def top_eigenvectors(problem: Problem, names: Iterable[str], count: int) -> Eigenvectors:
    """Eigenvectors of the largest eigenvalues of the Hessian in the named parameters, of unit length.

    One after the other by Lanczos, each in the space orthogonal to those before it.
    """
    space = ParameterSpace(problem, names)
    operator = HessianOperator(space)
    generator = torch.Generator().manual_seed(problem.seed)
    found: list[Tensor] = []
    values, residuals, converged = [], [], True
    for _ in range(min(count, space.dimension)):
        start = torch.randn(space.dimension, generator=generator, dtype=torch.float64, device="cpu")
        solver = TopEigenvalues(
            (1, space.dimension),
            problem.device,
            tolerance=default_tolerance(problem.dtype),
            max_products=_MOST_PRODUCTS,
            basis_limit=_BASIS,
            start=_without(start.to(problem.device), found)[None],
        )
        while not solver.done:
            (product,) = operator([solver.query()[0]])
            solver.tell(_without(product, found)[None])
        vector = _without(solver.vectors[0], found)
        found.append(vector / vector.norm())
        values.append(float(solver.values[0]))
        residuals.append(float(solver.residuals[0]))
        converged = converged and bool(solver.converged[0])
    return Eigenvectors([by_name(space.parameters, vector) for vector in found], values, residuals, converged)


def _without(vector: Tensor, found: list[Tensor]) -> Tensor:
    for other in found:
        vector = vector - (other @ vector) * other
    return vector


def feature_directions(layers: Mapping[str, Layer], generator: torch.Generator) -> dict[str, Tensor]:
    """W·A in every layer, A a random orthogonal matrix each: t moves features by t of their length.

    E(W + t W A) − E(W) is feature robustness (petzka2021, eq. 7); over A its curvature averages to κ_Tr / m.

    Args:
        layers: The layers, by the name of their weight.
        generator: Where A comes from.
    """
    kernel = kernel_of("orthogonal", None)
    direction = {}
    for name, layer in layers.items():
        V = random_directions(layer.matrix(), kernel, 1, generator)[0].to(layer.weight.device)
        laid = V[0].T if isinstance(layer, TransposedLinearLayer) else V.reshape(layer.weight.shape)
        direction[name] = laid
    return direction


def takes_feature_directions(layer: Layer) -> bool:
    """Whether W is the whole weight of a module, row by row."""
    return type(layer) in (LinearLayer, ConvolutionLayer, TransposedLinearLayer)
