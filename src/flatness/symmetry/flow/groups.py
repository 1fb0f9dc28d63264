"""Channels that scale together: what may be rescaled in a network, and why the rest may not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import listed
from flatness.problem import batches
from flatness.problem.guard import Guard
from flatness.problem.model import check_model, unwrap
from flatness.symmetry.flow.flow import Flow
from flatness.symmetry.flow.heads import Heads, find_heads
from flatness.symmetry.flow.rules import RULES
from flatness.symmetry.flow.uses import NormCorrection, Use
from flatness.symmetry.trace.forward_pass import Forward, Trace, default_forward, trace

_STATISTICS = ("running mean", "running variance")


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
        return f"{_counted(self.channels, 'channel')}: {_by_layer(self.producers)}{end}"


@dataclass(frozen=True, eq=False)
class Symmetries:
    """What may be changed in a network without changing what it computes. Print it.

    Attributes:
        model: Name of the model's class.
        groups: Groups of channels that may be rescaled, in network order.
        fixed: Groups that may not, with the reasons.
        actions: What happens to each parameter: its uses, with numbers of classes as labels.
        corrections: What batch norms need on top.
        classes: Number of classes: every channel of every group is one.
        trace: The recorded forward pass behind it.
        output: The class of the output, where one factor may scale all of it; else −1.
        inverse: For every class the one whose factor is its inverse (keys for queries); −1 without one.
        companies: Classes side by side in values, and numbers of the places that they share, such as heads.
        attention: Heads of attention whose channels may be mixed by a matrix, and why others may not.
    """

    model: str
    groups: tuple[Group, ...]
    fixed: tuple[Group, ...]
    actions: tuple[Use, ...]
    corrections: tuple[NormCorrection, ...]
    classes: int
    trace: Trace
    output: int
    inverse: tuple[int, ...]
    companies: tuple[tuple[Tensor, Tensor], ...]
    attention: Heads

    @property
    def held(self) -> dict[str, str]:
        """Parameters that no channel can be told apart in, with the reasons."""
        return {action.name: action.held for action in self.actions if action.held is not None}

    @cached_property
    def layers(self) -> dict[str, Use]:
        """Everything that produces channels, by the name of its layer, in network order.

        Further parts of a parameter that is used in parts are called ``name[1]``, ``name[2]``, …
        """
        found: dict[str, Use] = {}
        for action in self.actions:
            if action.rows is None or action.up_part in (*_STATISTICS, "bias", "shift"):
                continue
            parts = sum(other.name == action.name for other in found.values())
            if not parts or action.layer not in found:
                found[action.layer] = action
            elif action.index is not None:
                found[f"{action.layer}[{parts}]"] = action
        return found

    @cached_property
    def permutations(self) -> Symmetries:
        """The same network under the other question: which channels may change places."""
        return find_groups(self.trace, permuting=True)

    @property
    def reasons(self) -> list[str]:
        """Why something is fixed, each reason once."""
        fixed = [group for group in self.fixed if group.producers]
        return list(dict.fromkeys(reason for group in fixed for reason in group.reasons))

    def features_of(self, layer: str) -> set[int]:
        """Classes of the channels that a layer takes in, its own feature layer; empty where all are fixed."""
        return _classes_of([action.columns for action in self.actions if action.layer == layer])

    def units_of(self, layer: str) -> set[int]:
        """Classes of the channels that a layer puts out."""
        return _classes_of([action.rows for action in self.layers.values() if action.layer == layer])

    def __str__(self) -> str:
        """A tree of what may be rescaled and what may not."""
        channels = _counted(sum(group.channels for group in self.groups), "channel")
        free = f"may be rescaled: {channels} in {_counted(len(self.groups), 'group')}"
        fixed = [str(group) for group in self.fixed if group.producers]
        fixed += [f"{name}; {reason}" for name, reason in self.held.items()]
        branches = {free: [str(group) for group in self.groups]}
        if self.attention.in_words:
            branches['heads that may be mixed by matrices (kind="attention")'] = self.attention.in_words
        if fixed:
            branches["fixed"] = fixed
        *others, last = branches
        lines = [line for one in others for line in _branch(one, branches[one], last=False)]
        return "\n".join([self.model, *lines, *_branch(last, branches[last], last=True)])

    __repr__ = __str__


def symmetries(model: nn.Module, example: Any, *, forward: Forward | None = None) -> Symmetries:
    """What may be rescaled in a network, and why the rest may not.

    One forward pass of the example is recorded, whatever the model's code looks like, and factors are traced
    through it: positively homogeneous operators let them pass, sums and concatenations tie channels
    together, everything else ends the chain. The model is run in evaluation mode and then restored.

    Args:
        model: The network.
        example: Inputs for it: a tensor, a tuple of arguments, or a dict of keyword arguments; one sample is
            enough.
        forward: ``forward(model, example) -> output`` for models that put out more than one tensor.

    Returns:
        A `Symmetries`: print it, or look at its ``groups``, ``fixed`` and ``attention``.

    Raises:
        ModelError: When the model cannot run on the example, or where its computation cannot be followed.

    Example:
        >>> import torch, flatness
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> print(flatness.symmetries(model, torch.randn(1, 4)))
        Sequential
        ├─ may be rescaled: 8 channels in 1 group
        │  └─ 8 channels: 0 (rows, bias) → 2 (columns)
        └─ fixed
           └─ 3 channels: 2 (rows, bias); the network's output
    """
    model = checked(model)
    with Guard(model, 0):
        recorded = trace(model, placed(model, example), forward or default_forward)
    return find_groups(recorded)


def _counted(number: int, word: str) -> str:
    """A number and its noun.

    >>> _counted(1, "channel"), _counted(2, "channel")
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


def _branch(heading: str, leaves: list[str], *, last: bool) -> list[str]:
    """The lines of one branch of a tree."""
    ends = ["├─"] * (len(leaves) - 1) + ["└─"]
    twigs = [f"{' ' if last else '│'}  {end} {leaf}" for end, leaf in zip(ends, leaves, strict=False)]
    return [f"{'└─' if last else '├─'} {heading}", *twigs]


def _classes_of(units: list[Tensor | None]) -> set[int]:
    return {int(number) for part in units if part is not None for number in part.unique()} - {-1}


def placed(model: nn.Module, example: Any) -> Any:
    """The example on the model's device, floating-point parts in its dtype."""
    parameter = next(model.parameters())
    return batches.place(example, parameter.device, parameter.dtype)


def checked(model: nn.Module) -> nn.Module:
    """The model inside wrappers, refused with the reason where it cannot be used."""
    if isinstance(model, nn.Module):
        model, _ = unwrap(model)
    check_model(model)
    return model


def find_groups(trace: Trace, *, permuting: bool = False, free_output: bool = False) -> Symmetries:
    """Follow labels through a recorded pass, number the free classes, and sort channels into groups.

    Args:
        trace: The recorded forward pass.
        permuting: Whether channels are to change places instead of being scaled.
        free_output: Whether the output may scale, all of it by one factor.
    """
    flow = Flow(trace, RULES, permuting, free_output)
    table, roots = _numbered_classes(flow)
    groups = _families(flow)
    return Symmetries(
        model=trace.model,
        groups=tuple(group for group in groups if not group.reasons),
        fixed=tuple(group for group in groups if group.reasons),
        actions=tuple(use.numbered(table) for use in flow.uses),
        corrections=tuple(replace(one, labels=table[one.labels.long()]) for one in flow.corrections),
        classes=len(roots),
        trace=trace,
        output=int(table[flow.output.flatten()[0].long()]),
        inverse=tuple(int(table[flow.classes.inverse(root)]) for root in roots),
        companies=tuple((table[labels.long()], places) for labels, places in flow.companies),
        attention=Heads() if permuting else find_heads(flow, table),
    )


def _numbered_classes(flow: Flow) -> tuple[Tensor, list[int]]:
    """The number of every label's class, and the roots of the classes by number.

    Fixed classes, those that meet no parameter and the last entry, for the label −1 of a zero, have −1.
    """
    free = flow.classes.free_roots()
    used = [labels.flatten() for use in flow.uses for labels in (use.rows, use.columns) if labels is not None]
    roots = free[torch.cat([torch.empty(0), *used]).long()].unique()
    roots = roots[roots >= 0]
    number = torch.full((len(free),), -1, dtype=torch.int64)
    number[roots] = torch.arange(len(roots))
    return number[free], roots.tolist()  # no root is the last entry, where −1 leads to


_Touches = dict[tuple[int, bool, bool], list[int]]
"""Where a class meets parameters: rows, columns or entries, by the number of the use, whether they are rows,
and whether the group's factor multiplies there."""


def _families(flow: Flow) -> tuple[Group, ...]:
    """Classes that meet the same parameters in the same way, side by side."""
    touched = _touches(flow)
    for root in sorted(touched):
        # Classes with inverse factors are one group: what multiplies the one divides the other.
        partner = flow.classes.inverse(root)
        if partner in touched and partner > root and not flow.classes.reasons(root):
            inverse = touched.pop(partner)
            touched[root] |= {(number, up, not up): units for (number, up, _), units in inverse.items()}
    families: dict[Any, list[int]] = {}
    for root, touches in sorted(touched.items()):
        met = tuple((number, producing, len(units)) for (number, _, producing), units in touches.items())
        families.setdefault((met, flow.classes.reasons(root)), []).append(root)
    return tuple(_group(flow, members, [touched[root] for root in members]) for members in families.values())


def _touches(flow: Flow) -> dict[int, _Touches]:
    """Where every class meets parameters."""
    found: dict[int, _Touches] = {}
    for number, use in enumerate(flow.uses):
        for labels, up in ((use.rows, True), (use.columns, False)):
            roots = [] if labels is None else flow.classes.roots(labels.flatten(), free_only=False).tolist()
            for unit, root in enumerate(roots):
                found.setdefault(root, {}).setdefault((number, up, up), []).append(unit)
    found.pop(-1, None)
    return found


def _group(flow: Flow, roots: list[int], touched: list[_Touches]) -> Group:
    """The group of classes that meet parameters in the same way."""
    units = [torch.tensor(each) for each in zip(*(touches.values() for touches in touched), strict=True)]
    slots: dict[bool, list[Slot]] = {True: [], False: []}
    for (number, up, producing), each in zip(touched[0], units, strict=True):
        use = flow.uses[number]
        part = use.up_part if up else use.down_part
        slots[producing and part not in _STATISTICS].append(Slot(use.name, use.layer, part, each))
    return Group(len(roots), tuple(slots[True]), tuple(slots[False]), flow.classes.reasons(roots[0]))
