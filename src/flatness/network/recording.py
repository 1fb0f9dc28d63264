"""What flows through a network's layers in one forward pass: inputs, and the places where signals come back.

Recorded are *gradient edges*, not output tensors. An edge is fixed at the moment the layer returns, so an
in-place activation that overwrites the layer's output afterwards does not change what its derivative means.
No copy is needed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flatness.errors import LayerError


@dataclass(slots=True)
class Record:
    """One call of one module: its input x, and the gradient edges of x as it alone sees it and of z.

    `moves` says whether x depends on parameters of the network or on an earlier call; `counts`, once the
    graph is read, whether derivatives of the output come back to it.
    """

    x: Tensor
    x_version: int
    moves: bool
    x_edge: GradientEdge | None
    z_edge: GradientEdge | None
    z_shape: torch.Size
    counts: bool = False


class Recording(ExitStack):
    """Hooks on modules that record every call; a context manager that leaves no hook behind.

    Args:
        modules: Modules by name.
        edges: Whether derivatives will be asked for. Without, the pass may run under `torch.no_grad`.
        copy_inputs: Record copies of the inputs, for networks that overwrite them in place later on.
    """

    def __init__(
        self, modules: dict[str, nn.Module], *, edges: bool = True, copy_inputs: bool = False
    ) -> None:
        super().__init__()
        self.calls: dict[str, list[Record]] = {}
        self._modules, self._edges, self._copy_inputs = modules, edges, copy_inputs
        self._entered: dict[str, tuple[Tensor, bool]] = {}

    def __enter__(self) -> Self:
        """Install the hooks, which go in the end, with what was recorded."""
        self.callback(self.clear)
        for name, module in self._modules.items():
            before, after = partial(self._before, name), partial(self._after, name)
            self.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            self.enter_context(module.register_forward_hook(after))
        return self

    def clear(self) -> None:
        """Forget what was recorded."""
        self.calls.clear()
        self._entered.clear()

    def one(self, name: str) -> Record:
        """The only call of a module."""
        calls = self.calls.get(name, [])
        if len(calls) == 1:
            return calls[0]
        if calls:
            reason = (
                "The first samples called it once. Look for a path that depends on the data, or for "
                "something else that calls the layer again, such as a hook; or pass layers= without it."
            )
        else:
            reason = (
                "A network whose path depends on the data cannot be measured layer by layer: pass layers= "
                "without it."
            )
        raise LayerError(
            f"Expected {name!r} to be called once in every forward pass but it was called {len(calls)} times "
            f"on this batch. {reason}"
        )

    def overwritten(self) -> list[str]:
        """Names of modules whose recorded input was changed in place after they had used it."""
        return [name for name, calls in self.calls.items() if any(c.x._version != c.x_version for c in calls)]

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, rebuild = _input_of(name, args, kwargs)
        if self._copy_inputs:
            x = x.clone()
        moves = x.requires_grad
        if self._edges and x.is_floating_point():
            # A view of its own: the derivative at this edge is what flows through this module alone.
            x = x.view_as(x) if moves else x.detach().requires_grad_()
        self._entered[name] = x, moves
        return rebuild(x)

    def _after(self, name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        x, moves = self._entered.pop(name)
        replaced = self._edges and output._is_view()
        if replaced:
            # In-place operations on a view rewire its base's graph and would bypass the edge.
            output = output.clone()
        elif self._edges and torch.is_grad_enabled() and not output.requires_grad:
            # An embedding whose table is frozen: nothing before it has a derivative.
            output, replaced = output.detach().requires_grad_(), True
        # Reentrant checkpointing runs modules without a graph.
        edges = self._edges and torch.is_grad_enabled()
        x_edge, z_edge = (
            get_gradient_edge(value) if edges and value.requires_grad else None for value in (x, output)
        )
        record = Record(x.detach(), x._version, moves, x_edge, z_edge, output.shape)
        self.calls.setdefault(name, []).append(record)
        return output if replaced else None


def _input_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    """The tensor a module multiplies, and how to put another one in its place."""
    if args and isinstance(args[0], Tensor):
        return args[0], lambda x: ((x, *args[1:]), kwargs)
    if isinstance(kwargs.get("input"), Tensor):
        return kwargs["input"], lambda x: (args, {**kwargs, "input": x})
    raise LayerError(
        f"Expected {name!r} to be called with a tensor as its first argument but got {type(args[:1])}."
    )
