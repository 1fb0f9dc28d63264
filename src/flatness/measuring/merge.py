"""Parts of the data, measured by separate jobs: saved as sums, and merged into one report.

What `flatness.measure(..., statistics_to=path)` saves is all that rows are made from: the sums of one part of
the data, the folds that standard errors come from, the weights that finalisers read, and what was measured.
Sums add up, so that the merged report has the values of one measurement over all the data, to rounding where
they are exact; where they are sampled, every part has its own random directions, and its folds add up with
those of the others.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from flatness.catalogue.measure import Measure
from flatness.catalogue.registry import adapted_measures, get_measure
from flatness.curvature.sums.kinds import statistics_of
from flatness.curvature.sums.statistics import SampleGroups, Statistics
from flatness.errors import DataError, MeasureError, OptionError, listed
from flatness.files import (
    CHECKSUM,
    DamagedFileError,
    check_folder,
    intact,
    read_tensors,
    sealed,
    write_tensors,
)
from flatness.measuring.provenance import joint_fingerprint, with_risk
from flatness.measuring.request import MeasureRequest
from flatness.measuring.rows import report_rows, row_notes
from flatness.measuring.run.run import Run
from flatness.measuring.scatter import Scatter
from flatness.measuring.views import LayerOutline, Outline
from flatness.report.report import Report, joined
from flatness.version import __version__

_FORMAT, _VERSION = "flatness statistics", 2


def merge(paths: Iterable[str | os.PathLike[str]]) -> Report:
    """One report from parts of the data that separate jobs measured with ``statistics_to=``.

    All parts must have been measured by the same version of flatness, on the same model, with the same loss,
    measures, options, layers, curvature and weight decay. Every part counts once.

    Args:
        paths: The files, in any order.

    Returns:
        The report that one measurement over all the data would give: exact values to rounding; sampled ones
        with standard errors that combine those of the parts.

    Example:
        >>> import tempfile, torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(60, 4), torch.randint(3, (60,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paths = [f"{folder}/part-{task}.pt" for task in range(3)]
        ...     for task, path in enumerate(paths):
        ...         mine = slice(20 * task, 20 * task + 20)
        ...         _ = flatness.measure(model, (x[mine], y[mine]), statistics_to=path)
        ...     report = flatness.merge(paths)
        >>> report.meta["samples"]
        60
    """
    files = _files(paths)
    contents = [_read(path) for path in files]
    _check_same(files, contents)
    _check_once(files, contents)
    report = joined([_merged(parts) for parts in zip(*(one["parts"] for one in contents), strict=True)])
    report = with_risk(report, [risk for content in contents for risk in content["own_risk"]])
    left_out = (note for content in contents for note in content["left_out"])
    return replace(report, notes=tuple(dict.fromkeys((*report.notes, *left_out))))


def _files(paths: Any) -> list[Path]:
    given = [paths] if isinstance(paths, (str, os.PathLike)) or not isinstance(paths, Iterable) else [*paths]
    strange = [path for path in given if not isinstance(path, (str, os.PathLike))]
    if strange:
        raise OptionError(
            f"Expected paths of files but got {type(strange[0]).__name__}. For example "
            "flatness.merge(['part-0.pt', 'part-1.pt'])."
        )
    if not given:
        raise DataError(
            "Expected files that flatness.measure(..., statistics_to=path) wrote but got none. Check the "
            "pattern."
        )
    return [Path(path) for path in given]


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

    "default" and "all" leave out what is not a sum; such measures are refused if named.

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
    if any(statistic.units for statistic in statistics_of(measure.needs)):
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
    head = {"format": _FORMAT, "version": _VERSION, "flatness": __version__}
    write_tensors(path, sealed({**head, "parts": parts, "left_out": left_out, "own_risk": own_risk}))


def _read(path: Path) -> dict[str, Any]:
    again = "Measure this part again with statistics_to=."
    if not path.is_file():
        raise DataError(
            f"Expected a file that flatness.measure(..., statistics_to=path) wrote but there is no {path}."
        )
    try:
        content = read_tensors(path)
    except DamagedFileError:
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise DataError(
            f"Expected statistics that flatness.measure(..., statistics_to=path) wrote but {path} holds "
            f"something else, or is damaged. {again}"
        )
    if content.get("version") != _VERSION:
        raise DataError(
            f"Expected statistics of version {_VERSION} but {path} has version {content.get('version')}. "
            f"{again}"
        )
    if CHECKSUM not in content or not intact(content):
        raise DataError(
            f"Expected statistics as they were saved, but {path} has changed since, on the disk or on the "
            "way here. Copy it again, or measure this part again."
        )
    return content


def _check_same(files: list[Path], contents: list[dict[str, Any]]) -> None:
    """Refuse parts that were not measured alike."""
    first = _facts(contents[0])
    for path, content in zip(files[1:], contents[1:], strict=True):
        facts = _facts(content)
        # In this order: how layers are measured follows from the measures, which say more.
        for what in first | facts:
            if facts.get(what) != first.get(what):
                raise DataError(
                    f"Expected parts of one measurement but {path} and {files[0]} differ in their {what}: "
                    f"{_short(facts.get(what))} and {_short(first.get(what))}. Measure all parts in the "
                    "same way."
                )


def _facts(content: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in all parts, in words."""
    parts = content["parts"]
    losses = [part["outline"]["loss"] for part in parts]
    found: dict[str, Any] = {"version of flatness": content["flatness"], "losses": losses}
    for part, loss in zip(parts, losses, strict=True):
        facts = {
            **part["facts"],
            "measured layers": list(part["outline"]["layers"]),
            "data_stderr": part["groups"] is not None,
        }
        suffix = "" if len(parts) == 1 else f" with {loss}"
        found |= {f"{what}{suffix}": value for what, value in facts.items()}
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _check_once(files: list[Path], contents: list[dict[str, Any]]) -> None:
    """Refuse a part that is given twice."""
    seen: dict[Any, Path] = {}
    for path, content in zip(files, contents, strict=True):
        meta = content["parts"][0]["meta"]
        # Data that could not be told apart have the fingerprint 0; then files are.
        code = meta["data_fingerprint"]
        key = path.resolve() if code == "0" else (code, meta["samples"])
        if key in seen:
            raise DataError(
                f"Expected every part of the data once, but {path} and {seen[key]} hold the same "
                "samples. Leave one out, or give each job its own part."
            )
        seen[key] = path


def _merged(parts: Sequence[Mapping[str, Any]]) -> Report:
    """The report of all parts of one loss."""
    outline = _outline(parts[0]["outline"])
    sums = [Statistics.of(part["statistics"]) for part in parts]
    total = reduce(Statistics.merge, sums, Statistics())
    # Folds of means over each part become folds of means over all.
    folds = [
        Scatter(**part["scatter"]).divided(total.normaliser / own.normaliser)
        for part, own in zip(parts, sums, strict=True)
    ]
    sampled = {name for part in parts for name, method in part["methods"].items() if method == "sampled"}
    run = Run(
        total,
        {name: "sampled" if name in sampled else "exact" for name in parts[0]["methods"]},
        groups=_groups(parts),
        scatter=reduce(Scatter.beside, folds),
        remarks={name: _remarks(parts, name) for name in parts[0]["methods"]},
    )
    run.probes = max(part["probes"] for part in parts)
    gauss_newton = [part["gauss_newton"] for part in parts]
    if None not in gauss_newton:
        run.gauss_newton = reduce(Statistics.merge, map(Statistics.of, gauss_newton), Statistics())
    rows = report_rows(outline, run)
    notes = (*_notes(parts, run), *row_notes(outline, run, rows))
    return Report(tuple(rows), _meta(parts, total), notes)


def _outline(saved: Mapping[str, Any]) -> Outline:
    asked = saved["request"]
    measures = [get_measure(name).under(asked["options"][name]) for name in asked["measures"]]
    layers = {
        name: LayerOutline(**{**own, "needs": frozenset(own["needs"])})
        for name, own in saved["layers"].items()
    }
    request = MeasureRequest(**{**asked, "measures": measures})
    return Outline(**{**saved, "request": request, "layers": layers})


def _groups(parts: Sequence[Mapping[str, Any]]) -> SampleGroups | None:
    """The groups of samples of all parts, where they were asked for."""
    if parts[0]["groups"] is None:
        return None
    groups = SampleGroups()
    for part in parts:
        for mine, theirs in zip(groups.parts, part["groups"], strict=True):
            mine.merge(Statistics.of(theirs))
    return groups


def _remarks(parts: Sequence[Mapping[str, Any]], layer: str) -> tuple[str, ...]:
    """What all parts say of a layer: numbers of one part are not those of all the data."""
    first, *others = (part["remarks"].get(layer, ()) for part in parts)
    return tuple(one for one in first if all(one in other for other in others))


def _meta(parts: Sequence[Mapping[str, Any]], total: Statistics) -> dict[str, Any]:
    metas = [part["meta"] for part in parts]
    return {
        **metas[0],
        "data_fingerprint": joint_fingerprint(int(meta["data_fingerprint"], 16) for meta in metas),
        "samples": total.samples,
        "risk": float(total.risk / total.normaliser),
        "seconds": round(sum(meta["seconds"] for meta in metas), 4),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "parts": [
            {key: meta[key] for key in ("samples", "data_fingerprint", "seed", "seconds")} for meta in metas
        ],
    }


def _notes(parts: Sequence[Mapping[str, Any]], run: Run) -> tuple[str, ...]:
    metas = [part["meta"] for part in parts]
    samples = [str(meta["samples"]) for meta in metas]
    notes = [f"merged from {len(parts)} parts of {listed(samples, 20)} samples"]
    if run.scatter and run.scatter.folds and len({meta["seed"] for meta in metas}) < len(parts):
        notes.append(
            "some parts were sampled with the same seed, so their errors are correlated. The standard "
            "errors account for that; with a seed per job they would be smaller"
        )
    return tuple(dict.fromkeys([*notes, *(note for part in parts for note in part["notes"])]))
