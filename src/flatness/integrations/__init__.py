"""Bridges to other libraries; each imports its library only when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from flatness.errors import FlatnessError, OptionError


def library(title: str, use: str, extra: str, *names: str, refusal: type[FlatnessError] = OptionError) -> Any:
    """The first of these modules that is installed.

    Args:
        title: What the library is called.
        use: What it is needed for, in messages.
        extra: The extra of this package that installs it.
        names: The modules; none where the library's has its name.
        refusal: The error where there is none.
    """
    missing = None
    for name in names or (title,):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing = error
    raise refusal(
        f"Expected {title} for {use} but it is not installed. Type: pip install 'flatness[{extra}]'."
    ) from missing
