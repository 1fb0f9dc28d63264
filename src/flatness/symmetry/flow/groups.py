"""Channels that scale together: what may be rescaled in a network, and why the rest may not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flatness.problem import batches
from flatness.problem.guard import Guard
from flatness.problem.model import check_model, unwrap
from flatness.symmetry.flow.channels import Action, Group, Slot, counted, layer_of
from flatness.symmetry.flow.flow import Flow
from flatness.symmetry.flow.rules import RULES
from flatness.symmetry.flow.uses import NormCorrection
from flatness.symmetry.trace.forward_pass import Forward, Trace, default_forward, trace

_STATISTICS = ("running mean", "running variance")


@dataclass(frozen=True, eq=False)
class Symmetries:
    """What may be changed in a network without changing what it computes. Print it.

    Attributes:
        model: Name of the model's class.
        groups: Groups of channels that may be rescaled, in network order.
        fixed: Groups that may not, with the reasons.
        held: Parameters that no channel can be told apart in, with the reasons.
        actions: What happens to each parameter, for `flatness.rescale`.
        corrections: What batch norms need on top.
        classes: Number of classes: every channel of every group is one.
        trace: The recorded forward pass behind it.
        output: The class of the output, where one factor may scale all of it; else −1.
        inverse: For every class the one whose factor is its inverse (keys for queries); −1 without one.
        companies: Classes side by side in values, and numbers of the places that they share, such as heads.
    """

    model: str
    groups: tuple[Group, ...]
    fixed: tuple[Group, ...]
    held: dict[str, str]
    actions: tuple[Action, ...]
    corrections: tuple[tuple[NormCorrection, Tensor], ...]
    classes: int
    trace: Trace
    output: int = -1
    inverse: tuple[int, ...] = ()
    companies: tuple[tuple[Tensor, Tensor], ...] = ()

    @cached_property
    def layers(self) -> dict[str, Action]:
        """Everything that produces channels, by the name of its layer, in network order.

        Further parts of a parameter that is used in parts are called ``name[1]``, ``name[2]``, …
        """
        found: dict[str, Action] = {}
        for action in self.actions:
            if action.rows is None or action.use.up_part in (*_STATISTICS, "bias", "shift"):
                continue
            parts = sum(other.use.name == action.use.name for other in found.values())
            if not parts or action.layer not in found:
                found[action.layer] = action
            elif action.use.index is not None:
                found[f"{action.layer}[{parts}]"] = action
        return found

    @cached_property
    def permutations(self) -> Symmetries:
        """The same network under the other question: which channels may change places."""
        return find_groups(Flow(self.trace, RULES, permuting=True))

    @property
    def reasons(self) -> list[str]:
        """Why anything is fixed, each reason once."""
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
        channels = counted(sum(group.channels for group in self.groups), "channel")
        free = f"may be rescaled: {channels} in {counted(len(self.groups), 'group')}"
        fixed = [str(group) for group in self.fixed if group.producers]
        fixed += [f"{name}; {reason}" for name, reason in self.held.items()]
        lines = [self.model, *_branch(free, [str(group) for group in self.groups], last=not fixed)]
        return "\n".join([*lines, *_branch("fixed", fixed, last=True)] if fixed else lines)

    __repr__ = __str__


def symmetries(model: nn.Module, example: Any, *, forward: Forward | None = None) -> Symmetries:
    """What may be rescaled in a network, and why the rest may not.

    One forward pass of the example is recorded, whatever the model's code looks like, and factors are
    followed through it: positively homogeneous operators let them pass, sums and concatenations tie channels
    together, everything else ends the chain. The model is run in evaluation mode and left as it was.

    Args:
        model: The network.
        example: Inputs for it: a tensor, a tuple of arguments, or a dict of keyword arguments; one sample is
            enough.
        forward: ``forward(model, example) -> output`` for models that put out more than one tensor.

    Returns:
        A `Symmetries`: print it, or look at its ``groups`` and ``fixed``.

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
    return find_groups(Flow(recorded, RULES))


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


def find_groups(flow: Flow) -> Symmetries:
    """Number the free classes of a followed pass and sort its channels into groups."""
    table, roots = _numbered_classes(flow)
    groups = _families(flow)
    return Symmetries(
        model=flow.trace.model,
        groups=tuple(group for group in groups if not group.reasons),
        fixed=tuple(group for group in groups if group.reasons),
        held={use.name: use.held for use in flow.uses if use.held is not None},
        actions=tuple(Action.of(use, table) for use in flow.uses),
        corrections=tuple((correction, table[correction.labels.long()]) for correction in flow.corrections),
        classes=len(roots),
        trace=flow.trace,
        output=int(table[flow.output.flatten()[:1].long()]) if flow.output.numel() else -1,
        inverse=tuple(_inverse(flow, root, table) for root in roots),
        companies=tuple((table[labels.long()], places) for labels, places in flow.companies),
    )


def _inverse(flow: Flow, root: int, table: Tensor) -> int:
    """The number of the class with inverse factors; −1 without one."""
    partner = flow.classes.inverse(root)
    return -1 if partner is None else int(table[partner])


def _numbered_classes(flow: Flow) -> tuple[Tensor, list[int]]:
    """The number of every label's class, and the roots of the classes by number.

    Fixed classes, those that meet no parameter and the last entry, for the label −1 of a zero, have −1.
    """
    free = torch.cat([flow.classes.root_table(), torch.tensor([-1])])
    used = [labels.flatten() for use in flow.uses for labels in (use.rows, use.columns) if labels is not None]
    roots = free[torch.cat(used).long()].unique() if used else torch.empty(0, dtype=torch.int64)
    roots = roots[roots >= 0]
    number = torch.full((len(free),), -1, dtype=torch.int64)
    number[roots] = torch.arange(len(roots))
    return torch.where(free >= 0, number[free], -1), roots.tolist()


def _families(flow: Flow) -> tuple[Group, ...]:
    """Classes that meet the same parameters in the same way, side by side."""
    touched = _touches(flow)
    for root in sorted(touched):
        # Classes with inverse factors are one group: what multiplies the one divides the other.
        partner = flow.classes.inverse(root)
        if partner in touched and root in touched and partner > root and not flow.classes.reasons(root):
            touched[root] += [replace(touch, producing=not touch.up) for touch in touched.pop(partner)]
    families: dict[Any, list[int]] = {}
    for root, slots in sorted(touched.items()):
        met = tuple((touch.number, touch.producing, len(touch.units)) for touch in slots)
        families.setdefault((met, flow.classes.reasons(root)), []).append(root)
    return tuple(_group(flow, members, [touched[root] for root in members]) for members in families.values())


def _touches(flow: Flow) -> dict[int, list[_Touch]]:
    """Where every class meets parameters."""
    touched: dict[tuple[int, int, bool], list[int]] = {}
    for number, use in enumerate(flow.uses):
        for labels, up in ((use.rows, True), (use.columns, False)):
            roots = [] if labels is None else flow.classes.roots(labels.flatten(), free_only=False).tolist()
            for unit, root in enumerate(roots):
                touched.setdefault((root, number, up), []).append(unit)
    found: dict[int, list[_Touch]] = {}
    for (root, number, up), units in touched.items():
        found.setdefault(root, []).append(_Touch(number, up, up, units))
    found.pop(-1, None)
    return found


@dataclass(frozen=True)
class _Touch:
    """Where a class meets a use of a parameter.

    Attributes:
        number: Which use.
        up: Whether its factor multiplies rows (or columns divide by it).
        producing: Whether the group's factor multiplies there.
        units: The rows, columns or entries.
    """

    number: int
    up: bool
    producing: bool
    units: list[int]


def _group(flow: Flow, roots: list[int], touched: list[list[_Touch]]) -> Group:
    producers, consumers = [], []
    for position, touch in enumerate(touched[0]):
        use = flow.uses[touch.number]
        part = use.up_part if touch.up else use.down_part
        slot = Slot(use.name, layer_of(use), part, torch.tensor([slots[position].units for slots in touched]))
        (producers if touch.producing and part not in _STATISTICS else consumers).append(slot)
    return Group(len(roots), tuple(producers), tuple(consumers), flow.classes.reasons(roots[0]))
