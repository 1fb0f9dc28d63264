"""A network's parameters as one vector θ, and the risk as a function of it, streamed over the data.

Everything that asks for the loss at other weights comes here: ascent, noise, lines, surfaces. Other values
stand in the place of the model's own while it runs, which are neither written to nor moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from flatness.errors import DifferentiabilityError, FlatnessError, LossError
from flatness.losses import Items, counted
from flatness.network.memory import attempt, ran_out
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem
from flatness.problem.substitution import Substitution, refuse_read_elsewhere

LOSS, WRONG, COUNTED = range(3)
"""Entries of what `ParameterSpace.sums` returns."""


class ParameterSpace:
    """θ, moves away from it, and E, ∇E and the accuracy there. Everything happens in a guarded problem.

    Vectors are flat, parameters in the order of `names`. Weight decay is part of E and ∇E.

    Args:
        problem: The model, data and loss.
        names: The parameters that make up θ; all of them when None. The others stay where they are.

    Attributes:
        parameters: The parameters by name, in the order of the vector.
        dimension: Length of the vector.
    """

    def __init__(self, problem: Problem, names: Iterable[str] | None = None) -> None:
        self.problem = problem
        everything: dict[str, nn.Parameter] = dict(problem.model.named_parameters())
        wanted = list(everything) if names is None else list(names)
        self.parameters = {name: everything[name] for name in wanted}
        self.dimension = sum(value.numel() for value in self.parameters.values())
        self._normaliser: float | None = None
        self._here: Mapping[str, Tensor] = self.parameters

    @cached_property
    def substitution(self) -> Substitution:
        """Where the model reads θ from, and from nowhere else."""
        found = Substitution(self.problem.model, self.parameters)
        example = self.problem.example(1)
        here = {name: value.detach() for name, value in self.parameters.items()}
        with differentiable(self.problem.model), explained(), torch.enable_grad():
            with found(here):
                output, _ = self.problem.outputs(example)
            refuse_read_elsewhere(output, self.parameters)
        return found

    @cached_property
    def theta(self) -> Tensor:
        """The parameters as they were given, in float64."""
        return self.join(self.parameters)

    @cached_property
    def starts(self) -> dict[str, int]:
        """Where in the vector each parameter begins."""
        sizes = [value.numel() for value in self.parameters.values()]
        return dict(zip(self.parameters, accumulate(sizes, initial=0), strict=False))

    def join(self, parts: Any) -> Tensor:
        """One float64 vector from tensors by name."""
        whole = torch.empty(self.dimension, dtype=torch.float64, device=self.problem.device)
        for name, place in self.split_exactly(whole).items():
            place.copy_(parts[name].detach())
        return whole

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Tensors by name from a vector, in the precision of the model."""
        return self.split_exactly(vector.to(self.problem.dtype))

    def split_exactly(self, vector: Tensor) -> dict[str, Tensor]:
        """Tensors by name from a vector, in its own precision."""
        pieces = vector.split([value.numel() for value in self.parameters.values()])
        named = zip(self.parameters.items(), pieces, strict=True)
        return {name: piece.view(value.shape) for (name, value), piece in named}

    def per_parameter(self, value: Callable[[str, Tensor], Tensor]) -> Tensor:
        """A vector filled parameter by parameter with `value(name, parameter)`, spread over its entries."""
        return self.join(
            {
                name: value(name, parameter.detach()).expand(parameter.shape)
                for name, parameter in self.parameters.items()
            }
        )

    @contextmanager
    def moved(self, vector: Tensor) -> Iterator[None]:
        """The model at θ + vector, by other parameters in the place of its own."""
        # Added in float64, so that a small step is rounded once and not twice.
        after = self.split(self.theta + vector.double())
        with self.substitution({name: value.contiguous() for name, value in after.items()}) as self._here:
            try:
                yield
            finally:
                self._here = self.parameters

    def sums(self, items: Items) -> Tensor:
        """Σℓ of some predictions, how many are wrong and how many count, (3,); zeros without classes."""
        total = self.problem.loss.values(items).sum(dtype=torch.float64)
        mistakes = self.problem.loss.mistakes(items)
        return torch.cat([total[None], total.new_zeros(2) if mistakes is None else mistakes])

    def risk(self, vector: Tensor | None = None) -> float:
        """E at θ, or at θ + vector. One forward pass over the data."""
        return float(self._summed(vector)[LOSS]) / self.normaliser + self.penalty(vector)

    def error_rate(self, vector: Tensor | None = None) -> float:
        """The share of wrong predictions at θ, or at θ + vector."""
        found = self._summed(vector)
        if not found[COUNTED]:
            raise LossError(
                "Expected a classification loss, as an accuracy is needed, but got "
                f"{self.problem.loss.name!r}. Use 'cross_entropy' or 'bce' with class targets."
            )
        return float(found[WRONG] / found[COUNTED])

    def _summed(self, vector: Tensor | None) -> Tensor:
        """`sums` of all the data."""
        return self.totals(lambda items: [self.sums(items)], vector)[0]

    def gradient(self, vector: Tensor | None = None) -> tuple[float, Tensor]:
        """E and ∇E at θ, or at θ + vector. One forward and one backward pass."""

        def slopes(items: Items) -> list[Tensor]:
            values = self.problem.loss.values(items)
            return [self.derivatives(values.sum()), values.detach().sum(dtype=torch.float64)]

        slope, total = self.totals(slopes, vector, differentiate=True)
        risk = float(total) / self.normaliser + self.penalty(vector)
        slope /= self.normaliser
        if self.problem.weight_decay:
            slope += self.problem.weight_decay * (self.theta if vector is None else self.theta + vector)
        return risk, slope

    def derivatives(self, outputs: Tensor, signal: Tensor | None = None) -> Tensor:
        """∂⟨signal, outputs⟩/∂θ as a float64 vector; zeros for parameters they do not depend on."""
        with explained():
            found = torch.autograd.grad(
                outputs,
                list(self._here.values()),
                signal,
                retain_graph=signal is not None,
                allow_unused=True,
                materialize_grads=True,
            )
        return self.join(dict(zip(self.parameters, found, strict=True)))

    @property
    def normaliser(self) -> float:
        """C of E = Σ ℓ_i / C, known after a pass."""
        if self._normaliser is None:
            self.totals(lambda items: [])
        assert self._normaliser is not None
        return self._normaliser

    def totals(
        self,
        answers: Callable[[Items], Sequence[Tensor]],
        vector: Tensor | None = None,
        *,
        differentiate: bool = False,
        label: str = "risk",
    ) -> list[Tensor]:
        """Sums over all samples of what their predictions at θ + vector say, in float64; one pass.

        Args:
            answers: What to sum, from the predictions of a micro-batch.
            vector: Where to evaluate; at θ when None.
            differentiate: Whether derivatives in the parameters are taken.
            label: What the progress bar says.
        """
        totals: list[Tensor] = []

        def step(batch: Any) -> None:
            with torch.set_grad_enabled(differentiate):
                items = self.problem.items(batch)
                found = [*answers(items), self.problem.loss.normaliser(items)]
            # Only now: when memory runs out above, the same samples come again in smaller batches.
            before = totals or [torch.zeros_like(part, dtype=torch.float64) for part in found]
            totals[:] = [total + part for total, part in zip(before, found, strict=True)]

        ranks, place = self.problem.ranks, nullcontext() if vector is None else self.moved(vector)
        with ranks.stage(), differentiable(self.problem.model), place:
            self.problem.stream(step, label)
        totals = ranks.summed(totals)
        self._normaliser = counted(totals.pop(), self.problem.samples)
        return totals

    @cached_property
    def samples(self) -> int:
        """Number of samples, of all processes together."""
        return sum(self.problem.ranks.gathered(self.problem.samples or 1))

    def penalty(self, vector: Tensor | None = None) -> float:
        """What weight decay adds to E at θ, or at θ + vector."""
        if not self.problem.weight_decay:
            return 0.0
        at = self.theta if vector is None else self.theta + vector
        return 0.5 * self.problem.weight_decay * float(at.square().sum())


def over_points(one: Callable[[Any], Tensor], points: Any, *, together: bool) -> Tensor:
    """What `one` returns at several points.

    Args:
        one: Takes one point: the same tensors without their first axis.
        points: A tensor, or tensors by name, with a leading axis for the point.
        together: Whether all points run at once through `torch.vmap`, or one after another.
    """
    if together:
        return torch.vmap(one)(points)
    count = len(tree_leaves(points)[0])
    return torch.stack([one(tree_map(lambda value, i=i: value[i], points)) for i in range(count)])


def vectorises(work: Callable[[], object]) -> bool:
    """Do some work; False if it fails though the network itself has run: `torch.vmap` does not take it."""
    _, error = attempt(work, Exception)
    if isinstance(error, FlatnessError):
        raise error
    return error is None


@contextmanager
def explained(*, second: bool = False) -> Iterator[None]:
    """Say what torch's complaint about a derivative means for the user.

    Args:
        second: Whether a second derivative is being taken that the Gauss-Newton part does without.
    """
    try:
        yield
    except RuntimeError as error:
        if ran_out(error):
            raise
        reason = str(error).splitlines()[0].split(":")[0]
        if second:
            raise DifferentiabilityError(
                f"Expected operators that torch can differentiate twice but it says: {reason}. Write the "
                "operator's backward with differentiable operations, or pass curvature='gauss_newton', which "
                "needs first derivatives only."
            ) from error
        raise DifferentiabilityError(
            f"Expected operators whose derivatives in the parameters torch can take but it says: {reason}. "
            "Replace the operator, or leave out what walks in parameter space (eigenvalues of the network, "
            "ascent)."
        ) from error
