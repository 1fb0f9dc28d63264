"""From what the user asks for to directions in the parameter space of a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import LayerError, OptionError, listed, nearest
from flatness.landscape.arguments import digest
from flatness.landscape.curvature_directions import (
    feature_directions,
    takes_feature_directions,
    top_eigenvectors,
)
from flatness.landscape.networks import own_weights, parameter_names, without_weight
from flatness.landscape.random_directions import filter_normalized, layer_normalized
from flatness.network.layers import find_layers, select_layers
from flatness.problem.batches import describe
from flatness.problem.problem import Problem

KINDS = ("layer", "filter", "eigenvectors", "relative_flatness")
"""Directions by name."""
_PARAMETERS = ("all", "weights")


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
    shapes = [value.shape for value in parameters.values()]
    if isinstance(given, Tensor) and given.dim() == 2 and given.shape[1] == size:
        given = list(given)
    if isinstance(given, (Mapping, Tensor)):
        return [_one_direction(parameters, given, size)]
    if isinstance(given, (list, tuple)) and given:
        tensors = all(isinstance(part, Tensor) for part in given)
        if tensors and [part.shape for part in given] == shapes:
            return [_one_direction(parameters, dict(zip(parameters, given, strict=True)), size)]
        return [
            _one_direction(
                parameters,
                dict(zip(parameters, part, strict=True))
                if isinstance(part, (list, tuple)) and len(part) == len(parameters)
                else part,
                size,
            )
            for part in given
        ]
    raise OptionError(
        f"Expected directions to be one of {', '.join(KINDS)}, a dict of tensors by parameter name, a vector "
        f"of {size} numbers, or a list of these but got {describe(given)}. For example directions='layer'."
    )


def _one_direction(parameters: Mapping[str, Tensor], given: Any, size: int) -> dict[str, Tensor]:
    if isinstance(given, Tensor) and given.dim() == 1 and len(given) == size:
        pieces = given.detach().split([value.numel() for value in parameters.values()])
        given = {
            name: piece.reshape(value.shape)
            for (name, value), piece in zip(parameters.items(), pieces, strict=True)
        }
    if not isinstance(given, Mapping) or not all(isinstance(value, Tensor) for value in given.values()):
        raise OptionError(
            f"Expected a direction to be a dict of tensors by parameter name or a vector of {size} numbers "
            f"but got {describe(given)}. For example {{name: torch.randn_like(p) for name, p in "
            "model.named_parameters()}."
        )
    unknown = [name for name in given if name not in parameters]
    if unknown:
        raise OptionError(
            f"Expected directions of this network's parameters but got {listed(unknown)}."
            f"{nearest(unknown[0], parameters)} Its parameters: {listed(parameters)}."
        )
    for name, value in given.items():
        if value.shape != parameters[name].shape:
            raise OptionError(
                f"Expected a direction of shape {list(parameters[name].shape)} for {name!r} but got "
                f"{list(value.shape)}. Directions have the shapes of the parameters they move."
            )
        if not bool(value.isfinite().all()):
            raise OptionError(
                f"Expected a finite direction but got NaN or infinity for {name!r}. Check how it was made."
            )
    return {name: value.detach().double() for name, value in given.items()}
