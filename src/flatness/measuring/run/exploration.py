"""Measures that explore the space of all parameters: eigenvalues of the network, ascent, noise."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

from flatness.catalogue.measure import LayerView, Surroundings, Valued
from flatness.curvature.operators.network_spectrum import (
    check_metric,
    inverse_metric_root,
    metric_root,
    network_spectra,
)
from flatness.curvature.parameters.hessian_operator import HessianOperator
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.spectra import LAYER_METRICS, NetworkSpectrum, SpectrumRequest
from flatness.curvature.sums.squared_gradients import DRAWS, MOST_POSITIONS, squared_gradients
from flatness.errors import DifferentiabilityError, LossError, ProcessError, UndefinedMeasureError, listed
from flatness.measuring.plan.plan import Plan
from flatness.measuring.run.layer_metrics import metric_blocks
from flatness.measuring.run.run import Explored
from flatness.problem.problem import Problem

# What says that a measure does not exist for a network, its data or its loss.
_WITHOUT = (DifferentiabilityError, LossError, UndefinedMeasureError)


def explore(problem: Problem, plan: Plan, views: list[LayerView], *, everything: bool = False) -> Explored:
    """Run what cannot be a sum over one pass. The problem must be guarded.

    Measures that need the same thing share it: spectra advance in step, squared gradients are computed once.

    Args:
        problem: The model, data and loss.
        plan: What to measure.
        views: The measured layers.
        everything: Whether "all" was asked for, so that what does not exist here is left out with a note.
    """
    run = _Exploration(problem, plan, everything)
    return Explored(run.planned_spectra(), run.values(views), (*run.notes, *run.remarks()))


class _Exploration:
    """What measures share that explore the space of all parameters: each is computed once, when it is needed.

    Attributes:
        notes: What was left out, and why.
    """

    def __init__(self, problem: Problem, plan: Plan, everything: bool) -> None:
        self.notes: list[str] = []
        self._problem, self._plan, self._everything = problem, plan, everything
        self._space = ParameterSpace(problem)
        self._hessian = HessianOperator(
            self._space, curvature=plan.request.curvature, graph_bytes=plan.graph_bytes
        )
        self._squares = cache(lambda: squared_gradients(self._space, plan.gradient_routes))
        self._gradient = cache(self._space.gradient)
        self._blocks = cache(lambda metric: list(metric_blocks(self._space, plan, metric)))
        self._root = partial(metric_root, self._space, squared_gradients=self._squares, blocks=self._blocks)
        self._solved: dict[SpectrumRequest, NetworkSpectrum] = {}

    def planned_spectra(self) -> dict[str, NetworkSpectrum]:
        """The spectra that measures need, by measure; without those that do not exist here, where allowed."""
        asked, requests = self._plan.request.network_spectra, {}
        of_network = [measure for measure in self._plan.measures if measure.network_needs]
        allowed = self._everything or all(measure.of_layers for measure in of_network)
        with self._left_out(list(asked), allowed):
            for name, request in asked.items():
                with self._left_out([name], allowed):
                    check_metric(self._space, request)
                    if request.metric in LAYER_METRICS:
                        self._blocks(request.metric)
                    requests[name] = request
            return dict(zip(requests, self._spectra(requests.values()), strict=True))
        return {}

    def values(self, views: list[LayerView]) -> dict[str, Mapping[str | None, Valued]]:
        """What measures find that walk around in parameter space, by measure."""
        weights = {name: layer.matrix() for name, layer in self._plan.called.items()}
        values: dict[str, Mapping[str | None, Valued]] = {}
        for measure in self._plan.measures:
            if measure.explore is None:
                continue
            options = self._plan.request.options[measure.name]
            around = Surroundings(
                self._space,
                [replace(view, options=options) for view in views],
                weights,
                gradient=self._gradient,
                squared_gradients=self._squares,
                metric_root=lambda request: inverse_metric_root(self._space, request, self._squares),
                root=self._root,
                spectrum=lambda request: self._spectra([request])[0],
                hessian=self._hessian,
                options=options,
                seed=self._problem.seed,
            )
            with self._left_out([measure.name], self._everything):
                values[measure.name] = measure.explore(around)
        return values

    def remarks(self) -> Iterator[str]:
        """How what was shared was computed."""
        if self._squares.cache_info().currsize and self._squares().sampled:
            yield (
                f"squared gradients: more than {MOST_POSITIONS} predictions per sample, hence estimated from "
                f"{DRAWS} draws of random signs"
            )
        if self._hessian.error.relative is not None:
            yield f"eigenvalues of the network: {self._hessian.error}"

    def _spectra(self, requests: Collection[SpectrumRequest]) -> list[NetworkSpectrum]:
        """Solve several in step, each once; equal requests are one."""
        new = [request for request in dict.fromkeys(requests) if request not in self._solved]
        if new:
            self._solved |= zip(new, network_spectra(self._hessian, new, self._root), strict=True)
        return [self._solved[request] for request in requests]

    @contextmanager
    def _left_out(self, names: list[str], allowed: bool) -> Iterator[None]:
        """Turn what a measure cannot have here into a note, where that is allowed."""
        try:
            yield
        except (*_WITHOUT, ProcessError) as error:
            kind = error.kind if isinstance(error, ProcessError) else type(error).__name__
            if not allowed or kind not in [one.__name__ for one in _WITHOUT]:
                raise
            self.notes.append(f"not computed for the whole network: {listed(names)}. {error}")
