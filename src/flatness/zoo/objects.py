"""Objects by name, ``package.module:factory`` or ``timm:NAME``, and plain words where there are none."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from flatness.errors import FlatnessError, ModelError, OptionError, library, nearest


class SourceError(FlatnessError, RuntimeError):
    """The user's own code, given by its name, failed."""


def names_code(name: str) -> bool:
    """Whether a name stands for code, ``package.module:factory``, and not for a file or a thing of flatness.

    >>> names_code("mine.networks:build"), names_code("digits"), names_code("C:/data/mine.npz")
    (True, False, False)
    """
    return ":" in name and not name.lower().endswith(".npz")


def import_object(spec: str, what: str, refusal: type[FlatnessError] = OptionError) -> Any:
    """The object that ``package.module:name`` names; modules in the current folder are found too.

    Args:
        spec: The name.
        what: What messages call the place where it was given: ``--model``, ``name in [data]``.
        refusal: The error for a name behind which there is nothing.

    Raises:
        SourceError: The module is there and fails to import.
    """
    module_name, _, path = spec.partition(":")
    if module_name.endswith(".py"):  # a file of the current folder, as shells complete it
        module_name = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
    if not path or not all(part.isidentifier() for part in module_name.split(".")):
        hint = " Write dots for slashes." if "/" in module_name else ""
        raise refusal(f"Expected {what} to be package.module:name but got {spec!r}.{hint}")
    module = _imported(module_name, what, refusal)
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError as error:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise refusal(f"Expected a name in {module_name} but got {path!r}.{nearest(path, names)}") from error


def _imported(module_name: str, what: str, refusal: type[FlatnessError]) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with blamed_on_code(SourceError, f"Expected {module_name} to import", ModuleNotFoundError):
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise SourceError(
                f"Expected {module_name} to import but it needs {error.name!r}, which is not installed."
            ) from error
        raise refusal(
            f"Expected {what} to name a module that can be imported here but there is no {error.name!r}."
            f"{nearest(error.name, _modules_here())}"
        ) from error


def _modules_here() -> list[str]:
    return [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or path.is_dir()]


@contextmanager
def blamed_on_code(kind: type[FlatnessError], expected: str, *passed_on: type[Exception]) -> Iterator[None]:
    """Say of what the user's own code raises, inside, that it did: "Expected … but it raised KeyError: 'a'".

    Args:
        kind: The error to raise.
        expected: How its message begins.
        passed_on: What is left as it is, beside the errors of this package.
    """
    try:
        yield
    except (FlatnessError, *passed_on):
        raise
    except Exception as error:
        raise kind(f"{expected} but it raised {type(error).__name__}: {error}") from error


def made_by(spec: str, what: str, refusal: type[FlatnessError], /, **options: Any) -> Any:
    """What the factory ``package.module:name`` returns; anything else, a network too, as it is.

    Raises:
        SourceError: The factory fails.
    """
    found = import_object(spec, what, refusal)
    if isinstance(found, nn.Module) or not callable(found):
        return found
    with blamed_on_code(SourceError, f"Expected {spec} to work"):
        return found(**options)


def build_named(spec: str, what: str, refusal: type[FlatnessError], /, **options: Any) -> nn.Module:
    """The network that ``package.module:factory`` builds.

    Raises:
        ModelError: It is something else.
    """
    made = made_by(spec, what, refusal, **options)
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"Expected {spec} to give a torch.nn.Module but got {type(made).__name__}. "
            "Return the model from the factory."
        )
    return made


def build_timm(name: str, **options: Any) -> nn.Module:
    """Build a network of timm.

    Args:
        name: As `timm.create_model` takes it, for example ``resnet18``.
        **options: Passed on, for example ``num_classes=10`` or ``pretrained=True``.

    Raises:
        ModelError: When timm is not installed or has no such network.
    """
    timm = library("timm", f"'timm:{name}'", "timm", refusal=ModelError)
    known = timm.list_models()
    if name.partition(".")[0] not in known:
        raise ModelError(
            f"Expected one of timm's {len(known)} networks but got {name!r}.{nearest(name, known)}"
        )
    return timm.create_model(name, **options)
