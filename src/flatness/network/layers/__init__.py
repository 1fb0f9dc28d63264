"""Modules seen as matrices: a weight W, the features Φ it multiplies, the signals δ that come back."""

from flatness.network.layers.convolution import ConvolutionLayer, TransposedConvolutionLayer
from flatness.network.layers.linear import LinearLayer, ProjectionLayer, TransposedLinearLayer
from flatness.network.layers.registry import (
    SUPPORTED,
    find_layers,
    own_parameters,
    register_layer,
    select_layers,
    view_of,
)
from flatness.network.layers.view import Layer

__all__ = [
    "SUPPORTED",
    "ConvolutionLayer",
    "Layer",
    "LinearLayer",
    "ProjectionLayer",
    "TransposedConvolutionLayer",
    "TransposedLinearLayer",
    "find_layers",
    "own_parameters",
    "register_layer",
    "select_layers",
    "view_of",
]
