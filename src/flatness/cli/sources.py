"""From words on the command line to objects: models, data, losses and functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatness.cli.answers import UsageError, choice, usage_of
from flatness.cli.words import DTYPES, LOSSES, SPLITS
from flatness.errors import ModelError, nearest
from flatness.zoo.data import DATASETS, is_known, load
from flatness.zoo.models import MODELS, build
from flatness.zoo.objects import SourceError, blamed_on_code, build_timm, import_object, names_code


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
    made = _made(spec, "--model", options)
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
    if names_code(spec):
        if limit is not None or standardize or data_dir is not None:
            raise UsageError(
                "Expected --limit, --standardize and --data-dir with a named data set or an .npz file "
                f"but got {spec!r}. Let the factory do it."
            )
        return Data(_made(spec, "--data", {}), spec)
    if not is_known(spec):
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
    loss = import_object(spec, "--loss", UsageError)
    return loss() if isinstance(loss, type) and issubclass(loss, nn.Module) else loss


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """A function ``package.module:function``."""
    function = import_object(spec, option, UsageError)
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


def _made(spec: str, option: str, options: dict[str, Any]) -> Any:
    """What a factory returns; anything that is no factory, as it is."""
    source = import_object(spec, option, UsageError)
    if isinstance(source, nn.Module) or not callable(source):
        return source
    with blamed_on_code(SourceError, f"Expected {spec} to work"):
        return source(**options)
