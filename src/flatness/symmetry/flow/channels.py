"""Groups of channels: what they are called, what they touch, and what that means for a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from flatness.errors import listed
from flatness.symmetry.flow.uses import Use


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

    @classmethod
    def of(cls, use: Use, numbers: Tensor) -> Self:
        """What a use of a parameter does, labels replaced by the numbers of their classes."""
        parts = (use.up, use.down, use.rows, use.columns)
        return cls(use, *(None if labels is None else numbers[labels.long()] for labels in parts))

    @property
    def layer(self) -> str:
        """What users call it."""
        return layer_of(self.use)


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


def layer_of(use: Use) -> str:
    """The layer of a use of a parameter; of packed projections of attention the one it is: ``attn.q``."""
    owner, _, last = use.name.rpartition(".")
    part = ""
    if last in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        part = last[0]
    elif last in ("in_proj_weight", "in_proj_bias") and use.index is not None and use.index.numel():
        third = int(use.index.flatten()[0]) // use.index.numel()
        part = "qkv"[third] if third < 3 else ""
    return layer_name(use.name) if not part else f"{owner}.{part}" if owner else part


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
