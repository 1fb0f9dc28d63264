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
from flatness.symmetry.flow.labels import ANY, Classes, compact, distinct
from flatness.symmetry.flow.uses import NormCorrection, ParameterView, Use, entries_used
from flatness.symmetry.trace.calls import Call, Ref, UnknownFormError, Value
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

    def __init__(
        self,
        trace: Trace,
        rules: Mapping[str, Rule],
        *,
        permuting: bool = False,
        free_output: bool = False,
    ) -> None:
        self.trace = trace
        self.permuting = permuting
        self.classes = Classes()
        self.uses: list[Use] = []
        self.corrections: list[NormCorrection] = []
        self.companies: list[tuple[Tensor, Tensor]] = []
        self._entries: dict[int, Tensor | ParameterView] = {}
        # Labels of what whole numbers and truth values were decided by.
        self._deciders: dict[int, frozenset[int]] = {}
        self._used = {ref.index for call in trace.calls for ref in call.refs()}
        for call in trace.calls:
            self._follow(call, rules)
        output = self.labels(trace.output)
        if free_output:
            self.classes.unite_along(output, range(output.dim()))
        else:
            self.classes.pin(output, "the network's output")
        self.output = output
        self._check_uses()
        self._check_way(way_through(trace))

    def value(self, ref: Ref) -> Value:
        """The value behind a reference."""
        return self.trace.values[ref.index]

    def entry(self, operand: Any) -> Tensor | ParameterView:
        """Labels of an operand, or the parameter it is; numbers and constants get labels too."""
        if not isinstance(operand, Ref):
            return self._constant(torch.as_tensor(operand))
        if operand.index not in self._entries:
            value = self.value(operand)
            self._entries[operand.index] = self._first_entry(value)
        return self._entries[operand.index]

    def labels(self, operand: Any) -> Tensor:
        """Labels of an operand; a parameter among values is a producer whose entries can all scale."""
        entry = self.entry(operand)
        if isinstance(entry, Tensor):
            return entry
        size = math.prod(self.trace.shapes[entry.name])
        if self.permuting and size == 1:
            self.uses.append(Use(entry.name, entry.index))
            return torch.full((), ANY, dtype=torch.float64).expand(entry.shape)
        fresh = self.classes.fresh(size)
        labels = fresh.reshape(entry.shape) if entry.index is None else fresh[entry.index.long()]
        self.uses.append(Use(entry.name, entry.index, up=labels, rows=fresh))
        return labels

    def is_constant(self, operand: Any) -> bool:
        """Whether an operand is a number or a constant tensor."""
        return not isinstance(operand, Ref) or self.value(operand).kind == "constant"

    def shape(self, call: Call, position: int = 0) -> tuple[int, ...]:
        """Shape of a tensor that a call returned."""
        return self.value(call.outputs()[position]).shape

    def per_channel(self, labels: Tensor, axis: int) -> Tensor:
        """One label per index along an axis, all other dimensions put into its class."""
        axis %= labels.dim()
        return self.classes.unite_along(labels, [dim for dim in range(labels.dim()) if dim != axis]).flatten()

    def settled(self, labels: Tensor) -> Tensor:
        """Labels of channels that meet parameters of their own: constants among them stay in place."""
        blank = labels == ANY
        return torch.where(blank, self._fixed_constant(labels.shape), labels) if bool(blank.any()) else labels

    def hold(self, entry: ParameterView, reason: str) -> None:
        """Note a use of a parameter that does not allow it to change."""
        self.uses.append(Use(entry.name, entry.index, held=reason))

    def fixed_output(self, call: Call, reason: str | None = None) -> list[Tensor]:
        """Fixed labels for everything a call returned."""
        return [
            self.classes.fixed(self.value(ref).shape, reason or f"fed by {call}") for ref in call.outputs()
        ]

    def keep_company(self, labels: Tensor, dims: Sequence[int], *, alone: bool = False) -> None:
        """Note that channels side by side along some dimensions change places only with each other.

        Args:
            labels: Their labels.
            dims: The dimensions.
            alone: Whether channels that are alike along the dimensions, and so have no company, may change
                places with those elsewhere.
        """
        (small,) = compact(labels)
        dims = [dim % small.dim() for dim in dims]
        if alone and all(self.same_along(small, dim) for dim in dims):
            return
        shape = [1 if dim in dims else size for dim, size in enumerate(small.shape)]
        self.companies.append((small, torch.arange(math.prod(shape)).reshape(shape).expand(small.shape)))

    def same_along(self, labels: Tensor, dim: int) -> bool:
        """Whether all entries along a dimension are in one class."""
        (small,) = compact(labels)
        roots = self.classes.roots(small, free_only=False)
        return roots.numel() == 0 or bool((roots == roots.narrow(dim, 0, 1)).all())

    def decided(self, ref: Ref, reason: str) -> None:
        """Fix what whole numbers were decided by."""
        for label in self._deciders.get(ref.index, ()):
            self.classes.pin(torch.tensor(float(label), dtype=torch.float64), reason)

    def stop(self, call: Call, reason: str) -> list[Tensor]:
        """End all chains that run into a call: its operands and results keep their scale."""
        for ref in dict.fromkeys(call.refs()):
            if self.is_constant(ref):
                continue
            self.decided(ref, reason)
            entry = self.entry(ref)
            if isinstance(entry, Tensor):
                self.classes.pin(entry, reason)
            else:
                self.hold(entry, reason)
        return self.fixed_output(call)

    def _first_entry(self, value: Value) -> Tensor | ParameterView:
        if value.kind == "parameter":
            assert value.name is not None
            return ParameterView(value.name, value.shape)
        if value.kind == "constant":
            assert value.tensor is not None
            return self._constant(value.tensor)
        reason = "the network's input" if value.kind == "input" else "whole numbers"
        return self.classes.fixed(value.shape, reason)

    def _constant(self, tensor: Tensor) -> Tensor:
        """Zeros fit every factor, other constants fix what they join; permuted, equal entries fit all."""
        if self.permuting:
            alike = tensor.numel() == 0 or bool((tensor == tensor.flatten()[0]).all())
            return (
                torch.full((), ANY, dtype=torch.float64).expand(tensor.shape)
                if alike
                else self._fixed_constant(tensor.shape)
            )
        neutral = (tensor == 0) | (
            tensor.isinf() if tensor.is_floating_point() else torch.zeros_like(tensor, dtype=torch.bool)
        )
        if bool(neutral.all()):
            return torch.full((), ANY, dtype=torch.float64).expand(tensor.shape)
        fixed = self._fixed_constant(tensor.shape)
        return torch.where(neutral, ANY, fixed) if bool(neutral.any()) else fixed

    def _fixed_constant(self, shape: Sequence[int]) -> Tensor:
        return self.classes.fixed(shape, "a constant joins it")

    def _follow(self, call: Call, rules: Mapping[str, Rule]) -> None:
        outputs = call.outputs()
        self._note_deciders(call, outputs)
        word = OPERATORS.get(call.name, Operator()).flow
        reason = self._ending(call, outputs, word)
        results = None
        if reason is None:
            followed = any(self._labelled(ref) for ref in call.refs())
            if not followed and not any(self.value(ref).floating for ref in outputs):
                return  # whole numbers out of whole numbers
            results = self._ruled(call, rules[word]) if word is not None else None
        if results is None or len(results) != len(outputs):
            results = self.stop(call, reason or _unknown(call))
        self._store(call, outputs, results)

    def _ruled(self, call: Call, rule: Rule) -> list[Any] | None:
        """What a rule says of each result; None where it does not know this form of the call."""
        try:
            results = rule(self, call)
        except UnknownFormError:
            return None
        if results is None:
            return None
        return list(results) if isinstance(results, (list, tuple)) else [results]

    def _labelled(self, ref: Ref) -> bool:
        """Whether an operand can scale or move: values, parameters, and what was decided by values."""
        moved = self.permuting and ref.index in self._entries
        return not self.is_constant(ref) and (self.value(ref).floating or moved)

    def _ending(self, call: Call, outputs: list[Ref], word: str | None) -> str | None:
        """Why a call ends all chains whatever its rule says; None where it does not."""
        if not outputs:
            return f"Python code reads its values ({call})"
        operands = [ref for ref in call.refs() if self._labelled(ref) and self.value(ref).floating]
        if any(0 in self.value(ref).shape for ref in operands):
            return f"the example has no entries for {call}"
        return (
            None if not operands or word in (None, _CREATION) else self._loss(call, outputs, operands, word)
        )

    def _loss(self, call: Call, outputs: list[Ref], operands: list[Ref], word: str | None) -> str | None:
        """What a call takes away from floating-point operands, if anything."""
        counted = any(not self.value(ref).floating and ref.index in self._used for ref in outputs)
        if counted and word not in _UNMOVED:
            return f"{call} turns it into whole numbers"
        if not self.permuting and min(self._bits(outputs), default=64) < max(self._bits(operands)):
            return f"{call} rounds it to fewer digits"
        return None

    def _bits(self, refs: list[Ref]) -> list[int]:
        dtypes = [self.value(ref).dtype for ref in refs]
        return [torch.finfo(dtype).bits for dtype in dtypes if dtype.is_floating_point]

    def _note_deciders(self, call: Call, outputs: list[Ref]) -> None:
        if all(self.value(ref).floating for ref in outputs):
            return
        deciders: set[int] = set()
        for ref in call.refs():
            deciders |= self._deciders.get(ref.index, frozenset())
            entry = self._entries.get(ref.index)
            if isinstance(entry, Tensor) and not self.is_constant(ref):
                deciders.update(distinct(entry))
        for ref in outputs:
            if not self.value(ref).floating:
                self._deciders[ref.index] = frozenset(deciders)

    def _store(self, call: Call, outputs: list[Ref], results: list[Any]) -> None:
        for ref, result in zip(outputs, results, strict=True):
            if self.value(ref).floating or self.permuting:
                self._store_one(call, ref, result)

    def _store_one(self, call: Call, ref: Ref, result: Tensor | ParameterView) -> None:
        if tuple(result.shape) != self.value(ref).shape:
            result = self.stop(call, _unknown(call))[0].reshape(-1)[:1].expand(self.value(ref).shape)
        if call.in_place is not None and self.entry(call.in_place) is not result:
            # Other names for the same memory still carry the old labels: both must stay true.
            old = self.entry(call.in_place)
            if isinstance(old, ParameterView) or isinstance(result, ParameterView):
                result = self.stop(call, _unknown(call))[0].reshape(-1)[:1].expand(self.value(ref).shape)
            elif result.shape != old.shape:
                self.classes.pin(old, _unknown(call))
                self.classes.pin(result, _unknown(call))
            else:
                result = self.classes.unite(result, old)
        self._entries[ref.index] = result

    def _check_uses(self) -> None:
        """Pin what belongs to parameters that are held, used more than once, or used in part."""
        by_name: dict[str, list[Use]] = {}
        for use in self.uses:
            by_name.setdefault(use.name, []).append(use)
        refs = [ref for call in self.trace.calls for ref in call.refs()]
        read = Counter(self.value(ref).name for ref in refs if self.is_constant(ref))
        for name, uses in by_name.items():
            reason = self._held(name, uses, read[name])
            for use in uses:
                self._pin(reason, use.up, use.down)

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

    def _check_way(self, reason: str | None) -> None:
        """Where other data may take another way through the network, nothing is known to be free."""
        for use in self.uses:
            self._pin(reason, use.up, use.down, use.rows, use.columns)

    def _pin(self, reason: str | None, *parts: Tensor | None) -> None:
        """Fix labels, where there is a reason to."""
        for labels in parts:
            if reason is not None and labels is not None:
                self.classes.pin(labels, reason)


def _unknown(call: Call) -> str:
    return f"{call} is not known to keep channels apart"
