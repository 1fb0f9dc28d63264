"""`flatness.measure`: plan, stream, finalise."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatness.curvature.exact import exact_statistics
from flatness.curvature.moments import feature_spreads
from flatness.curvature.routes import Routes
from flatness.curvature.spectrum import Spectrum, top_eigenvalues
from flatness.curvature.statistics import Statistics
from flatness.errors import DataError, LossError, NotFiniteError, OptionError, ProcessError, listed
from flatness.finalise import finalise
from flatness.forward import Forward
from flatness.measures.catalogue import LossGroup, by_loss
from flatness.memory import kept_budget
from flatness.plan import Plan, make_plan
from flatness.problem import Problem
from flatness.provenance import facts, provenance, shares
from flatness.ranks import Ranks
from flatness.result import Report, joined
from flatness.views import layer_views, network_view
from flatness.walking import walk


def measure(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    *,
    measures: str | Iterable[str] = "default",
    layers: str | Iterable[str] | None = None,
    method: str = "auto",
    curvature: str = "hessian",
    precision: float = 0.01,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    forward: Forward | None = None,
    weight_decay: float = 0.0,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Report:
    """Measure how flat the minimum is that a trained network sits in, layer by layer.

    The model is measured in evaluation mode and left exactly as it was. Under an initialised
    `torch.distributed` process group all processes must call this, each with its own part of the data: the
    report is that of all the data (see `separately` for measuring in one process alone).

    Args:
        model: The trained network, any `torch.nn.Module`.
        data: A DataLoader, a pair of tensors, or any re-iterable of batches; normally the training data.
        loss: "cross_entropy", "mse" (torch's mean), "squared_error" (a sum), "bce",
        "normalized_cross_entropy", "nll", a torch loss
            module, or a callable ``(output, target) -> one loss per sample``.
        measures: A name, a list of names, "default" (all that one shared pass gives) or "all".
        layers: None for every supported layer, "last", a name, or a list of names.
        method: "exact", or "auto", which is exact wherever that is possible and affordable.
        curvature: "hessian", or "gauss_newton" for that part of it.
        precision: Relative standard error that each sampled value aims at (exact values have none).
        options: Options of single measures, ``{"layer_flatness": {"tolerance": 1e-9}}``.
        forward: ``forward(model, batch) -> (output, target)`` for batches of another structure.
        weight_decay: Coefficient of torch's weight decay; adds its Hessian, weight_decay·I.
        batch_size: Samples per micro-batch; chosen by memory when None.
        device: Measure on a copy of the model there.
        dtype: Measure a copy of the model in that precision.
        seed: Seed of everything random.
        progress: Whether to show a bar on work of more than two seconds.

    Returns:
        A `Report`: print it, or use ``report.to_frame()``, ``report.value(...)``, ``report.save(...)``.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> report = flatness.measure(model, (torch.randn(50, 4), torch.randint(3, (50,))))
        >>> report.layers()
        ['0', '2']
        >>> report.result("relative_flatness", layer="2").method
        'exact'
    """
    started = time.perf_counter()
    _check_precision(precision)
    setting = {
        "forward": forward,
        "weight_decay": weight_decay,
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "seed": seed,
        "progress": progress,
    }
    planning = {"layers": layers, "method": method, "curvature": curvature}
    reports: list[Report] = []
    ranks = Ranks.current()
    setting["progress"] = progress and ranks.rank == 0
    for group in by_loss(measures, options):
        try:
            with ranks.stage():
                problem = Problem(model, data, loss if group.loss is None else group.loss, **setting)
            problem.ranks = ranks
            reports.append(_report(problem, group, planning, started, everything=measures == "all"))
        except (LossError, DataError, ProcessError) as error:
            # "all" means all that exist here: a measure defined with another loss may not fit the data.
            fitting = not isinstance(error, ProcessError) or error.kind in ("LossError", "DataError")
            if measures != "all" or group.loss is None or not fitting:
                raise
            reports.append(Report((), reports[0].meta, (f"left out: {listed(group.names)}. {error}",)))
    return joined(reports)


def _report(
    problem: Problem, group: LossGroup, planning: dict[str, Any], started: float, *, everything: bool
) -> Report:
    """Measure one group of measures that share a loss."""
    with problem.guarded():
        with problem.ranks.stage():
            chosen = make_plan(problem, measures=group.names, options=group.options, **planning)
        if problem.ranks.count > 1:
            problem.ranks.check_same(facts(problem, chosen))
        statistics, spectra, spreads = _run(problem, chosen)
        views = layer_views(problem, chosen, statistics, spectra, spreads)
        found = walk(problem, chosen, views, everything=everything)
    network = network_view(problem, chosen, statistics)
    results = finalise(chosen, views, network, found, problem.loss.name)
    meta = provenance(problem, chosen, statistics, time.perf_counter() - started)
    if problem.ranks.count > 1:
        meta |= shares(problem)
    return Report(tuple(results), meta, (*problem.notes, *chosen.notes))


def plan(model: nn.Module, data: Any, loss: Any = "cross_entropy", **arguments: Any) -> Plan:
    """What `measure` would do with the same arguments, and why; only a few samples are looked at.

    Example:
        >>> import torch, flatness
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> plan = flatness.plan(
        ...     model, (torch.randn(50, 4), torch.randint(3, (50,))), measures="relative_flatness"
        ... )
        >>> plan.routes.passes
        2
        >>> plan.reasons["2"]
        'last layer: the output is linear in its weight'
    """
    bound = inspect.signature(measure).bind(model, data, loss, **arguments)
    bound.apply_defaults()
    given = bound.arguments
    _check_precision(given.pop("precision"))
    groups = by_loss(given.pop("measures"), given.pop("options"))
    planning = {key: given.pop(key) for key in ("layers", "method", "curvature")}
    plans = []
    for group in groups:
        problem = Problem(**{**given, "loss": given["loss"] if group.loss is None else group.loss})
        with problem.guarded():
            plans.append(make_plan(problem, measures=group.names, options=group.options, **planning))
    plans[0].others = plans[1:]
    return plans[0]


def _check_precision(precision: Any) -> None:
    if not isinstance(precision, (int, float)) or not 0 < precision < 1:
        raise OptionError(
            f"Expected precision to be a relative standard error between 0 and 1 but got {precision!r}. "
            "For example precision=0.01."
        )


def _run(
    problem: Problem, chosen: Plan
) -> tuple[Statistics, dict[tuple[str, str], Spectrum], dict[str, Tensor]]:
    routes = chosen.routes
    available = {route.name: route.layer for route in routes.layers}
    spreads: dict[str, Tensor] = {}
    if chosen.needs_spread:
        spreads = feature_spreads(
            problem, {name: available[name] for name in chosen.needs_spread}, routes.copy_inputs
        )
    statistics = exact_statistics(problem, routes if chosen.streams else Routes([]), spreads)
    _check_totals(problem, statistics)
    if not chosen.spectra:
        return statistics, {}, spreads
    measured = [route for route in routes.layers if route.name in chosen.spectra]
    keep = chosen.kept_bytes * (problem.samples or 0) <= kept_budget(problem.device)
    settings = _spectrum_settings(chosen)
    return (
        statistics,
        top_eigenvalues(
            problem,
            Routes(measured, copy_inputs=routes.copy_inputs),
            chosen.spectra,
            normaliser=float(statistics.normaliser),
            keep=keep,
            **settings,
        ),
        spreads,
    )


def _check_totals(problem: Problem, statistics: Statistics) -> None:
    """Refuse sums that cannot be divided or that are no numbers."""
    if float(statistics.normaliser) == 0:
        raise DataError(
            f"Expected targets that count but all {statistics.samples} samples weigh 0: every target is "
            "ignored, or its class has weight 0. Check ignore_index and the class weights of the loss."
        )
    broken = [
        owner
        for owner, sums in statistics.sums.items()
        if not all(bool(value.isfinite().all()) for value in sums.values())
    ]
    if broken:
        raise NotFiniteError(
            f"Expected finite curvature but got NaN or infinity in {listed(sorted(broken))}, though every "
            f"loss is finite: numbers overflow in {problem.dtype}. Pass dtype=torch.float64."
        )


def _spectrum_settings(chosen: Plan) -> dict[str, Any]:
    """The strictest tolerance and the largest limit that any of the measures asks for."""
    asked = [options for options in chosen.options.values() if "max_products" in options]
    tolerances = [options["tolerance"] for options in asked if options["tolerance"] is not None]
    return {
        "tolerance": min(tolerances, default=None),
        "max_products": max(options["max_products"] for options in asked),
    }
