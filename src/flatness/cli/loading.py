"""From words to what they stand for: checkpoints found, networks and data loaded, folders looked at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer
from torch import nn

from flatness.cli.answers import UsageError, usage_of
from flatness.cli.inputs import DataWords, Inputs, NetworkWords
from flatness.cli.sources import (
    Data,
    load_data,
    load_device,
    load_dtype,
    load_function,
    load_loss,
    load_model,
)
from flatness.errors import CheckpointError
from flatness.zoo.checkpoints import find_checkpoints, fit_checkpoint, read_checkpoint


def checkpoints_of(paths: list[str]) -> list[Path]:
    """The files that paths, folders and globs stand for."""
    try:
        return find_checkpoints(paths)
    except CheckpointError as error:
        raise usage_of(error) from error


def one_checkpoint(paths: list[str], advice: str) -> Path | None:
    """The only file, or none; several are refused with a word of advice."""
    found = checkpoints_of(paths)
    if len(found) > 1:
        raise UsageError(f"Expected one checkpoint but got {len(found)}. {advice}")
    return found[0] if found else None


def network_of(words: NetworkWords, path: Path | None, seed: int) -> nn.Module:
    """A network with the weights of a checkpoint, or as it was built; prints what there is to note."""
    network = load_model(words.model, words.arguments, seed)
    if path is not None:
        for note in fit_checkpoint(network, read_checkpoint(path), str(path)):
            typer.echo(f"note: {note}", err=True)
    return network.eval()


def data_of(words: DataWords) -> Data:
    """The data asked for."""
    return load_data(
        words.spec,
        split=words.split,
        data_dir=words.data_dir,
        limit=words.limit,
        standardize=words.standardize,
    )


def arguments_of(given: Inputs) -> dict[str, Any]:
    """Loss, forward, device and dtype as the library takes them; without those that were not given."""
    arguments: dict[str, Any] = {"loss": load_loss(given.loss)}
    if given.forward:
        arguments["forward"] = load_function(given.forward, "--forward")
    if given.device:
        arguments["device"] = load_device(given.device)
    if given.dtype:
        arguments["dtype"] = load_dtype(given.dtype)
    return arguments


def check_folder(out: Path) -> None:
    """Refuse a folder that cannot be written to before anything is measured for it."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"Expected --out to be a folder but {existing} is a file.")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"Expected --out to be a folder that can be written to but {existing} cannot.")
