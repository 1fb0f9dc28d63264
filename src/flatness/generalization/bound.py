"""`flatness.generalization_bound`: representativeness plus flatness, with everything that is assumed."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from flatness.catalogue.options import share
from flatness.errors import NotExactError
from flatness.generalization.assumptions import (
    Assumption,
    Expansion,
    assumed,
    at_minimum,
    expansions,
    given_delta,
    smooth_density,
    why_smaller,
)
from flatness.generalization.bound_result import BoundTerm, GeneralizationBound
from flatness.generalization.chosen_layer import (
    choose_layer,
    collect_samples,
    measured_flatness,
    require_all_through,
)
from flatness.generalization.fitting import fitter_of
from flatness.generalization.kernels import Kernel, bandwidth, kernel_of
from flatness.generalization.locally_constant import LabelConstancy, label_constancy
from flatness.generalization.perturbed_layer import ChosenLayer
from flatness.generalization.rate_constants import rate_constants
from flatness.generalization.representativeness import (
    Representativeness,
    check_features,
    check_folds,
    cross_validated,
    layer_notes,
)
from flatness.problem import setting_of
from flatness.problem.model import Forward
from flatness.problem.problem import Problem
from flatness.problem.ranks import separately
from flatness.report.report import Report
from flatness.report.tables import format_value

_LABEL_SAMPLES = 1000
_FAILURE = share(0.05, "a probability between 0 and 1", example="failure=0.05")
_CROSS = "cross-validated, eq. 3: the paper says it is then technically not a bound"
# A sum this share of the gap below the gap is worth a warning; less is within what refits differ by.
_BELOW = 0.1


@separately()
def generalization_bound(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    *,
    layer: str = "last",
    delta: float | str | None = None,
    kernel: str | Kernel = "uniform",
    sigma: float | None = None,
    fitter: Any = "auto",
    penalty: float = 1.0,
    folds: int = 3,
    draws: int = 100,
    failure: float = 0.05,
    forward: Forward | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
) -> GeneralizationBound:
    """E_gen ≲ representativeness + δ²/(2m) κ_Tr (petzka2021, §5), with its terms and what they assume.

    Args:
        model: The trained network.
        data: Its training data.
        loss: As for `flatness.measure`.
        layer: Name of a Linear layer, or "last".
        delta: δ; "rule" for |S|^(−1/(4+m)); None for the largest of that and its halves at which the
            second-order expansion holds (`assumptions.TOLERANCE`), with the rule's terms below.
        kernel: Of the local distributions, as for `representativeness`.
        sigma: Of the truncated normal.
        fitter: What refits ψ in every fold, as for `representativeness`.
        penalty: Of both linear fits.
        folds: Folds of the cross-validation.
        draws: Draws per point.
        failure: Δ, the probability with which Theorem 6 may fail.
        forward: ``forward(model, batch) -> (output, target)`` for batches with another structure.
        batch_size: Samples per micro-batch; chosen by memory when None.
        device: Work on a copy of the model there.
        dtype: Work on a copy of the model in that precision.
        seed: Seed of everything random.
        progress: Whether to show a bar on work of more than two seconds.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
        >>> bound = flatness.generalization_bound(
        ...     model, (torch.randn(60, 4), torch.randint(3, (60,))), delta=0.1
        ... )
        >>> [term.kind for term in bound.terms]
        ['approximation', 'approximation', 'approximation', 'approximation', 'approximation', 'approximation']
    """
    setting = setting_of(locals())
    _FAILURE.check("failure", failure)
    shape, given = kernel_of(kernel, sigma), given_delta(delta)
    problem = Problem(model, data, loss, **setting)
    fitter_of(fitter, problem.loss, 1, penalty)
    with problem.guarded():
        chosen = choose_layer(problem, layer)
        require_all_through(chosen)
        seen = collect_samples(problem, chosen)
        z, y = seen.z, seen.y
        check_folds(folds, len(z))
        check_features(z)
        names = ["relative_flatness", "maximal_relative_flatness"]
        report = measured_flatness(names, chosen, (model, data, loss), setting)
        flat = None if isinstance(report, NotExactError) else report
        notes = [f"no flatness: {report}"] if flat is None else []
        kappa = flat.value("relative_flatness", layer=chosen.name) if flat else None
        predict = chosen.predictor()
        tried = expansions(predict, z, y, problem.loss, shape, kappa, given, seed)
        step, rule = tried[-1].delta, bandwidth(*z.shape)
        minimum = at_minimum(chosen, kappa, step)
        few = z[:_LABEL_SAMPLES], y[:_LABEL_SAMPLES]
        with torch.no_grad():
            # Definition 9 with the nearest sample's label in place of the unknown y(·).
            labels = label_constancy(predict, *few, problem.loss, seed=seed, layer=chosen.name)
    refit = fitter_of(fitter, problem.loss, seen.outputs, penalty)
    represented = functools.partial(
        cross_validated, z, y, refit, problem.loss, kernel=shape, folds=folds, draws=draws, seed=seed
    )
    found = represented(delta=step, layer=chosen.name, notes=tuple(layer_notes(chosen)))
    terms = _bound_terms(found, flat, chosen, shape)
    notes += _below_the_gap(found, terms, tried[-1])
    if given is None and step < rule:
        terms += _rule_terms(represented(delta=rule), flat, chosen, shape)
        notes.append(why_smaller(tried))
    share = None if kappa is None else kappa / (2 * chosen.features)
    rate = () if share is None else rate_constants(z, shape, share, seen.largest_loss, failure)
    return GeneralizationBound(
        layer=chosen.name,
        samples=len(z),
        features=chosen.features,
        delta=step,
        terms=tuple(terms),
        rate=rate,
        assumptions=(*minimum, _label_assumption(labels), smooth_density(z), *assumed(tried[-1])),
        representativeness=found,
        labels=labels,
        notes=tuple(dict.fromkeys([*notes, *found.notes, *problem.notes])),
    )


def _bound_terms(
    found: Representativeness, flat: Report | None, chosen: ChosenLayer, kernel: Kernel
) -> list[BoundTerm]:
    """All terms at the δ of a cross-validated representativeness; without flatness, the others are None."""
    delta, m, d = found.delta, chosen.features, chosen.outputs
    kappa = flat.result("relative_flatness", layer=chosen.name) if flat else None
    maximal = flat.value("maximal_relative_flatness", layer=chosen.name) if flat else math.nan
    factor, tau2 = delta**2 / (2 * m), kernel.second_moment(m)
    term, error = (factor * kappa.value, factor * kappa.stderr) if kappa else (math.nan, 0.0)
    uniform, whole = delta**2 * d / 2 * maximal, math.hypot(found.stderr, error)
    rows = [
        ("representativeness", found.value, found.stderr, _CROSS),
        ("flatness term", term, error, "δ²/(2m) κ_Tr, Theorem 5: up to O(δ³), at a minimum, labels held"),
        ("bound", found.value + term, whole, "representativeness + flatness term, §5"),
        (
            "with the kernel's radius",
            found.value + tau2 * term,
            whole,
            f"the same with E[r²] = {tau2:.3g} δ² for δ²",
        ),
        ("uniform flatness term", uniform, 0.0, "(δ²d/2) κ^φ, Theorem 14: over all ‖A‖ ≤ 1, up to O(δ³)"),
        (
            "uniform bound",
            found.value + uniform,
            found.stderr,
            "Theorem 15 (without its second Σ_s, a slip)",
        ),
    ]
    return [
        BoundTerm(name, None if math.isnan(value) else value, stderr, "approximation", source)
        for name, value, stderr, source in rows
    ]


def _rule_terms(
    found: Representativeness, flat: Report | None, chosen: ChosenLayer, kernel: Kernel
) -> list[BoundTerm]:
    """The first three at the rule's δ, for comparison with a smaller one."""
    where = f"δ = |S|^(−1/(4+m)) = {found.delta:.3g}"
    return [
        BoundTerm(f"{term.name} at the rule's δ", term.value, term.stderr, term.kind, where)
        for term in _bound_terms(found, flat, chosen, kernel)[:3]
    ]


def _below_the_gap(found: Representativeness, terms: list[BoundTerm], expansion: Expansion) -> list[str]:
    """Warn where the sum lies below the gap it should bound: the flatness term misses a part of E_F."""
    value = {term.name: term.value for term in terms}
    whole, flat = value["bound"], value["flatness term"]
    if whole is None or flat is None or found.gap - whole <= _BELOW * abs(found.gap):
        return []
    advice = "pass a smaller delta, at which the expansion holds"
    if expansion.holds:
        advice = "the network's own ψ does as the flatness term says, but the refitted one is less robust"
    return [
        f"not a bound here: it lies below the cross-validated gap of {format_value(found.gap)}, since the "
        f"risk of the refitted ψ rises by {format_value(found.robustness)} under the perturbation and the "
        f"flatness term is {format_value(flat)}; {advice}"
    ]


def _label_assumption(labels: LabelConstancy) -> Assumption:
    largest = max(labels.deltas)
    detail = (
        f"Definition 9's left side is {labels.value:.3g} at δ = {largest:g}, {labels.order_in_words()}, with "
        "the nearest sample's label for y(·) [heuristic]"
    )
    holds = None if math.isnan(labels.order) else labels.holds
    return Assumption("locally constant labels", labels.order, holds, detail)
