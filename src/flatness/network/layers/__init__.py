"""Modules seen as matrices: a weight W, the features Φ it multiplies, the signals δ that come back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn

from flatness.errors import LayerError, listed, nearest
from flatness.network.attention import Projection
from flatness.network.layers.convolution import ConvolutionLayer, TransposedConvolutionLayer
from flatness.network.layers.linear import (
    EmbeddingLayer,
    LinearLayer,
    ProjectionLayer,
    TransposedLinearLayer,
)
from flatness.network.layers.view import Layer

_VIEWS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    Projection: ProjectionLayer,
    nn.Embedding: EmbeddingLayer,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvolutionLayer),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), TransposedConvolutionLayer),
}
# Kinds of other packages, which are not imported for it. What such a module computes is held against its view
# before it is measured.
_VIEWS_BY_NAME: dict[str, type[Layer]] = {"Conv1D": TransposedLinearLayer}
SUPPORTED = "Linear, Embedding, Conv1d to Conv3d, ConvTranspose1d to 3d, MultiheadAttention, GPT-2's Conv1D"
"""The supported kinds of modules, for messages."""

LAYER_WORDS: dict[str, str] = {
    "last": "the layer that runs last",
    "trainable": "layers that are not frozen",
}
"""Words that choose layers beside their names; a layer of that name goes before."""


def register_layer(module_type: type[nn.Module], view: type[Layer]) -> None:
    """Add a new kind of layer to the library.

    Args:
        module_type: The torch module; its subclasses are covered too.
        view: A subclass of `flatness.Layer` that says what W, Φ and δ are for it.

    Example:
        >>> import torch, flatness
        >>> class Scaled(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return torch.nn.functional.linear(2 * x, self.weight, self.bias)
        >>> class ScaledLayer(flatness.LinearLayer):
        ...     def features(self, x, n):
        ...         return 2 * super().features(x, n)
        >>> flatness.register_layer(Scaled, ScaledLayer)
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise LayerError(
            f"Expected a subclass of torch.nn.Module but got {module_type!r}. Pass the class, not a module."
        )
    if not (isinstance(view, type) and issubclass(view, Layer)):
        raise LayerError(
            f"Expected a subclass of flatness.Layer but got {view!r}. Derive a class that defines W, Φ and δ."
        )
    _VIEWS[module_type] = view


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module itself holds; `parameters(recurse=False)` takes ten times as long."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def own_parameter(model: nn.Module, layer: Layer) -> str | None:
    """The parameter that a layer's weight is, or is a part of, as `named_parameters` calls it; None if none.

    A weight that is made from other parameters is none.
    """
    aliases = dict(model.named_parameters(remove_duplicate=False))
    parameter = aliases.get(layer.weight_name)
    if parameter is None or _memory(parameter) != _memory(layer.weight):
        return None
    return next(name for name, value in model.named_parameters() if value is parameter)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def view_of(module: nn.Module) -> type[Layer] | None:
    """The registered view of a module, by its nearest base class; None when there is none.

    A table whose rows are shortened when they are looked up is no function of its weights alone.
    """
    for kind in type(module).__mro__:
        if kind in _VIEWS:
            return _VIEWS[kind] if getattr(module, "max_norm", None) is None else None
        weight = getattr(module, "weight", None) if kind.__name__ in _VIEWS_BY_NAME else None
        if isinstance(weight, Tensor) and weight.dim() == 2:
            return _VIEWS_BY_NAME[kind.__name__]
    return None


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """Every supported layer of a model, by name, in the order of registration."""
    found: dict[str, Layer] = {}
    for name, module in model.named_modules():
        view = view_of(module)
        if view is not None:
            found[name] = view(name, module)
    return found


def select_layers(
    available: Mapping[str, Layer],
    called: list[str],
    layers: str | Iterable[str] | None,
    *,
    last: str | None = None,
    modules: Mapping[str, str] | None = None,
) -> list[str]:
    """Resolve the `layers` argument to names, in the order in which the network calls them.

    Args:
        available: The supported layers of the model.
        called: Names of the layers that ran in a forward pass, in order.
        layers: None for all, a word of `LAYER_WORDS`, a name, or a list of names.
        last: What "last" means; the one called last by default.
        modules: Kinds of all modules of the model by name, for messages.
    """
    if layers is None:
        return called
    if is_layer_word(layers, available):
        if layers == "trainable":
            return _trainable(available, called)
        return [last] if last is not None else called[-1:]
    names = _names(layers, available, modules or {})
    for name in names:
        if name not in called:
            raise LayerError(
                f"Expected a layer that the forward pass uses but {name!r} was never called. "
                f"Layers that were: {listed(called)}."
            )
    return sorted(set(names), key=called.index)


def is_layer_word(layers: object, available: Collection[str]) -> bool:
    """Whether the `layers` argument is a word of `LAYER_WORDS`, and not the name of a layer."""
    return isinstance(layers, str) and layers in LAYER_WORDS and layers not in available


def _trainable(available: Mapping[str, Layer], called: list[str]) -> list[str]:
    """The layers that ran and are trained."""
    found = [name for name in called if available[name].trainable]
    if not found:
        raise LayerError(
            "Expected layers that are trained but every layer that runs is frozen (requires_grad=False): "
            f"{listed(called, 6)}. Leave layers= out to measure them anyway, or unfreeze "
            "what was trained: PEFT loads adapters frozen unless from_pretrained gets is_trainable=True."
        )
    return found


def _names(
    layers: str | Iterable[str], available: Mapping[str, Layer], modules: Mapping[str, str]
) -> list[str]:
    """The names that a user wrote, at least one, all of them of supported layers."""
    known = f"Supported layers of this model: {listed(available) or 'none'}."
    if not isinstance(layers, Iterable):
        kind = type(layers).__name__
        raise LayerError(
            f"Expected layers to be None, {listed(map(repr, LAYER_WORDS))}, a name or a list of names "
            f"but got {kind}. {known}"
        )
    names = [layers] if isinstance(layers, str) else list(layers)
    if not names:
        raise LayerError(f"Expected at least one layer but got an empty list. {known}")
    for name in names:
        if not isinstance(name, str) or name not in available:
            kind = modules.get(str(name))
            alone = str(name) in LAYER_WORDS
            close = f" Pass {name!r} without a list." if alone else nearest(name, [*available, *LAYER_WORDS])
            what = f", which is a {kind}." if kind else f".{close}"
            raise LayerError(f"Expected the name of a supported layer but got {name!r}{what} {known}")
    return names
