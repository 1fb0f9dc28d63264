"""How flat is the minimum? Flatness measures for PyTorch networks that rescaling cannot change."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from flatness.version import __version__ as __version__

# For type checkers.
if TYPE_CHECKING:
    from flatness import data as data
    from flatness import landscape as landscape
    from flatness import models as models
    from flatness import study as study
    from flatness.catalogue.measure import LayerView as LayerView
    from flatness.catalogue.measure import Measure as Measure
    from flatness.catalogue.measure import NetworkView as NetworkView
    from flatness.catalogue.measure import Valued as Valued
    from flatness.catalogue.registry import measures as measures
    from flatness.catalogue.registry import register_measure as register_measure
    from flatness.errors import FlatnessError as FlatnessError
    from flatness.generalization.bound import generalization_bound as generalization_bound
    from flatness.generalization.bound_result import GeneralizationBound as GeneralizationBound
    from flatness.generalization.locally_constant import LabelConstancy as LabelConstancy
    from flatness.generalization.locally_constant import locally_constant_labels as locally_constant_labels
    from flatness.generalization.pac_bayes import PacBayesBound as PacBayesBound
    from flatness.generalization.pac_bayes import pac_bayes_bound as pac_bayes_bound
    from flatness.generalization.representativeness import Representativeness as Representativeness
    from flatness.generalization.representativeness import representativeness as representativeness
    from flatness.generalization.robustness import feature_robustness as feature_robustness
    from flatness.generalization.robustness_result import Robustness as Robustness
    from flatness.integrations.monitor import Monitor as Monitor
    from flatness.measuring.measure import measure as measure
    from flatness.measuring.measure import plan as plan
    from flatness.measuring.merge import merge as merge
    from flatness.measuring.penalty import penalty as penalty
    from flatness.measuring.plan.plan import Plan as Plan
    from flatness.measuring.spectra import network_spectrum as network_spectrum
    from flatness.network.layers import ConvolutionLayer as ConvolutionLayer
    from flatness.network.layers import Layer as Layer
    from flatness.network.layers import LinearLayer as LinearLayer
    from flatness.network.layers import register_layer as register_layer
    from flatness.problem.problem import Problem as Problem
    from flatness.problem.ranks import separately as separately
    from flatness.report.compare import Comparison as Comparison
    from flatness.report.compare import compare as compare
    from flatness.report.report import Report as Report
    from flatness.report.report import Result as Result
    from flatness.report.trajectory import Trajectory as Trajectory
    from flatness.show.plot import plot as plot
    from flatness.symmetry.check.invariance import check_invariance as check_invariance
    from flatness.symmetry.check.verdicts import InvarianceReport as InvarianceReport
    from flatness.symmetry.flow.groups import Symmetries as Symmetries
    from flatness.symmetry.flow.groups import symmetries as symmetries
    from flatness.symmetry.rewriting.rescaling import rescale as rescale
    from flatness.symmetry.rewriting.rescaling import vertical_directions as vertical_directions
    from flatness.zoo.checkpoints import trajectory as trajectory

# Where each public name lives. Names are imported when they are first used: the command line answers `--help`
# without loading torch. A new name goes here, and into the imports above for type checkers.
_PUBLIC = {
    "catalogue.measure": ("LayerView", "Measure", "NetworkView", "Valued"),
    "catalogue.registry": ("measures", "register_measure"),
    "errors": ("FlatnessError",),
    "generalization.bound": ("generalization_bound",),
    "generalization.bound_result": ("GeneralizationBound",),
    "generalization.locally_constant": ("LabelConstancy", "locally_constant_labels"),
    "generalization.pac_bayes": ("PacBayesBound", "pac_bayes_bound"),
    "generalization.representativeness": ("Representativeness", "representativeness"),
    "generalization.robustness": ("feature_robustness",),
    "generalization.robustness_result": ("Robustness",),
    "integrations.monitor": ("Monitor",),
    "measuring.measure": ("measure", "plan"),
    "measuring.merge": ("merge",),
    "measuring.penalty": ("penalty",),
    "measuring.plan.plan": ("Plan",),
    "measuring.spectra": ("network_spectrum",),
    "network.layers": ("ConvolutionLayer", "Layer", "LinearLayer", "register_layer"),
    "problem.problem": ("Problem",),
    "problem.ranks": ("separately",),
    "report.compare": ("Comparison", "compare"),
    "report.report": ("Report", "Result"),
    "report.trajectory": ("Trajectory",),
    "show.plot": ("plot",),
    "symmetry.check.invariance": ("check_invariance",),
    "symmetry.check.verdicts": ("InvarianceReport",),
    "symmetry.flow.groups": ("Symmetries", "symmetries"),
    "symmetry.rewriting.rescaling": ("rescale", "vertical_directions"),
    "zoo.checkpoints": ("trajectory",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

# Modules that are public as such: `flatness.study.run.run`, `flatness.landscape.line`.
_MODULES = ("data", "landscape", "models", "study")

__all__ = sorted([*_HOME, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        # With both, a traceback suggests the nearest name.
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
