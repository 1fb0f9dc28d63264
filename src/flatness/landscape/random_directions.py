"""Random directions in parameter space, in units of the network's own weights.

    layer    V_i · ‖W_i‖ / ‖V_i‖ for every parameter tensor W_i               (rangamani2019, §4.2)
    filter   the same for every filter: the incoming weights of one output    (Li et al. 2018, §4)

V has independent standard normal entries. What is zero does not move.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from flatness.network.layers import find_layers
from flatness.network.layers.convolution import TransposedConvolutionLayer
from flatness.network.layers.linear import TransposedLinearLayer
from flatness.network.layers.view import Layer


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
