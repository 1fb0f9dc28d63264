"""The kinds of rewriting, a file each: a class that is called like its file, in capitals.

A new kind is one new file here. Nothing is loaded before a kind is asked for, so that the command line and
study files can say what there is without torch.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from flatness.errors import OptionError, listed, nearest

if TYPE_CHECKING:
    from flatness.symmetry.rewriting.base import Invariance, Rescaling

KINDS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def kind_named(name: str) -> type[Rescaling]:
    """The class of a kind of rewriting."""
    if name not in KINDS:
        raise OptionError(
            f"Expected kind to be one of {listed(KINDS)} but got {name!r}.{nearest(name, KINDS)}"
        )
    module = import_module(f"{__name__}.{name}")
    return getattr(module, name.title().replace("_", ""))


def invariances() -> tuple[Invariance, ...]:
    """What a measure may declare that it does not notice."""
    return tuple(word for kind in KINDS for word in kind_named(kind).invariances)
