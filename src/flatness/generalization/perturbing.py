"""Losses of a network whose weights or features are changed at one layer, for many changes at once.

f(x) = g(W φ(x)): all that comes before the layer is computed once, at the layer the batch grows to one copy
per change, and what follows sees them all together. Where something goes around the layer (a skip
connection), copies are made at the input instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import FlatnessError, LayerError
from flatness.network.layers import ConvolutionLayer, Layer, LinearLayer
from flatness.network.memory import batch_budget
from flatness.problem import batches
from flatness.problem.problem import Problem

Change = Callable[[Tensor, int], Tensor]
"""(the layer's input x, number of samples n) → (C, *shape): C changes, of the input or of the output."""


class PerturbedLayer:
    """One layer of a network, ready to be changed. Use it inside ``with problem.guarded():``.

    Args:
        problem: Model, data and loss.
        layer: The layer, as W and Φ.
        bytes_per_sample: Memory that one sample takes on its way through the network.

    Attributes:
        grows: Whether copies can be made at the layer.
    """

    def __init__(self, problem: Problem, layer: Layer, bytes_per_sample: int) -> None:
        self.problem = problem
        self.layer = layer
        self.W = layer.matrix()
        self._bytes = max(1, bytes_per_sample)
        self.grows = True
        self.grows = self._can_grow()

    def copies_at_once(self, n: int) -> int:
        """How many copies of n samples fit into memory together."""
        return max(1, batch_budget(self.problem.device, backward=False) // (self._bytes * n))

    def losses(self, batch: Any) -> Tensor:
        """ℓ_i of the network as it is: (n,)."""
        return self.problem.loss.values(self.problem.items(batch)).double()

    def normaliser(self, batch: Any) -> float:
        """The batch's share of C in E = Σ ℓ_i / C."""
        with torch.no_grad():
            return float(self.problem.loss.normaliser(self.problem.items(batch)))

    def weight_losses(self, batch: Any, V: Tensor) -> Tensor:
        """ℓ_i with W + V in place of W: (C, n) for V (C, G, d, m)."""
        V = V.to(self.W)

        def change(x: Tensor, n: int) -> Tensor:
            Phi = self.layer.features(x, n)
            # One product for all copies: their rows are stacked.
            C, G, d, m = V.shape
            stacked = V.transpose(0, 1).reshape(G, C * d, m)
            moved = (stacked @ Phi).reshape(n, G, C, d, -1).permute(2, 0, 1, 3, 4)
            return torch.stack([self._as_output(copy) for copy in moved])

        return self._run(batch, len(V), change, at_input=False)

    def feature_losses(self, batch: Any, A: Tensor) -> Tensor:
        """ℓ_i with φ + Aφ in place of φ: (C, n) for A (C, G, size, size) on features or channels."""
        A = A.to(self.W)

        def change(x: Tensor, n: int) -> Tensor:
            units = self.layer.per_input_unit(x, n)  # (n, units, positions)
            grouped = units.reshape(n, A.shape[1], -1, units.shape[2])
            mixed = torch.einsum("cgij,ngjp->cngip", A, grouped).reshape(len(A), *units.shape)
            return torch.stack([self._as_input(copy, x.shape) for copy in mixed])

        return self._run(batch, len(A), change, at_input=True)

    def noise_losses(self, batch: Any, noise: Tensor) -> Tensor:
        """ℓ_i with φ_i + ‖φ_i‖ ξ_i in place of φ_i: (C, n) for ξ (C, n, m)."""

        def change(x: Tensor, n: int) -> Tensor:
            lengths = x.flatten(1).norm(dim=1)
            return (noise.to(x) * lengths[None, :, None]).reshape(len(noise), *x.shape)

        return self._run(batch, len(noise), change, at_input=True)

    def outputs_of(self, batch: Any, features: Tensor) -> Tensor:
        """ψ(z), the network's outputs with its layer's input replaced by any rows z (N, m)."""
        n = batches.size_of(batch)

        def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (features.to(self._input(args)), *args[1:])

        handle = self.layer.module.register_forward_pre_hook(replace)
        try:
            returned = self.problem.forward(self.problem.model, self._given(batch))
        finally:
            handle.remove()
        output = returned[0]
        if output.shape[0] != len(features):
            raise LayerError(
                f"Expected {len(features)} outputs for as many feature vectors but got {output.shape[0]} "
                f"from {n} samples: not everything passes through {self.layer.name!r}."
            )
        return output

    def _run(self, batch: Any, copies: int, change: Change, *, at_input: bool) -> Tensor:
        n = batches.size_of(batch)
        if not self.grows:
            batch = repeated(batch, copies, n)
        with self._changed(change, copies, n, at_input=at_input):
            if not self.grows:
                items = self.problem.items(batch)
            else:
                output, target = self.problem.forward(self.problem.model, self._given(batch))
                items = self.problem.loss.items(output, repeated(target, copies, n))
        return self.problem.loss.values(items).double().reshape(copies, n)

    def _input(self, args: tuple[Any, ...]) -> Tensor:
        if not args:
            raise LayerError(
                f"Expected {self.layer.name!r} to be called with its input as first argument but it is "
                "called with keywords only. Call it as layer(x) in the model's forward."
            )
        return args[0]

    def _given(self, batch: Any) -> Any:
        return batch if self.problem.copy_batches is False else batches.copied(batch)

    @contextmanager
    def _changed(self, change: Change, copies: int, n: int, *, at_input: bool) -> Iterator[None]:
        """Hooks that add the changes to the layer's input or output, one copy of the samples for each."""

        def first_copy(value: Tensor) -> Tensor:
            return value if self.grows else value[: value.shape[0] // copies]

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = first_copy(self._input(args))
            return ((x + change(x, n)).flatten(0, 1), *args[1:])

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return (first_copy(output) + change(first_copy(self._input(args)), n)).flatten(0, 1)

        module = self.layer.module
        handle = module.register_forward_pre_hook(before) if at_input else module.register_forward_hook(after)
        try:
            yield
        finally:
            handle.remove()

    def _as_output(self, signals: Tensor) -> Tensor:
        """(n, G, d, P), as `Layer.signals` lays values out, in the shape of the module's output."""
        return self._unfold(signals.flatten(1, 2), self._output_shape)

    def _as_input(self, units: Tensor, shape: torch.Size) -> Tensor:
        """(n, units, positions) in the shape of the module's input."""
        return self._unfold(units, shape)

    def _unfold(self, values: Tensor, shape: torch.Size) -> Tensor:
        if isinstance(self.layer, LinearLayer):
            values = values.transpose(1, 2)
        return values.reshape(-1, *shape[1:])

    def _can_grow(self) -> bool:
        """Whether the copies may be made at the layer: the answer must be that of copies of the input."""
        if not isinstance(self.layer, (LinearLayer, ConvolutionLayer)):
            raise LayerError(
                f"Expected a Linear or convolution layer but {self.layer.name!r} has a view of its own, "
                f"{type(self.layer).__name__}. Derive the view from flatness.LinearLayer or "
                "flatness.ConvolutionLayer."
            )
        example = self.problem.example(8)
        shapes: list[torch.Size] = []
        handle = self.layer.module.register_forward_hook(
            lambda module, args, output: shapes.append(output.shape)
        )
        try:
            with torch.no_grad():
                self.problem.items(batches.copied(example))
        finally:
            handle.remove()
        self._output_shape = shapes[0]
        steps = torch.tensor([0.1, -0.2, 0.0], dtype=self.W.dtype).reshape(3, 1, 1, 1)
        V = steps.to(self.W) * self.W
        with torch.no_grad():
            self.grows = False
            expected = self.weight_losses(batches.copied(example), V)
            self.grows = True
            try:
                found = self.weight_losses(batches.copied(example), V)
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, FlatnessError):
                return False
        close = torch.allclose(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
        return found.shape == expected.shape and close


def repeated(batch: Any, copies: int, n: int) -> Any:
    """A batch of n samples repeated as a whole; tensors without a row per sample stay as they are."""

    def repeat(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != n:
            return tensor
        return tensor.repeat(copies, *[1] * (tensor.dim() - 1))

    return batches.map_tensors(batch, repeat)
