"""Networks of timm, by name."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from flatness.errors import ModelError, nearest


def build_timm(name: str, **options: Any) -> nn.Module:
    """Build a network of timm.

    Args:
        name: As `timm.create_model` takes it, for example ``resnet18``.
        **options: Passed on, for example ``num_classes=10`` or ``pretrained=True``.

    Raises:
        ModelError: When timm is not installed or has no such network.
    """
    try:
        timm: Any = importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise ModelError(
            f"Expected the package timm for 'timm:{name}' but it is not installed. "
            "Run: pip install 'flatness[timm]'."
        ) from error
    known = timm.list_models()
    if name.partition(".")[0] not in known:
        raise ModelError(
            f"Expected one of timm's {len(known)} networks but got {name!r}.{nearest(name, known)}"
        )
    return timm.create_model(name, **options)
