"""What produced a record: the versions, the code itself, and the machine."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import flatness
from flatness.version import __version__

if TYPE_CHECKING:
    import torch


def environment(device: torch.device) -> dict[str, str | int]:
    """Versions, a digest of this package's source, and the device."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return {
        "flatness": __version__,
        "code": code_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "device_name": name,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 0,
    }


@functools.cache
def code_digest() -> str:
    """Sixteen hexadecimal digits that change when a line of this package changes."""
    digest = hashlib.sha256()
    root = Path(flatness.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
