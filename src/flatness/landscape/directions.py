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

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from flatness.curvature.operators.lanczos import TopEigenvalues, default_tolerance
from flatness.curvature.parameters.hessian_operator import HessianOperator
from flatness.curvature.parameters.parameter_products import entries_of
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import LayerError, OptionError, listed, nearest
from flatness.files import digest
from flatness.generalization.kernels import kernel_of
from flatness.generalization.matrices import random_directions
from flatness.landscape.networks import (
    by_name,
    chosen_layers,
    difference,
    given_direction,
    own_weights,
    size_of,
)
from flatness.network.layers import find_layers
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
        kind: One of `KINDS`; "given", "between" two networks, or the plane of a "trajectory".
        count: How many, of a kind with a name.
        parameters: "all", "weights", or None for what the kind usually moves.
        layers: Only parameters of these layers move; None for all.
        seed: Seed of random directions.
        given: The directions, or the weights to go to.
    """

    kind: str
    count: int
    parameters: str | None = None
    layers: str | list[str] | None = None
    seed: int = 0
    given: Any = None

    @property
    def identity(self) -> str:
        """What tells the directions from others."""
        return self.kind if self.given is None else f"{self.kind} {digest(self.given)}"


@dataclass(frozen=True)
class Chosen:
    """Directions, and what is known about them.

    Attributes:
        vectors: A change of parameters each, by name.
        labels: What to call each.
        notes: What the user should know.
        facts: Numbers to keep, for each: eigenvalues, and their residuals.
    """

    vectors: list[dict[str, Tensor]]
    labels: list[str]
    notes: list[str] = field(default_factory=list)
    facts: dict[str, list[float]] = field(default_factory=dict)


def asked_for(
    directions: Any, count: int, parameters: Any, layers: str | list[str] | None, seed: int
) -> Asked:
    """What a call asks for, which may be arrays of NumPy; what no network has directions for is refused."""
    if isinstance(directions, str) and directions not in KINDS:
        raise OptionError(
            f"Expected directions to be one of {', '.join(KINDS)}, or the directions themselves, but got "
            f"{directions!r}.{nearest(directions, KINDS)}"
        )
    if parameters not in (None, *_PARAMETERS):
        raise OptionError(
            f"Expected parameters to be 'all', 'weights' or None but got {parameters!r}. None takes "
            "what the kind of direction usually moves."
        )
    if isinstance(directions, str):
        return Asked(directions, count, parameters, layers, seed)
    given = tree_map_only(np.ndarray, torch.from_numpy, directions)
    return Asked("given", count, parameters, layers, seed, given)


def choose_directions(problem: Problem, asked: Asked, number: int) -> Chosen:
    """The directions for one network, inside its guard.

    Args:
        problem: The model, data and loss.
        asked: What was asked for.
        number: The network's place in its group: networks in the same place draw the same random numbers.
    """
    model = problem.model
    if asked.kind == "between":
        return Chosen([difference(model, asked.given, "between")], ["to the other network"])
    if asked.kind == "given":
        vectors = _given_directions(model, asked.given)
        return Chosen(vectors, _numbered("direction", len(vectors)))
    generator = torch.Generator().manual_seed((asked.seed + 1_000_003 * number) % 2**63)
    if asked.kind == "eigenvectors":
        return _eigenvectors(problem, _moving(model, asked), asked.count)
    if asked.kind == "relative_flatness":
        layers = _perturbable(model, asked)
        vectors = [_feature_direction(layers, generator) for _ in range(asked.count)]
        labels = _numbered("W·A", asked.count)
    else:
        names = _moving(model, asked)
        vectors = [_normalised(model, names, asked.kind, generator) for _ in range(asked.count)]
        labels = _numbered("direction", asked.count)
    return Chosen(vectors, labels, _notes(model, vectors[0]))


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
        notes.append(f"frozen (requires_grad=False) but moved like the others: {listed(frozen, 4)}")
    return notes


def _moving(model: nn.Module, asked: Asked) -> list[str]:
    """Names of the parameters that move.

    Li et al. leave biases and norm parameters where they are; rangamani2019's metric includes them.
    """
    parameters = dict(model.named_parameters())
    which = asked.parameters or ("weights" if asked.kind == "filter" else "all")
    names = [name for name, value in parameters.items() if which == "all" or value.dim() >= 2]
    if asked.layers is not None:
        own = _parameters_of(model, chosen_layers(model, asked.layers))
        names = [name for name in names if name in own]
    if not names:
        raise LayerError(
            f"Expected parameters that can move but there are none with parameters={which!r} and "
            f"layers={asked.layers!r}. Pass parameters='all', or leave layers out."
        )
    return names


def _parameters_of(model: nn.Module, layers: list[Layer]) -> set[str]:
    """Names of the weights and biases of layers."""
    aliases = dict(model.named_parameters(remove_duplicate=False))
    biases = {id(aliases[layer.bias_name]) for layer in layers if layer.bias_name in aliases}
    named = {name for name, value in model.named_parameters() if id(value) in biases}
    return named | set(own_weights(model, layers).values())


def _given_directions(model: nn.Module, given: Any) -> list[dict[str, Tensor]]:
    """A user's directions, each as tensors by parameter name.

    One direction is a dict of tensors by parameter name (what is missing stays), a list of tensors shaped
    like the parameters, or one flat vector; several are a list of such, or a matrix of flat vectors.
    """
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    size = size_of(parameters)
    if isinstance(given, Tensor) and given.dim() == 2 and given.shape[1] == size:
        given = list(given)
    if isinstance(given, (Mapping, Tensor)) or _is_one(given, parameters):
        given = [given]
    if not isinstance(given, (list, tuple)) or not given:
        raise OptionError(
            f"Expected directions to be one of {', '.join(KINDS)}, a dict of tensors by parameter name, a "
            f"vector of {size} numbers, or a list of these but got {describe(given)}. For example "
            "directions='layer'."
        )
    return [given_direction(parameters, part) for part in given]


def _is_one(given: Any, parameters: Mapping[str, Tensor]) -> bool:
    """Whether a list is one direction, with a tensor shaped like every parameter."""
    shapes = [value.shape for value in parameters.values()]
    return isinstance(given, (list, tuple)) and [getattr(part, "shape", None) for part in given] == shapes


def _normalised(
    model: nn.Module, names: Iterable[str], kind: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """A random direction with the length of each parameter tensor, or of each filter.

    A filter is what one output unit or channel sees: a row of a linear weight, a slice of a convolution's.
    Of a parameter with one number per unit (a bias, a norm's scale or shift) every entry is a filter of its
    own and moves by its own size, up or down.
    """
    parameters = dict(model.named_parameters())
    views = {layer.weight_name: layer for layer in find_layers(model).values()}
    direction = {}
    for name in names:
        W = parameters[name].detach().double().flatten()
        V = torch.randn(len(W), generator=generator, dtype=torch.float64, device="cpu").to(W.device)
        order, count = (slice(None), 1) if kind == "layer" else _filters(parameters[name], views.get(name))
        shape = count, len(W) // max(1, count)
        own, drawn = W[order].view(shape), V[order].view(shape)
        lengths = drawn.norm(dim=1)
        ratios = torch.where(lengths > 0, own.norm(dim=1) / lengths.clamp(min=1e-300), 0.0)
        V[order] = (drawn * ratios[:, None]).flatten()
        direction[name] = V.view(parameters[name].shape)
    return direction


def _filters(parameter: nn.Parameter, layer: Layer | None) -> tuple[slice | Tensor, int]:
    """The entries of a parameter, counted flat, filter after filter; and how many filters they are."""
    turned = isinstance(layer, (TransposedLinearLayer, TransposedConvolutionLayer))
    if layer is not None and turned and not layer.chooses:
        places = entries_of(layer, parameter).flatten(0, 1)
        return places.flatten(), len(places)
    return slice(None), len(parameter) if parameter.dim() >= 2 else parameter.numel()


def _eigenvectors(problem: Problem, names: Iterable[str], count: int) -> Chosen:
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
    vectors = [by_name(space.parameters, vector) for vector in found]
    labels = [f"eigenvector {place} (λ = {value:.4g})" for place, value in enumerate(values, 1)]
    notes = [] if converged else ["eigenvectors not converged: their residuals are in the meta"]
    notes += _notes(problem.model, vectors[0])
    return Chosen(vectors, labels, notes, {"eigenvalues": values, "residuals": residuals})


def _without(vector: Tensor, found: list[Tensor]) -> Tensor:
    for other in found:
        vector = vector - (other @ vector) * other
    return vector


def _perturbable(model: nn.Module, asked: Asked) -> dict[str, Layer]:
    """Layers whose features can be perturbed, by the name of their weight: W is all of it, row by row."""
    layers = chosen_layers(model, asked.layers)
    names = {layer.name: layer for layer in layers}
    kinds = (LinearLayer, ConvolutionLayer, TransposedLinearLayer)
    weights = own_weights(model, [layer for layer in layers if type(layer) in kinds], lenient=True)
    if not weights:
        raise LayerError(
            "Expected a Linear or convolution layer to perturb the features of but got "
            f"{listed(names) or 'none'}. Use directions='layer'."
        )
    return {weight: names[name] for name, weight in weights.items()}


def _feature_direction(layers: Mapping[str, Layer], generator: torch.Generator) -> dict[str, Tensor]:
    """W·A in every layer, A a random orthogonal matrix each: t moves features by t of their length.

    E(W + t W A) − E(W) is feature robustness (petzka2021, eq. 7); over A its curvature averages to κ_Tr / m.
    """
    direction, kernel = {}, kernel_of("orthogonal")
    for name, layer in layers.items():
        V = random_directions(layer.matrix(), kernel, 1, generator)[0].to(layer.weight.device)
        laid = V[0].T if isinstance(layer, TransposedLinearLayer) else V.reshape(layer.weight.shape)
        direction[name] = laid
    return direction
