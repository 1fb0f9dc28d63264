"""Which networks a call is about, and how weights and directions that a user gives fit them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import (
    CheckpointError,
    LayerError,
    ModelError,
    NotFiniteError,
    OptionError,
    listed,
    nearest,
)
from flatness.network.layers.view import Layer
from flatness.problem.batches import describe
from flatness.problem.model import unwrap

# What modules save beside parameters and buffers has a name that ends so.
_BESIDE = "_extra_state"

Networks = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module | Sequence[nn.Module]]
"""A network; several, which make one mean and band; or any of these by name, a curve for each name."""

Weights = nn.Module | Mapping[str, Tensor]
"""Weights of a network: the network itself, or its state dict."""


@dataclass(frozen=True)
class Member:
    """One network of a call.

    Attributes:
        group: Name of the curve it belongs to.
        number: Its place in the group.
        model: The network.
    """

    group: str
    number: int
    model: nn.Module


def members_of(model: Any) -> list[Member]:
    """The networks of a call, group by group."""
    groups = model if isinstance(model, Mapping) else {"network": model}
    members = []
    for group, networks in groups.items():
        several = networks if isinstance(networks, (list, tuple)) else [networks]
        members += [Member(str(group), number, network) for number, network in enumerate(several)]
    if not members:
        raise ModelError("Expected at least one network but got none. Pass the model, a list, or a dict.")
    for member in members:
        if not isinstance(member.model, nn.Module):
            raise ModelError(
                f"Expected networks to be torch.nn.Modules but {member.group!r} holds "
                f"{describe(member.model)}. Load checkpoints into models first."
            )
    return members


def parameter_names(model: nn.Module) -> dict[str, str]:
    """Every name that a parameter goes by, to the one that ``model.named_parameters()`` gives it.

    They differ for tied parameters, which have several.
    """
    first = {id(value): name for name, value in model.named_parameters()}
    everything = model.named_parameters(remove_duplicate=False)
    return {name: first[id(value)] for name, value in everything}


def own_weights(model: nn.Module, layers: Iterable[Layer]) -> tuple[dict[str, str], list[str]]:
    """Parameters that are the weights of layers, by the layers' names; and layers that have none.

    Those share a packed weight, as the projections of attention do, or compute theirs from other parameters.
    """
    known, sizes = parameter_names(model), {name: value.numel() for name, value in model.named_parameters()}
    found, without = {}, []
    for layer in layers:
        name = known.get(layer.weight_name)
        if name is not None and sizes[name] == layer.weight.numel():
            found[layer.name] = name
        else:
            without.append(layer.name)
    return found, without


def unknown_layers(model: nn.Module, layers: Iterable[Layer]) -> list[str]:
    """Modules with a weight, of two axes or more, that none of the layers has."""
    layers = list(layers)
    named = {layer.weight_name for layer in layers}
    known = {id(value) for name, value in model.named_parameters(remove_duplicate=False) if name in named}
    inside = tuple(f"{layer.name}." for layer in layers)
    return [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside)
        and any(value.dim() >= 2 and id(value) not in known for value in module.parameters(recurse=False))
    ]


def without_weight(names: list[str]) -> LayerError:
    """The error about layers whose weight is not a parameter of its own."""
    return LayerError(
        f"Expected layers whose weight is a parameter of its own but {listed(names)} share a packed one or "
        "compute theirs from others. Leave them out."
    )


def state_of(weights: Any) -> dict[str, Tensor]:
    """Floating-point parameters and buffers by name, detached; of a wrapper those of what it wraps."""
    found = unwrap(weights)[0].state_dict() if isinstance(weights, nn.Module) else weights
    if isinstance(found, Mapping):
        found = {name: value for name, value in found.items() if not str(name).endswith(_BESIDE)}
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(
            f"Expected a network or its state dict but got {describe(weights)}. For example "
            "torch.load(path, weights_only=True)."
        )
    return {str(name): value.detach() for name, value in found.items() if value.is_floating_point()}


def difference(model: nn.Module, weights: Any, what: str) -> dict[str, Tensor]:
    """Where other weights lie, seen from a model: parameters and buffers by name, in float64.

    Args:
        model: The network.
        weights: Another network, or a state dict.
        what: How to call them in an error.

    Raises:
        CheckpointError: When the weights are those of another network.
        NotFiniteError: When they hold NaN or infinity where the model does not.
    """
    here, there = state_of(model), state_of(weights)
    _check_same_names(here, there, what)
    # A tied parameter has several names in a state dict; it moves once.
    first: dict[Any, str] = {}
    for name, value in here.items():
        first.setdefault(value.data_ptr() if value.numel() else name, name)
    moved: dict[str, Tensor] = {}
    for name in first.values():
        value, other = here[name], there[name].to(here[name].device, torch.float64)
        # Masks of attention hold −∞ in both.
        moved[name] = torch.where(other == value, 0.0, other - value.double())
    broken = [name for name, move in moved.items() if not bool(move.isfinite().all())]
    if broken:
        raise NotFiniteError(
            f"Expected {what} to be finite weights but got NaN or infinity in {listed(broken)}. Training "
            "diverged, or the checkpoint is damaged: leave it out."
        )
    return moved


def _check_same_names(here: Mapping[str, Tensor], there: Mapping[str, Tensor], what: str) -> None:
    """Refuse weights with other names or shapes."""
    shapes = [
        f"{name} {list(there[name].shape)} for {list(value.shape)}"
        for name, value in here.items()
        if name in there and there[name].shape != value.shape
    ]
    differences = {
        "missing:": [name for name in here if name not in there],
        "unexpected:": [name for name in there if name not in here],
        "other shapes:": shapes,
    }
    problems = [f"{label} {listed(names, 4)}" for label, names in differences.items() if names]
    if problems:
        raise CheckpointError(
            f"Expected {what} to be weights of the same network but they differ: {'; '.join(problems)}. Pass "
            "checkpoints of one architecture."
        )


def by_name(parameters: Mapping[str, Tensor], vector: Tensor) -> dict[str, Tensor]:
    """The pieces of a flat vector, each in the shape and on the device of its parameter."""
    pieces = vector.split([value.numel() for value in parameters.values()])
    return {
        name: piece.reshape(value.shape).to(value.device)
        for (name, value), piece in zip(parameters.items(), pieces, strict=True)
    }


def given_direction(parameters: Mapping[str, Tensor], given: Any) -> dict[str, Tensor]:
    """A user's direction, a vector or tensors by parameter name, as tensors by name in float64."""
    size = sum(value.numel() for value in parameters.values())
    if isinstance(given, Tensor) and given.dim() == 1 and len(given) == size:
        given = by_name(parameters, given.detach())
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
        _check_move(name, value, parameters[name])
    return {name: value.detach().double() for name, value in given.items()}


def _check_move(name: str, value: Tensor, parameter: Tensor) -> None:
    """Refuse a change of a parameter that is of another shape, or not finite."""
    if value.shape != parameter.shape:
        raise OptionError(
            f"Expected a direction of shape {list(parameter.shape)} for {name!r} but got "
            f"{list(value.shape)}. Directions have the shapes of the parameters they move."
        )
    if not bool(value.isfinite().all()):
        raise OptionError(
            f"Expected a finite direction but got NaN or infinity for {name!r}. Check how it was made."
        )
