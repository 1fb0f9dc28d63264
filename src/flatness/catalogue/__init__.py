"""The measures of the papers, small functions of shared statistics; importing this fills the catalogue."""

import importlib
import pkgutil

from flatness.catalogue.measure import Measure
from flatness.catalogue.registry import register_measure

# In the order in which tables show them: the papers' own, then what they are compared with. Measures of other
# files in this folder come behind.
_ORDER = (
    "baselines",
    "petzka2019",
    "petzka2021",
    "rangamani2019",
    "tsuzuku2020",
    "sharpness",
    "pac_bayes_flatness",
    "norms",
)

_files = [module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg]
for _family in dict.fromkeys([*_ORDER, *_files]):
    for _value in vars(importlib.import_module(f"{__name__}.{_family}")).values():
        if isinstance(_value, Measure):
            register_measure(_value)
