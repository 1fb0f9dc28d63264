"""All statistics of layers: a module that is put here is found.

| statistic             | shape          | divided by the normaliser it is                         |
|-----------------------|----------------|---------------------------------------------------------|
| `row_traces`          | (rows,)        | Tr H_ss for every row s of W                            |
| `relative`            | ()             | κ_Tr = Σ_ss' ⟨w_s, w_s'⟩ Tr H_ss'                       |
| `relative_normalized` | ()             | the same for features of unit spread                    |
| `relative_whitened`   | ()             | the same for white features                             |
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
from types import ModuleType

from flatness.curvature.sums.statistic import Statistic
from flatness.errors import MeasureError, listed


def _found() -> dict[str, Statistic]:
    found: dict[str, Statistic] = {}
    for file in iter_modules(__path__):
        for kind in _defined_in(import_module(f"{__name__}.{file.name}")):
            if kind.name in found:
                raise MeasureError(
                    f"Expected statistics with names of their own but {type(found[kind.name]).__name__} and "
                    f"{kind.__name__} are both called {kind.name!r}. Rename one."
                )
            found[kind.name] = kind()
    return found


def _defined_in(module: ModuleType) -> list[type[Statistic]]:
    """The statistics of a file, without what it imports.

    Raises:
        MeasureError: When there is none, or one without a name.
    """
    begun = _derived_in(module)
    kinds = [kind for kind in begun if not inspect.isabstract(kind)]
    if not kinds:
        lacking = [f"{kind.__name__} lacks {listed(sorted(kind.__abstractmethods__))}" for kind in begun]
        raise MeasureError(
            f"Expected a statistic in {module.__name__} but {'; '.join(lacking) or 'no class there is one'}. "
            "Derive a class from Statistic and give it what flatness/curvature/sums/statistic.py asks for."
        )
    for kind in kinds:
        if not hasattr(kind, "name"):
            raise MeasureError(
                f"Expected a statistic with a name but {kind.__name__} in {module.__name__} has none. Write "
                'name = "...", what measures call it in their needs.'
            )
    return kinds


def _derived_in(module: ModuleType) -> list[type[Statistic]]:
    classes = (value for value in vars(module).values() if inspect.isclass(value))
    return [kind for kind in classes if kind.__module__ == module.__name__ and issubclass(kind, Statistic)]


STATISTICS: dict[str, Statistic] = _found()


def statistics_of(needs: Iterable[str]) -> list[Statistic]:
    """The statistics of these names, in a fixed order."""
    return [STATISTICS[name] for name in sorted(set(needs) & STATISTICS.keys())]
