"""What layers are given and return in one forward pass of training, with the autograd graph attached."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flatness.errors import LayerError


@dataclass(slots=True)
class LiveCall:
    """One call of one module: its input x and output z, and the edge where signals come back.

    The edge is fixed when the module returns: an activation that overwrites z later on does not move it.
    """

    x: Tensor
    x_version: int
    z: Tensor
    edge: GradientEdge | None


class LiveCalls(ExitStack):
    """Hooks on modules that keep what they are called with; a context manager that leaves no hook behind.

    Args:
        modules: Modules by name.
        probed: Names of those where signals must come back, whatever the network does to their outputs.

    Attributes:
        of: The calls of every module that ran, in the order of first calls.
    """

    def __init__(self, modules: Mapping[str, nn.Module], probed: Collection[str] = ()) -> None:
        super().__init__()
        self.of: dict[str, list[LiveCall]] = {}
        self._modules, self._probed = modules, probed

    def __enter__(self) -> Self:
        """Install the hooks, which go in the end; what was kept stays."""
        for name, module in self._modules.items():
            keep = partial(self._keep, name)
            self.enter_context(module.register_forward_hook(keep, with_kwargs=True))
        return self

    def _keep(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Any
    ) -> Tensor | None:
        x = args[0] if args else kwargs.get("input")
        if not (isinstance(x, Tensor) and isinstance(z, Tensor)):
            raise LayerError(
                f"Expected {name!r} to be called with a tensor and to return one but it was called with "
                f"{type(x).__name__} and returned {type(z).__name__}. Pass layers= without it."
            )
        returned = z
        if name in self._probed and torch.is_grad_enabled():
            if z._is_view():
                # In-place operations on a view rewire its base's graph and would bypass the edge: this is
                # the same memory, and no view to autograd.
                z = torch.ops.aten._unsafe_view(z, z.shape)
            elif not z.requires_grad:
                z = z.detach().requires_grad_()  # nothing before is trained; what comes after may be
        edge = get_gradient_edge(z) if z.requires_grad else None
        self.of.setdefault(name, []).append(LiveCall(x, x._version, z, edge))
        return None if z is returned else z
