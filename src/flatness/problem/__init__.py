"""A model, its data and a loss, made safe to differentiate; and the arguments passed on to a `Problem`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTING = ("forward", "weight_decay", "batch_size", "device", "dtype", "tf32", "seed", "progress")


def setting_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those among the arguments of a call, which are its ``locals()`` at the very beginning.

    >>> def call(model, layer, batch_size=None, seed=0):
    ...     return setting_of(locals())
    >>> call("net", "fc1", seed=3)
    {'batch_size': None, 'seed': 3}
    """
    return {name: arguments[name] for name in SETTING if name in arguments}
