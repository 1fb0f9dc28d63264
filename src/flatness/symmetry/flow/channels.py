"""Groups of channels: what they are called, and what they touch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flatness.errors import listed


@dataclass(frozen=True, eq=False)
class Slot:
    """Where a group of channels meets a parameter.

    Attributes:
        parameter: Name of the parameter or buffer.
        layer: What users call the layer it belongs to.
        part: "rows", "bias", "scale", "shift", "columns", "running mean", …
        units: (channels, k): for every channel the rows, columns or entries of the parameter that belong to
            it. After a flatten k columns belong to one channel.
    """

    parameter: str
    layer: str
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
        consumers: What makes up for it: columns, the running statistics of a batch norm, and the rows and
            biases of keys for those of queries.
        reasons: Why the channels may not be rescaled; empty for those that may.
    """

    channels: int
    producers: tuple[Slot, ...]
    consumers: tuple[Slot, ...]
    reasons: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The layers that produce it."""
        return ", ".join(dict.fromkeys(slot.layer for slot in self.producers)) or "input"

    def __str__(self) -> str:
        """One line: producers → consumers, or the reason."""
        end = f"; {listed(self.reasons, 3)}" if self.reasons else f" → {_by_layer(self.consumers)}"
        return f"{counted(self.channels, 'channel')}: {_by_layer(self.producers)}{end}"


def counted(number: int, word: str) -> str:
    """A number and its noun.

    >>> counted(1, "channel"), counted(2, "channel")
    ('1 channel', '2 channels')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _by_layer(slots: tuple[Slot, ...]) -> str:
    parts: dict[str, list[str]] = {}
    for slot in slots:
        parts.setdefault(slot.layer, []).append(str(slot))
    named = [
        f"{layer} ({', '.join(dict.fromkeys(parts))})" if parts != ["entries"] else layer
        for layer, parts in parts.items()
    ]
    return ", ".join(named) or "nothing"
