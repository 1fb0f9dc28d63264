"""Loss and accuracy of a network at many points θ + Σ_k c_k d_k of its parameter space.

Points are evaluated in chunks. A chunk is one pass over the data, which stays on the device between chunks
when it fits there. On a CPU the points of a chunk take turns on every micro-batch; on a GPU they run
together, each layer with a leading axis for the point, by the engine that is faster in a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flatness.errors import OptionError
from flatness.landscape.choosing import choose_engine
from flatness.landscape.engines import LOOPED, LOSS, Stacked, accuracy_of, bytes_of
from flatness.landscape.first_layers import KeptMaps, Steps
from flatness.losses import counted
from flatness.measuring.examine.probe import check_example
from flatness.network.memory import fits, kept_budget
from flatness.problem import batches
from flatness.problem.problem import Problem

BATCH_NORM = ("as_is", "recomputed")
"""Statistics of batch norm: those of the model at every point, or computed anew there."""

Direction = Mapping[str, Tensor]
"""A change of parameters, and perhaps of buffers, by name; what is not named stays."""

# Points that share a pass: on a CPU few, so that an interrupt loses little.
_CHUNK = {"cpu": 8, "cuda": 64}
_LEFT_ALONE = "batch norm's statistics leave out batches of a single sample"
_ONE_BY_ONE = "torch.vmap does not take this network; its points were evaluated one by one"


class Points:
    """A network, seen from its parameters θ. Use it inside ``with problem.guarded():``.

    Args:
        problem: The model, data and loss.
        batch_norm: One of `BATCH_NORM`.
        engine: One of `engines.ENGINES`; None chooses by device and a trial.
        chunk: Points per pass over the data; None chooses.
        fixed_batch: Whether the size of micro-batches is the user's, and stays.

    Attributes:
        loss: E at θ, weight decay included.
        accuracy: The share of right predictions at θ; NaN where there are no classes.
        batch: Samples in the largest batch.
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
        self.engine = engine or LOOPED
        self.chunk = chunk or _CHUNK.get(problem.device.type, 8)
        # First of all: a forward pass may bring weights to where they are measured.
        check_example(problem, problem.example(2))
        self._stacked = Stacked(problem, self.engine)
        self._stacked.check_reading(problem.example(1))
        self._recompute = batch_norm == "recomputed" and bool(self._stacked.norms)
        self._values = {
            name: value.detach()
            for name, value in (*problem.model.named_parameters(), *problem.model.named_buffers())
        }
        self._buffers = frozenset(name for name, _ in problem.model.named_buffers())
        self._directions: dict[str, Tensor] = {}
        self._kept: list[Any] | None = []
        self._maps, self._maps_along = KeptMaps(0), None
        self._map_budget = kept_budget(problem.device) // 2
        if engine is None and problem.device.type == "cuda":
            self._choose(fixed_batch)
        self._normaliser, self.batch = 0.0, 0
        self.loss, self.accuracy = self._at_theta()

    @property
    def has_batch_norm(self) -> bool:
        """Whether the network has batch norm."""
        return bool(self._stacked.norms)

    def along(self, directions: Sequence[Direction]) -> Points:
        """The same points, with directions d_k to go along."""
        names = dict.fromkeys(name for direction in directions for name in direction)
        self._directions, self._maps_along = {}, None
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
        self._maps, self._map_budget = KeptMaps(0), 0
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
        steps = self._steps(coefficients)
        moved = steps.moved()
        with torch.no_grad():
            if self._recompute:
                moved |= self._statistics(moved, steps)
            sums = torch.zeros(count, 3, dtype=torch.float64, device=self.problem.device)

            def step(batch: Any) -> None:
                part = self._stacked.sums(moved, batch, steps)
                sums.add_(part)

            self._pass(step)
        loss = sums[:, LOSS] / self._normaliser + self._penalty(moved, count)
        # Of outputs that are NaN, argmax would name a class all the same.
        accuracy = torch.where(loss.isnan(), torch.nan, accuracy_of(sums))
        return torch.stack([loss, accuracy], dim=1).cpu()

    def _steps(self, coefficients: Tensor) -> Steps:
        """The points, without the directions in which none of them goes."""
        goes = coefficients.any(0)
        along = goes.tolist()
        if along != self._maps_along:
            self._maps, self._maps_along = KeptMaps(self._map_budget), along
        directions = {name: D[goes] for name, D in self._directions.items()}
        maps = None if self._kept is None else self._maps
        return Steps(self._values, directions, coefficients[:, goes], maps, self._buffers)

    def _penalty(self, moved: dict[str, Tensor], count: int) -> Tensor:
        decay = self.problem.weight_decay
        total = torch.zeros(count, dtype=torch.float64, device=self.problem.device)
        if decay:
            for name, parameter in self.problem.model.named_parameters():
                value = moved.get(name, parameter.detach()[None])
                total = total + value.double().square().flatten(1).sum(1)
        return 0.5 * decay * total

    def _statistics(self, moved: dict[str, Tensor], steps: Steps) -> dict[str, Tensor]:
        """Statistics of the batch norms at each point: means over micro-batches, weighed by samples."""
        norms = {id(buffer) for norm in self._stacked.norms for buffer in norm.buffers()}
        found = {
            name: buffer.detach().expand(len(steps.coefficients), *buffer.shape).clone()
            for name, buffer in self.problem.model.named_buffers()
            if id(buffer) in norms
        }
        seen, alone = 0, 0

        def step(batch: Any) -> None:
            nonlocal seen, alone
            n = batches.size_of(batch)
            trial = {name: value.clone() for name, value in found.items()}
            try:
                self._stacked.track({**moved, **trial}, batch, n / (seen + n), steps)
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

    def _pass(self, step: Callable[[Any], None]) -> None:
        """One pass over the data: over what is kept of it, or streamed; see `Problem.stream`."""
        if self._kept is None:
            self.problem.stream(step, "landscape")
            return
        for batch in self._kept:
            step(batch)

    def _choose(self, fixed_batch: bool) -> None:
        choice = choose_engine(self.problem, self.chunk)
        if choice.engine == LOOPED:
            self.problem.notes.append(_ONE_BY_ONE)
        self.engine = choice.engine
        self._stacked = Stacked(self.problem, self.engine)
        if not fixed_batch:
            self.problem.micro_batch = choice.samples

    def _at_theta(self) -> tuple[float, float]:
        """E and accuracy of the network as it is; targets are checked, and the data kept if it fits."""
        problem, kept, held = self.problem, [], 0
        sums = torch.zeros(1, 3, dtype=torch.float64, device=problem.device)
        total = torch.zeros((), dtype=torch.float64, device=problem.device)
        budget = kept_budget(problem.device)

        def step(batch: Any) -> None:
            nonlocal held
            items = problem.items(batch)
            values = problem.loss.values(items).sum(dtype=torch.float64)
            wrong = problem.loss.mistakes(items)
            sums[0].add_(torch.cat([values[None], values.new_zeros(2) if wrong is None else wrong]))
            total.add_(problem.loss.normaliser(items))
            self.batch = max(self.batch, batches.size_of(batch))
            held += bytes_of(batch)
            if held <= budget:
                kept.append(batch)

        with torch.no_grad():
            problem.stream(step, "landscape")
        self._kept = kept if held <= budget else None
        self._normaliser = counted(total, problem.samples)
        if not bool(sums.isfinite().all()):
            problem.locate_bad_loss()
        loss = sums[:, LOSS] / total + self._penalty({}, 1)
        return float(loss), float(accuracy_of(sums))
