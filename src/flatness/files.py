"""Files that are written at once or not at all, known by digests: texts, tensors, JSON of a known shape."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatness.errors import OptionError, ReportError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to, renamed to `path` at the end; removed after an error or Ctrl-C.

    Readers see the old file or the new one, never half.
    """
    target = Path(path)
    check_folder(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_folder(path: str | os.PathLike[str]) -> None:
    """Refuse a folder, and a path whose folder is not there or cannot be written to."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise OptionError(f"Expected the name of a file but got the folder {str(path)!r}. Add a file name.")
    if not folder.is_dir():
        raise OptionError(
            f"Expected a path in an existing folder but got {str(path)!r}. Make the folder first."
        )
    if not os.access(folder, os.W_OK):
        raise OptionError(
            f"Expected a path in a folder that can be written to but got {str(path)!r}. Choose "
            "another folder."
        )


def set_aside(path: Path) -> None:
    """Rename a file that cannot be read, so that it is out of the way and can still be looked at.

    It becomes ``NAME.damaged``, with a number added where there is such a file.
    """
    wanted = path.with_name(f"{path.name}.damaged")
    free, number = wanted, 1
    while free.exists() or free.is_symlink():
        number += 1
        free = wanted.with_name(f"{wanted.name}-{number}")
    os.rename(path, free)


def _flush(path: Path) -> None:
    """Have the content on the disk before the name: after a power cut the file is whole or not there."""
    if path.is_file():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


# What JSON has no numbers for, under the names that JavaScript and Python's own reader know them by.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_text(content: Any, **layout: Any) -> str:
    r"""Content as JSON that every reader takes: NaN and the infinities become words, see `parse_json`.

    A text that is one of the words gets a backslash in front, which `parse_json` takes off again.

    Args:
        content: Dictionaries, lists, texts, numbers, None.
        **layout: As `json.dumps` takes it, for example ``separators``; one entry a line if not given.

    >>> json_text([1.5, float("nan"), float("-inf"), "NaN"], indent=None)
    '[1.5, "NaN", "-Infinity", "\\\\NaN"]'
    """
    layout = {"indent": 1, "ensure_ascii": False, **layout}
    try:
        text = json.dumps(content, allow_nan=False, **layout)
    except ValueError:
        text = None
    if text is None or any(f'{word}"' in text for word in _NOT_FINITE):
        text = json.dumps(_replaced(content, _in_words), allow_nan=False, **layout)
    return text


def parse_json(raw: bytes) -> Any:
    """What `json_text` wrote, the words for NaN and the infinities as numbers; with one kind of error.

    Earlier versions wrote these without quotes, as Python does; that is read too.

    Raises:
        ShapeError: It is no JSON, or nested so deeply that nothing could read it. The message goes behind
            "is": ``not JSON: Expecting value``.

    >>> parse_json(b'[1.5, "NaN", -Infinity]')
    [1.5, nan, -inf]
    """
    try:
        content = json.loads(raw.decode())
        # Hardly any file has one of the words, and files are large.
        worded = any(f'{word}"'.encode() in raw for word in _NOT_FINITE)
        return _replaced(content, _in_numbers) if worded else content
    except RecursionError as error:
        raise ShapeError("nested too deeply") from error
    except ValueError as error:
        raise ShapeError(f"not JSON: {error}") from error


def _replaced(value: Any, replace: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replaced(part, replace) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(part, replace) for part in value]
    return replace(value)


def _in_words(value: Any) -> Any:
    if _is_word(value):
        return f"\\{value}"
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _in_numbers(value: Any) -> Any:
    return _NOT_FINITE.get(value, value[1:]) if _is_word(value) else value


def _is_word(value: Any) -> bool:
    """Whether a text is one of the words, or one with backslashes in front."""
    return isinstance(value, str) and value.lstrip("\\") in _NOT_FINITE


NUMBER, TEXT, YES_NO, WHOLE, ANY = "a number", "text", "true or false", "a whole number", "anything"
"""What a place in a file may hold, as `check_shape` takes it."""

EVERY = "*"
"""As the key of a shape: every key, whatever it is called."""

KINDS: dict[str, tuple[type, ...]] = {
    NUMBER: (int, float),
    TEXT: (str,),
    YES_NO: (bool,),
    WHOLE: (int,),
    ANY: (object,),
}
"""The types of these."""


class Optional:
    """A key that may be missing, or null.

    Args:
        shape: What it holds where it is there.
    """

    def __init__(self, shape: Any) -> None:
        self.shape = shape


class ShapeError(ValueError):
    """Content of another shape; the message is a clause: ``results[2].value is 'x' instead of a number``."""


def check_shape(content: Any, shape: Any, place: str = "") -> None:
    """Refuse content that does not have a shape.

    Args:
        content: What was read.
        shape: One of the words above, a dictionary of shapes by key (more keys are allowed), a list of one
            shape for a list of such, or `Optional`.
        place: Where it stands in the file; "" for the whole of it.

    Raises:
        ShapeError: The first place that does not fit.

    >>> check_shape({"rows": [{"value": 1.5}, {}]}, {"rows": [{"value": NUMBER}]})
    Traceback (most recent call last):
    flatness.files.ShapeError: rows[1] has no 'value'
    """
    wrong = _wrong(content, shape)
    if wrong is not None:
        steps, what = wrong
        raise ShapeError(f"{(place + steps).removeprefix('.') or 'it'} {what}")


def _wrong(content: Any, shape: Any) -> tuple[str, str] | None:
    """The way to the first place that does not fit, and what is wrong there; None where all fits.

    The way is put together on the way back: files are large, and nearly always fit.
    """
    if isinstance(shape, Optional):
        return None if content is None else _wrong(content, shape.shape)
    if isinstance(shape, Mapping):
        return _wrong_entry(content, shape)
    if isinstance(shape, list):
        return _wrong_item(content, shape[0])
    truth = isinstance(content, bool) and shape in (NUMBER, WHOLE)
    return None if isinstance(content, KINDS[shape]) and not truth else ("", _instead(content, shape))


def _wrong_entry(content: Any, shape: Mapping[str, Any]) -> tuple[str, str] | None:
    if not isinstance(content, Mapping):
        return "", _instead(content, "an object")
    shape = dict.fromkeys(content, shape[EVERY]) if EVERY in shape else shape
    for key, inner in shape.items():
        if key in content:
            found = _wrong(content[key], inner)
            if found is not None:
                return f".{key}{found[0]}", found[1]
        elif not isinstance(inner, Optional):
            return "", f"has no {key!r}"
    return None


def _wrong_item(content: Any, shape: Any) -> tuple[str, str] | None:
    if not isinstance(content, list):
        return "", _instead(content, "a list")
    for number, one in enumerate(content):
        found = _wrong(one, shape)
        if found is not None:
            return f"[{number}]{found[0]}", found[1]
    return None


def _instead(content: Any, wanted: str) -> str:
    shown = repr(content)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"is {shown} instead of {wanted}"


def read_saved(
    path: str | os.PathLike[str],
    what: str,
    head: tuple[str, int],
    shape: Mapping[str, Any],
    *,
    writer: str = "save",
    again: str = "Compute it again.",
) -> dict[str, Any]:
    """The content of a JSON file that a ``save`` of this package wrote.

    Args:
        path: The file.
        what: What messages call it: ``a report``.
        head: The format and the version that it must have.
        shape: What it must hold, see `check_shape`.
        writer: The function that writes such files, for the messages.
        again: What to do about a file that is damaged, or of another version.

    Raises:
        ReportError: It is something else, of another version, or damaged.
    """
    try:
        content = parse_json(Path(path).read_bytes())
        found = "holds something else"
    except ShapeError as error:
        content, found = None, f"is {error}"
    if not isinstance(content, dict) or content.get("format") != head[0]:
        raise ReportError(
            f"Expected {what} saved by flatness but {path} {found}. Pass a file written by {writer}()."
        )
    if content.get("version") != head[1]:
        raise ReportError(
            f"Expected {what} of version {head[1]} but {path} has version {content.get('version')}. {again}"
        )
    try:
        check_shape(content, shape)
    except ShapeError as error:
        whole = re.sub("^(an? )?", r"\1whole ", what)
        raise ReportError(f"Expected {whole} but {path} is damaged: {error}. {again}") from error
    return content


def write_tensors(path: str | os.PathLike[str], content: Any) -> None:
    """Write tensors, numbers and texts as ``torch.save`` does, whole or not at all.

    ``torch.load`` does not look at the checksums in such a file: who must notice a flipped bit puts a digest
    of `content` beside it.

    Raises:
        OSError: The disk is full; ``torch.save`` by itself reports an unexpected position then.
    """
    import torch

    with replacing(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class DamagedFileError(ValueError):
    """A file is not what was written to it: cut short, changed, or something else."""


def read_tensors(path: str | os.PathLike[str]) -> Any:
    """What `write_tensors` wrote, on the host; nothing in the file is executed.

    Raises:
        OSError: The disk cannot read it, or it is not there: nothing is known about its content.
        DamagedFileError: It is read, and is not whole.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOVERFLOW, None):  # places in the file that make no sense
            raise DamagedFileError(str(error)) from error
        raise
    except Exception as error:  # what the reader trips over depends on where the damage is
        raise DamagedFileError(str(error)) from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def digest(value: Any) -> str:
    """Hexadecimal digits that depend on every number in nested lists and dictionaries, tensors included."""
    found = hashlib.blake2b(digest_size=16)
    for piece in _pieces(value):
        found.update(piece)
    return found.hexdigest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    import torch

    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{list(value.shape)}".encode()
        flat = value.detach().cpu().contiguous().reshape(-1)
        flat = flat if flat.stride(0) == 1 else flat.clone()  # a single number may have any stride
        # As bytes: not all of torch's types are numpy's.
        yield flat.view(torch.uint8).numpy().data
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}".encode()
        for key, part in value.items():
            yield from _pieces(key)
            yield from _pieces(part)
    elif isinstance(value, (list, tuple)):
        yield f"list of {len(value)}".encode()
        for part in value:
            yield from _pieces(part)
    else:
        yield f"{type(value).__name__} {value!r};".encode()


CHECKSUM = "checksum"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Content with a digest of itself, by which `intact` knows a flipped bit."""
    return {**content, CHECKSUM: digest(content)}


def intact(content: Mapping[str, Any]) -> bool:
    """Whether sealed content is as it was; what has no digest is believed, as earlier versions wrote none."""
    if CHECKSUM not in content:
        return True
    rest = {name: value for name, value in content.items() if name != CHECKSUM}
    try:
        return content[CHECKSUM] == digest(rest)
    except Exception:  # damage can make tensors that no operation takes
        return False
