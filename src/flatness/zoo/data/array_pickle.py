"""Unpickle a dictionary of arrays, numbers and text, and nothing else.

A pickle is a program: it may name any function on the machine and call it. The Python batches of CIFAR-10
name three, ``numpy.core.multiarray._reconstruct``, ``numpy.ndarray`` and ``numpy.dtype`` (saved again by
Python 3, a fourth, ``_codecs.encode``). Even these are not handed out, because numpy trusts the state it is
given: a forged dtype turns bytes into object pointers. Stand-ins of the same names record what an array is
made of, check it, and build it from its bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import cast

import numpy as np


class ArrayPickleError(ValueError):
    """The pickle is broken, or holds something else. The message is a clause that starts with "it"."""


class _StandIn:
    """Something a pickle may name and call, but not change."""

    __slots__ = ("_call", "name")

    def __init__(self, name: str, call: Callable[..., object]) -> None:
        self.name, self._call = name, call

    def __call__(self, *arguments: object) -> object:
        return self._call(*arguments)

    def __setstate__(self, state: object) -> None:
        raise ArrayPickleError(f"it changes {self.name}")


class _Dtype:
    """For ``numpy.dtype(code, align, copy)``: a whole-number or boolean type of one to eight bytes."""

    __slots__ = ("dtype",)

    def __init__(self, code: object, *_: object) -> None:
        text = code.decode("latin1") if isinstance(code, bytes) else code
        if not isinstance(text, str) or not re.fullmatch(r"[|<>=]?([iu][1248]|b1)", text):
            raise ArrayPickleError(f"it has an array of type {text!r}")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: object) -> None:
        """Take the byte order from numpy's state: (version, order, subarray, names, fields, …)."""
        match state:
            case (int(), (b"|" | b"<" | b">" | b"=" | "|" | "<" | ">" | "=") as order, None, None, None, *_):
                text = order.decode() if isinstance(order, bytes) else order
                self.dtype = np.dtype(text + self.dtype.str[1:])
            case _:
                raise ArrayPickleError("it has an array with fields")


class _Array:
    """For an array that its state will fill."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: np.ndarray = np.empty(0, np.uint8)

    def __setstate__(self, state: object) -> None:
        """Build the array from numpy's (version, shape, dtype, is_fortran, bytes)."""
        match state:
            case (int(), tuple() as shape, _Dtype() as kind, bool() | int() as fortran, bytes() as raw) if (
                all(type(size) is int and size >= 0 for size in shape)
            ):
                if math.prod(shape) * kind.dtype.itemsize != len(raw):
                    raise ArrayPickleError(
                        f"it has an array of shape {shape} and type {kind.dtype} with {len(raw)} bytes"
                    )
                self.values = np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if fortran else "C")
            case _:
                raise ArrayPickleError("it has an array of another kind than whole numbers")


def _reconstruct(kind: object, *_: object) -> _Array:
    """For ``numpy.core.multiarray._reconstruct``, called as ``_reconstruct(ndarray, (0,), b"b")``."""
    if not isinstance(kind, _StandIn) or kind.name != "numpy.ndarray":
        raise ArrayPickleError("it has an array of a class of its own")
    return _Array()


def _encode(text: object, encoding: object) -> bytes:
    """For ``_codecs.encode``, by which Python 3 writes bytes into old pickles."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise ArrayPickleError(f"it encodes text as {encoding!r}")
    return text.encode("latin1")


def _ndarray(*_: object) -> object:
    """For ``numpy.ndarray``, which is only a word to pass to ``_reconstruct``."""
    raise TypeError("an array is not made by calling its class")


_ADMITTED: dict[str, Callable[..., object]] = {
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.ndarray": _ndarray,
    "numpy.dtype": _Dtype,
    "_codecs.encode": _encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _StandIn:
        """Hand out a fresh stand-in for an admitted name, and refuse every other."""
        full = f"{module}.{name}"
        if "." in name or full not in _ADMITTED:
            raise ArrayPickleError(f"it asks for {full}, which is refused")
        return _StandIn(full, _ADMITTED[full])


def load_array_pickle(raw: bytes) -> dict[object, object]:
    """Unpickle a dictionary whose values are arrays of whole numbers, lists, numbers and text.

    Strings of Python 2 come back as bytes. The arrays are read-only.

    Raises:
        ArrayPickleError: `raw` is truncated, corrupted, or asks for anything else; nothing of it has run.
    """
    try:
        _refuse_huge_memo(raw)
        loaded = _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()
    except ArrayPickleError:
        raise
    except Exception as error:  # a forged pickle can make the unpickler fail in any way
        raise ArrayPickleError("it is truncated or corrupted") from error
    if not isinstance(loaded, dict):
        raise ArrayPickleError(f"it holds {type(loaded).__name__} instead of a dictionary")
    return {key: value.values if isinstance(value, _Array) else value for key, value in loaded.items()}


def _refuse_huge_memo(raw: bytes) -> None:
    """Refuse memo slots that no pickle this short can need; the unpickler would allocate up to them."""
    for opcode, argument, _ in pickletools.genops(raw):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and cast(int, argument) > len(raw):
            raise ArrayPickleError(f"it asks for memo slot {argument}")
