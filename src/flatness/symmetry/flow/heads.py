"""Heads of attention whose channels may be mixed by a matrix, and why others may not.

In a head queries and keys meet only in products ⟨q, k⟩, so that (q, k) → (Aᵀq, A⁻¹k) has no effect for any
invertible A; values only pass to the output projection, so that v → Bv may be undone there. Channel scales
are the diagonal part of that. It holds where every operator between the projections treats the channels of a
head alike. Rotary embeddings turn channels in pairs and leave a scaled rotation of each pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flatness.symmetry.flow.flow import Flow, is_constant
from flatness.symmetry.flow.labels import compact
from flatness.symmetry.flow.uses import Use
from flatness.symmetry.trace.attention import WEIGHTED, attentions, rule_of
from flatness.symmetry.trace.calls import Call, Value

# Rules of operators that do with each channel what they do with the others, linearly; of rules that have
# other operators too, these.
_ALIKE = WEIGHTED | {"copies", "layout", "pick", "set_item", "creation", "pad"}
_ALIKE_BY_NAME = frozenset(
    "add sub rsub copy fill neg mean sum cumsum dropout dropout1d dropout2d dropout3d".split()  # noqa: SIM905
)
_PRODUCTS = ("multiply", "divide")
# What a matrix can be multiplied with; a scale or a statistic has one number for each channel.
_PARTS = frozenset({"rows", "bias", "entries", "columns", "columns of the table"})


@dataclass(frozen=True, eq=False)
class Part:
    """What one parameter has of a head.

    Attributes:
        parameter: Its name.
        layer: What users call its layer.
        name: The same, with the role behind it where one layer has several: ``qkv.q``.
        role: "q", "k" or "v", which make channels; "o" for whatever takes them in.
        along: Whether it is multiplied by the head's matrix, and not by the inverse of the transpose.
        shape: Shape of the parameter, or of the view of it that is used.
        index: Which entry of the parameter stands where in that view; None where nothing has moved.
        axis: The axis along which channels stand.
        places: (d, k): where each channel is on it, several times for the query heads of a group.
    """

    parameter: str
    layer: str
    name: str
    role: str
    along: bool
    shape: tuple[int, ...]
    index: Tensor | None
    axis: int
    places: Tensor

    @property
    def entries(self) -> Tensor:
        """(d, r) places in the flattened parameter: for each channel the numbers that belong to it.

        Made anew each time: together they are as many as the network has parameters in attention.
        """
        axis, along = self.axis % len(self.shape), self.places.flatten()
        if self.index is not None:
            found = self.index.index_select(axis, along).long()
        else:
            found, stride = torch.zeros((), dtype=torch.int64), 1
            for dim, size in reversed(list(enumerate(self.shape))):
                numbers = along if dim == axis else torch.arange(size)
                found = found + stride * numbers.reshape(-1, *[1] * (len(self.shape) - dim - 1))
                stride *= size
        return found.movedim(axis, 0).reshape(len(self.places), -1)


@dataclass(frozen=True, eq=False)
class Head:
    """A head's queries and keys, or its values and what takes them in; of grouped queries, a group of them.

    Attributes:
        compares: Whether it is one of queries and keys.
        channels: The class of each channel; −1 for one that is not mixed.
        parts: Where it meets parameters, those that are multiplied by its matrix first.
    """

    compares: bool
    channels: tuple[int, ...]
    parts: tuple[Part, ...]

    @cached_property
    def moved(self) -> list[int]:
        """The channels that are mixed, in order: what rows of `Part.entries` are about."""
        return [place for place, number in enumerate(self.channels) if number >= 0]

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Channels that are turned together by rotary embeddings."""
        places: dict[int, list[int]] = {}
        for place in self.moved:
            places.setdefault(self.channels[place], []).append(place)
        return [(both[0], both[1]) for both in places.values() if len(both) == 2]

    @cached_property
    def free(self) -> list[int]:
        """Channels that any invertible matrix may mix."""
        paired = {place for pair in self.pairs for place in pair}
        return [place for place in self.moved if place not in paired]

    @property
    def name(self) -> str:
        """What users call it: the layer of the queries or values."""
        return self.parts[0].name

    def __str__(self) -> str:
        """What may be mixed: its size, and the layers."""
        ends = [
            ", ".join(dict.fromkeys(part.name for part in self.parts if part.along == along))
            for along in (True, False)
        ]
        sizes = ((len(self.free), "channel"), (len(self.pairs), "rotary pair"))
        what = " and ".join(f"{count} {word}{'s' * (count > 1)}" for count, word in sizes if count)
        return f"{what}: {ends[0]} {'↔' if self.compares else '→'} {ends[1]}"


class Heads(NamedTuple):
    """What was found.

    Attributes:
        heads: The heads that may be mixed, in network order.
        reasons: Why others may not.
        calls: How many calls of attention there are.
    """

    heads: tuple[Head, ...] = ()
    reasons: tuple[str, ...] = ()
    calls: int = 0

    @property
    def in_words(self) -> list[str]:
        """A line for each kind of head, and the reasons of those that may not be mixed."""
        counts = Counter(str(head) for head in self.heads)
        lines = [f"{number} head{'s' * (number > 1)} of {what}" for what, number in counts.items()]
        return [*lines, *(f"not the {reason}" for reason in self.reasons)]


class _UnmixedError(Exception):
    """Why a head's channels may not be mixed."""


def find_heads(flow: Flow, table: Tensor) -> Heads:
    """The heads of a network whose channels may be mixed.

    Args:
        flow: The scales that were followed through it.
        table: The number of every label's class; −1 for those that are fixed.
    """
    found = list(attentions(flow.trace))
    if not found:
        return Heads()
    uses = _Uses(flow, table)
    heads: list[Head] = []
    taken: set[int] = set()
    reasons: list[str] = []
    for one in found:
        operands = (("queries and keys", one.query), ("values", one.value))
        for (what, operand), norm in zip(operands, one.norms, strict=True):
            if norm:
                reasons.append(f"{what} of {one.where}: {norm} divides by their size, which no matrix passes")
                continue
            for labels in _by_head(flow.known(operand)):
                try:
                    heads += uses.head(labels, taken, compares=operand is one.query)
                except _UnmixedError as reason:
                    reasons.append(f"{what} of {one.where}: {reason}")
    return Heads(_named(heads), tuple(dict.fromkeys(reasons)), len(found))


def _named(heads: Iterable[Head]) -> tuple[Head, ...]:
    """Heads whose parts are called after their layers, and after their roles where a layer plays several."""
    roles: dict[str, set[str]] = {}
    for part in (part for head in heads for part in head.parts):
        roles.setdefault(part.layer, set()).add(part.role)

    def named(part: Part) -> Part:
        return replace(part, name=f"{part.layer}.{part.role}") if len(roles[part.layer]) > 1 else part

    return tuple(replace(head, parts=tuple(map(named, head.parts))) for head in heads)


def _by_head(labels: Tensor | None) -> list[Tensor]:
    """Labels of the channels of every head (…, positions, channels), each head once."""
    if labels is None or labels.dim() < 2 or 0 in labels.shape:
        return []
    at_one = labels.select(-2, 0).reshape(-1, labels.shape[-1])
    return list({tuple(row.tolist()): row for row in at_one}.values())


def _told_apart(flow: Flow, table: Tensor) -> tuple[dict[int, str], dict[int, str]]:
    """Classes whose channels an operator bends, and those that it multiplies by numbers of their own."""
    bent: dict[int, str] = {}
    multiplied: dict[int, str] = {}
    for call in flow.trace.calls:
        if _treats_alike(call):
            continue
        found = multiplied if rule_of(call) in _PRODUCTS else bent
        for labels in map(flow.known, call.operands()):
            for number in () if labels is None else _classes(table, labels):
                found.setdefault(number, str(call))
    return bent, multiplied


def _treats_alike(call: Call) -> bool:
    """Whether an operator is linear in each channel, and the same for all of them."""
    if rule_of(call) in _PRODUCTS:
        return sum(map(_varies, call.operands())) < 2
    return rule_of(call) in _ALIKE or call.name in _ALIKE_BY_NAME


def _varies(value: Value) -> bool:
    """Whether a factor may have different entries along its last dimension, where channels stand."""
    if not value.shape or value.shape[-1] < 2:
        return False
    known = value.tensor if is_constant(value) else None
    return known is None or bool((known != known[..., :1]).any())


def _classes(table: Tensor, labels: Tensor) -> list[int]:
    """The free classes among labels."""
    return [number for number in table[compact(labels)[0].long()].unique().tolist() if number >= 0]


class _Uses:
    """Parameters by the classes that they meet, and what stands in the way of mixing these."""

    def __init__(self, flow: Flow, table: Tensor) -> None:
        self._uses = [use.numbered(table) for use in flow.uses]
        self._table, self._flow = table, flow
        self._bent, self._multiplied = _told_apart(flow, table)
        for one in flow.corrections:
            self._bent |= dict.fromkeys(_classes(table, one.labels), f"the batch norm {one.scale}")
        self._met: dict[int, dict[tuple[int, bool], None]] = {}
        for number, use in enumerate(flow.uses):
            for labels, up in ((use.up, True), (use.down, False)):
                for met in () if labels is None else _classes(table, labels):
                    self._met.setdefault(met, {})[number, up] = None

    def head(self, labels: Tensor, taken: set[int], *, compares: bool) -> list[Head]:
        """The head whose queries or values have these labels; nothing where it has been found before.

        Args:
            labels: One per channel.
            taken: Classes of the heads so far, which those of this one join.
            compares: Whether they are queries.

        Raises:
            _UnmixedError: When no channel may be mixed, with the reason.
        """
        classes = self._table[labels.long()].tolist()
        partners = [self._inverse(label) for label in labels.tolist()] if compares else classes
        new = {*classes, *partners} - {-1}
        if new and new <= taken:
            return []
        if new & taken:
            raise _UnmixedError("other heads have some of their channels")
        counts, both = Counter(classes), zip(classes, partners, strict=True)
        why = [self._reason({number, other}, counts[number]) for number, other in both]
        if all(why):
            fixed = self._flow.classes.reasons(int(labels[0])) if float(labels[0]) >= 0 else ()
            raise _UnmixedError(next(iter((*fixed, *why))))
        channels, inverse = _mixed_ones(classes, why), _mixed_ones(partners, why)
        parts = list(self._parts(channels, "q" if compares else "v", along=True))
        if compares:
            parts += self._parts(inverse, "k", along=False)
        if len({part.along for part in parts}) < 2:
            raise _UnmixedError("no two layers make up for each other")
        taken |= new
        parts.sort(key=lambda part: not part.along)
        return [Head(compares, channels, tuple(parts))]

    def _inverse(self, label: float) -> int:
        """The class with the inverse factors of a label's; −1 without one."""
        return int(self._table[self._flow.classes.inverse(int(label))]) if label >= 0 else -1

    def _reason(self, both: set[int], count: int) -> str | None:
        """Why a channel may not be mixed with others, of so many in its class; None where it may."""
        if -1 in both:
            return "they keep their scale"
        if count > 2:
            return "the channels of a head share one factor"
        for each in both:
            if each in self._bent:
                return f"{self._bent[each]} does not treat their channels alike"
            if count == 1 and each in self._multiplied:
                return f"{self._multiplied[each]} multiplies each channel by a number of its own"
        return None

    def _parts(self, classes: tuple[int, ...], role: str, *, along: bool) -> Iterator[Part]:
        """Where channels of some classes meet parameters.

        Args:
            classes: The class of each channel; −1 for those that are left out.
            role: The role of what makes them.
            along: Whether they are multiplied by the head's matrix.
        """
        for number, up in dict.fromkeys(met for one in classes for met in self._met.get(one, ())):
            use = self._uses[number]
            labels, part = (use.up, use.up_part) if up else (use.down, use.down_part)
            if part not in _PARTS or use.power != 1:
                raise _UnmixedError(
                    f"{use.layer} has a number of its own for each channel ({part}), which no matrix passes"
                )
            assert labels is not None
            shape = self._flow.trace.shapes[use.name] if use.index is None else tuple(use.index.shape)
            where = shape, use.index, *_places(use, shape, labels, classes)
            yield Part(use.name, use.layer, use.layer, role if up else "o", along == up, *where)


def _mixed_ones(classes: list[int], why: list[str | None]) -> tuple[int, ...]:
    """The classes of channels that no reason keeps from being mixed; −1 for the others."""
    return tuple(-1 if reason else number for number, reason in zip(classes, why, strict=True))


def _places(use: Use, shape: tuple[int, ...], labels: Tensor, classes: tuple[int, ...]) -> tuple[int, Tensor]:
    """The axis along which channels stand in a parameter, and (d, k) where each of them is on it.

    A parameter may have several channels of one class, such as the rows of grouped queries; the first row of
    each class then belongs to the first query head, the second to the second, and so on.
    """
    moved = [number for number in classes if number >= 0]
    each = Counter(moved)
    axis, line = _axis(use, labels, moved)
    line = line.expand(shape[axis])
    places = {number: (line == number).nonzero().flatten() for number in each}
    copies = {len(places[number]) / count for number, count in each.items()}
    if len(copies) > 1 or not copies.pop().is_integer():
        raise _UnmixedError(
            f"{use.layer} has {len(line)} of them, which is not a multiple of the {len(moved)} of a head"
        )
    seen: Counter[int] = Counter()
    rows = []
    for number in moved:
        rows.append(places[number].reshape(-1, each[number])[:, seen[number]])
        seen[number] += 1
    return axis, torch.stack(rows)


def _axis(use: Use, labels: Tensor, moved: list[int]) -> tuple[int, Tensor]:
    """The axis of a parameter along which the channels of a head stand, and the classes along it."""
    kept = torch.where(torch.isin(labels, torch.tensor(moved)), labels, -1)
    axes = [axis for axis in range(-labels.dim(), 0) if bool((kept != kept.narrow(axis, 0, 1)).any())]
    if len(axes) > 1:
        raise _UnmixedError(f"{use.layer} takes them in by groups")
    axis = axes[0] if axes else -1
    return axis, kept.movedim(axis, 0).reshape(kept.shape[axis], -1)[:, 0] if kept.dim() else kept
