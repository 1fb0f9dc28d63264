"""How flat is the minimum? Flatness measures for PyTorch networks that rescaling cannot change."""

import importlib
from typing import TYPE_CHECKING, Any

from flatness.version import __version__ as __version__

if TYPE_CHECKING:
    from flatness import data, landscape, models, study
    from flatness.catalogue.measure import LayerView, Measure, NetworkView, Valued
    from flatness.catalogue.registry import measures, register_measure
    from flatness.errors import FlatnessError
    from flatness.generalization.bound import generalization_bound
    from flatness.generalization.bound_result import GeneralizationBound
    from flatness.generalization.locally_constant import LabelConstancy, locally_constant_labels
    from flatness.generalization.pac_bayes import PacBayesBound, pac_bayes_bound
    from flatness.generalization.representativeness import Representativeness, representativeness
    from flatness.generalization.robustness import feature_robustness
    from flatness.generalization.robustness_result import Robustness
    from flatness.integrations.monitor import Monitor
    from flatness.measuring.measure import measure, plan
    from flatness.measuring.merge import merge
    from flatness.measuring.plan.plan import Plan
    from flatness.measuring.spectra import network_spectrum
    from flatness.network.layers import ConvolutionLayer, Layer, LinearLayer, register_layer
    from flatness.problem.problem import Problem
    from flatness.problem.ranks import separately
    from flatness.report.compare import Comparison, compare
    from flatness.report.report import Report, Result
    from flatness.symmetry.check.invariance import check_invariance
    from flatness.symmetry.check.verdicts import InvarianceReport
    from flatness.symmetry.flow.groups import Symmetries, symmetries
    from flatness.symmetry.rewriting.rescaling import rescale, vertical_directions

__all__ = [
    "Comparison",
    "ConvolutionLayer",
    "FlatnessError",
    "GeneralizationBound",
    "InvarianceReport",
    "LabelConstancy",
    "Layer",
    "LayerView",
    "LinearLayer",
    "Measure",
    "Monitor",
    "NetworkView",
    "Valued",
    "PacBayesBound",
    "Plan",
    "Problem",
    "Report",
    "Representativeness",
    "Result",
    "Robustness",
    "Symmetries",
    "check_invariance",
    "compare",
    "data",
    "feature_robustness",
    "generalization_bound",
    "locally_constant_labels",
    "landscape",
    "measure",
    "measures",
    "merge",
    "models",
    "network_spectrum",
    "pac_bayes_bound",
    "plan",
    "register_layer",
    "register_measure",
    "representativeness",
    "rescale",
    "separately",
    "study",
    "symmetries",
    "vertical_directions",
]

# Where each public name lives. Names are imported when they are first used: the command line answers `--help`
# without loading torch. A new name goes here, into __all__ and into the imports above, for type checkers.
_HOME = {
    "Comparison": "report.compare",
    "ConvolutionLayer": "network.layers",
    "FlatnessError": "errors",
    "GeneralizationBound": "generalization.bound_result",
    "InvarianceReport": "symmetry.check.verdicts",
    "LabelConstancy": "generalization.locally_constant",
    "Layer": "network.layers",
    "LayerView": "catalogue.measure",
    "LinearLayer": "network.layers",
    "Measure": "catalogue.measure",
    "Monitor": "integrations.monitor",
    "NetworkView": "catalogue.measure",
    "Valued": "catalogue.measure",
    "PacBayesBound": "generalization.pac_bayes",
    "Plan": "measuring.plan.plan",
    "Problem": "problem.problem",
    "Report": "report.report",
    "Representativeness": "generalization.representativeness",
    "Result": "report.report",
    "Robustness": "generalization.robustness_result",
    "Symmetries": "symmetry.flow.groups",
    "check_invariance": "symmetry.check.invariance",
    "compare": "report.compare",
    "feature_robustness": "generalization.robustness",
    "generalization_bound": "generalization.bound",
    "locally_constant_labels": "generalization.locally_constant",
    "measure": "measuring.measure",
    "measures": "catalogue.registry",
    "merge": "measuring.merge",
    "network_spectrum": "measuring.spectra",
    "pac_bayes_bound": "generalization.pac_bayes",
    "plan": "measuring.measure",
    "register_layer": "network.layers",
    "register_measure": "catalogue.registry",
    "representativeness": "generalization.representativeness",
    "rescale": "symmetry.rewriting.rescaling",
    "separately": "problem.ranks",
    "symmetries": "symmetry.flow.groups",
    "vertical_directions": "symmetry.rewriting.rescaling",
}

# Modules that are public as such: `flatness.study.run.run`, `flatness.landscape.line`.
_MODULES = ("data", "landscape", "models", "study")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
