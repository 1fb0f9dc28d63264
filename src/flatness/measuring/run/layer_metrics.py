"""The metrics of layers: factors of D of single weights, and D^½ on the weights of a whole network."""

from __future__ import annotations

from collections.abc import Iterator

from flatness.curvature.metrics import Block, LayerRoot
from flatness.curvature.parameters.parameter_products import entries_of
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.sums.spread import Spread, feature_spreads
from flatness.errors import UndefinedMeasureError
from flatness.measuring.plan.plan import Plan
from flatness.network.layers import Layer, own_parameter


def layer_root(layer: Layer, spread: Spread | None = None) -> LayerRoot:
    """The metric of a layer, in which its features are white where it is known how they spread."""
    W = layer.matrix().double()
    whitening = None if spread is None else spread.whitening
    return LayerRoot(W, None if whitening is None else whitening.to(W))


def metric_blocks(space: ParameterSpace, plan: Plan, metric: str) -> Iterator[Block]:
    """The blocks of D: of every layer whose weight is a parameter, and which runs once for every sample.

    Raises:
        UndefinedMeasureError: When no layer has one.
    """
    problem = space.problem
    layers = {route.name: route.layer for route in plan.gradient_routes.layers}
    parameters = {name: own_parameter(problem.model, layer) for name, layer in layers.items()}
    own = {name: layer for name, layer in layers.items() if parameters[name] in space.parameters}
    if not any(bool(layer.matrix().any()) for layer in own.values()):
        raise UndefinedMeasureError(
            f"Expected layers whose weight is a parameter that is not 0, as the {metric} metric has a block "
            "for each, but got none. Use the metric 'layerwise', which has one for every parameter."
        )
    spreads: dict[str, Spread] = {}
    if metric == "whitened":
        spreads = feature_spreads(problem, own, plan.copy_inputs, whitened=own)
    for name, layer in own.items():
        parameter = parameters[name]
        assert parameter is not None
        places = entries_of(layer, space.parameters[parameter]) + space.starts[parameter]
        yield Block(places, layer_root(layer, spreads.get(name)))
