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
from flatness.network.layers import find_layers, own_parameter, own_parameters, select_layers
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
        several: Whether its group has others.
    """

    group: str
    number: int
    model: nn.Module
    several: bool

    @property
    def name(self) -> str:
        """That of the group, with a number where there are others."""
        return f"{self.group} {self.number + 1}" if self.several else self.group


def members_of(model: Any) -> list[Member]:
    """The networks of a call, group by group."""
    groups = model if isinstance(model, Mapping) else {"network": model}
    members = []
    for group, networks in groups.items():
        own = networks if isinstance(networks, (list, tuple)) else [networks]
        members += [Member(str(group), number, network, len(own) > 1) for number, network in enumerate(own)]
    if not members:
        raise ModelError("Expected at least one network but got none. Pass the model, a list, or a dict.")
    for member in members:
        if not isinstance(member.model, nn.Module):
            raise ModelError(
                f"Expected networks to be torch.nn.Modules but {member.group!r} holds "
                f"{describe(member.model)}. Load checkpoints into models first."
            )
    return members


def chosen_layers(model: nn.Module, layers: str | Iterable[str] | None) -> list[Layer]:
    """The supported layers that a user names; all of them when None."""
    available = find_layers(model)
    return [available[name] for name in select_layers(available, list(available), layers)]


def own_weights(model: nn.Module, layers: Iterable[Layer], *, lenient: bool = False) -> dict[str, str]:
    """Parameters that are the weights of layers, by the layers' names.

    Some layers have none: they share a packed weight, as the projections of attention do, or compute theirs
    from other parameters.

    Args:
        model: The network.
        layers: Its layers.
        lenient: Whether to leave out layers without such a weight where others have one; else they are
            refused.
    """
    sizes = {name: value.numel() for name, value in model.named_parameters()}
    found, without = {}, []
    for layer in layers:
        name = own_parameter(model, layer)
        if name and sizes[name] == layer.weight.numel():
            found[layer.name] = name
        else:
            without.append(layer.name)
    if without and not (lenient and found):
        raise LayerError(
            f"Expected layers whose weight is a parameter of its own but {listed(without)} share a packed "
            "one or compute theirs from others. Leave them out."
        )
    return found


def unknown_layers(model: nn.Module, layers: list[Layer]) -> list[str]:
    """Modules with a weight, of two axes or more, that none of the layers has."""
    named, inside = {layer.weight_name for layer in layers}, tuple(f"{layer.name}." for layer in layers)
    aliases = model.named_parameters(remove_duplicate=False)
    known = {id(value) for name, value in aliases if name in named or value.dim() < 2}
    return [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside) and not known.issuperset(map(id, own_parameters(module)))
    ]


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
    own, other = _shapes(here), _shapes(there)
    differences = {
        "missing:": [name for name in own if name not in other],
        "unexpected:": [name for name in other if name not in own],
        "other shapes:": [
            f"{n} {other[n]} for {shape}" for n, shape in own.items() if other.get(n, shape) != shape
        ],
    }
    problems = [f"{label} {listed(names, 4)}" for label, names in differences.items() if names]
    if problems:
        raise CheckpointError(
            f"Expected {what} to be weights of the same network but they differ: {'; '.join(problems)}. Pass "
            "checkpoints of one architecture."
        )


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in weights.items()}


def size_of(parameters: Mapping[str, Tensor]) -> int:
    """How many numbers there are in all."""
    return sum(value.numel() for value in parameters.values())


def by_name(parameters: Mapping[str, Tensor], vector: Tensor) -> dict[str, Tensor]:
    """The pieces of a flat vector, each in the shape and on the device of its parameter."""
    pieces = vector.split([value.numel() for value in parameters.values()])
    return {
        name: piece.reshape(value.shape).to(value.device)
        for (name, value), piece in zip(parameters.items(), pieces, strict=True)
    }


def given_direction(parameters: Mapping[str, Tensor], given: Any) -> dict[str, Tensor]:
    """A user's direction, a vector or tensors, perhaps by parameter name, as tensors by name in float64."""
    given, size = _named(given, parameters), size_of(parameters)
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
    return {name: _checked(name, value.detach(), parameters[name]) for name, value in given.items()}


def _named(given: Any, parameters: Mapping[str, Tensor]) -> Any:
    """A flat vector, or a list with an entry for every parameter, by name; anything else as it is."""
    if isinstance(given, Tensor) and given.dim() == 1 and len(given) == size_of(parameters):
        return by_name(parameters, given)
    if isinstance(given, (list, tuple)) and len(given) == len(parameters):
        return dict(zip(parameters, given, strict=True))
    return given


def _checked(name: str, value: Tensor, parameter: Tensor) -> Tensor:
    """A change of a parameter in float64; refused where it is of another shape, or not finite."""
    if value.shape != parameter.shape:
        raise OptionError(
            f"Expected a direction of shape {list(parameter.shape)} for {name!r} but got "
            f"{list(value.shape)}. Directions have the shapes of the parameters they move."
        )
    if not bool(value.isfinite().all()):
        raise OptionError(
            f"Expected a finite direction but got NaN or infinity for {name!r}. Check how it was made."
        )
    return value.double()
