"""The measures of the papers, small functions of shared statistics; importing this fills the catalogue."""

import importlib
import pkgutil

from flatness.catalogue.measure import Measure
from flatness.catalogue.registry import register_measure

# In the order in which tables, pages, LaTeX and notebooks show them: the recommended first. Measures of other
# files in this folder come after these, and what changes when layers are rescaled comes last.
_ORDER = (
    "petzka2021",
    "petzka2019",
    "rangamani2019",
    "tsuzuku2020",
    "sharpness",
    "pac_bayes_flatness",
    "norms",
    "soft_rank",
    "baselines",
)

_files = [module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg]
_declared = [
    value
    for family in dict.fromkeys([*_ORDER, *_files])
    for value in vars(importlib.import_module(f"{__name__}.{family}")).values()
    if isinstance(value, Measure)
]
for _measure in sorted(_declared, key=lambda measure: not measure.invariant):
    register_measure(_measure)
