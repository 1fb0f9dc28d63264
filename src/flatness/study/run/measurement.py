"""Measure one trained network, as it is and after a random rescaling that leaves its function alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatness.catalogue.registry import select_measures
from flatness.errors import UndefinedMeasureError
from flatness.measuring.measure import measure
from flatness.report.report import Report
from flatness.study.configuration import digest
from flatness.study.objects import Corrupted, stream_seed
from flatness.study.training.program import risk_and_accuracy
from flatness.symmetry.rewriting.rescaling import rescale

_PASSED_ON = ("layers", "method", "curvature", "precision", "options", "batch_size")
_KEPT = ("measure", "layer", "reduction", "value", "stderr", "method", "converged")
_EXAMPLE = 64


def measuring_key(settings: Mapping[str, Any]) -> str:
    """Digest of how a study measures: a record measured otherwise is measured again, not trained again."""
    asked = {table: dict(settings.get(table, {})) for table in ("measure", "rescale")}
    asked["measure"].pop("which", None)  # who is measured changes nothing about how
    return digest({**asked, "which": None})


def measured(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    loss: str,
    seed: int,
    key: str,
    settings: Mapping[str, Any],
    so_far: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """The `measuring` part of a record: values of layers and network, perhaps also of a rescaled copy.

    Args:
        model: The network.
        train: What it was trained on.
        loss: The loss's name.
        seed: Of what is random.
        key: The network's key; the rescaling depends on it.
        settings: The study's tables.
        so_far: What `keep` was last given, if it was measured in the same way.
        keep: Called after each pass with what has been found.
    """
    own = measuring_key(settings)
    passes = _passes(model, train, {"loss": loss, "progress": False, "seed": seed}, settings)
    found: dict[str, Any] = {"key": own, "samples": len(passes[0].data[0]), "results": [], "notes": []}
    found |= {"seconds": 0.0, "passes": 0}
    if so_far is not None and so_far["key"] == own:
        found = dict(so_far)
    if "rescale" in settings:
        found.setdefault("rescaled", [])
        passes += _rescaled_passes(passes, train[0], key, settings["rescale"])
    for each in passes[found["passes"] :]:
        _add(found, each)
        keep(found)
    return {name: value for name, value in found.items() if name != "passes"}


def corruptions_key(settings: Mapping[str, Any]) -> str | None:
    """Digest of the table [corruptions]; None where there is none."""
    return digest(settings["corruptions"]) if settings.get("corruptions") else None


def on_corrupted(
    model: nn.Module, tests: Sequence[Corrupted], loss: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The `corrupted` part of a record: mean loss and accuracy on every corrupted copy of the test data."""
    results = []
    for kind, strength, test in tests:
        risk, accuracy = risk_and_accuracy(model, test, loss)
        results.append({"kind": kind, "strength": strength, "loss": risk, "accuracy": accuracy})
    return {"key": corruptions_key(settings), "results": results}


@dataclass(frozen=True)
class _Pass:
    """One call of `measure`, the place in the record for what it finds, and what every row says beside."""

    model: nn.Module
    data: tuple[Tensor, Tensor]
    arguments: Mapping[str, Any]
    place: str = "results"
    label: Mapping[str, Any] = field(default_factory=dict)

    @property
    def measures(self) -> list[str]:
        """Their names."""
        return [one.name for one in select_measures(self.arguments["measures"])]

    def of(self, names: Collection[str]) -> _Pass:
        """The same for those of its measures that have one of these names."""
        kept = [name for name in self.measures if name in names]
        options = {name: given for name, given in self.arguments.get("options", {}).items() if name in kept}
        return replace(self, arguments={**self.arguments, "measures": kept, "options": options})


def _passes(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> list[_Pass]:
    """What [measure] asks for; then [measure.subset], which goes by [measure] where it is silent."""
    asked = settings.get("measure", {})

    def one(table: Mapping[str, Any]) -> _Pass:
        given = {name: table[name] for name in _PASSED_ON if name in table}
        data = (train[0][: table.get("samples")], train[1][: table.get("samples")])
        return _Pass(model, data, {**given, "measures": table.get("measures", "default"), **arguments})

    if "subset" not in asked:
        return [one(asked)]
    fewer = one({**asked, "options": {}, **asked["subset"]})
    return [one(asked), replace(fewer, label={"samples": len(fewer.data[0])})]


def _rescaled_passes(
    passes: Sequence[_Pass], inputs: Tensor, key: str, asked: Mapping[str, Any]
) -> list[_Pass]:
    """The same passes over a rescaled copy, for the measures that [rescale] asks for."""
    # By key: networks that share a training seed must not share their factors.
    drawn = stream_seed(asked.get("seed", 0), "rescale", key) % 2**31
    given = {name: asked[name] for name in ("kind", "low", "high", "condition") if name in asked}
    with torch.no_grad():
        equal = rescale(passes[0].model, inputs[:_EXAMPLE], seed=drawn, **given)
    moved = [replace(each, model=equal, place="rescaled", label={}) for each in passes]
    if asked.get("measures") is None:
        return moved
    names = {one.name for one in select_measures(asked["measures"])}
    return [each.of(names) for each in moved if names & set(each.measures)]


def _add(found: dict[str, Any], asked: _Pass) -> None:
    """Put what one pass finds where it belongs."""
    started = time.perf_counter()
    notes = found["notes"] if asked.place == "results" else []
    for report in _reports(asked, notes):
        found.setdefault("risk", report.meta["risk"])
        found[asked.place] += [{**row, **asked.label} for row in _rows(report)]
        notes += [note for note in report.notes if note not in notes]
    found["seconds"] = round(found["seconds"] + time.perf_counter() - started, 3)
    found["passes"] += 1


def _reports(asked: _Pass, notes: list[str]) -> list[Report]:
    """What a pass finds; where a measure has no value for this network, those of the other measures."""
    try:
        return [measure(asked.model, asked.data, **asked.arguments)]
    except UndefinedMeasureError as error:
        if len(asked.measures) == 1:
            notes.append(f"{asked.measures[0]}: {error}")
            return []
        return [report for name in asked.measures for report in _reports(asked.of([name]), notes)]


def _rows(report: Report) -> list[dict[str, Any]]:
    """Every value of a layer or the network; those of single units would make records large."""
    return [{name: getattr(row, name) for name in _KEPT} for row in report.results if row.unit is None]
