"""The kinds of rewriting, a file each: `powers_of_two.py` has the class `PowersOfTwo`.

A new kind is one new file here. Nothing is loaded before a kind is asked for, so that the command line and
study files can say what there is without torch.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from flatness.errors import OptionError, listed, nearest

if TYPE_CHECKING:
    from flatness.symmetry.rewriting.base import Invariance, Rescaling

KINDS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def kind_named(name: str) -> type[Rescaling]:
    """The class of a kind of rewriting.

    Raises:
        OptionError: When there is no such kind, or its file has no complete class of the right name.
    """
    if name not in KINDS:
        raise OptionError(
            f"Expected kind to be one of {listed(KINDS)} but got {name!r}.{nearest(name, KINDS)}"
        )
    module = import_module(f"{__name__}.{name}")
    called = name.title().replace("_", "")
    kind = getattr(module, called, None)
    if kind is None:
        raise OptionError(
            f"Expected a class {called} in {module.__name__} but there is none. Rename the class."
        )
    if inspect.isabstract(kind):
        raise OptionError(
            f"Expected a complete kind of rewriting but {called} in {module.__name__} lacks "
            f"{listed(sorted(kind.__abstractmethods__))}. Define them, or derive it from a kind that does."
        )
    if getattr(kind, "kind", None) != name:
        raise OptionError(
            f"Expected {called} in {module.__name__} to have kind = {name!r}, the name of its file, but got "
            f"{getattr(kind, 'kind', None)!r}. Write kind = {name!r}."
        )
    return kind


def invariances() -> tuple[Invariance, ...]:
    """What a measure may declare that it does not notice."""
    return tuple(word for kind in KINDS for word in kind_named(kind).invariances)
