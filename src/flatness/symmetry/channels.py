"""Groups of channels: what they are called, what they touch, and what that means for a parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flatness.errors import listed
from flatness.symmetry.flow import Use


@dataclass(frozen=True, eq=False)
class Slot:
    """Where a group of channels meets a parameter.

    Attributes:
        parameter: Name of the parameter or buffer.
        part: "rows", "bias", "scale", "shift", "columns", "running mean", …
        units: (channels, k): for every channel the rows, columns or entries of the parameter that belong to
            it. After a flatten k columns belong to one channel.
    """

    parameter: str
    part: str
    units: Tensor

    def __str__(self) -> str:
        """The part, and how much of it belongs to one channel."""
        return f"{self.part} ×{self.units.shape[1]}" if self.units.shape[1] > 1 else self.part


@dataclass(frozen=True, eq=False)
class Group:
    """Channels side by side: each may have a factor of its own, and all that it touches is scaled together.

    Attributes:
        channels: Number of channels.
        producers: What is multiplied by a channel's factor: rows, biases, scales and shifts.
        consumers: What makes up for it: columns, and the running statistics of a batch norm.
        reasons: Why the channels may not be rescaled; empty for those that may.
    """

    channels: int
    producers: tuple[Slot, ...]
    consumers: tuple[Slot, ...]
    reasons: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The layers that produce it."""
        return ", ".join(dict.fromkeys(layer_name(slot.parameter) for slot in self.producers)) or "input"

    def __str__(self) -> str:
        """One line: producers → consumers, or the reason."""
        line = (
            f"{counted(self.channels, 'channel')}: {_by_layer(self.producers)} → {_by_layer(self.consumers)}"
        )
        return (
            f"{counted(self.channels, 'channel')}: {_by_layer(self.producers)}; {listed(self.reasons, 3)}"
            if self.reasons
            else line
        )


@dataclass(frozen=True, eq=False)
class Action:
    """What happens to one parameter: which classes of channels (numbered; −1 is fixed) scale its entries.

    Attributes:
        use: Where it comes from.
        up: Classes that multiply, broadcasting against the entries in use.
        down: Classes that divide.
        rows: Class of every output unit.
        columns: Class of every input unit.
    """

    use: Use
    up: Tensor | None
    down: Tensor | None
    rows: Tensor | None
    columns: Tensor | None

    @property
    def layer(self) -> str:
        """What users call it."""
        return layer_name(self.use.name)


def layer_name(parameter: str) -> str:
    """The layer of a parameter: ``fc1`` for ``fc1.weight`` and ``fc1.bias``; another parameter is its own.

    >>> layer_name("block.fc1.weight"), layer_name("mix")
    ('block.fc1', 'mix')
    """
    owner, _, last = parameter.rpartition(".")
    return (
        owner
        if owner and last in ("weight", "bias", "running_mean", "running_var", "weight_orig")
        else parameter
    )


def counted(number: int, word: str) -> str:
    """A number and its noun.

    >>> counted(1, "channel"), counted(2, "channel")
    ('1 channel', '2 channels')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _by_layer(slots: tuple[Slot, ...]) -> str:
    parts: dict[str, list[str]] = {}
    for slot in slots:
        parts.setdefault(layer_name(slot.parameter), []).append(str(slot))
    named = [
        f"{layer} ({', '.join(dict.fromkeys(parts))})" if parts != ["entries"] else layer
        for layer, parts in parts.items()
    ]
    return ", ".join(named) or "nothing"
