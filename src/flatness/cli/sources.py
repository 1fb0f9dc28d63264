"""From words on the command line to objects: networks, data, losses, devices and measures."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from flatness.catalogue.registry import select_measures
from flatness.cli.answers import UsageError, blamed_on_words, choice
from flatness.cli.options import Compute, Network
from flatness.cli.values import key_values, one_or_many
from flatness.cli.words import LOSSES
from flatness.errors import CheckpointError, MeasureError, ModelError, nearest
from flatness.integrations.transformers import load_data, load_model
from flatness.zoo.checkpoints import find_checkpoints, fit_checkpoint, read_checkpoint
from flatness.zoo.data import DATASETS, is_known, load
from flatness.zoo.data.source import SOURCES
from flatness.zoo.models import MODELS, build
from flatness.zoo.objects import build_named, build_timm, import_object, made_by, names_code

_AS_BUILT = "no checkpoint was given, so the model's initial weights are measured"


@dataclass(frozen=True)
class Data:
    """What `flatness.measure` gets as data, and what the report says about it."""

    batches: Any
    name: str
    notes: tuple[str, ...] = ()


def checkpoints_of(paths: Sequence[str] | None) -> list[Path]:
    """The files that paths, folders and globs stand for."""
    with blamed_on_words(CheckpointError):
        return find_checkpoints(paths or [])


def model_of(given: Network, seed: int) -> nn.Module:
    """The model: ``package.module:factory``, ``timm:NAME``, ``hf:PATH`` or a name of `flatness.models`."""
    torch.manual_seed(seed)
    options = key_values(given.model_arg, "--model-arg")
    kind, colon, name = given.model.partition(":")
    if not colon:
        return _own_model(given, options)
    if kind == "timm":
        return build_timm(name, **options)
    if kind == "hf":
        return load_model(name, **options)
    return build_named(given.model, "--model", UsageError, **options)


def as_built(given: Network) -> list[str]:
    """What to note where no checkpoint is given: only a folder of transformers comes with weights."""
    return [] if given.model.startswith("hf:") else [_AS_BUILT]


def _own_model(given: Network, options: dict[str, Any]) -> nn.Module:
    factory = MODELS.get(given.model.replace("-", "_"))
    if factory is None:
        raise UsageError(
            "Expected --model to be package.module:factory, timm:NAME, hf:PATH or one of flatness.models but "
            f"got {given.model!r}.{nearest(given.model.lower().replace('-', '_'), MODELS)} "
            f"Known: {', '.join(MODELS)}."
        )
    fitting = {name: value for name, value in _fitting(factory, given.data).items() if name not in options}
    if fitting:
        words = ", ".join(f"{name}={value}" for name, value in fitting.items())
        typer.echo(f"note: built with {words}, to fit {given.data}; --model-arg sets others", err=True)
    with blamed_on_words(ModelError):
        return build(given.model, **fitting, **options)


def _fitting(factory: Callable[..., nn.Module], data: str) -> dict[str, Any]:
    """Arguments that the images of a named data set decide, where they differ from the factory's defaults."""
    shape = getattr(SOURCES.get(data), "shape", None)
    if shape is None:
        return {}
    defaults = {name: each.default for name, each in inspect.signature(factory).parameters.items()}
    wanted = {
        "channels": shape[0],
        "size": shape[1],
        "sizes": (math.prod(shape), *defaults.get("sizes", ())[1:]),
    }
    return {name: value for name, value in wanted.items() if defaults.get(name, value) != value}


def network_of(given: Network, path: Path | None, seed: int) -> nn.Module:
    """A network with the weights of a checkpoint, or as it was built; prints what there is to note."""
    network = model_of(given, seed)
    if path is not None:
        for note in fit_checkpoint(network, read_checkpoint(path), str(path)):
            typer.echo(f"note: {note}", err=True)
    return network.eval()


def only_network(given: Network, seed: int, advice: str) -> nn.Module:
    """The network of the only checkpoint, or as it was built; several are refused with a word of advice."""
    found = checkpoints_of(given.checkpoints)
    if len(found) > 1:
        raise UsageError(f"Expected one checkpoint but got {len(found)}. {advice}")
    return network_of(given, found[0] if found else None, seed)


def data_of(given: Network) -> Data:
    """The data of a name, an ``.npz`` file, ``hf:PATH`` or ``package.module:factory``."""
    spec = given.data
    if spec.startswith("hf:"):
        return _tokenised(given)
    if names_code(spec):
        if given.limit is not None or given.standardize or given.data_dir is not None:
            raise UsageError(
                "Expected --limit, --standardize and --data-dir with a named data set or an .npz file "
                f"but got {spec!r}. Do that in the factory."
            )
        return Data(made_by(spec, "--data", UsageError), spec)
    if not is_known(spec):
        raise UsageError(
            f"Expected --data to be one of {', '.join(DATASETS)}, the path of an .npz file, hf:PATH or "
            f"package.module:factory but got {spec!r}.{nearest(spec.lower(), DATASETS)}"
        )
    choices = {name: getattr(given, name) for name in ("split", "data_dir", "limit", "standardize")}
    data = load(spec, **choices)
    scaled = ", standardized" if given.standardize else ""
    return Data(data.pair, f"{data.name} ({given.split}{scaled})", data.notes)


def _tokenised(given: Network) -> Data:
    """Data of the package datasets on disk."""
    if given.standardize or given.data_dir is not None:
        raise UsageError(
            "Expected --standardize and --data-dir with a named data set or an .npz file but got "
            f"{given.data!r}, which is measured as it was saved."
        )
    folder = given.data.removeprefix("hf:")
    return Data(load_data(folder, given.split, given.limit), given.data)


def arguments_of(given: Network, compute: Compute) -> dict[str, Any]:
    """Loss, forward, device and the like as the library takes them; without those that were not given."""
    arguments = {"loss": _loss(given.loss), **asdict(compute)}
    if given.forward:
        arguments["forward"] = _function(given.forward, "--forward")
    if compute.device:
        arguments["device"] = _device(compute.device)
    if compute.dtype:
        arguments["dtype"] = getattr(torch, compute.dtype)
    return {name: value for name, value in arguments.items() if value is not None}


def _loss(spec: str) -> Any:
    """A loss by name, or an object ``package.module:loss``; a loss class is called without arguments."""
    if ":" not in spec:
        return choice(spec, "--loss", LOSSES)
    loss = import_object(spec, "--loss", UsageError)
    return loss() if isinstance(loss, type) and issubclass(loss, nn.Module) else loss


def _function(spec: str, option: str) -> Any:
    """A function ``package.module:function``."""
    function = import_object(spec, option, UsageError)
    if not callable(function):
        raise UsageError(f"Expected {option} to name a function but {spec} is {type(function).__name__}.")
    return function


def _device(name: str) -> torch.device:
    """A device that this machine has."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        usable = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        raise UsageError(
            f"Expected --device to be one that this machine has ({', '.join(usable)}) but got {name!r}."
            f"{_device_hint(name, usable)}"
        ) from error
    return device


def _device_hint(name: str, usable: Sequence[str]) -> str:
    """What torch calls a GPU, and why there is none; else the nearest name."""
    if name.lower() in ("gpu", "nvidia", "cuda") or name.startswith("cuda"):
        if "cuda" in usable:
            return " torch calls a GPU 'cuda', the second one 'cuda:1'."
        return " torch calls a GPU 'cuda' and cannot use one here: torch.cuda.is_available() is False."
    return nearest(name, usable)


def chosen_measures(names: list[str] | None) -> Any:
    """Measures as the library takes them, in its spelling; unknown ones are refused.

    "all" stays a word: it means all that exist here, and what does not is left out with a note.
    """
    found = one_or_many([name.replace("-", "_") for name in names or ()], "default")
    with blamed_on_words(MeasureError):
        select_measures(found or "default")
    return found
