"""A network of a study before it is trained: what decides its outcome, and its key."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Configuration:
    """Everything that decides what a trained network is.

    Attributes:
        part: The part of the study it belongs to; "" where there are no parts.
        axes: Its place in the grid: a value for every axis of `spec.layout.AXES`.
        data: The table [data].
        model: The table [model].
        train: The table [train], without what does not change the outcome.
        stop: The table [stop].
        checkpoint: Path of the file, for a network that was trained elsewhere; else "".
        fingerprint: Digest of that file, which stands for it in the key.
    """

    part: str
    axes: Mapping[str, Any]
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    train: Mapping[str, Any]
    stop: Mapping[str, Any]
    checkpoint: str = ""
    fingerprint: str = ""

    def content(self) -> dict[str, Any]:
        """As plain dictionaries, for records and for the key; folders of data do not count."""
        data = {key: value for key, value in self.data.items() if key != "data_dir"}
        # An axis that came later counts where it is used: records of earlier versions keep their keys.
        axes = {axis: value for axis, value in self.axes.items() if (axis, value) != ("augmentation", "none")}
        found = {"axes": axes, "data": data}
        found |= {name: dict(getattr(self, name)) for name in ("model", "train", "stop")}
        file = {"name": os.path.basename(self.checkpoint), "sha256": self.fingerprint}
        return {**found, "checkpoint": file} if self.checkpoint else found

    @property
    def key(self) -> str:
        """Twenty hexadecimal digits that depend on the content and on nothing else."""
        return digest(self.content())


def digest(content: Any) -> str:
    """Twenty hexadecimal digits of plain content, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
