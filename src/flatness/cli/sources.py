"""From words on the command line to objects: models, data, losses and functions."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatness.cli.answers import UsageError, choice, usage_of
from flatness.cli.words import DTYPES, LOSSES, SPLITS
from flatness.errors import FlatnessError, ModelError, nearest
from flatness.integrations.timm import build_timm
from flatness.zoo.data import DATASETS, load
from flatness.zoo.models import MODELS, build


class SourceError(FlatnessError, RuntimeError):
    """The user's own code, named on the command line, failed."""


@dataclass(frozen=True)
class Data:
    """What `flatness.measure` gets as data, and what the report says about it."""

    batches: Any
    name: str
    notes: tuple[str, ...] = ()


def load_model(spec: str, options: dict[str, Any], seed: int) -> nn.Module:
    """The model of ``package.module:factory``, ``timm:NAME`` or a name of `flatness.models`."""
    torch.manual_seed(seed)
    kind, colon, name = spec.partition(":")
    if not colon:
        return _own_model(spec, options)
    if kind == "timm":
        return build_timm(name, **options)
    made = _made(import_object(spec, "--model"), spec, options)
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"Expected {spec} to give a torch.nn.Module but got {type(made).__name__}. "
            "Return the model from the factory."
        )
    return made


def _own_model(name: str, options: dict[str, Any]) -> nn.Module:
    if name.replace("-", "_") not in MODELS:
        raise UsageError(
            "Expected --model to be package.module:factory, timm:NAME or one of flatness.models but got "
            f"{name!r}.{nearest(name.lower().replace('-', '_'), MODELS)} Known: {', '.join(MODELS)}."
        )
    try:
        return build(name, **options)
    except ModelError as error:
        raise usage_of(error) from error


def load_data(spec: str, *, split: str, data_dir: str | None, limit: int | None, standardize: bool) -> Data:
    """The data of a name, an ``.npz`` file or ``package.module:factory``."""
    if ":" in spec and not spec.lower().endswith(".npz"):
        if limit is not None or standardize or data_dir is not None:
            raise UsageError(
                "Expected --limit, --standardize and --data-dir with a named data set or an .npz file "
                f"but got {spec!r}. Let the factory do it."
            )
        return Data(_made(import_object(spec, "--data"), spec, {}), spec)
    if spec not in DATASETS and not spec.lower().endswith(".npz"):
        raise UsageError(
            f"Expected --data to be one of {', '.join(DATASETS)}, the path of an .npz file or "
            f"package.module:factory but got {spec!r}.{nearest(spec.lower(), DATASETS)}"
        )
    split = choice(split, "--split", SPLITS)
    if limit is not None and limit < 1:
        raise UsageError(f"Expected --limit to be at least 1 but got {limit}.")
    data = load(spec, split=split, data_dir=data_dir, limit=limit, standardize=standardize)
    scaled = ", standardized" if standardize else ""
    return Data(data.pair, f"{data.name} ({split}{scaled})", data.notes)


def load_loss(spec: str) -> Any:
    """A loss by name, or an object ``package.module:loss``; a loss class is called without arguments."""
    if ":" not in spec:
        return choice(spec, "--loss", LOSSES)
    loss = import_object(spec, "--loss")
    return loss() if isinstance(loss, type) and issubclass(loss, nn.Module) else loss


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """A function ``package.module:function``."""
    function = import_object(spec, option)
    if not callable(function):
        raise UsageError(f"Expected {option} to name a function but {spec} is {type(function).__name__}.")
    return function


def load_dtype(name: str) -> torch.dtype:
    """A floating-point dtype by name."""
    return getattr(torch, choice(name, "--dtype", DTYPES))


def load_device(name: str) -> torch.device:
    """A device that this machine has."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        usable = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        raise UsageError(
            f"Expected --device to be one that this machine has ({', '.join(usable)}) but got {name!r}."
            f"{nearest(name, usable)}"
        ) from error
    return device


def import_object(spec: str, option: str) -> Any:
    """The object that ``package.module:name`` names; modules in the current folder are found too."""
    module_name, _, path = spec.partition(":")
    if not path or not all(part.isidentifier() for part in module_name.split(".")):
        hint = (
            " Write it without .py and with dots for slashes."
            if ".py" in module_name or "/" in module_name
            else ""
        )
        raise UsageError(f"Expected {option} to be package.module:name but got {spec!r}.{hint}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise SourceError(
                f"Expected {module_name} to import but it needs {error.name!r}, which is not installed."
            ) from error
        raise UsageError(
            f"Expected {option} to name a module that can be imported here but there is no {error.name!r}."
            f"{nearest(error.name, _modules_here())}"
        ) from error
    except Exception as error:
        raise SourceError(
            f"Expected {module_name} to import but it raised {type(error).__name__}: {error}"
        ) from error
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError as error:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise UsageError(
            f"Expected a name in {module_name} but got {path!r}.{nearest(path, names)}"
        ) from error


def _modules_here() -> list[str]:
    return [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or path.is_dir()]


def _made(source: Any, spec: str, options: dict[str, Any]) -> Any:
    """What a factory returns; anything that is no factory, as it is."""
    if isinstance(source, nn.Module) or not callable(source):
        return source
    try:
        return source(**options)
    except FlatnessError:
        raise
    except Exception as error:
        raise SourceError(f"Expected {spec} to work but it raised {type(error).__name__}: {error}") from error
