"""All statistics of layers, one module each: a module that is put here is found.

| statistic             | shape          | divided by the normaliser it is                         |
|-----------------------|----------------|---------------------------------------------------------|
| `row_traces`          | (rows,)        | Tr H_ss for every row s of W                            |
| `relative`            | ()             | κ_Tr = Σ_ss' ⟨w_s, w_s'⟩ Tr H_ss'                       |
| `relative_normalized` | ()             | the same for features of unit spread                    |
| `outgoing`            | (input units,) | w(j)ᵀ H w(j), the outgoing weights of input unit j      |
| `incoming`            | (rows,)        | w_sᵀ H_ss w_s for every row s                           |
| `diagonal`            | (G, d, m)      | the diagonal of H; a vector for biases and norm scales  |
| `block_traces`        | (G, d, d)      | Tr H_ss' for every pair of rows of a group              |
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from flatness.curvature.sums.statistic import Statistic


def _found() -> dict[str, Statistic]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    defined = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    kinds = [kind for kind in defined if issubclass(kind, Statistic) and not inspect.isabstract(kind)]
    return {kind.name: kind() for kind in kinds}


STATISTICS: dict[str, Statistic] = _found()


def statistics_of(needs: Iterable[str]) -> list[Statistic]:
    """The statistics of these names, in a fixed order."""
    return [STATISTICS[name] for name in sorted(set(needs) & STATISTICS.keys())]
