"""Files of landscapes: arrays and a JSON text in one .npz, written at once or not at all."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatness.errors import ReportError
from flatness.files import replacing

Array = NDArray[Any]
_VERSION = 1
_META = "meta"


def write_arrays(
    path: str | os.PathLike[str], kind: str, arrays: Mapping[str, Array], meta: Mapping[str, Any]
) -> None:
    """Write arrays by name, and what is known about them, to an .npz file."""
    text = json.dumps({"format": f"flatness {kind}", "version": _VERSION, **meta}, ensure_ascii=False)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **{_META: np.array(text)}, **arrays)  # type: ignore[arg-type]


def read_arrays(path: str | os.PathLike[str], *kinds: str) -> tuple[str, dict[str, Array], dict[str, Any]]:
    """What `write_arrays` wrote: which of the kinds it is, the arrays, and what is known about them.

    Nothing in the file is executed: arrays of Python objects are refused.

    Raises:
        ReportError: When the file is something else.
    """
    wanted = " or ".join(kinds)
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
        meta = json.loads(str(arrays.pop(_META)))
    except (
        IsADirectoryError,
        ValueError,
        KeyError,
        EOFError,
        AttributeError,
        TypeError,
        zipfile.BadZipFile,
    ) as error:
        raise ReportError(
            f"Expected a {wanted} saved by flatness but {path} is something else. Pass a file that save "
            "wrote."
        ) from error
    kind = str(meta.pop("format", "")).removeprefix("flatness ") if isinstance(meta, dict) else ""
    if kind not in kinds:
        raise ReportError(
            f"Expected a {wanted} saved by flatness but {path} holds {kind or 'something else'}. Pass a file "
            "that save wrote."
        )
    meta.pop("version", None)
    return kind, arrays, meta
