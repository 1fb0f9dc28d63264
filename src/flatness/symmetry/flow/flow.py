"""How factors flow through a recorded forward pass: labels on every value, and what parameters do about them.

The flow is followed under one of two questions. *Scaling*: which entries may be multiplied by a positive
factor? Only positively homogeneous operators let one pass. *Permuting*: which entries may change places?
Every operator that treats entries alike lets them pass, also tanh or a batch norm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flatness.network.operators import OPERATORS, Operator
from flatness.symmetry.flow.labels import ANY, Classes, blank, compact, distinct
from flatness.symmetry.flow.uses import NormCorrection, ParameterView, Use, entries_used
from flatness.symmetry.trace.calls import Call, UnknownFormError, Value
from flatness.symmetry.trace.forward_pass import Trace, way_through

Rule = Callable[["Flow", Call], Any]
"""Follows one call: gives the labels of what it returned (or moved parameters), or None to end the chain."""

# Rules of operators whose whole numbers, or truth values, stay as they are when all their operands share one
# factor, and of those that take from a tensor only what it looks like.
_UNMOVED, _CREATION = ("compare", "sign"), "creation"


class Flow:
    """Labels of every value and uses of every parameter, for one recorded forward pass.

    Args:
        trace: The recorded forward pass.
        rules: What operators do to labels, by the words of their rows.
        permuting: Whether entries are to change places instead of being scaled.
        free_output: Whether the output may scale, all of it by one factor.
    """

    def __init__(self, trace: Trace, rules: Mapping[str, Rule], permuting: bool, free_output: bool) -> None:
        self.trace = trace
        self.permuting = permuting
        self.classes = Classes()
        self.uses: list[Use] = []
        self.corrections: list[NormCorrection] = []
        self.companies: list[tuple[Tensor, Tensor]] = []
        self._entries: dict[Value, Tensor | ParameterView] = {}
        # Labels of what whole numbers and truth values were decided by.
        self._deciders: dict[Value, frozenset[int]] = {}
        for call in trace.calls:
            self._follow(call, rules)
        self.output = self.labels(trace.output)
        if free_output:
            self.classes.unite_along(self.output, range(self.output.dim()))
        else:
            self.classes.pin(self.output, "the network's output")
        self._check_uses()

    def entry(self, operand: Any) -> Tensor | ParameterView:
        """Labels of an operand, or the parameter it is; numbers and constants get labels too."""
        if not isinstance(operand, Value):
            return self._constant(torch.as_tensor(operand))
        if operand not in self._entries:
            self._entries[operand] = self._first_entry(operand)
        return self._entries[operand]

    def known(self, value: Value) -> Tensor | None:
        """Labels that a value has got so far; None for parameters and what no call has used."""
        entry = self._entries.get(value)
        return entry if isinstance(entry, Tensor) else None

    def parameter(self, operand: Any) -> ParameterView:
        """The parameter that an operand is.

        Raises:
            UnknownFormError: When it is none.
        """
        entry = self.entry(operand)
        if isinstance(entry, ParameterView):
            return entry
        raise UnknownFormError

    def labels(self, operand: Any) -> Tensor:
        """Labels of an operand; a parameter among values is a producer whose entries can all scale."""
        entry = self.entry(operand)
        if isinstance(entry, Tensor):
            return entry
        size = self.size(entry)
        if self.permuting and size == 1:
            self.uses.append(Use(entry.name, entry.index))
            return blank(entry.shape)
        fresh = self.classes.fresh(size)
        labels = fresh[entry.entries().long()]
        self.uses.append(Use(entry.name, entry.index, up=labels, rows=fresh))
        return labels

    def size(self, view: ParameterView) -> int:
        """How many entries the parameter has, in view or not."""
        return math.prod(self.trace.shapes[view.name])

    def shape(self, call: Call) -> tuple[int, ...]:
        """Shape of the first tensor that a call returned."""
        return call.outputs[0].shape

    def per_channel(self, labels: Tensor, axis: int) -> Tensor:
        """One label per index along an axis, all other dimensions put into its class."""
        axis %= labels.dim()
        return self.classes.unite_along(labels, [dim for dim in range(labels.dim()) if dim != axis]).flatten()

    def settled(self, labels: Tensor) -> Tensor:
        """Labels of channels that meet parameters of their own: constants among them stay in place."""
        return torch.where(labels == ANY, self._fixed_constant(labels.shape), labels)

    def join(self, operand: Any, labels: Tensor, part: str) -> None:
        """Let a bias, scale or shift, if there is one, go with values that have these labels."""
        entry = None if operand is None else self.entry(operand)
        if isinstance(entry, ParameterView) and entry.shape[-labels.dim() :] == labels.shape:
            self.uses.append(Use(entry.name, entry.index, up=labels, rows=labels.flatten(), up_part=part))
        elif operand is not None:
            self.classes.unite(labels, self.labels(operand))

    def fixed_output(self, call: Call, reason: str | None = None) -> list[Tensor]:
        """Fixed labels for everything a call returned."""
        return [self.classes.fixed(value.shape, reason or f"fed by {call}") for value in call.outputs]

    def keep_company(self, labels: Tensor, dims: Sequence[int], *, alone: bool = False) -> None:
        """Note that channels side by side along some dimensions change places only with each other.

        Args:
            labels: Their labels.
            dims: The dimensions.
            alone: Whether channels that are alike along the dimensions, and so have no company, may change
                places with those elsewhere.
        """
        (small,) = compact(labels)
        if alone and all(self.same_along(small, dim) for dim in dims):
            return
        shape = list(small.shape)
        for dim in dims:
            shape[dim] = 1
        self.companies.append((small, torch.arange(math.prod(shape)).reshape(shape).expand(small.shape)))

    def same_along(self, labels: Tensor, dim: int) -> bool:
        """Whether all entries along a dimension are in one class."""
        (small,) = compact(labels)
        roots = self.classes.roots(small, free_only=False)
        return roots.numel() == 0 or bool((roots == roots.narrow(dim, 0, 1)).all())

    def decided(self, value: Value, reason: str) -> None:
        """Fix what whole numbers were decided by."""
        deciders = torch.tensor(sorted(self._deciders.get(value, ())), dtype=torch.float64)
        self.classes.pin(deciders, reason)

    def stop(self, call: Call, reason: str) -> list[Tensor]:
        """End all chains that run into a call: its operands and results keep their scale."""
        for value in dict.fromkeys(call.operands()):
            if is_constant(value):
                continue
            self.decided(value, reason)
            entry = self.entry(value)
            if isinstance(entry, Tensor):
                self.classes.pin(entry, reason)
            else:
                self.uses.append(Use(entry.name, entry.index, held=reason))
        return self.fixed_output(call)

    def _first_entry(self, value: Value) -> Tensor | ParameterView:
        if value.kind == "parameter":
            return ParameterView(value.name, value.shape)
        if value.kind == "constant" and value.tensor is not None:
            return self._constant(value.tensor)
        reason = "the network's input" if value.kind == "input" else "whole numbers"
        return self.classes.fixed(value.shape, reason)

    def _constant(self, tensor: Tensor) -> Tensor:
        """Zeros fit every factor, other constants fix what they join; permuted, equal entries fit all."""
        if self.permuting:
            free = torch.full_like(tensor, bool((tensor == tensor.flatten()[:1]).all()), dtype=torch.bool)
        else:
            free = (tensor == 0) | tensor.isinf()
        if bool(free.all()):
            return blank(tensor.shape)
        fixed = self._fixed_constant(tensor.shape)
        return torch.where(free, ANY, fixed) if bool(free.any()) else fixed

    def _fixed_constant(self, shape: Sequence[int]) -> Tensor:
        return self.classes.fixed(shape, "a constant joins it")

    def _follow(self, call: Call, rules: Mapping[str, Rule]) -> None:
        self._note_deciders(call)
        word = OPERATORS.get(call.name, Operator()).flow
        reason = self._ending(call, word)
        if reason is None and not self._concerns(call):
            return  # whole numbers out of whole numbers
        results = self._ruled(call, rules.get(word or "")) if reason is None else None
        if results is None or len(results) != len(call.outputs):
            results = self.stop(call, reason or _unknown(call))
        for value, result in zip(call.outputs, results, strict=True):
            self._store(call, value, result)

    def _ruled(self, call: Call, rule: Rule | None) -> list[Any] | None:
        """What a rule says of each result; None where it does not know this form of the call."""
        try:
            results = None if rule is None else rule(self, call)
        except UnknownFormError:
            return None
        return results if results is None or isinstance(results, list) else [results]

    def _concerns(self, call: Call) -> bool:
        """Whether anything that a call takes or puts out can scale or move."""
        labelled = any(self._labelled(value) for value in call.operands())
        return labelled or any(value.floating for value in call.outputs)

    def _labelled(self, value: Value) -> bool:
        """Whether an operand can scale or move: values, parameters, and what was decided by values."""
        return not is_constant(value) and (value.floating or (self.permuting and value in self._entries))

    def _ending(self, call: Call, word: str | None) -> str | None:
        """Why a call ends all chains whatever its rule says; None where it does not."""
        if not call.outputs:
            return f"Python code reads its values ({call})"
        operands = [value for value in call.operands() if self._labelled(value) and value.floating]
        if any(0 in value.shape for value in operands):
            return f"the example has no entries for {call}"
        return self._loss(call, operands, word) if operands and word not in (None, _CREATION) else None

    def _loss(self, call: Call, operands: list[Value], word: str | None) -> str | None:
        """What a call takes away from floating-point operands, if anything."""
        counted = [value for value in call.outputs if not value.floating]
        if word not in _UNMOVED and any(value in self.trace.used for value in counted):
            return f"{call} turns it into whole numbers"
        if not self.permuting and min(_bits(call.outputs), default=64) < max(_bits(operands)):
            return f"{call} rounds it to fewer digits"
        return None

    def _note_deciders(self, call: Call) -> None:
        """Remember what the whole numbers that a call puts out were decided by."""
        decided = [value for value in call.outputs if not value.floating]
        deciders: set[int] = set()
        for value in call.operands() if decided else ():
            deciders |= self._deciders.get(value, frozenset())
            entry = self._entries.get(value)
            if isinstance(entry, Tensor) and not is_constant(value):
                deciders.update(distinct(entry))
        self._deciders |= dict.fromkeys(decided, frozenset(deciders))

    def _store(self, call: Call, value: Value, result: Tensor | ParameterView) -> None:
        if not value.floating and not self.permuting:
            return
        both = result if call.in_place is None else self._written(call, self.entry(call.in_place), result)
        if both is None or tuple(both.shape) != value.shape:
            both = self.stop(call, _unknown(call))[0].reshape(-1)[:1].expand(value.shape)
        self._entries[value] = both

    def _written(
        self, call: Call, old: Tensor | ParameterView, new: Tensor | ParameterView
    ) -> Tensor | ParameterView | None:
        """What is true of memory that other names carry old labels of; None where nothing is known to be."""
        if old is new:
            return new
        if isinstance(old, ParameterView) or isinstance(new, ParameterView):
            return None
        if new.shape == old.shape:
            return self.classes.unite(new, old)
        self.classes.pin(old, _unknown(call))
        self.classes.pin(new, _unknown(call))
        return new

    def _check_uses(self) -> None:
        """Pin what belongs to parameters that are held, used more than once, or used in part.

        Where other data may take another way through the network, nothing is known to be free.
        """
        by_name: dict[str, list[Use]] = {}
        for use in self.uses:
            by_name.setdefault(use.name, []).append(use)
        operands = [value for call in self.trace.calls for value in call.operands()]
        read = Counter(value.name for value in operands if is_constant(value))
        for name, uses in by_name.items():
            reason = self._held(name, uses, read[name])
            for use in uses:
                self.classes.pin(use.up, reason)
                self.classes.pin(use.down, reason)
        other_way = way_through(self.trace)
        for use in self.uses:
            for labels in (use.up, use.down, use.rows, use.columns):
                self.classes.pin(labels, other_way)

    def _held(self, name: str, uses: list[Use], read: int) -> str | None:
        """Why a parameter, or a running statistic that so many calls read, may not change; None: it may."""
        if read > len(uses):  # a running statistic that not only its norm reads
            return f"{name} is used elsewhere too"
        total = math.prod(self.trace.shapes[name])
        different, taken = entries_used(uses, total)
        if taken > different:
            return f"{name} is used {len(uses)} times"
        held = next((use.held for use in uses if use.held is not None), None)
        return f"the example uses only a part of {name}" if held is None and different < total else held


def is_constant(operand: Any) -> bool:
    """Whether an operand is a number or a constant tensor."""
    return not isinstance(operand, Value) or operand.kind == "constant"


def _bits(values: list[Value]) -> list[int]:
    """How many bits floating-point numbers among values have."""
    return [torch.finfo(value.dtype).bits for value in values if value.floating]


def _unknown(call: Call) -> str:
    return f"{call} is not known to keep channels apart"
