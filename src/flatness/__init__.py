"""How flat is the minimum? Reparameterisation-invariant flatness measures for PyTorch networks, exact and in one pass."""

from flatness import measures as _fill_catalogue  # noqa: F401
from flatness.comparing import Comparison, compare
from flatness.curvature.statistics import Statistics
from flatness.errors import FlatnessError
from flatness.layers import ConvolutionLayer, Layer, LinearLayer, register_layer
from flatness.measures.catalogue import LayerView, Measure, NetworkView, measures, register_measure
from flatness.measuring import measure, plan
from flatness.plan import Plan
from flatness.problem import Problem
from flatness.result import Report, Result

__all__ = [
    "Comparison",
    "ConvolutionLayer",
    "FlatnessError",
    "Layer",
    "LayerView",
    "LinearLayer",
    "Measure",
    "NetworkView",
    "Plan",
    "Problem",
    "Report",
    "Result",
    "Statistics",
    "compare",
    "measure",
    "measures",
    "plan",
    "register_layer",
    "register_measure",
]
