"""Parts of the data, measured by separate jobs: saved as sums, and merged into one report.

What `flatness.measure(..., statistics_to=path)` saves is all that rows are made from: the sums of one part of
the data, the folds that standard errors come from, the weights that finalisers read, and what was measured.
Sums add up, so that the merged report has the values of one measurement over all the data, to rounding where
they are exact; where they are sampled, every part has its own random directions, and its folds add up with
those of the others.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatness.catalogue.measure import SPECTRA, Measure
from flatness.catalogue.registry import get_measure, resolve_options, select_measures
from flatness.curvature.sums.groups import SampleGroups
from flatness.curvature.sums.kinds import statistics_of
from flatness.curvature.sums.statistics import Statistics
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
from flatness.measuring.rows.finalisation import report_rows
from flatness.measuring.run.exploration import Explored
from flatness.measuring.run.run import Run
from flatness.measuring.scatter import Scatter
from flatness.measuring.views import LayerOutline, Outline, layer_views
from flatness.report.report import Report, joined
from flatness.version import __version__

_FORMAT, _VERSION = "flatness statistics", 1


@dataclass(frozen=True)
class Part:
    """One part of the data, measured with one loss.

    Attributes:
        outline: What was measured.
        run: What the engines found.
        facts: What must be the same in all parts.
        meta: The `meta` of its report.
        notes: What to say about it.
    """

    outline: Outline
    run: Run
    facts: Mapping[str, Any]
    meta: dict[str, Any]
    notes: Sequence[str]


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
    given = [paths] if isinstance(paths, (str, os.PathLike)) or not isinstance(paths, Iterable) else [*paths]
    strange = [path for path in given if not isinstance(path, (str, os.PathLike))]
    if strange:
        raise OptionError(
            f"Expected paths of files but got {type(strange[0]).__name__}. For example "
            "flatness.merge(['part-0.pt', 'part-1.pt'])."
        )
    files = [Path(path) for path in given]
    if not files:
        raise DataError(
            "Expected files that flatness.measure(..., statistics_to=path) wrote but got none. Check the "
            "pattern."
        )
    contents = [_read(path) for path in files]
    _check_same(files, contents)
    _check_once(files, contents)
    parts = [[_loaded(group) for group in content["groups"]] for content in contents]
    reports = [_merged(group) for group in zip(*parts, strict=True)]
    report = joined(reports)
    own = [content["own_risk"] for content in contents]
    if all(own):
        risk = sum(one["risk"] for one in own) / sum(one["normaliser"] for one in own)
        report = replace(report, meta={**report.meta, **own[0]["loss"], "risk": risk})
    return report


def additive(measures: Any, options: Mapping[str, Mapping[str, Any]] | None) -> tuple[list[str], list[str]]:
    """The measures that are functions of sums over samples, and notes on those that are left out.

    A word that stands for many leaves out what is no sum; names of such measures are refused.

    Raises:
        MeasureError: With the names and the reasons.
    """
    chosen = select_measures(measures)
    resolved = resolve_options(chosen, options)
    adapted = [one.adapted(resolved[one.name]) if one.adapted else one for one in chosen]
    why = {one.name: reason for one in adapted if (reason := _why_no_sum(one)) is not None}
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
        return "looks at the loss around the parameters"
    if measure.needs & SPECTRA or "spectrum" in measure.network_needs:
        return "eigenvalues"
    if any(statistic.scaled for statistic in statistics_of(measure.needs)):
        return "needs the spread of features over all the data"
    return None


def check_destination(path: str | os.PathLike[str] | None) -> None:
    """Refuse a file that cannot be written, before any data is looked at."""
    if path is not None:
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


def save_parts(
    path: str | os.PathLike[str], parts: Sequence[Part], own_risk: Mapping[str, Any] | None
) -> None:
    """Write what one job measured, whole or not at all.

    Args:
        path: The file.
        parts: One part for each loss.
        own_risk: The risk of the user's loss where no measure uses that, with its normaliser.
    """
    head = {"format": _FORMAT, "version": _VERSION, "flatness": __version__}
    write_tensors(path, sealed({**head, "groups": [_saved(part) for part in parts], "own_risk": own_risk}))


def _saved(part: Part) -> dict[str, Any]:
    outline, run = part.outline, part.run
    return {
        "outline": {
            "measures": [measure.name for measure in outline.measures],
            "options": outline.options,
            "loss": outline.loss,
            "curvature": outline.curvature,
            "weight_decay": outline.weight_decay,
            "layers": {
                name: [own.weight.detach().cpu().clone(), own.taps, sorted(own.needs), own.reason]
                for name, own in outline.layers.items()
            },
            "network": outline.network,
            "norms": outline.norms,
            "sizes": outline.sizes,
            "layer_sizes": outline.layer_sizes,
            "sources": {name: [list(one) for one in found] for name, found in outline.sources.items()},
        },
        "statistics": run.statistics.content(),
        "groups": None if run.groups is None else [part.content() for part in run.groups.parts],
        "scatter": [run.scatter.count, {owner: dict(found) for owner, found in run.scatter.folds.items()}],
        "methods": dict(run.methods),
        "remarks": {name: list(remarks) for name, remarks in run.remarks.items()},
        "facts": dict(part.facts),
        "meta": json.loads(json.dumps(part.meta)),
        "notes": list(part.notes),
    }


def _loaded(saved: Mapping[str, Any]) -> Part:
    outline = dict(saved["outline"])
    names, options = outline["measures"], outline["options"]
    measures = [one.adapted(options[one.name]) if one.adapted else one for one in map(get_measure, names)]
    layers = {
        name: LayerOutline(weight, taps, frozenset(needs), reason)
        for name, (weight, taps, needs, reason) in outline["layers"].items()
    }
    sources = {name: [(owner, key) for owner, key in found] for name, found in outline["sources"].items()}
    groups = None
    if saved["groups"] is not None:
        groups = SampleGroups()
        groups.parts = [Statistics.of(content) for content in saved["groups"]]
    run = Run(
        Statistics.of(saved["statistics"]),
        dict(saved["methods"]),
        groups=groups,
        scatter=Scatter(*saved["scatter"]),
        remarks={name: tuple(remarks) for name, remarks in saved["remarks"].items()},
    )
    made = Outline(**{**outline, "measures": measures, "layers": layers, "sources": sources})
    return Part(made, run, saved["facts"], saved["meta"], saved["notes"])


def _read(path: Path) -> dict[str, Any]:
    again = "Measure this part again with statistics_to=."
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
            f"Expected statistics as they were saved but {path} has changed since, on the disk or on the way "
            "here. Copy it again, or measure this part again."
        )
    return content


def _check_same(files: list[Path], contents: list[dict[str, Any]]) -> None:
    """Refuse parts that were not measured alike."""
    first = _facts(contents[0])
    for path, content in zip(files[1:], contents[1:], strict=True):
        facts = _facts(content)
        # How layers are measured follows from the measures and the loss, which say more.
        for what in sorted(first.keys() | facts.keys(), key=lambda what: (what.startswith("layers"), what)):
            if facts.get(what) != first.get(what):
                raise DataError(
                    f"Expected parts of one measurement but {path} and {files[0]} differ in their {what}: "
                    f"{_short(facts.get(what))} and {_short(first.get(what))}. Measure all parts alike."
                )


def _facts(content: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in all parts, in words."""
    found: dict[str, Any] = {"version of flatness": content["flatness"], "losses": len(content["groups"])}
    for group in content["groups"]:
        suffix = "" if len(content["groups"]) == 1 else f" with {group['outline']['loss']}"
        found |= {f"{what}{suffix}": value for what, value in group["facts"].items()}
        found[f"measured layers{suffix}"] = list(group["outline"]["layers"])
        found[f"data_stderr{suffix}"] = group["groups"] is not None
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _check_once(files: list[Path], contents: list[dict[str, Any]]) -> None:
    """Refuse a part that is given twice."""
    seen: dict[Any, Path] = {}
    for path, content in zip(files, contents, strict=True):
        meta = content["groups"][0]["meta"]
        # Data that could not be told apart have the fingerprint 0; then files are.
        code = meta["data_fingerprint"]
        key = path.resolve() if code == "0" else (code, meta["samples"])
        if key in seen:
            raise DataError(
                f"Expected every part of the data once but {path} and {seen[key]} hold the same samples. "
                "Leave one out, or give each job its own part."
            )
        seen[key] = path


def _merged(parts: Sequence[Part]) -> Report:
    """The report of all parts of one loss."""
    first = parts[0]
    run = Run(Statistics(), {}, groups=None if first.run.groups is None else SampleGroups())
    for part in parts:
        run.statistics.merge(part.run.statistics)
        for name, method in part.run.methods.items():
            run.methods[name] = method if run.methods.get(name, "exact") == "exact" else "sampled"
        if run.groups is not None and part.run.groups is not None:
            for mine, theirs in zip(run.groups.parts, part.run.groups.parts, strict=True):
                if theirs.samples:
                    mine.merge(theirs)
    run.scatter = _scatter(parts, run.statistics.normaliser)
    run.remarks = {name: _common([part.run.remarks.get(name, ()) for part in parts]) for name in run.methods}
    rows = report_rows(first.outline, run, Explored(), layer_views(first.outline, run.statistics, {}, {}))
    return Report(tuple(rows), _meta(parts, run.statistics), _notes(parts, run))


def _scatter(parts: Sequence[Part], normaliser: Tensor) -> Scatter:
    """The folds of all parts, which are those of means over each, added up to folds of means over all."""
    count = max(part.run.scatter.count for part in parts)
    folds: dict[str, dict[str, Tensor]] = {}
    for part in parts:
        share = float(part.run.statistics.normaliser / normaliser)
        for owner, statistics in part.run.scatter.folds.items():
            mine = folds.setdefault(owner, {})
            for name, value in statistics.items():
                padded = torch.cat([value, value.new_zeros(count - len(value), *value.shape[1:])])
                mine[name] = mine.get(name, 0) + share * padded
    return Scatter(count, folds)


def _common(remarks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What all parts say: numbers of one part are not those of all the data."""
    return tuple(one for one in remarks[0] if all(one in others for others in remarks))


def _meta(parts: Sequence[Part], statistics: Statistics) -> dict[str, Any]:
    metas = [part.meta for part in parts]
    # Codes of samples add up modulo 2^64, whatever the parts: the fingerprint is that of all the data.
    code = (sum(int(meta["data_fingerprint"], 16) for meta in metas) + 2**63) % 2**64 - 2**63
    return {
        **metas[0],
        "data_fingerprint": f"{code:x}",
        "samples": statistics.samples,
        "risk": float(statistics.risk / statistics.normaliser),
        "seconds": round(sum(meta["seconds"] for meta in metas), 4),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "parts": [
            {key: meta[key] for key in ("samples", "data_fingerprint", "seed", "seconds")} for meta in metas
        ],
    }


def _notes(parts: Sequence[Part], run: Run) -> tuple[str, ...]:
    notes = [
        f"merged from {len(parts)} parts of {listed([str(p.meta['samples']) for p in parts], 20)} samples"
    ]
    seeds = {part.meta["seed"] for part in parts}
    if len(parts) > 1 and run.scatter.folds and len(seeds) < len(parts):
        notes.append(
            "some parts were sampled with the same seed, so that their errors go together; the standard "
            "errors count that. Give every job a seed of its own for smaller ones"
        )
    return tuple(dict.fromkeys([*notes, *(note for part in parts for note in part.notes)]))
