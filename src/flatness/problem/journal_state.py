"""What a loop changes, as tensors, numbers and texts that can be written, and back again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

# What stands for itself; asked first, as asking what a protocol asks takes a while.
_SIMPLE = (str, int, float, bool, type(None))


@runtime_checkable
class Kept(Protocol):
    """Part of what a loop changes that knows by itself how it is written and read."""

    @property
    def bytes(self) -> int:
        """How long it is, about."""
        ...

    def saved(self) -> Any:
        """As tensors, numbers and texts in lists and dictionaries."""
        ...

    def restore(self, saved: Any) -> None:
        """Become what was saved."""
        ...


class Fields:
    """Attributes of an object as part of what a loop changes.

    Args:
        owner: The object.
        names: Its attributes; all of them when none are named.
    """

    def __init__(self, owner: Any, *names: str) -> None:
        self.owner, self.names = owner, names or tuple(vars(owner))

    @property
    def bytes(self) -> int:
        """What they take."""
        return sum(size_of(getattr(self.owner, name)) for name in self.names)

    def saved(self) -> dict[str, Any]:
        """By name."""
        return {name: plain(getattr(self.owner, name)) for name in self.names}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set them; tensors are replaced, as several attributes may be views of one."""
        for name, value in saved.items():
            mine = getattr(self.owner, name)
            setattr(self.owner, name, restored(None if isinstance(mine, Tensor) else mine, value))


def digest_of(value: Any) -> str:
    """Hexadecimal digits that depend on every number in nested lists and dictionaries."""
    found = hashlib.blake2b(digest_size=16)
    for piece in _pieces(value):
        found.update(piece)
    return found.hexdigest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, Tensor):
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
    elif isinstance(value, (set, frozenset)):
        yield from _pieces(sorted(value, key=repr))
    elif isinstance(value, (list, tuple)):
        yield f"list of {len(value)}".encode()
        for part in value:
            yield from _pieces(part)
    else:
        yield f"{type(value).__name__} {value!r};".encode()


_CHECKSUM = "checksum"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Content with a digest of itself, by which `intact` knows a flipped bit."""
    return {**content, _CHECKSUM: digest_of(content)}


def intact(content: Any) -> bool:
    """Whether sealed content is as it was; what has no digest is believed, as earlier versions wrote none."""
    if not isinstance(content, Mapping):
        return False
    if _CHECKSUM not in content:
        return True
    try:
        rest = {name: value for name, value in content.items() if name != _CHECKSUM}
        return content[_CHECKSUM] == digest_of(rest)
    except Exception:  # damage can make tensors that no operation takes
        return False


def plain(value: Any) -> Any:
    """A copy that does not change any more."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value.saved() if isinstance(value, Kept) else value


def restored(mine: Any, saved: Any) -> Any:
    """What was saved: `mine` itself, changed in place, where it can be."""
    if isinstance(mine, torch.Generator):
        mine.set_state(saved.cpu())
    elif isinstance(mine, Tensor) and (mine.shape, mine.dtype) == (saved.shape, saved.dtype):
        mine.copy_(saved)
    elif isinstance(mine, dict):
        for key, part in saved.items():
            mine[key] = restored(mine.get(key), part)
    elif isinstance(mine, list):
        known = [*mine, *[None] * len(saved)]
        mine[:] = [restored(known[place], part) for place, part in enumerate(saved)]
    elif isinstance(mine, Kept):
        mine.restore(saved)
    else:
        return plain(saved)
    return mine


def size_of(value: Any) -> int:
    """Bytes of what is to be written, about."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, _SIMPLE):
        return 64
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(size_of, value))
    return value.bytes if isinstance(value, Kept) else 64
