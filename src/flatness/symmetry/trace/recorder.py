"""The recorder behind `forward_pass`: intercepts every call into torch while a network runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from flatness.symmetry.trace.calls import Call, Value, canonical_name, values_in

# Questions about a tensor that its values do not enter.
_QUERIES = frozenset(
    """
    size dim ndimension numel nelement stride len element_size data_ptr get_device storage_offset
    is_contiguous is_floating_point is_complex is_signed is_pinned is_same_size is_shared
    is_inference is_conj is_neg is_set_to requires_grad requires_grad_ register_hook retain_grad hash repr
    format str dir has_names is_tensor is_storage
    """.split()  # noqa: SIM905
)


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
        self._recording = False
        self._model = model
        self._known: dict[int, Value] = {}
        # What lies where. The tensors are kept, so that no two can have the same id or the same memory.
        self._memory: dict[int, list[tuple[Tensor, Value]]] = {}
        self._names = {id(buffer): name for name, buffer in model.named_buffers()}
        for name, parameter in model.named_parameters():
            self._add(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self._add(buffer, "constant", name)
        for leaf in _tensors(example):
            self._add(leaf, "input")

    def known(self, tensor: Tensor) -> Value | None:
        """What stands for a tensor that took part, else None."""
        return self._known.get(id(tensor))

    def adopt(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record a module as one unknown operator when its output was not made by recorded calls."""
        if module is self._model:
            return
        with self._busy(), torch._C.DisableTorchFunction():
            lost = [tensor for tensor in _tensors(output) if self.known(tensor) is None]
            followed = [tensor for tensor in _tensors(inputs) if self._follows(self.known(tensor))]
            if lost and followed:
                self._enclose(self.location.names.get(module))
                operands = self._standing_for((*followed, *module.parameters()))
                self._record(type(module).__name__, module, (operands, {}), output, [])

    def _enclose(self, name: str | None) -> None:
        """What a module did to get at values belongs to the one operator that it is recorded as."""
        for position, call in enumerate(self.calls):
            if name and (call.module == name or call.module.startswith(f"{name}.")):
                self.calls[position] = replace(call, enclosed=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call and write it down."""
        name, kwargs = canonical_name(func), kwargs or {}
        if name in _QUERIES:
            return func(*args, **kwargs)
        if name == "iter":
            with self:
                return iter(args[0].unbind(0))
        with self._busy():
            return self._called(name, func, args, kwargs)

    def _called(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        arguments = self._standing_for((tree_map_only(slice, self._without_tensors, args), kwargs))
        before = [(tensor, _version(tensor)) for tensor in _tensors((args, kwargs))]
        # Where nothing that is followed shows in the arguments, it may still be inside, as in those of vmap.
        with self._busy(any(self._follows(value) for value in values_in(arguments))):
            output = func(*args, **kwargs)
        # Views of one memory count together: the first of them is what was written to.
        written = {
            _address(tensor): tensor for tensor, version in reversed(before) if _version(tensor) != version
        }
        asked = isinstance(output, (torch.Size, str, torch.dtype, torch.device))
        if not asked and (isinstance(output, Tensor) or func.__name__ != "__get__"):
            self._record(name, func, arguments, output, list(written.values()))
        return output

    def see(self, name: str, operands: Any, output: Any) -> None:
        """Record what an operator did outside of the calls that are written down, as one unknown operator."""
        if self._recording:
            return
        with self._busy(), torch._C.DisableTorchFunction():
            tensors = _tensors(operands)
            if any(self._sharers(tensor) for tensor in tensors):
                written = [tensor for tensor in _tensors(output) if any(tensor is one for one in tensors)]
                inner = self.location.stack[-1] if self.location.stack else None
                name = type(inner).__name__ if isinstance(inner, torch.jit.ScriptModule) else name
                self._record(name, None, (self._standing_for(tuple(tensors)), {}), output, written)

    @contextmanager
    def _busy(self, busy: bool = True) -> Iterator[None]:
        """Inside, operators belong to a call that is being written down."""
        before, self._recording = self._recording, busy
        try:
            yield
        finally:
            self._recording = before

    def _without_tensors(self, bounds: slice) -> slice:
        """A slice with tensors in it as one with numbers: Python reads them."""
        numbers = [bounds.start, bounds.stop, bounds.step]
        for place, bound in enumerate(numbers):
            if isinstance(bound, Tensor):
                self._record("index()", Tensor.__index__, ((self._value(bound),), {}), None, [])
                numbers[place] = int(bound)
        return slice(*numbers)

    def _record(
        self, name: str, func: Any, arguments: tuple[Any, Any], output: Any, written: list[Tensor]
    ) -> None:
        operands = values_in(arguments)
        overwritten = next((value for tensor in written if (value := self.known(tensor)) in operands), None)
        for tensor in written:
            self._forget_sharers(tensor)
        if not any(self._follows(value) for value in operands):
            return
        returned = _tensors(output)
        beside = [tensor for tensor in written if all(tensor is not one for one in returned)]
        outputs = [self._add(tensor, "computed") for tensor in (*returned, *beside)]
        args, kwargs = arguments
        self.calls.append(Call(name, func, args, kwargs, outputs, self.location.module, overwritten))

    def _standing_for(self, tree: Any) -> Any:
        """The same structure with a value for every tensor."""
        return tree_map_only(Tensor, self._value, tree)

    def _value(self, tensor: Tensor) -> Value:
        known = self.known(tensor)
        if known is not None:
            return known
        sharers = self._sharers(tensor)
        if not sharers:
            return self._add(tensor, "constant", self._names.get(id(tensor), ""))
        # A tensor nobody returned, in the memory of one that was written to: a base or a view of it.
        value = self._add(tensor, "computed")
        self.calls.append(Call("shared memory", torch.clone, sharers, {}, [value], self.location.module))
        return value

    def _sharers(self, tensor: Tensor) -> tuple[Value, ...]:
        """The values in a tensor's memory, if any of them is followed."""
        values = tuple(value for _, value in self._there(tensor))
        return values if any(self._follows(value) for value in values) else ()

    def _there(self, tensor: Tensor) -> list[tuple[Tensor, Value]]:
        """What lies in a tensor's memory, as far as it has one."""
        address = _address(tensor)
        return self._memory.get(address, []) if address else []

    def _forget_sharers(self, written: Tensor) -> None:
        """Whatever lies in memory that was written to is looked at anew when it is used next."""
        for tensor, value in self._there(written):
            if value.kind != "parameter" and self.known(tensor) is value:
                del self._known[id(tensor)]

    def _follows(self, value: Value | None) -> bool:
        return value is not None and value.kind != "constant"

    def _add(self, tensor: Tensor, kind: str, name: str = "") -> Value:
        constant = kind == "constant" or not tensor.is_floating_point()
        entries = tensor.detach().cpu().clone() if constant else None
        value = Value(kind, tuple(tensor.shape), tensor.dtype, name, entries)
        self.values.append(value)
        self._known[id(tensor)] = value
        self._memory.setdefault(_address(tensor), []).append((tensor, value))
        return value


class Unrecorded(TorchDispatchMode):
    """Sees every operator that runs, also where no call shows it: TorchScript, vmap, extensions."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch; True would load its compiler, which takes seconds and compiles nothing here."""
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and tell the recorder."""
        with torch._C.DisableTorchFunction():
            output = func(*args, **(kwargs or {}))
        self._recorder.see(func.name(), (args, kwargs), output)
        return output


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _version(tensor: Tensor) -> int:
    """A counter that grows when a tensor, or another view of its memory, is written to."""
    return -1 if tensor.is_inference() else tensor._version


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
