"""Hessians of layers in any network on micro-batches, by differentiating twice.

For a direction V in the place of a layer's weight, η = VΦ is what it does to the preactivations of every
sample, h = (∇²_z ℓ)η comes from a second backward pass, and H V = Σ_i h_i Φ_iᵀ. No other layer moves, so that
it is the layer's own Hessian that is multiplied. A block of one row is the same with η zero in all others. A
weight used more than once moves in all of its uses at once. What no call of a module shows sample by sample
moves through its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial, reduce
from operator import add
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from flatness.curvature.operators.spectrum import HessianSlice
from flatness.curvature.parameters.parameter_products import batch_product, entries_of
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.parameters.second_derivatives import second_derivatives
from flatness.curvature.sums.pair_statistics import LayerPairs, laid_out_like
from flatness.curvature.sums.routes import ParameterRoutes, Routes
from flatness.network.layers.shared import SharedLayer, Use
from flatness.network.recording import Recording
from flatness.problem import batches
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem


@contextmanager
def product_slices(
    problem: Problem, routes: Routes, curvature: str
) -> Iterator[Callable[[Any], dict[str, HessianSlice]]]:
    """A pass over the data in which layers move where they are called.

    Args:
        problem: The model, data and loss.
        routes: The layers.
        curvature: "hessian" or "gauss_newton".
    """
    with (
        Recording(routes.modules(), copy_inputs=routes.copy_inputs) as recording,
        _SharedShifts(routes.shared) as shifts,
    ):

        def slices_of(batch: Any) -> dict[str, HessianSlice]:
            recording.clear()
            n = batches.size_of(batch)
            shifts.prepare(n)
            with torch.enable_grad():
                items = problem.items(batch, twice=True)
                shared = dict(shifts.shifts)
                called = [route for route in routes.layers if route.name not in shared]
                records = {route.name: recording.one(route.name) for route in called}
                at = shared | {name: record.z_edge for name, record in records.items()}
                products = second_derivatives(problem.loss, items, at, curvature)
            recording.clear()

            def multiply(name: str, eta: Tensor) -> Tensor:
                found = products({name: eta})
                return found[name] if found else torch.zeros_like(eta)

            slices: dict[str, HessianSlice] = {
                name: partial(_product, partial(multiply, name)) for name in shared
            }
            for route in called:
                record = records[route.name]
                pairs = LayerPairs(route, record.x, n, None, bias=False)
                slices[route.name] = _CallSlice(pairs, record.z_shape, partial(multiply, route.name))
            return slices

        yield slices_of


@contextmanager
def parameter_slices(
    problem: Problem, routes: ParameterRoutes
) -> Iterator[Callable[[Any], dict[str, HessianSlice]]]:
    """A pass over the data in which layers move through their parameters.

    Args:
        problem: The model, data and loss.
        routes: The layers, with their parameters.
    """
    spaces = {name: ParameterSpace(problem, [parameter]) for name, parameter in routes.parameters.items()}
    entries = {
        route.name: entries_of(route.layer, *spaces[route.name].parameters.values())
        for route in routes.layers
    }

    def of_parameter(batch: Any, name: str, V: Tensor, rows: bool) -> Tensor:
        places = entries[name]
        _, multiply = batch_product(spaces[name], batch, routes.curvature)

        def whole(V: Tensor) -> Tensor:
            vector = V.new_zeros(spaces[name].dimension)
            vector[places] = V
            return multiply(vector)[places].to(V.dtype)

        return _product(whole, V, rows)

    with differentiable(problem.model):
        yield lambda batch: {name: partial(of_parameter, batch, name) for name in entries}


def _product(whole: Callable[[Tensor], Tensor], V: Tensor, rows: bool) -> Tensor:
    """H V (G, d, m); or H_ss V_s for all rows s, by a product with the whole Hessian each."""
    if not rows:
        return whole(V)
    result = torch.zeros_like(V)
    for group in range(V.shape[0]):
        for row in range(V.shape[1]):
            alone = torch.zeros_like(V)
            alone[group, row] = V[group, row]
            result[group, row] = whole(alone)[group, row]
    return result


class _SharedShifts:
    """Hooks that add Vφ to every use of a shared weight, V = 0: derivatives in V are those in the weight.

    Args:
        layers: The shared layers, by the name that each is measured under.

    Attributes:
        shifts: V (G, d, m) by layer, of the batch that `prepare` was called for.
    """

    def __init__(self, layers: Mapping[str, SharedLayer]) -> None:
        self._layers, self._samples = layers, 0
        self._handles: list[Any] = []
        self.shifts: dict[str, Tensor] = {}

    def __enter__(self) -> _SharedShifts:
        for name, layer in self._layers.items():
            # A module may be known under several names: it gets one hook.
            for use in {id(use.view.module): use for use in layer.uses}.values():
                hook = partial(self._add, name, use)
                self._handles.append(use.view.module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self.shifts.clear()

    def prepare(self, samples: int) -> None:
        """Fresh zeros for a batch of so many samples."""
        self._samples = samples
        for name, layer in self._layers.items():
            self.shifts[name] = torch.zeros_like(layer.matrix()).requires_grad_()

    def _add(
        self, name: str, use: Use, module: nn.Module, args: tuple[Any, ...], kwargs: Any, z: Tensor
    ) -> Tensor:
        x = args[0] if args else kwargs["input"]
        change = use.view.seen(x, self._samples).along(use.turned(self.shifts[name]))
        return z + laid_out_like(use.view, change, z.shape)


class _CallSlice:
    """A layer on one micro-batch, moved where it is called.

    Args:
        pairs: The layer, with its input.
        shape: The shape of its output z.
        multiply: Products with ∇²_z Σℓ.
    """

    def __init__(self, pairs: LayerPairs, shape: torch.Size, multiply: Callable[[Tensor], Tensor]) -> None:
        self._pairs, self._shape, self._multiply = pairs, shape, multiply

    def __call__(self, V: Tensor, rows: bool) -> Tensor:
        """Σ_i of H_i V, or of the row blocks with their rows of V: (G, d, m)."""
        if rows and self._pairs.plain:
            phi = self._pairs.x.reshape(self._pairs.n, -1)
            return (((phi @ V[0].T) * self._own_curvature).T @ phi)[None]
        return _product(self._whole, V, rows)

    @cached_property
    def _own_curvature(self) -> Tensor:
        """∂²ℓ/∂z_s² of every sample and unit, (n, d): at one position H_ss = Σ_i (∂²ℓ_i/∂z_s²) φ_i φ_iᵀ."""
        n, d = self._pairs.n, self._pairs.W.shape[1]
        found = self._pairs.x.new_zeros(n, d)
        for unit in range(d):
            eta = torch.zeros_like(found)
            eta[:, unit] = 1.0
            found[:, unit] = self._multiply(eta.reshape(self._shape)).reshape(n, d)[:, unit]
        return found

    def _whole(self, V: Tensor) -> Tensor:
        pairs = self._pairs
        eta = torch.cat(
            [seen.along(V.expand(part.stop - part.start, *V.shape)) for part, seen in pairs.chunks()]
        )
        h = pairs.layer.signals(self._multiply(laid_out_like(pairs.layer, eta, self._shape)), pairs.n)
        return reduce(add, (seen.outer(h[part]).sum(0) for part, seen in pairs.chunks()))
