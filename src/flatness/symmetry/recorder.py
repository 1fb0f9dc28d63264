"""The recorder behind `flatness.symmetry.tracing`: intercepts every call into torch while a network runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

# Questions about a tensor that its values do not enter.
_QUERIES = frozenset(
    """
    size dim ndimension numel nelement stride len element_size data_ptr get_device storage_offset storage
    untyped_storage is_contiguous is_floating_point is_complex is_signed is_pinned is_same_size is_shared
    is_inference is_conj is_neg is_set_to requires_grad requires_grad_ register_hook retain_grad hash repr
    format str dir has_names is_tensor is_storage
    """.split()  # noqa: SIM905
)
_SYNONYMS = {
    **{
        "radd": "add",
        "iadd": "add",
        "isub": "sub",
        "subtract": "sub",
        "rmul": "mul",
        "imul": "mul",
        "multiply": "mul",
    },
    **{"truediv": "div", "itruediv": "div", "true_divide": "div", "divide": "div", "imatmul": "matmul"},
    **{
        "negative": "neg",
        "absolute": "abs",
        "arctan": "atan",
        "concat": "cat",
        "concatenate": "cat",
        "swapaxes": "transpose",
    },
    **{
        "swapdims": "transpose",
        "moveaxis": "movedim",
        "greater": "gt",
        "less": "lt",
        "greater_equal": "ge",
        "less_equal": "le",
    },
    **{"clip": "clamp", "native_dropout": "dropout", "special_expit": "sigmoid"},
}


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor inside recorded arguments: the number of a `Value`."""

    index: int


@dataclass(frozen=True)
class Value:
    """A tensor of the forward pass.

    Attributes:
        kind: "input", "parameter", "constant" (buffers too) or "computed" from the others.
        shape: Its shape.
        name: Name of the parameter or buffer.
        tensor: Its entries, for constants and for whatever is not floating-point.
    """

    kind: str
    shape: tuple[int, ...]
    name: str | None = None
    tensor: Tensor | None = None

    @property
    def floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.tensor is None or self.tensor.is_floating_point()


@dataclass(frozen=True)
class Call:
    """One call into torch.

    Attributes:
        name: The operator, however it was spelled: "add" for ``a + b``, ``a.add_(b)`` and ``torch.add(a,
            b)``.
        function: What was called.
        args: Its arguments, tensors replaced by `Ref`.
        kwargs: Its keyword arguments, likewise.
        output: What it returned, likewise.
        module: Name of the innermost module it ran in.
        in_place: The value it overwrote, if any.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    module: str
    in_place: Ref | None = None

    def __str__(self) -> str:
        """The operator and where it is."""
        return f"{self.name} in {self.module}" if self.module else self.name

    def bound(self, names: str) -> dict[str, Any]:
        """The arguments by name, given the names of the positional ones; those left out are missing."""
        return dict(zip(names.split(), self.args, strict=False)) | self.kwargs

    def refs(self) -> list[Ref]:
        """All tensors among the arguments."""
        return [leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, Ref)]

    def outputs(self) -> list[Ref]:
        """All tensors it returned."""
        return [leaf for leaf in tree_flatten(self.output)[0] if isinstance(leaf, Ref)]


def canonical_name(function: Any) -> str:
    """One name for all spellings of an operator.

    >>> [
    ...     canonical_name(f)
    ...     for f in (torch.add, Tensor.add_, Tensor.__iadd__, Tensor.__radd__, Tensor.T.__get__)
    ... ]
    ['add', 'add', 'add', 'add', 'T']
    """
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(function.__self__, "__name__", name)
    name = name.strip("_")
    return _SYNONYMS.get(name, name)


@dataclass
class Location:
    """The modules that are running, innermost last."""

    names: dict[nn.Module, str] = field(default_factory=dict)
    stack: list[nn.Module] = field(default_factory=list)

    @property
    def module(self) -> str:
        """Name of the innermost module that has one."""
        return next((self.names[module] for module in reversed(self.stack) if self.names.get(module)), "")

    def describe(self, model: nn.Module) -> str:
        """The innermost module in words."""
        inner = self.stack[-1] if self.stack else model
        name = self.names.get(inner)
        return f"module {name!r} ({type(inner).__name__})" if name else type(inner).__name__


@contextmanager
def located(model: nn.Module, recorder: Recorder | None = None) -> Iterator[Location]:
    """Follow which module runs, by hooks that are not put on the model and are removed afterwards."""
    location = Location({module: name for name, module in model.named_modules()})

    def enter(module: nn.Module, inputs: Any) -> None:
        location.stack.append(module)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if recorder is not None:
            recorder.adopt(module, inputs, output)
        if location.stack and location.stack[-1] is module:
            location.stack.pop()

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield location
    finally:
        for handle in handles:
            handle.remove()


class Recorder(TorchFunctionMode):
    """Writes down every call into torch that an input or a parameter of the network takes part in."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.location = Location()
        # Tensors are kept, so that no two of them can have the same id or the same memory.
        self._model = model
        self._kept: list[Tensor] = []
        self._known: dict[int, Ref] = {}
        self._memory: dict[int, list[tuple[Ref, int]]] = {}
        for name, parameter in model.named_parameters():
            self._add(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self._add(buffer, "constant", name)
        for leaf in tree_flatten(example)[0]:
            if isinstance(leaf, Tensor):
                self._add(leaf, "input")

    def known(self, tensor: Tensor) -> Ref | None:
        """The reference of a tensor that took part, else None."""
        return self._known.get(id(tensor))

    def adopt(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record a module as one unknown operator when its output was not made by recorded calls."""
        if module is self._model:
            return
        with torch._C.DisableTorchFunction():
            lost = [
                tensor
                for tensor in _tensors(output)
                if self.known(tensor) is None and tensor.is_floating_point()
            ]
            followed = [tensor for tensor in _tensors(inputs) if self._follows(self.known(tensor))]
            if lost and followed:
                operands = (*followed, *module.parameters())
                self._record(
                    type(module).__name__, module, tree_map(self._reference, (operands, {})), output, None
                )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call and write it down."""
        name = canonical_name(func)
        if name in _QUERIES:
            return func(*args, **(kwargs or {}))
        arguments = tree_map(self._reference, (args, kwargs or {}))
        output = func(*args, **(kwargs or {}))
        asked = isinstance(output, (torch.Size, str, torch.dtype, torch.device))
        if not asked and (isinstance(output, Tensor) or func.__name__ != "__get__"):
            self._record(name, func, arguments, output, args[0] if name == "setitem" else None)
        return output

    def _record(self, name: str, func: Any, arguments: Any, output: Any, target: Tensor | None) -> None:
        refs = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Ref)]
        result = output if target is None else target
        if not any(self._follows(ref) for ref in refs):
            self._forget_constants(result)
            return
        overwritten = next((ref for tensor in _tensors(result) if (ref := self.known(tensor)) in refs), None)
        if overwritten is not None:
            self._forget_constants(result)
        returned = tree_map(
            lambda leaf: self._add(leaf, "computed") if isinstance(leaf, Tensor) else leaf, result
        )
        args, kwargs = arguments
        self.calls.append(Call(name, func, args, kwargs, returned, self.location.module, overwritten))

    def _reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        ref = self.known(leaf)
        if ref is not None:
            return ref
        sharers = [sharer for sharer, _ in self._memory.get(_address(leaf), [])] if _address(leaf) else []
        if any(self._follows(sharer) for sharer in sharers):
            # A tensor nobody returned, in the memory of one that was written to: a base or a view of it.
            ref = self._add(leaf, "computed")
            self.calls.append(
                Call("shared memory", torch.clone, tuple(sharers), {}, ref, self.location.module)
            )
            return ref
        return self._add(leaf, "constant")

    def _forget_constants(self, written: Any) -> None:
        """Constants in memory that may have been written to are looked at anew when they are used next."""
        addresses = {_address(tensor) for tensor in _tensors(written)} - {0}
        for ref, identity in [entry for address in addresses for entry in self._memory.get(address, [])]:
            value = self.values[ref.index]
            if value.kind == "constant" and value.name is None and self._known.get(identity) == ref:
                del self._known[identity]

    def _follows(self, ref: Ref | None) -> bool:
        return ref is not None and self.values[ref.index].kind != "constant"

    def _add(self, tensor: Tensor, kind: str, name: str | None = None) -> Ref:
        ref = Ref(len(self.values))
        entries = (
            tensor.detach().cpu().clone() if kind == "constant" or not tensor.is_floating_point() else None
        )
        self.values.append(Value(kind, tuple(tensor.shape), name, entries))
        self._kept.append(tensor)
        self._known[id(tensor)] = ref
        self._memory.setdefault(_address(tensor), []).append((ref, id(tensor)))
        return ref


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
