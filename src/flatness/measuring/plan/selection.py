"""Selecting layers: those that are measured, each weight under one name."""

from __future__ import annotations

from collections.abc import Iterable

from flatness.curvature.parameters.parameter_products import own_parameter
from flatness.errors import LayerError, listed
from flatness.measuring.examine.examined import Examined
from flatness.network.layers import SUPPORTED, select_layers
from flatness.network.layers.linear import ProjectionLayer
from flatness.network.parts import named_modules
from flatness.problem.problem import Problem


def selected_layers(problem: Problem, examined: Examined, layers: str | Iterable[str] | None) -> list[str]:
    """The names of the layers to measure, in network order; None stands for all that ran."""
    kinds = {name: type(module).__name__ for name, module in named_modules(problem.model)}
    if examined.called:
        names = select_layers(examined.layers, examined.called, layers, last=examined.last, modules=kinds)
        return _one_per_weight(problem, examined, names)
    if examined.layers:
        raise LayerError(
            "Expected at least one layer to measure but the forward pass calls none of "
            f"{listed(examined.layers)}. Call them as modules, not through their weights."
        )
    raise LayerError(
        f"Expected at least one supported layer ({SUPPORTED}) but "
        f"{type(problem.model).__name__} has none. Teach the library yours with flatness.register_layer."
    )


def _one_per_weight(problem: Problem, examined: Examined, names: list[str]) -> list[str]:
    """The names without those whose weight comes under another name already."""
    kept: list[str] = []
    for name in names:
        weight = _weight_key(problem, examined, name)
        same = next((other for other in kept if _weight_key(problem, examined, other) == weight), None)
        if same is None:
            kept.append(name)
        else:
            examined.notes.append(f"{name} has the weight of {same} and is measured under that name")
    return kept


def _weight_key(problem: Problem, examined: Examined, name: str) -> object:
    """What layers with one weight have in common."""
    if name in examined.shared:
        return id(examined.shared[name])
    layer = examined.layers[name]
    packed = isinstance(layer, ProjectionLayer)
    return own_parameter(problem.model, layer) if name in examined.loose and not packed else name
