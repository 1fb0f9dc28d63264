"""What pilots on a few samples have in common, of probes and of directions of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flatness.catalogue.measure import SPECTRA, LayerView, Measure
from flatness.curvature.sums.folds import FOLDS, FOLDS_OF_LARGE, LARGE
from flatness.curvature.sums.routes import LayerRoute
from flatness.curvature.sums.statistics import Statistics
from flatness.measuring.plan.plan import Plan
from flatness.measuring.scatter import Scatter, standard_error
from flatness.measuring.views import Outline, layer_values, layer_views
from flatness.problem.problem import Problem

# Pilot probes of each sample, or of each unit of samples.
PROBES = 2
# A variance from a few hundred samples, or from a few units, may be too small by as much.
CAUTION = 1.5
_FEWEST_SAMPLES, _MOST_SAMPLES = 32, 512


def pilot_size(samples: int | None) -> int:
    """How many of so many samples a pilot looks at: an eighth, within limits; the most where none knows."""
    return _MOST_SAMPLES if samples is None else min(_MOST_SAMPLES, max(_FEWEST_SAMPLES, samples // 8))


def fold_count(routes: Iterable[LayerRoute]) -> int:
    """Degrees of freedom of standard errors."""
    return FOLDS_OF_LARGE if any(route.needs & LARGE for route in routes) else FOLDS


def relative_variances(
    problem: Problem,
    plan: Plan,
    spreads: dict[str, Tensor],
    statistics: Statistics,
    scatter: Scatter,
    names: Collection[str],
    gauss_newton: Statistics | None = None,
) -> list[Tensor]:
    """Squared standard errors of all values of layers that a pilot gives, measure by measure.

    They are relative to the value, or to that of the Gauss-Newton part where it is larger and known: where
    the two parts nearly cancel, no number of probes reaches a precision relative to what is left.

    Nothing when none of the pilot's samples counts: they all have targets that are ignored.
    """
    if not float(statistics.normaliser):
        return []
    sums = [m for m in plan.measures if m.needs and not m.needs & SPECTRA and (m.units or m.layer)]
    variances: list[Tensor] = []
    outline = Outline.of(problem, plan)
    views = layer_views(outline, statistics, {}, spreads)
    parts = layer_views(outline, statistics if gauss_newton is None else gauss_newton, {}, spreads)
    for view, part in zip(views, parts, strict=True):
        for measure in sums if view.name in names else ():
            options = plan.request.options[measure.name]
            pair = replace(view, options=options), replace(part, options=options)
            # Values that are not finite are refused after the pass over all samples, with their layers.
            variances.append(_relative_variance(measure, *pair, scatter).nan_to_num(nan=torch.inf))
    return variances


def _relative_variance(measure: Measure, view: LayerView, part: LayerView, scatter: Scatter) -> Tensor:
    """Those of one measure of one layer, seen whole and in its Gauss-Newton part."""
    at = layer_values(measure, view)
    size = torch.maximum(at.abs(), layer_values(measure, part).abs())
    levels = len(measure.reductions) if measure.units is not None else 1
    moved = scatter.of_layer(view, partial(layer_values, measure), at, measure.clips)
    error = torch.zeros_like(at) if moved is None else standard_error(moved)
    return (error / size.clamp(min=1e-300))[-levels:].square()
