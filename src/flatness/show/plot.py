"""`flatness.plot`: the obvious picture of anything that flatness returns."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatness.errors import OptionError
from flatness.report.report import Report
from flatness.report.trajectory import Trajectory

if TYPE_CHECKING:
    from flatness.show.plots.themes import Picture

# What draws each kind of result: a module of `plots` and a function (path, result, *, dark). Kinds are
# named, so that nothing is imported that is not drawn.
_DRAWN_BY = {
    "Report": ("reports", "save_report"),
    "Trajectory": ("reports", "save_trajectory"),
    "Comparison": ("reports", "save_comparison"),
    "InvarianceReport": ("reports", "save_check"),
    "Line": ("landscape", "save_line"),
    "Surface": ("surfaces", "save_contour"),
    "Density": ("landscape", "save_density"),
    "Study": ("study", "save_study"),
    "ExperimentStudy": ("study", "save_experiment"),
    "GeneralizationBound": ("generalization", "save_terms"),
    "LabelConstancy": ("generalization", "save_labels"),
    "Robustness": ("generalization", "save_robustness"),
}
# Those of them that take measures=.
_CHOOSING = ("Report", "Trajectory", "Comparison", "InvarianceReport", "Study")


def plot(
    thing: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    measures: str | Iterable[str] | None = None,
    dark: bool = False,
) -> Picture:
    """Draw a result: returns a matplotlib figure that notebooks display.

    ============================  ====================================================================
    what                          picture
    ============================  ====================================================================
    a `Report`                    layer by layer, a panel per measure
    reports in a dict or a list,  against epoch, a panel per measure; the keys of a dict are the epochs
    a trajectory, a `Monitor`
    a `Comparison`                the ratio of both networks with its error, a row per measure
    a check of invariance         how far each measure moved, by kind of rewriting
    a study                       a measure against the generalisation gap, a mark per network
    a line, a surface, a density  loss and accuracy; contours; the eigenvalues' density
    a bound, feature robustness   its terms with their errors; its curve over δ
    ============================  ====================================================================

    Args:
        thing: The result.
        path: A file to also save it to; its extension, such as .png, .svg or .pdf, sets the format.
        measures: A name or a list of names: what to draw of a result that has several measures; for a study,
            one of its columns.
        dark: Whether to draw light on dark.

    Example:
        >>> import torch, flatness
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> report = flatness.measure(model, (torch.randn(50, 4), torch.randint(3, (50,))))
        >>> figure = flatness.plot(report, measures="relative_flatness")
        >>> figure.axes[0].get_xlabel()
        'relative flatness'
    """
    thing = _in_order(thing)
    names = [kind.__name__ for kind in type(thing).__mro__ if kind.__module__.startswith("flatness.")]
    name = next((name for name in names if name in _DRAWN_BY), None)
    if name is None:
        raise OptionError(
            f"Expected a result of flatness that has a picture but got {type(thing).__name__}. Pass a "
            "report, a dict of reports, a comparison, a check, a study, a landscape or a bound."
        )
    if measures is not None and name not in _CHOOSING:
        raise OptionError(
            f"Expected measures= with a result that has several measures but got {type(thing).__name__}. "
            "Leave it out."
        )
    module, function = _DRAWN_BY[name]
    draw = getattr(importlib.import_module(f"flatness.show.plots.{module}"), function)
    names = [measures] if isinstance(measures, str) else measures
    chosen = {} if names is None else {"measures": list(names)}
    return draw(path, thing, dark=dark, **chosen)


def _in_order(thing: Any) -> Any:
    """Reports in a dict, a list or a monitor's history as a trajectory; anything else as it is."""
    history = getattr(thing, "history", None)
    if isinstance(history, list):
        if not history:
            raise OptionError("Expected a monitor that has measured but it holds no report yet.")
        return _numbered(dict(history), "step")
    if isinstance(thing, Mapping) and _are_reports(list(thing.values())):
        numbered = all(isinstance(key, int | float) for key in thing)
        return _numbered(thing, "epoch") if numbered else Trajectory.of([*map(str, thing)], [*thing.values()])
    if isinstance(thing, list | tuple) and _are_reports(thing):
        names = [str(report.meta.get("checkpoint", place)) for place, report in enumerate(thing)]
        return Trajectory.of(names, list(thing))
    return thing


def _are_reports(things: Sequence[Any]) -> bool:
    return bool(things) and all(isinstance(thing, Report) for thing in things)


def _numbered(reports: Mapping[Any, Report], unit: str) -> Trajectory:
    names, steps = (f"{key:g}" for key in reports), map(float, reports)
    return Trajectory(tuple(names), tuple(steps), tuple(reports.values()), unit)
