"""Losses of a network whose weights or features are changed at one layer, for many changes at once.

f(x) = g(W φ(x)): what comes before the layer is the same for all changes and computed once; at the layer each
adds its own, and what follows sees them all together, or one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flatness.curvature.parameters.parameter_space import ParameterSpace, over_points, vectorises
from flatness.errors import FlatnessError, LayerError
from flatness.network.layers import ConvolutionLayer, Layer, LinearLayer
from flatness.network.memory import batch_budget
from flatness.problem import batches
from flatness.problem.problem import Problem

Change = Callable[[Tensor, torch.Size], Tensor]
"""(the layer's input x, shape) → (C, *shape): C changes, of an input or output of that shape."""

# Feature vectors that ψ takes at once.
_AT_ONCE = 20_000


class ChosenLayer:
    """One layer of a network, ready to be changed. Use it inside ``with problem.guarded():``.

    Args:
        problem: Model, data and loss.
        layer: The layer, as W and Φ.
        bytes_each: Memory that one sample takes on its way through the network.
        positions: P, how often a sample meets W.
        last: Whether the output is W φ + b itself, so that only the loss follows.
        kinks: Whether what follows is piecewise linear with pieces: a Hessian does not see where they meet.

    Attributes:
        name: The layer's name in the model.
        W: The weight, (G, d, m).
        features: m, the columns of W in each group.
        outputs: The rows of W over all groups.
    """

    def __init__(
        self, problem: Problem, layer: Layer, bytes_each: int, *, positions: int, last: bool, kinks: bool
    ) -> None:
        if not isinstance(layer, (LinearLayer, ConvolutionLayer)):
            raise LayerError(
                f"Expected a Linear or convolution layer but {layer.name!r} has a view of its own, "
                f"{type(layer).__name__}. Derive the view from flatness.LinearLayer or "
                "flatness.ConvolutionLayer."
            )
        self.problem = problem
        self.layer, self.name = layer, layer.name
        self.W = layer.matrix()
        self.features, self.outputs = self.W.shape[2], layer.output_units
        self.positions, self.last, self.kinks = positions, last, kinks
        self._bytes = max(1, bytes_each)
        few = torch.zeros(2, *self.W.shape, dtype=self.W.dtype, device=self.W.device)
        self._together = True
        with torch.no_grad():
            self._together = vectorises(lambda: self.weight_losses(problem.example(8), few))

    @cached_property
    def normaliser(self) -> float:
        """C of E = Σ ℓ_i / C."""
        return ParameterSpace(self.problem).normaliser

    def copies_at_once(self, n: int) -> int:
        """How many copies of n samples fit into memory together."""
        return max(1, batch_budget(self.problem.device, backward=False) // (self._bytes * n))

    def losses(self, batch: Any) -> Tensor:
        """ℓ_i of the network as it is: (n,)."""
        return self.problem.loss.values(self.problem.items(batch)).double()

    def weight_losses(self, batch: Any, V: Tensor) -> Tensor:
        """ℓ_i with W + V in place of W: (C, n) for V (C, G, d, m)."""
        V, n = V.to(self.W), batches.size_of(batch)

        def change(x: Tensor, shape: torch.Size) -> Tensor:
            Phi = self.layer.features(x, n)
            # One product for all copies: their rows are stacked.
            C, G, d, m = V.shape
            stacked = V.transpose(0, 1).reshape(G, C * d, m)
            moved = (stacked @ Phi).reshape(n, G, C, d, -1).permute(2, 0, 1, 3, 4)
            return torch.stack([self._laid_out(copy.flatten(1, 2), shape) for copy in moved])

        return self._losses(batch, len(V), change, at_input=False)

    def feature_losses(self, batch: Any, A: Tensor) -> Tensor:
        """ℓ_i with φ + Aφ in place of φ: (C, n) for A (C, G, size, size) on features or channels."""
        A, n = A.to(self.W), batches.size_of(batch)

        def change(x: Tensor, shape: torch.Size) -> Tensor:
            units = self.layer.per_input_unit(x, n)  # (n, units, positions)
            grouped = units.reshape(n, A.shape[1], -1, units.shape[2])
            mixed = torch.einsum("cgij,ngjp->cngip", A, grouped).reshape(len(A), *units.shape)
            return torch.stack([self._laid_out(copy, shape) for copy in mixed])

        return self._losses(batch, len(A), change, at_input=True)

    def noise_losses(self, batch: Any, noise: Tensor) -> Tensor:
        """ℓ_i with φ_i + ‖φ_i‖ ξ_i in place of φ_i: (C, n) for ξ (C, n, m)."""

        def change(x: Tensor, shape: torch.Size) -> Tensor:
            lengths = x.flatten(1).norm(dim=1)
            return (noise.to(x) * lengths[None, :, None]).reshape(len(noise), *shape)

        return self._losses(batch, len(noise), change, at_input=True)

    def gradient(self, V: Tensor, direction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """E(W + V) of each V, (C,), and its derivative in V, (C, G, d, m), both in float64.

        With a direction (C, G, d, m) the derivative of ⟨derivative, direction⟩ instead: the Hessian times it.
        """
        risks = torch.zeros(len(V), dtype=torch.float64)
        found = torch.zeros(V.shape, dtype=torch.float64, device=self.W.device)

        def step(batch: Any) -> None:
            at = V.detach().to(self.W).clone().requires_grad_()
            losses = self.weight_losses(batch, at).sum(1)
            (part,) = torch.autograd.grad(losses.sum(), at, create_graph=direction is not None)
            if direction is not None:
                curved = part.requires_grad
                part = torch.autograd.grad(part, at, direction.to(at))[0] if curved else torch.zeros_like(at)
            found.add_(part.double())
            risks.add_(losses.detach().cpu())

        self.problem.stream(step, "gradient")
        return risks / self.normaliser, found / self.normaliser

    def outputs_of(self, batch: Any, features: Tensor) -> Tensor:
        """ψ(z), the network's outputs with its layer's input replaced by any rows z (N, m)."""

        def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (features.to(self._input(args)), *args[1:])

        given = batch if self.problem.copy_batches is False else batches.copied(batch)
        with self.layer.module.register_forward_pre_hook(replace):
            output = self.problem.forward(self.problem.model, given)[0]
        if output.shape[0] != len(features):
            raise LayerError(
                f"Expected {len(features)} outputs for as many feature vectors but got {output.shape[0]} "
                f"from {batches.size_of(batch)} samples: not everything passes through {self.layer.name!r}."
            )
        return output

    def predictor(self) -> Callable[[Tensor], Tensor]:
        """ψ of the network as a function of the layer's features, its outputs in float64 on the CPU."""
        batch = self.problem.example(2)

        def predict(features: Tensor) -> Tensor:
            parts = features.to(self.problem.device, self.problem.dtype).split(_AT_ONCE)
            return torch.cat([self.outputs_of(batch, part).double().cpu() for part in parts])

        return predict

    def everything_passes(self) -> bool:
        """Whether the output is a function of the layer's input: nothing goes around it."""
        example = self.problem.example(8)
        with torch.no_grad():
            with self.inputs() as seen:
                expected = torch.cat([self.problem.outputs(example)[0]] * 3)
            try:
                found = self.outputs_of(example, torch.cat([seen[0]] * 3))
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, FlatnessError):
                return False
        return torch.allclose(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))

    def _losses(self, batch: Any, copies: int, change: Change, *, at_input: bool) -> Tensor:
        """ℓ_i with each of the changes added to the layer's input or output: (C, n)."""
        made: list[Tensor] = []
        number = torch.zeros((), dtype=torch.int64)

        def changed(x: Tensor, value: Tensor) -> Tensor:
            if not made:  # the layer's input is the same for all of them
                made.append(change(x, value.shape))
            return value + made[0].index_select(0, number.reshape(1))[0]

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = self._input(args)
            return (changed(x, x), *args[1:])

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return changed(self._input(args), output)

        def one(place: Tensor) -> Tensor:
            nonlocal number
            number = place
            return self.problem.loss.values(self.problem.items(batch, look=False)).double()

        module, places = self.layer.module, torch.arange(copies, device=self.problem.device)
        with module.register_forward_pre_hook(before) if at_input else module.register_forward_hook(after):
            return over_points(one, places, together=self._together)

    @contextmanager
    def inputs(self) -> Iterator[list[Tensor]]:
        """Inside, the layer's inputs gather in the list, call by call."""
        seen: list[Tensor] = []
        with self.layer.module.register_forward_pre_hook(lambda _, args: seen.append(self._input(args))):
            yield seen

    def _input(self, args: tuple[Any, ...]) -> Tensor:
        if not args:
            raise LayerError(
                f"Expected {self.layer.name!r} to be called with its input as first argument but it is "
                "called with keywords only. Call it as layer(x) in the model's forward."
            )
        return args[0]

    def _laid_out(self, values: Tensor, shape: torch.Size) -> Tensor:
        """(n, units, positions) in the shape of the module's input or output."""
        if isinstance(self.layer, LinearLayer):
            values = values.transpose(1, 2)
        return values.reshape(-1, *shape[1:])
