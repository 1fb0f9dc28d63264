"""How flat is the minimum? Flatness measures for PyTorch networks that rescaling cannot change."""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from flatness.version import __version__ as __version__

if TYPE_CHECKING:
    from flatness import landscape, study
    from flatness.comparing import Comparison, compare
    from flatness.curvature.statistics import Statistics
    from flatness.errors import FlatnessError
    from flatness.generalization.bound import generalization_bound
    from flatness.generalization.bound_result import GeneralizationBound
    from flatness.generalization.locally_constant import LabelConstancy, locally_constant_labels
    from flatness.generalization.representativeness import Representativeness, representativeness
    from flatness.generalization.robustness import feature_robustness
    from flatness.generalization.robustness_result import Robustness
    from flatness.kinks import kink_share
    from flatness.layers import ConvolutionLayer, Layer, LinearLayer, register_layer
    from flatness.measures.catalogue import measures, register_measure
    from flatness.measures.measure import LayerView, Measure, NetworkView, Surroundings, Valued
    from flatness.measuring import measure, plan
    from flatness.monitor import Monitor
    from flatness.pac_bayes import PacBayesBound, pac_bayes_bound
    from flatness.plan import Plan
    from flatness.problem import Problem
    from flatness.ranks import separately
    from flatness.result import Report, Result
    from flatness.spectra import network_spectrum
    from flatness.symmetry.groups import Symmetries, symmetries
    from flatness.symmetry.invariance import check_invariance
    from flatness.symmetry.rescaling import rescale
    from flatness.symmetry.verdicts import InvarianceReport
    from flatness.symmetry.vertical import vertical_directions

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
    "Surroundings",
    "Valued",
    "PacBayesBound",
    "Plan",
    "Problem",
    "Report",
    "Representativeness",
    "Result",
    "Robustness",
    "Statistics",
    "Symmetries",
    "check_invariance",
    "compare",
    "feature_robustness",
    "generalization_bound",
    "locally_constant_labels",
    "kink_share",
    "landscape",
    "measure",
    "measures",
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
    "Comparison": "comparing",
    "ConvolutionLayer": "layers",
    "FlatnessError": "errors",
    "GeneralizationBound": "generalization.bound_result",
    "InvarianceReport": "symmetry.verdicts",
    "LabelConstancy": "generalization.locally_constant",
    "Layer": "layers",
    "LayerView": "measures.measure",
    "LinearLayer": "layers",
    "Measure": "measures.measure",
    "Monitor": "monitor",
    "NetworkView": "measures.measure",
    "Surroundings": "measures.measure",
    "Valued": "measures.measure",
    "PacBayesBound": "pac_bayes",
    "Plan": "plan",
    "Problem": "problem",
    "Report": "result",
    "Representativeness": "generalization.representativeness",
    "Result": "result",
    "Robustness": "generalization.robustness_result",
    "Statistics": "curvature.statistics",
    "Symmetries": "symmetry.groups",
    "check_invariance": "symmetry.invariance",
    "compare": "comparing",
    "feature_robustness": "generalization.robustness",
    "generalization_bound": "generalization.bound",
    "locally_constant_labels": "generalization.locally_constant",
    "kink_share": "kinks",
    "measure": "measuring",
    "measures": "measures.catalogue",
    "network_spectrum": "spectra",
    "pac_bayes_bound": "pac_bayes",
    "plan": "measuring",
    "register_layer": "layers",
    "register_measure": "measures.catalogue",
    "representativeness": "generalization.representativeness",
    "rescale": "symmetry.rescaling",
    "separately": "ranks",
    "symmetries": "symmetry.groups",
    "vertical_directions": "symmetry.vertical",
}

# Modules that are public as such: `flatness.study.run`, `flatness.landscape.line`.
_MODULES = ("landscape", "study")


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


class _Package(types.ModuleType):
    """Keeps the functions `flatness.measures` and `flatness.plan` apart from the modules of these names."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds every imported submodule to its package, which would hide the function.
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
