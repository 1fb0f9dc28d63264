"""Ray as a backend of joblib. The only importer of ray."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from flatness.errors import OptionError


def register() -> None:
    """Make the backend "ray" known to joblib."""
    _found()()


def _found() -> Callable[[], None]:
    try:
        register_ray = importlib.import_module("ray.util.joblib").register_ray
    except ImportError as error:
        raise OptionError(
            "Expected Ray for executor='ray' but it is not installed. Type: pip install 'flatness[ray]'."
        ) from error
    return register_ray


def check() -> None:
    """Refuse, with what to type, where Ray is not installed."""
    _found()
