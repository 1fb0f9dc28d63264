"""Measures that explore the space of all parameters: eigenvalues of the network, ascent, noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache

from flatness.catalogue.measure import LayerView, Surroundings, Valued
from flatness.curvature.operators.network_spectrum import (
    NetworkSpectrum,
    SpectrumRequest,
    check_metric,
    network_spectra,
)
from flatness.curvature.parameters.hessian_operator import HessianOperator
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.sums.squared_gradients import (
    DRAWS,
    MOST_POSITIONS,
    SquaredGradients,
    squared_gradients,
)
from flatness.errors import DifferentiabilityError, LossError, ProcessError, UndefinedMeasureError, listed
from flatness.measuring.plan.plan import Plan
from flatness.problem.problem import Problem


@dataclass(frozen=True)
class Explored:
    """What was found, by measure.

    Attributes:
        spectra: Extreme eigenvalues of the network's Hessian.
        values: Values by layer, None for the network.
        notes: What the user should know.
    """

    spectra: Mapping[str, NetworkSpectrum] = field(default_factory=dict)
    values: Mapping[str, Mapping[str | None, Valued]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def explore(problem: Problem, plan: Plan, views: list[LayerView], *, everything: bool = False) -> Explored:
    """Run what cannot be a sum over one pass. The problem must be guarded.

    Measures that need the same thing share it: spectra advance in step, squared gradients are computed once.

    Args:
        problem: The model, data and loss.
        plan: What to measure.
        views: The measured layers.
        everything: Whether "all" was asked for, so that what does not exist here is left out with a note.
    """
    exploring = [measure for measure in plan.measures if measure.explore is not None]
    if not exploring and not plan.request.network_spectra:
        return Explored()
    space = ParameterSpace(problem)
    hessian = HessianOperator(space, curvature=plan.request.curvature, graph_bytes=plan.graph_bytes)
    squares = cache(lambda: squared_gradients(space, plan.gradient_routes))
    gradient = cache(space.gradient)
    solver = _Spectra(hessian, squares)
    notes: list[str] = []
    spectra = _planned_spectra(problem, plan, solver, notes, everything)
    values: dict[str, Mapping[str | None, Valued]] = {}
    weights = {name: layer.matrix() for name, layer in plan.called.items()}
    for measure in exploring:
        options = plan.request.options[measure.name]
        seen = [replace(view, options=options) for view in views]
        assert measure.explore is not None
        with _left_out(notes, [measure.name], everything):
            _refuse_several(problem)
            values[measure.name] = measure.explore(
                Surroundings(
                    space, seen, weights, gradient, squares, solver.one, hessian, options, problem.seed
                )
            )
    if squares.cache_info().currsize and squares().sampled:
        notes.append(
            f"squared gradients: more than {MOST_POSITIONS} predictions per sample, hence estimated from "
            f"{DRAWS} draws of random signs"
        )
    if hessian.error.relative is not None:
        notes.append(f"eigenvalues of the network: {hessian.error}")
    return Explored(spectra, values, tuple(notes))


@dataclass
class _Spectra:
    """Spectra of the network's Hessian, each solved once."""

    hessian: HessianOperator
    squares: Callable[[], SquaredGradients]
    solved: dict[SpectrumRequest, NetworkSpectrum] = field(default_factory=dict)

    def one(self, request: SpectrumRequest) -> NetworkSpectrum:
        """The spectrum that answers a request."""
        if request not in self.solved:
            self.advance_together([request])
        return self.solved[request]

    def advance_together(self, requests: Iterable[SpectrumRequest]) -> None:
        """Solve several in step; equal requests are one."""
        distinct = list(dict.fromkeys(requests))
        found = network_spectra(self.hessian, distinct, self.squares)
        self.solved.update(zip(distinct, found, strict=True))


def _planned_spectra(
    problem: Problem, plan: Plan, solver: _Spectra, notes: list[str], everything: bool
) -> dict[str, NetworkSpectrum]:
    """The spectra that measures need, by measure; without those that do not exist here, where allowed."""
    allowed = everything or all(measure.of_layers for measure in plan.measures if measure.network_needs)
    asked, requests = plan.request.network_spectra, {}
    if not asked:
        return {}
    with _left_out(notes, list(asked), allowed):
        _refuse_several(problem)
        for name, request in asked.items():
            with _left_out(notes, [name], allowed):
                check_metric(solver.hessian.space, request)
                requests[name] = request
        solver.advance_together(requests.values())
        return {name: solver.solved[request] for name, request in requests.items()}
    return {}


def _refuse_several(problem: Problem) -> None:
    if problem.ranks.count > 1:
        raise ProcessError(
            "Expected one process, as this walks in the space of all parameters, but got a group of "
            f"{problem.ranks.count}. Measure it in one process, on all the data, inside "
            "flatness.separately()."
        )


@contextmanager
def _left_out(notes: list[str], names: list[str], allowed: bool) -> Iterator[None]:
    """Turn what a measure cannot have here into a note, where that is allowed."""
    try:
        yield
    except (DifferentiabilityError, LossError, ProcessError, UndefinedMeasureError) as error:
        if not allowed:
            raise
        notes.append(f"left out for the network: {listed(names)}. {error}")
