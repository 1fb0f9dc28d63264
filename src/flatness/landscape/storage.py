"""Files of landscapes: arrays and a JSON text in one .npz, written at once or not at all."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from flatness.errors import ReportError
from flatness.files import ANY, TEXT, ShapeError, check_shape, json_text, parse_json, replacing
from flatness.report.report import Drawn
from flatness.report.unpacking import UNREADABLE, TooLargeError, array_names, check_unpacked, read_array

Array = NDArray[Any]
_VERSION = 1
_META = "meta"


class Saved(Drawn):
    """A dataclass of arrays, names and `meta` that saves and loads itself.

    Attributes:
        kind: What the file says it is.
        array_fields: Fields that hold an array.
        text_fields: Fields that hold texts, or something by name.
        meta: What else is known.
        done: Which points were computed.
    """

    kind: ClassVar[str]
    array_fields: ClassVar[tuple[str, ...]] = ()
    text_fields: ClassVar[tuple[str, ...]]
    meta: dict[str, Any]
    done: Array

    @property
    def complete(self) -> bool:
        """Whether every point was computed."""
        return bool(self.done.all())

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the work before all of it was done."""
        return not self.complete

    def _repr_html_(self) -> str:
        from flatness.report.notebook import picture_html

        return picture_html(self, str(self).splitlines())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write arrays and meta to an .npz file, at once or not at all."""
        told = {"format": f"flatness {self.kind}", "version": _VERSION, **self.meta, **self._texts()}
        text = np.array(json_text(told, indent=None))
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **{_META: text}, **self._arrays())  # type: ignore[arg-type]

    def _arrays(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in self.array_fields}

    def _texts(self) -> dict[str, Any]:
        return {name: list(getattr(self, name)) for name in self.text_fields}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        _, arrays, meta = read_arrays(path, cls.kind)
        try:
            return cls(**cls._fields(arrays, meta), **{"meta": meta})
        except ShapeError as error:
            raise ReportError(
                f"Expected a whole {cls.kind} but {path} is damaged: {error}. Compute it again."
            ) from error

    @classmethod
    def _fields(cls, arrays: dict[str, Array], meta: dict[str, Any]) -> dict[str, Any]:
        """All fields but `meta`, whose entries that are fields are taken out of it.

        Raises:
            ShapeError: When one is missing.
        """
        check_shape(meta, {name: [TEXT] for name in cls.text_fields})
        texts = {name: tuple(meta.pop(name)) for name in cls.text_fields}
        return named_arrays(arrays, cls.array_fields) | texts


def named_arrays(arrays: dict[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """Some arrays of a file, all of which must be there."""
    check_shape(arrays, dict.fromkeys(names, ANY))
    return {name: arrays[name] for name in names}


def read_arrays(path: str | os.PathLike[str], *kinds: str) -> tuple[str, dict[str, Array], dict[str, Any]]:
    """What `Saved.save` wrote: which of the kinds it is, the arrays, and what is known about them.

    Nothing in the file is executed: arrays of Python objects are refused.

    Args:
        path: The file.
        *kinds: What it may be.

    Raises:
        ReportError: When the file is something else, is not whole, or is larger than it may be.
    """
    wanted = " or ".join(kinds)
    try:
        names = array_names(path)
        with zipfile.ZipFile(path) as archive:
            check_unpacked(path, sum(member.file_size for member in archive.infolist()))
        found = {name: read_array(path, name) for name in names}
        told = parse_json(str(found.pop(_META)).encode())
    except FileNotFoundError:
        raise
    except TooLargeError as error:
        raise ReportError(f"Expected a {wanted} of a usual size but {path} {error}.") from error
    except (*UNREADABLE, MemoryError) as error:
        raise ReportError(
            f"Expected a {wanted} saved by flatness but {path} is something else. Pass a file written by "
            "save()."
        ) from error
    kind = str(told.pop("format", "")).removeprefix("flatness ") if isinstance(told, dict) else ""
    if kind not in kinds:
        raise ReportError(
            f"Expected a {wanted} saved by flatness but {path} holds {kind or 'something else'}. Pass a "
            "file written by save()."
        )
    told.pop("version", None)
    return kind, found, told
