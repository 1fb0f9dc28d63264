"""Loss and accuracy of a network at many points θ + Σ_k c_k d_k of its parameter space.

Points are evaluated in chunks. A chunk is one pass over the data, which stays on the device between chunks
when it fits there. The points of a chunk take turns on every micro-batch, or run together through
`torch.vmap`, each layer with a leading axis for the point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from flatness.curvature.parameters.parameter_space import (
    COUNTED,
    LOSS,
    WRONG,
    ParameterSpace,
    over_points,
    vectorises,
)
from flatness.errors import OptionError
from flatness.losses import counted
from flatness.measuring.examine.probe import check_example
from flatness.network.memory import fits, kept_budget
from flatness.problem import batches
from flatness.problem.problem import Problem

BATCH_NORM = ("as_is", "recomputed")
"""Statistics of batch norm: those of the model at every point, or recomputed there."""

LOOPED, TOGETHER = ENGINES = ("looped", "together")
"""How the points of a chunk run: one after another, or all at once through `torch.vmap`."""

Direction = Mapping[str, Tensor]
"""A change of parameters, and perhaps of buffers, by name; what is not named stays."""

# Points that share a pass: few where they take turns, so that an interrupt loses little.
_CHUNK = {LOOPED: 8, TOGETHER: 64}
# Up to so many parameters a network leaves a GPU idle, and several at once are faster: LeNet-5 twice. A
# transformer of 2.7 million is as fast either way, ResNet-18 takes 1.7 times as long.
_SMALL = 1_000_000
# A look at the memory that a sample takes at a point.
_FEW_POINTS, _FEW_SAMPLES = 8, 16
_LONGEST = 16384  # samples at a time: from there on nothing is gained
_LEFT_ALONE = "batch norm statistics leave out batches of a single sample"
_ONE_BY_ONE = "torch.vmap does not support this network; its points were evaluated one by one"


class Points:
    """A network, seen from its parameters θ. Use it inside ``with problem.guarded():``.

    Args:
        problem: The model, data and loss.
        batch_norm: One of `BATCH_NORM`.
        engine: One of `ENGINES`; None chooses by device and size of the network.
        chunk: Points per pass over the data; None chooses.
        fixed_batch: Whether the size of micro-batches is the user's, and stays.

    Attributes:
        loss: E at θ, weight decay included.
        accuracy: The share of right predictions at θ; NaN where there are no classes.
        batch: Samples in the largest batch.
        has_batch_norm: Whether the network has batch norm.
        engine: The engine in use.
        chunk: Points per pass over the data.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        batch_norm: str = "as_is",
        engine: str | None = None,
        chunk: int | None = None,
        fixed_batch: bool = False,
    ) -> None:
        self.problem = problem
        # First of all: a forward pass may bring weights to where they are measured.
        check_example(problem, problem.example(2))
        self._space = ParameterSpace(problem)
        self._norms = [module for module in problem.model.modules() if isinstance(module, _BatchNorm)]
        self.has_batch_norm = bool(self._norms)
        self._recompute = batch_norm == "recomputed" and self.has_batch_norm
        buffers = dict(problem.model.named_buffers())
        self._values = {
            name: value.detach() for name, value in (*self._space.parameters.items(), *buffers.items())
        }
        self._buffers = frozenset(buffers)
        self._directions: dict[str, Tensor] = {}
        self._kept: list[Any] | None = []
        self._channels_last = False
        self._choose(engine, chunk, fixed_batch)
        self._normaliser, self.batch = 0.0, 0
        self.loss, self.accuracy = self._at_theta()

    def along(self, directions: Sequence[Direction]) -> Points:
        """The same points, with directions d_k to go along."""
        names = dict.fromkeys(name for direction in directions for name in direction)
        self._directions = {}
        for name in names:
            zero = torch.zeros_like(self._values[name], dtype=torch.float64)
            parts = [direction[name].to(zero) if name in direction else zero for direction in directions]
            stacked = torch.stack(parts)
            if bool(stacked.any()):
                self._directions[name] = stacked
        return self

    def __call__(self, coefficients: Tensor) -> Tensor:
        """E and accuracy at θ + Σ_k c_k d_k: (points, 2), float64 on the host, for c (points, K).

        Buffers that move go no further than from c_k = 0 to 1.
        """
        coefficients = coefficients.to(self.problem.device, torch.float64)
        found: list[Tensor] = []
        if fits(lambda: found.append(self._evaluate(coefficients)), self.problem.device):
            return found[0]
        if len(coefficients) == 1:
            # From here on batches are streamed, and halved where they do not fit.
            self._kept = None
            return self._evaluate(coefficients)
        half = len(coefficients) // 2
        self.chunk = max(1, min(self.chunk, half))
        return torch.cat([self(coefficients[:half]), self(coefficients[half:])])

    def _evaluate(self, coefficients: Tensor) -> Tensor:
        count = len(coefficients)
        if not self._directions and not self._recompute:
            return torch.tensor([[self.loss, self.accuracy]], dtype=torch.float64).expand(count, 2).clone()
        moved = self._moved(coefficients)
        with torch.no_grad():
            if self._recompute:
                moved |= self._statistics(moved, count)
            sums = torch.zeros(count, 3, dtype=torch.float64, device=self.problem.device)
            self._pass(lambda batch: sums.add_(self._sums(moved, batch)))
        loss = sums[:, LOSS] / self._normaliser + self._penalty(moved)
        # Of outputs that are NaN, argmax would name a class all the same.
        accuracy = torch.where(loss.isnan(), torch.nan, _accuracy(sums))
        return torch.stack([loss, accuracy], dim=1).cpu()

    def _moved(self, coefficients: Tensor) -> dict[str, Tensor]:
        """θ + Σ c_k d_k by name, (points, …), added in float64 and rounded once."""
        goes = coefficients.any(0)  # along directions in which no point goes there is nothing to add
        found = {}
        for name, D in self._directions.items():
            value = self._values[name]
            # Beyond both networks a variance may become negative.
            c = coefficients.clamp(0, 1) if name in self._buffers else coefficients
            moved = (value.double() + torch.tensordot(c[:, goes], D[goes], 1)).to(value.dtype)
            found[name] = self._laid_out(moved.flatten(0, 1)).view_as(moved) if moved.dim() == 5 else moved
        return found

    def _sums(self, moved: Mapping[str, Tensor], batch: Any) -> Tensor:
        """`ParameterSpace.sums` of a batch at every point, (points, 3)."""

        def at(values: dict[str, Tensor]) -> Tensor:
            with self._space.substitution(values):
                return self._space.sums(self.problem.items(batch, look=False))

        return over_points(at, dict(moved), together=self.engine == TOGETHER)

    def _penalty(self, moved: Mapping[str, Tensor]) -> Tensor | float:
        decay = self.problem.weight_decay
        if not decay:
            return 0.0
        parameters = self._space.parameters.items()
        values = (moved.get(name, own.detach()[None]).double() for name, own in parameters)
        return 0.5 * decay * sum(value.square().flatten(1).sum(1) for value in values)

    def _statistics(self, moved: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Statistics of the batch norms at each point: means over micro-batches, weighed by samples."""
        norms = {id(buffer) for norm in self._norms for buffer in norm.buffers()}
        found = {
            name: buffer.detach().expand(count, *buffer.shape).clone()
            for name, buffer in self.problem.model.named_buffers()
            if id(buffer) in norms
        }
        seen, alone = 0, 0

        def step(batch: Any) -> None:
            nonlocal seen, alone
            n = batches.size_of(batch)
            trial = {name: value.clone() for name, value in found.items()}
            try:
                self._track({**moved, **trial}, batch, n / (seen + n))
            except ValueError as error:
                # torch's word about a single sample, which has no variance.
                if n > 1 or "more than 1 value per channel" not in str(error):
                    raise
                alone += 1
                return
            found.update(trial)
            seen += n

        self._pass(step)
        if not seen:
            raise OptionError(
                "Expected batches of at least 2 samples to compute batch norm's statistics from but got "
                "single samples. Pass a larger batch_size, more data, or batch_norm='as_is'."
            )
        if alone and _LEFT_ALONE not in self.problem.notes:
            self.problem.notes.append(_LEFT_ALONE)
        return found

    def _track(self, moved: Mapping[str, Tensor], batch: Any, share: float) -> None:
        """Move the batch norms' statistics among `moved` towards those of a batch, by a share."""
        momenta = [norm.momentum for norm in self._norms]
        try:
            for norm in self._norms:
                norm.training, norm.momentum = True, share
            self._sums(moved, batch)
        finally:
            for norm, momentum in zip(self._norms, momenta, strict=True):
                norm.training, norm.momentum = False, momentum

    def _pass(self, step: Callable[[Any], Any]) -> None:
        """One pass over the data: over what is kept of it, or streamed; see `Problem.stream`."""
        if self._kept is None:
            self.problem.stream(step, "landscape")
            return
        for batch in self._kept:
            step(batch)

    def _choose(self, engine: str | None, chunk: int | None, fixed_batch: bool) -> None:
        """The engine, the points of a chunk and, on a GPU, the samples that fit there with them."""
        on_gpu = self.problem.device.type == "cuda"
        example = self.problem.example(_FEW_SAMPLES)
        self.engine = engine or self._usual_engine(example)
        if not on_gpu and self.engine == LOOPED:
            self._channels_last = True
            self._channels_last = self._runs(batches.map_tensors(example, self._laid_out))
        self.chunk = chunk or _CHUNK[self.engine]
        if on_gpu and engine is None and not fixed_batch:
            points = self.chunk if self.engine == TOGETHER else 1
            room = kept_budget(self.problem.device) // 2 // self._bytes_each(example)
            self.problem.take_together(max(1, min(_LONGEST, room // points)))
        self._directions = {}

    def _usual_engine(self, example: Any) -> str:
        self.engine = _usual(self.problem.device, self._space.dimension)
        if self.engine == TOGETHER and not self._runs(example):
            self.problem.notes.append(_ONE_BY_ONE)
            return LOOPED
        return self.engine

    def _runs(self, example: Any) -> bool:
        """Whether the network takes what a trial does to it, be it `torch.vmap` or images laid out anew."""
        with torch.no_grad():
            return vectorises(lambda: self._sums(self._still(), example))

    def _still(self) -> dict[str, Tensor]:
        """A few points that are all θ."""
        self._directions = {
            name: torch.zeros(1, *value.shape, dtype=torch.float64, device=value.device)
            for name, value in self._space.parameters.items()
        }
        points = _FEW_POINTS if self.engine == TOGETHER else 1
        return self._moved(torch.zeros(points, 1, dtype=torch.float64, device=self.problem.device))

    def _bytes_each(self, example: Any) -> int:
        """Memory on a GPU that a sample takes at a point, at its peak."""
        device, still = self.problem.device, self._still()
        points = len(next(iter(still.values())))
        with torch.no_grad():
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._sums(still, example)
            taken = torch.cuda.max_memory_allocated(device) - before
        return max(1, taken // (points * batches.size_of(example)))

    def _at_theta(self) -> tuple[float, float]:
        """E and accuracy of the network as it is; targets are checked, and the data kept if it fits."""
        problem, kept, held = self.problem, [], 0
        sums = torch.zeros(1, 3, dtype=torch.float64, device=problem.device)
        total = torch.zeros((), dtype=torch.float64, device=problem.device)
        budget = kept_budget(problem.device)

        def step(batch: Any) -> None:
            nonlocal held
            items = problem.items(batch)
            part, share = self._space.sums(items), problem.loss.normaliser(items)
            held += sum(tensor.numel() * tensor.element_size() for tensor in batches.tensors_in(batch))
            if held <= budget:
                kept.append(batches.map_tensors(batch, self._laid_out))
            sums.add_(part)
            total.add_(share)
            self.batch = max(self.batch, batches.size_of(batch))

        with torch.no_grad():
            problem.stream(step, "landscape")
        self._kept = kept if held <= budget else None
        self._normaliser = counted(total, problem.samples)
        if not bool(sums.isfinite().all()):
            problem.locate_bad_loss()
        loss = sums[:, LOSS] / total + self._penalty({})
        return float(loss), float(_accuracy(sums))

    def _laid_out(self, x: Tensor) -> Tensor:
        """Images and kernels as a CPU likes them, the channels of a pixel side by side.

        AlexNet takes 0.5 and LeNet-5 0.7 times as long for it, VGG-16 and ResNet-18 as long as otherwise.
        """
        images = self._channels_last and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if images else x


def _usual(device: torch.device, dimension: int) -> str:
    return TOGETHER if device.type == "cuda" and dimension <= _SMALL else LOOPED


def _accuracy(sums: Tensor) -> Tensor:
    """The share of right predictions, NaN where there are no classes."""
    return (sums[:, COUNTED] - sums[:, WRONG]) / sums[:, COUNTED]
