"""`flatness.measure`: request, plan, run, rows; and `flatness.plan`, which stops after the second."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from flatness.catalogue.registry import LossGroup, by_loss, select_measures
from flatness.curvature.sums.statistics import SampleGroups
from flatness.errors import DataError, LossError, ProcessError, listed
from flatness.losses import resolve_loss
from flatness.measuring.plan.plan import Plan
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.provenance import facts, provenance, risk_of, shares, with_risk
from flatness.measuring.request import MeasureRequest
from flatness.measuring.rows import relative_error, report_rows, row_notes
from flatness.measuring.run.run import run_plan
from flatness.measuring.views import Outline, layer_views
from flatness.problem import setting_of
from flatness.problem.model import DefaultForward, Forward
from flatness.problem.problem import Problem
from flatness.problem.ranks import Ranks
from flatness.report.report import Report, joined

# Arguments of `measure` that say how.
_WORDS = ("layers", "method", "curvature", "precision", "max_passes")


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
    max_passes: int = 100,
    data_stderr: bool = False,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    forward: Forward | None = None,
    weight_decay: float = 0.0,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    samples: int | str | None = None,
    tf32: bool = False,
    seed: int = 0,
    progress: bool = True,
    statistics_to: str | os.PathLike[str] | None = None,
) -> Report:
    """Measure how flat the minimum is that a trained network sits in, layer by layer.

    The model is measured in evaluation mode and then restored exactly. Under an initialised
    `torch.distributed` process group all processes must call this, each with its own part of the data: the
    report is about all the data (see `separately` for measuring in one process alone).

    Args:
        model: The trained network, any `torch.nn.Module`.
        data: A DataLoader, a Dataset, a pair of tensors, a dict of tensors with "labels", or any re-iterable
            of batches; normally the training data.
        loss: "cross_entropy", "mse" (torch's mean), "squared_error" (a sum), "bce",
            "normalized_cross_entropy", "nll", a torch loss module, or a callable
            ``(output, target) -> one loss per sample``.
        measures: A name, a list of names, "default" (all that one shared pass gives) or "all".
        layers: None for every supported layer, "last", "trainable" (those that are not frozen), a name, or a
            list of names.
        method: "exact", "sampled", or "auto", which is exact wherever that is possible and affordable.
        curvature: "hessian", "gauss_newton" for that part of it, or "finite_differences" for the Hessian
            of networks with operators that torch cannot differentiate twice.
        precision: Target for the standard error of each sampled layer value, relative to the value or to its
            Gauss-Newton part, whichever is larger; exact values have no error.
        max_passes: The most random probes per sample, on average; if that is too few, a note says what
            precision was reached.
        data_stderr: Whether every result also gets the standard error of its value as an estimate for the
            distribution that the samples were drawn from. It does not shrink with more probes, only with
            more data.
        options: Options of single measures, ``{"layer_flatness": {"tolerance": 1e-9}}``.
        forward: ``forward(model, batch) -> (output, target)`` for batches with another structure.
        weight_decay: Coefficient of torch's weight decay; adds its Hessian, weight_decay·I.
        batch_size: Samples per micro-batch; by default as many as fit into memory.
        device: Where to measure, such as "cuda:1", on a copy of the model; by default where the model is.
        dtype: Floating-point type to measure a copy of the model in; by default the model's own.
        samples: How many samples to draw at random, without replacement, or "enough" for as many as the
            precision takes; by default all are measured. Standard errors then include the choice of samples,
            for values that are functions of sums over samples, and precision refers to all of the data.
        tf32: Whether a GPU may round factors of float32 products to TF32: faster, and good for about three
            digits.
        seed: Seed of everything random.
        progress: Whether to show a bar on work of more than two seconds.
        statistics_to: A file for the sums behind this report, so that `merge` makes one report from the parts
            of the data that several jobs measure. Give each job its own part and its own seed.

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
    given = _settled(locals())
    started, ranks = time.perf_counter(), Ranks.current()
    given |= {"progress": progress and ranks.rank == 0, "ranks": ranks}
    if statistics_to is not None:
        from flatness.measuring.merge import check_destination

        check_destination(statistics_to)
    if samples is None:
        return _reported(given, started)[0]
    from flatness.measuring.part import measured_part

    return measured_part(partial(_reported, started=started), given)


def _reported(given: Mapping[str, Any], started: float) -> tuple[Report, float]:
    """The report, and the largest relative error of a layer's value."""
    statistics_to, ranks, measures = given["statistics_to"], given["ranks"], given["measures"]
    everything, left_out = measures == "all", []
    if statistics_to is not None:
        from flatness.measuring.merge import additive

        measures, left_out = additive(measures, given["options"])
    groups = by_loss(measures, given["options"])
    measured: list[tuple[Report, dict[str, Any], float]] = []
    for group in groups:
        try:
            measured.append(_measured(given, group, started))
        except (LossError, DataError, ProcessError) as error:
            of_data = not isinstance(error, ProcessError) or error.kind in ("LossError", "DataError")
            # "all" means all that exist here: the loss of a group may not fit the data.
            if not (everything and group.loss is not None and of_data):
                raise
            left_out.append(f"left out: {listed(group.options)}. {error}")
    reports, parts, errors = zip(*measured, strict=True)
    # The risk of a report is that of the user's loss, whether a measure rests on it or not.
    own_risk = [] if groups[0].loss is None else [risk_of(_problem(given, given["loss"]))]
    if statistics_to is not None and ranks.rank == 0:
        from flatness.measuring.merge import save_parts

        save_parts(statistics_to, parts, left_out, own_risk)
    asked = given["measures"]
    order = [measure.name for measure in select_measures(asked)] if isinstance(asked, str) else ()
    report = with_risk(joined([*reports], order), own_risk)
    return replace(report, notes=(*report.notes, *left_out)), max(errors)


def _measured(
    given: Mapping[str, Any], group: LossGroup, started: float
) -> tuple[Report, dict[str, Any], float]:
    """Measure one group of measures that share a loss.

    Returns:
        Their report, what it was made from, to be kept, and the largest relative error of a layer's value.
    """
    ranks, kept = given["ranks"], given["statistics_to"] is not None
    with ranks.stage():
        problem, request = _posed(given, group)
    with problem.guarded():
        with ranks.stage():
            plan = make_plan(problem, request)
        alike = facts(problem, plan) if kept or ranks.count > 1 else {}
        ranks.check_same(alike)
        # Where errors are to count which samples were measured.
        population, distribution = given.get("population"), given["data_stderr"]
        counted = population is not None or distribution
        groups = SampleGroups(population, distribution=distribution) if counted else None
        run = run_plan(problem, plan, groups)
        outline = Outline.of(problem, plan)
        if request.explores:
            from flatness.measuring.run.exploration import explore

            views = layer_views(outline, run.statistics, run.spectra, run.spreads)
            run.explored = explore(problem, plan, views, everything=given["measures"] == "all")
        results, part = report_rows(outline, run), {}
        if kept:
            from flatness.measuring.merge import part_of

            part = part_of(outline, run, alike)
    meta = provenance(problem, plan, run.statistics, time.perf_counter() - started)
    if ranks.count > 1:
        meta |= shares(problem)
    notes = (*problem.notes, *plan.notes, *run.notes, *run.explored.notes)
    report = Report(tuple(results), meta, (*notes, *row_notes(outline, run, results)))
    error = 0.0 if population is None else relative_error(outline, run, results)
    return report, {**part, "meta": meta, "notes": notes}, error


def _settled(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `measure` by name; one forward for all losses, as the user's says what labels mean."""
    forward = arguments["forward"] or DefaultForward(resolve_loss(arguments["loss"]))
    return {**arguments, "forward": forward}


def _posed(given: Mapping[str, Any], group: LossGroup) -> tuple[Problem, MeasureRequest]:
    """The problem and the request of one group of measures that share a loss."""
    request = MeasureRequest(group.measures, group.options, **{word: given[word] for word in _WORDS})
    _check_classes(given["loss"], group)
    return _problem(given, given["loss"] if group.loss is None else group.loss), request


def _problem(given: Mapping[str, Any], loss: Any) -> Problem:
    return Problem(given["model"], given["data"], loss, **setting_of(given), ranks=given.get("ranks"))


def _check_classes(loss: Any, group: LossGroup) -> None:
    """Refuse a classification loss in place of another kind of loss, whose targets are not classes."""
    if group.loss is None:
        return
    from flatness.losses.elementwise import Elementwise

    if isinstance(resolve_loss(loss), Elementwise):
        raise LossError(
            f"Expected a classification loss, as {listed(group.options)} rests on {group.loss}, but got "
            f"{resolve_loss(loss).name!r}. Use loss='cross_entropy' with class targets, or leave it out."
        )


def plan(model: nn.Module, data: Any, loss: Any = "cross_entropy", **arguments: Any) -> Plan:
    """What `measure` would do with the same arguments, why, and at what cost; looks at only a few samples.

    If a layer has its own forward or a hook on its output, one forward pass over all of the data checks
    whether it computes what its class does.

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
    from flatness.measuring.plan.estimate import estimate

    bound = inspect.signature(measure).bind(model, data, loss, **arguments)
    bound.apply_defaults()
    given = _settled(bound.arguments)
    plans = []
    for group in by_loss(given["measures"], given["options"]):
        problem, request = _posed(given, group)
        with problem.guarded():
            made = make_plan(problem, request)
            plans.append(replace(made, estimate=estimate(problem, made)))
    return replace(plans[0], others=tuple(plans[1:]))
