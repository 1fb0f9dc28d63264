"""What `flatness.measure(..., statistics_to=path)` keeps of one part of the data, for `flatness.merge`.

It is all that rows are made from: the sums, the folds that standard errors come from, the weights that
finalisers read, and what was measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatness.catalogue.measure import Measure
from flatness.catalogue.registry import adapted_measures
from flatness.curvature.sums.kinds import statistics_of
from flatness.errors import MeasureError, OptionError, listed
from flatness.files import check_folder, sealed, write_tensors
from flatness.measuring.run.run import Run
from flatness.measuring.scatter import Scatter
from flatness.measuring.views import Outline
from flatness.version import __version__

FORMAT, VERSION = "flatness statistics", 2


def check_destination(path: str | os.PathLike[str]) -> None:
    """Refuse a file that cannot be written, before any data is looked at."""
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(
            f"Expected statistics_to to be a path but got {type(path).__name__}. For example "
            "statistics_to='part-3.pt'."
        )
    if not str(path) or Path(path).is_dir():
        raise OptionError(
            f"Expected statistics_to to name a file but got {str(path)!r}. For example "
            "statistics_to='part-3.pt'."
        )
    check_folder(path)


def additive(measures: Any, options: Mapping[str, Mapping[str, Any]] | None) -> tuple[list[str], list[str]]:
    """The measures that are functions of sums over samples, and notes on those that are left out.

    A word that stands for many leaves out what is no sum; names of such measures are refused.

    Raises:
        MeasureError: With the names and the reasons.
    """
    chosen, _ = adapted_measures(measures, options)
    why = {one.name: reason for one in chosen if (reason := _why_no_sum(one)) is not None}
    refused = listed([f"{name} ({reason})" for name, reason in why.items()], 40)
    if why and measures not in ("default", "all"):
        raise MeasureError(
            f"Expected measures that are functions of sums over samples, as statistics_to= saves those, but "
            f"got {refused}. Leave them out, or measure them on all the data in one call."
        )
    notes = [f"left out, as statistics_to= saves sums over samples: {refused}"] if why else []
    return [one.name for one in chosen if one.name not in why], notes


def _why_no_sum(measure: Measure) -> str | None:
    if measure.explore is not None:
        return f"computed apart, with {measure.cost or 'passes of its own'}"
    if not measure.of_sums:
        return "eigenvalues"
    if any(statistic.scaled for statistic in statistics_of(measure.needs)):
        return "needs the spread of features over all the data"
    return None


def part_of(outline: Outline, run: Run, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What to keep of one part of the data, measured with one loss, in dictionaries, tensors and texts.

    Args:
        outline: What was measured.
        run: What the engines found.
        facts: What must be the same in all parts.
    """
    layers = {
        name: {
            **vars(own),
            "weight": own.weight.detach().cpu().clone(),
            "needs": sorted(own.needs),
            "layer": None,
        }
        for name, own in outline.layers.items()
    }
    names = [measure.name for measure in outline.request.measures]
    # Layers are named by the outline, whatever the words for them were.
    request = {**vars(outline.request), "measures": names, "layers": None}
    return {
        "outline": {**vars(outline), "request": request, "layers": layers},
        "statistics": run.statistics.content(),
        "gauss_newton": None if run.gauss_newton is None else run.gauss_newton.content(),
        "groups": None if run.groups is None else [part.content() for part in run.groups.parts],
        "scatter": vars(run.scatter or Scatter()),
        "methods": run.methods,
        "probes": run.probes,
        "remarks": run.remarks,
        # Every job may have a seed of its own.
        "facts": {name: value for name, value in facts.items() if name != "seed"},
    }


def save_parts(
    path: str | os.PathLike[str],
    parts: Sequence[Mapping[str, Any]],
    left_out: Sequence[str],
    own_risk: Sequence[Mapping[str, Any]],
) -> None:
    """Write what one job measured, whole or not at all.

    Args:
        path: The file.
        parts: What `part_of` made for each loss, with the `meta` and the notes of its report.
        left_out: Notes on measures that are not among them.
        own_risk: The risk of the user's loss where no measure uses that, see `risk_of`; else nothing.
    """
    head = {"format": FORMAT, "version": VERSION, "flatness": __version__}
    write_tensors(path, sealed({**head, "parts": parts, "left_out": left_out, "own_risk": own_risk}))
