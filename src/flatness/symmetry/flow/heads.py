"""Heads of attention whose channels may be mixed by a matrix, and why others may not.

In a head queries and keys meet only in products ⟨q, k⟩, so that (q, k) → (Aᵀq, A⁻¹k) changes nothing for any
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

from flatness.network.operators import OPERATORS, Operator
from flatness.symmetry.flow.flow import Flow, is_constant
from flatness.symmetry.flow.labels import compact
from flatness.symmetry.flow.uses import ParameterView, Use
from flatness.symmetry.trace.calls import Call, UnknownFormError, Value
from flatness.symmetry.trace.forward_pass import Trace

LOOKED_FOR = (
    "scaled_dot_product_attention (as in nn.MultiheadAttention), or a product of two values, a softmax and "
    "a product with a third value"
)

# Operators that weights take part in: between the two products of attention there are none.
_WEIGHTED = frozenset({"linear", "matmul", "conv", "conv_transpose", "embedding", "scaled_attention"})
# Rules of operators that do with each channel what they do with the others, linearly; of rules that have
# other operators too, these.
_ALIKE = _WEIGHTED | {"copies", "layout", "pick", "set_item", "creation", "pad"}
_ALIKE_BY_NAME = frozenset(
    "add sub rsub copy fill neg mean sum cumsum dropout dropout1d dropout2d dropout3d".split()  # noqa: SIM905
)
# What a matrix can be multiplied with; a scale or a statistic has one number for each channel.
_PARTS = frozenset({"rows", "bias", "entries", "columns", "columns of the table"})


@dataclass(frozen=True, eq=False)
class Part:
    """What one parameter has of a head.

    Attributes:
        parameter: Its name.
        layer: What users call its layer.
        name: The same, with the role behind it where one layer has several: ``qkv.q``.
        role: "q", "k", "v" or "o".
        entries: (d, r) places in the flattened parameter: for each channel the numbers that belong to it.
    """

    parameter: str
    layer: str
    name: str
    role: str
    entries: Tensor


@dataclass(frozen=True, eq=False)
class Head:
    """A head's queries and keys, or its values and what takes them in; of grouped queries, a group of them.

    Attributes:
        channels: The class of each channel; −1 for one that is not mixed.
        parts: Where it meets parameters, what makes the queries or values first.
    """

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

    @property
    def compares(self) -> bool:
        """Whether it is one of queries and keys."""
        return self.parts[0].role == "q"

    def __str__(self) -> str:
        """What may be mixed: its size, and the layers."""
        first, arrow, second = "q↔k" if self.compares else "v→o"
        ends = [
            ", ".join(dict.fromkeys(part.name for part in self.parts if part.role == role))
            for role in (first, second)
        ]
        sizes = ((len(self.free), "channel"), (len(self.pairs), "rotary pair"))
        what = " and ".join(f"{count} {word}{'s' * (count > 1)}" for count, word in sizes if count)
        return f"{what}: {ends[0]} {arrow} {ends[1]}"


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


class _Attention(NamedTuple):
    """Operands of one attention."""

    query: Value
    value: Value
    where: str


class _UnmixedError(Exception):
    """Why a head's channels may not be mixed."""


def find_heads(flow: Flow, table: Tensor) -> Heads:
    """The heads of a network whose channels may be mixed.

    Args:
        flow: The scales that were followed through it.
        table: The number of every label's class; −1 for those that are fixed.
    """
    found = list(_attentions(flow.trace))
    if not found:
        return Heads()
    uses = _Uses(flow, table)
    heads: list[Head] = []
    taken: set[int] = set()
    reasons: list[str] = []
    for one in found:
        for roles, operand in (("qk", one.query), ("vo", one.value)):
            for labels in _by_head(flow.known(operand)):
                try:
                    heads += uses.head(roles, labels, taken)
                except _UnmixedError as reason:
                    what = "queries and keys" if roles == "qk" else "values"
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


def _attentions(trace: Trace) -> Iterator[_Attention]:
    """Every attention of a forward pass, as one call or as product, softmax and product."""
    made = {value: call for call in trace.calls for value in call.outputs}
    for call in trace.calls:
        if call.name == "scaled_dot_product_attention":
            try:
                given = call.bound("query key value | attn_mask dropout_p is_causal scale enable_gqa")
            except UnknownFormError:
                continue
            yield _Attention(given["query"], given["value"], str(call))
        elif _word(call) == "matmul" and len(operands := call.operands()) == 2:
            softmax = _behind(operands[0], made, "softmax")
            scores = _behind(softmax.first(), made, "matmul") if softmax else None
            if scores is not None and len(compared := scores.operands()) == 2:
                yield _Attention(compared[0], operands[1], str(call))


def _behind(value: Value, made: dict[Value, Call], word: str) -> Call | None:
    """The nearest call of a kind that a value was made by, with nothing weighted in between."""
    waiting, seen = [value], {value}
    while waiting:
        call = made.get(waiting.pop(0))
        if call is None:
            continue
        if _word(call) == word:
            return call
        if _word(call) not in _WEIGHTED:
            new = [one for one in call.operands() if one.floating and one not in seen]
            seen.update(new)
            waiting += new
    return None


def _word(call: Call) -> str:
    return OPERATORS.get(call.name, Operator()).flow or ""


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
        word = _word(call)
        product = word in ("multiply", "divide")
        if word in _ALIKE or call.name in _ALIKE_BY_NAME or (product and sum(map(_varies, call.operands())) < 2):
            continue
        for value in call.operands():
            labels = flow.known(value) if value.floating else None
            for number in () if labels is None else _classes(table, labels):
                (multiplied if product else bent).setdefault(number, str(call))
    return bent, multiplied


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

    def head(self, roles: str, labels: Tensor, taken: set[int]) -> list[Head]:
        """The head whose queries or values have these labels; nothing where it has been found before.

        Args:
            roles: "qk" or "vo".
            labels: One per channel.
            taken: Classes of the heads so far, which those of this one join.

        Raises:
            _UnmixedError: When no channel may be mixed, with the reason.
        """
        classes = self._table[labels.long()].tolist()
        partners = [self._inverse(label) if roles == "qk" else -1 for label in labels.tolist()]
        new = {*classes, *partners} - {-1}
        if new and new <= taken:
            return []
        if new & taken:
            raise _UnmixedError("other heads have some of their channels")
        counts = Counter(classes)
        why = [
            self._reason(number, other, counts[number], roles)
            for number, other in zip(classes, partners, strict=True)
        ]
        if all(why):
            fixed = self._flow.classes.reasons(int(labels[0])) if float(labels[0]) >= 0 else ()
            raise _UnmixedError(next(iter((*fixed, *why))))
        channels = tuple(-1 if reason else number for number, reason in zip(classes, why, strict=True))
        parts = list(self._parts(channels, *roles))
        if roles == "qk":
            inverse = tuple(-1 if reason else number for number, reason in zip(partners, why, strict=True))
            parts += self._parts(inverse, "k", "q")
        parts.sort(key=lambda part: part.role != roles[0])
        if {part.role for part in parts} != set(roles):
            raise _UnmixedError("no two layers make up for each other")
        taken |= new
        return [Head(channels, tuple(parts))]

    def _inverse(self, label: float) -> int:
        """The class with the inverse factors of a label's; −1 without one."""
        return int(self._table[self._flow.classes.inverse(int(label))]) if label >= 0 else -1

    def _reason(self, number: int, other: int, count: int, roles: str) -> str | None:
        """Why a channel may not be mixed with others; None where it may."""
        if number < 0 or (roles == "qk" and other < 0):
            return "they keep their scale"
        for each in {number, other} - {-1}:
            if each in self._bent:
                return f"{self._bent[each]} does not treat their channels alike"
            if count == 1 and each in self._multiplied:
                return f"{self._multiplied[each]} multiplies each channel by a number of its own"
        return "the channels of a head share one factor" if count > 2 else None

    def _parts(self, classes: tuple[int, ...], role: str, other: str) -> Iterator[Part]:
        """Where channels of some classes meet parameters.

        Args:
            classes: The class of each channel; −1 for those that are left out.
            role: The role of what is multiplied along with them.
            other: The role of what is divided.
        """
        for number, up in dict.fromkeys(met for one in classes for met in self._met.get(one, ())):
            use = self._uses[number]
            labels, part = (use.up, use.up_part) if up else (use.down, use.down_part)
            if part not in _PARTS or use.power != 1:
                raise _UnmixedError(
                    f"{use.layer} has a number of its own for each channel ({part}), which no matrix passes"
                )
            assert labels is not None
            whole = ParameterView(use.name, self._flow.trace.shapes[use.name], use.index).entries().long()
            entries = _entries(use, whole, labels, classes)
            yield Part(use.name, use.layer, use.layer, role if up else other, entries)


def _entries(use: Use, index: Tensor, labels: Tensor, classes: tuple[int, ...]) -> Tensor:
    """(d, r) places in the flattened parameter: for each mixed channel the numbers that belong to it.

    A parameter may have several channels of one class, such as the rows of grouped queries; the first row of
    each class then belongs to the first query head, the second to the second, and so on.
    """
    moved = [number for number in classes if number >= 0]
    each = Counter(moved)
    wanted = torch.isin(labels, torch.tensor(moved))
    axes = [axis for axis in range(-labels.dim(), 0) if _differs(labels, wanted, axis)]
    if len(axes) > 1:
        raise _UnmixedError(f"{use.layer} has them in groups")
    axis = axes[0] if axes else -1
    along = labels.movedim(axis, 0).reshape(labels.shape[axis], -1)[:, 0] if labels.dim() else labels
    line = along.expand(index.shape[axis])
    places = {number: (line == number).nonzero().flatten() for number in each}
    copies = {len(places[number]) / count for number, count in each.items()}
    if len(copies) > 1 or not copies.pop().is_integer():
        raise _UnmixedError(f"the channels of a head are no part of the {len(line)} of {use.layer} that repeats")
    laid = index.movedim(axis, 0).reshape(len(line), -1)
    seen: Counter[int] = Counter()
    rows = []
    for number in moved:
        copied = places[number].reshape(-1, each[number])[:, seen[number]]
        seen[number] += 1
        rows.append(laid[copied].flatten())
    return torch.stack(rows)


def _differs(labels: Tensor, wanted: Tensor, axis: int) -> bool:
    """Whether the classes of a head, or whether there are any, differ along an axis."""
    kept = torch.where(wanted, labels, -1)
    return bool((kept != kept.narrow(axis, 0, 1)).any())
