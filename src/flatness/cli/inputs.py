"""What commands about a network are given, in the words of the command line; nothing here loads anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NetworkWords:
    """Which network, with which weights."""

    model: str
    arguments: dict[str, Any]
    checkpoints: list[str]


@dataclass(frozen=True)
class DataWords:
    """What data to measure on."""

    spec: str
    split: str
    data_dir: str | None
    limit: int | None
    standardize: bool


@dataclass(frozen=True)
class Inputs:
    """A network, data, a loss, and where and in which precision to compute."""

    network: NetworkWords
    data: DataWords
    loss: str
    forward: str | None
    device: str | None = None
    dtype: str | None = None
