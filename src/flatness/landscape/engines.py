"""Many parameter points at once: the network's forward pass with a leading axis for the point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from flatness.landscape.first_layers import FirstLayers, Steps
from flatness.problem import batches
from flatness.problem.convolutions import AsProducts
from flatness.problem.guard import differentiable
from flatness.problem.pool_first import (
    FEW_CHANNELS,
    MANY_CHANNELS,
    pool_first,
    pooled_windows,
    pooling_sequences,
)
from flatness.problem.pooling import StackedPooling
from flatness.problem.problem import Problem
from flatness.problem.substitution import refuse_read_elsewhere

LOOPED = "looped"
ENGINES = (LOOPED, "grouped", "windowed", "unfolded", "banded")
"""How points are evaluated. ``looped``: one after the other. ``grouped``: all at once through `torch.vmap`,
which makes a batch of products out of linear layers and a grouped convolution out of convolutions.
``windowed``: the same with convolutions that are pooled computed for whole windows at once. ``unfolded``:
that, with convolutions written as products over unfolded images, whose samples lie side by side. ``banded``:
with convolutions written as products of whole image rows with the band matrix of the kernel. All of them take
the first layer as `FirstLayers` does."""

LOSS, WRONG, COUNTED = range(3)
"""Columns of what `Stacked.sums` returns."""


class _Caller(nn.Module):
    """What `functional_call` calls: the problem's forward pass, with the model as a submodule."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.model = problem.model
        self._outputs = problem.outputs

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        return self._outputs(batch)


class Stacked:
    """Sums over a batch at several parameter points. Everything happens in a guarded problem, without graphs.

    Args:
        problem: The model, data and loss.
        engine: One of `ENGINES`.

    Attributes:
        norms: The batch norms of the model.
    """

    def __init__(self, problem: Problem, engine: str) -> None:
        self.problem, self.engine = problem, engine
        # Made aside: a module's attributes are restored when the problem's guard ends, this one is not its.
        self._caller = _Caller(problem).eval()
        self._sequences = pooling_sequences(problem.model)
        self.norms = [module for module in problem.model.modules() if isinstance(module, _BatchNorm)]

    def sums(self, moved: dict[str, Tensor], batch: Any, steps: Steps | None = None) -> Tensor:
        """Σℓ, wrong predictions and predictions that count, (points, 3) in float64.

        Args:
            moved: Parameters and buffers that differ between points, each with a leading axis for the point.
            batch: A placed batch.
            steps: How they came about, for `FirstLayers`; None runs all layers as usual.
        """
        return self._over_points(self._sums_of, moved, batch, steps)

    def track(self, moved: dict[str, Tensor], batch: Any, share: float, steps: Steps | None = None) -> None:
        """Move the batch norms' statistics among `moved` towards those of a batch, by a share."""
        settings = [(norm, norm.momentum) for norm in self.norms]
        try:
            for norm in self.norms:
                norm.training, norm.momentum = True, share
            self._over_points(
                lambda values, batch: self._call(values, batch)[0].flatten()[:1], moved, batch, steps
            )
        finally:
            for norm, momentum in settings:
                norm.training, norm.momentum = False, momentum

    def check_reading(self, example: Any) -> None:
        """Refuse a network that does not take its parameters from where `functional_call` puts them."""
        parameters = dict(self.problem.model.named_parameters())
        others = {name: nn.Parameter(value.detach()) for name, value in parameters.items()}
        with differentiable(self.problem.model), torch.enable_grad():
            refuse_read_elsewhere(self._call(others, example)[0], parameters)

    def _over_points(
        self,
        one: Callable[[dict[str, Tensor], Any], Tensor],
        moved: dict[str, Tensor],
        batch: Any,
        steps: Steps | None,
    ) -> Tensor:
        first = None
        if steps is not None and steps.few:
            first = FirstLayers(steps, batch, samples_last=self.engine == "unfolded")

        def at(values: dict[str, Tensor], weights: Any) -> Tensor:
            with nullcontext() if first is None else first.at(values, weights):
                return one(values, batch)

        weights = None if steps is None or first is None else steps.weights()
        with ExitStack() as rewritten:
            channels = MANY_CHANNELS if self.engine in ("windowed", "unfolded") else FEW_CHANNELS
            compute = pooled_windows if first is None else first.pooled_windows
            rewritten.enter_context(pool_first(self._sequences, windows=channels, compute=compute))
            if self.engine == LOOPED:
                count = len(next(iter(moved.values())))
                rows = [None] * count if weights is None else weights.tolist()
                points = [{name: value[i] for name, value in moved.items()} for i in range(count)]
                return torch.stack([at(*point) for point in zip(points, rows, strict=True)])
            rewritten.enter_context(StackedPooling())
            if self.engine in ("unfolded", "banded"):
                rewritten.enter_context(AsProducts(self.engine == "banded"))
            return torch.vmap(at, in_dims=(0, None if weights is None else 0))(moved, weights)

    def _call(self, values: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, Any]:
        # Buffers too: what a network puts in their place is another thing at every point.
        values = {**dict(self.problem.model.named_buffers()), **values}
        named = {f"model.{name}": value for name, value in values.items()}
        return functional_call(self._caller, named, (batch,))

    def _sums_of(self, values: dict[str, Tensor], batch: Any) -> Tensor:
        loss = self.problem.loss
        items = loss.lay_out(*self._call(values, batch))
        total = loss.values(items).sum(dtype=torch.float64)
        mistakes = loss.mistakes(items)
        return torch.cat([total[None], total.new_zeros(2) if mistakes is None else mistakes])


def accuracy_of(sums: Tensor) -> Tensor:
    """The share of right predictions, NaN where there are no classes."""
    return (sums[:, COUNTED] - sums[:, WRONG]) / sums[:, COUNTED]


def bytes_of(batch: Any) -> int:
    """Memory that a batch takes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in batches.tensors_in(batch))
