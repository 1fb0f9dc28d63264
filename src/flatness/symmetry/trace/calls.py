"""Calls into torch as they are written down: what was called, on which values, and what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# How Python asks a tensor for a number; `t.float()` and `t.int()` are other operators.
_NUMBERS = frozenset("__float__ __int__ __bool__ __index__ __complex__ __long__".split())  # noqa: SIM905
# Other spellings of an operator, by its name.
_SPELLINGS = {
    "add": "radd iadd",
    "sub": "isub subtract",
    "mul": "rmul imul multiply",
    "div": "truediv itruediv true_divide divide",
    "matmul": "imatmul",
    "neg": "negative",
    "abs": "absolute",
    "atan": "arctan",
    "cat": "concat concatenate",
    "transpose": "swapaxes swapdims",
    "movedim": "moveaxis",
    "gt": "greater",
    "lt": "less",
    "ge": "greater_equal",
    "le": "less_equal",
    "clamp": "clip",
    "dropout": "native_dropout",
    "sigmoid": "special_expit",
}
_SYNONYMS = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the forward pass. Recorded arguments and results have it in the tensor's place.

    Attributes:
        kind: "input", "parameter", "constant" (buffers too) or "computed" from the others.
        shape: Its shape.
        dtype: Its dtype.
        name: Name of the parameter or buffer; empty for others.
        tensor: Its entries, for constants and for whatever is not floating-point.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""
    tensor: Tensor | None = None

    @property
    def floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype.is_floating_point


class UnknownFormError(Exception):
    """A call with arguments that the operator's row in the table does not describe."""


@dataclass(frozen=True)
class Call:
    """One call into torch.

    Attributes:
        name: The operator, however it was spelled: "add" for ``a + b``, ``a.add_(b)`` and ``torch.add(a,
            b)``.
        function: What was called.
        args: Its arguments, with a `Value` for every tensor.
        kwargs: Its keyword arguments.
        outputs: All tensors it returned or wrote into.
        module: Name of the innermost module it ran in.
        in_place: The value it overwrote, if any.
        enclosed: Whether it belongs to a module that was recorded as one operator.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Value]
    module: str
    in_place: Value | None = None
    enclosed: bool = False

    def __str__(self) -> str:
        """The operator and where it is."""
        return f"{self.name} in {self.module}" if self.module else self.name

    def bound(self, names: str) -> dict[str, Any]:
        """The arguments by name; optional ones that were left out are missing.

        Args:
            names: Names of all arguments in order, required ones first, then "|" and those that may be left
                out.

        Raises:
            UnknownFormError: When the call has other arguments: what they do is not known.
        """
        required, _, optional = (part.split() for part in names.partition("|"))
        given = dict(zip([*required, *optional], self.args, strict=False)) | self.kwargs
        known = set(required) <= set(given) <= {*required, *optional}
        if not known or len(given) != len(self.args) + len(self.kwargs):
            raise UnknownFormError
        return given

    def first(self) -> Value:
        """The first argument, which is a tensor.

        Raises:
            UnknownFormError: When it is none.
        """
        first = self.args[0] if self.args else self.kwargs.get("input")
        if not isinstance(first, Value):
            raise UnknownFormError
        return first

    def operand(self) -> Value:
        """The only tensor among an operator's arguments.

        Raises:
            UnknownFormError: When there are more tensors, or the first argument is none.
        """
        first = self.first()
        if self.operands() != [first]:
            raise UnknownFormError
        return first

    def operands(self) -> list[Value]:
        """All tensors among the arguments."""
        return values_in((self.args, self.kwargs))


def canonical_name(function: Any) -> str:
    """One name for all spellings of an operator.

    >>> [
    ...     canonical_name(f)
    ...     for f in (torch.add, Tensor.add_, Tensor.__iadd__, Tensor.__radd__, Tensor.T.__get__)
    ... ]
    ['add', 'add', 'add', 'add', 'T']
    >>> [
    ...     canonical_name(f)
    ...     for f in (Tensor.float, Tensor.__float__, Tensor.data.__get__, Tensor.data.__set__)
    ... ]
    ['float', 'float()', 'data', 'set data']
    """
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(function.__self__, "__name__", name)
        return attribute if name == "__get__" else f"{name.strip('_')} {attribute}"
    if name in _NUMBERS:
        return f"{name.strip('_')}()"
    name = name.strip("_")
    return _SYNONYMS.get(name, name)


def values_in(tree: Any) -> list[Value]:
    """All values in nested arguments, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Value)]
