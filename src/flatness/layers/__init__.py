"""Modules seen as matrices: a weight W, the features Φ it multiplies, the signals δ that come back."""

from flatness.layers.convolution import ConvolutionLayer, TransposedConvolutionLayer
from flatness.layers.linear import LinearLayer, ProjectionLayer, TransposedLinearLayer
from flatness.layers.registry import (
    SUPPORTED,
    find_layers,
    own_parameters,
    register_layer,
    select_layers,
    view_of,
)
from flatness.layers.view import Layer

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
