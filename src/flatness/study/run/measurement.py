"""Measure one trained network, as it is and after a random rescaling that leaves its function alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatness.catalogue.registry import select_measures
from flatness.errors import UndefinedMeasureError
from flatness.measuring.measure import measure
from flatness.report.report import Report
from flatness.study.configuration import digest
from flatness.study.objects import stream_seed
from flatness.symmetry.rewriting.rescaling import rescale

_PASSED_ON = ("layers", "method", "curvature", "precision", "options", "batch_size")
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
    passes = _passes(train, {"loss": loss, "progress": False, "seed": seed}, settings.get("measure", {}))
    own = measuring_key(settings)
    found: dict[str, Any] = {
        "key": own,
        "samples": len(passes[0].data[0]),
        "results": [],
        "notes": [],
        "seconds": 0.0,
        "passes": 0,
    }
    if so_far is not None and so_far["key"] == own:
        found = dict(so_far)
    steps = [(model, each, "results") for each in passes]
    if "rescale" in settings:
        equal, wanted = _rescaled(model, train[0], key, settings), settings["rescale"].get("measures")
        steps += [(equal, some, "rescaled") for each in passes if (some := each.of(wanted)) is not None]
        found.setdefault("rescaled", [])
    for network, asked, place in steps[found["passes"] :]:
        _add(found, network, asked, place)
        keep(found)
    return {name: value for name, value in found.items() if name != "passes"}


def _add(found: dict[str, Any], network: nn.Module, asked: _Pass, place: str) -> None:
    """Put what one pass finds where it belongs."""
    started = time.perf_counter()
    notes = found["notes"] if place == "results" else []
    for report in _reports(network, asked, notes):
        found.setdefault("risk", report.meta["risk"])
        found[place] += [{**row, **(asked.label if place == "results" else {})} for row in _rows(report)]
        notes += [note for note in report.notes if note not in notes]
    found["seconds"] = round(found["seconds"] + time.perf_counter() - started, 3)
    found["passes"] += 1


@dataclass(frozen=True)
class _Pass:
    """One call of `measure`."""

    data: tuple[Tensor, Tensor]
    arguments: Mapping[str, Any]
    label: Mapping[str, Any]

    def of(self, wanted: Any) -> _Pass | None:
        """The same for those of its measures that are among the wanted ones; None without any."""
        if wanted is None:
            return self
        names = {one.name for one in select_measures(wanted)}
        kept = [one.name for one in select_measures(self.arguments["measures"]) if one.name in names]
        options = {name: given for name, given in self.arguments.get("options", {}).items() if name in kept}
        arguments = {**self.arguments, "measures": kept, "options": options}
        return _Pass(self.data, arguments, self.label) if kept else None

    def single(self) -> list[_Pass]:
        """Its measures one at a time."""
        names = [one.name for one in select_measures(self.arguments["measures"])]
        return [one for name in names if (one := self.of([name])) is not None]


def _passes(
    train: tuple[Tensor, Tensor], arguments: Mapping[str, Any], asked: Mapping[str, Any]
) -> list[_Pass]:
    """What [measure] asks for; then [measure.subset], which goes by [measure] where it is silent."""
    tables = [asked, {**asked, "options": {}, **asked["subset"]}] if "subset" in asked else [asked]
    return [
        _Pass(
            (train[0][: table.get("samples")], train[1][: table.get("samples")]),
            {
                **{name: table[name] for name in _PASSED_ON if name in table},
                "measures": table.get("measures", "default"),
                **arguments,
            },
            {} if table is asked else {"samples": min(table.get("samples", len(train[0])), len(train[0]))},
        )
        for table in tables
    ]


def _reports(model: nn.Module, asked: _Pass, notes: list[str]) -> list[Report]:
    """What a pass finds; where a measure has no value for this network, those of the other measures."""
    try:
        return [measure(model, asked.data, **asked.arguments)]
    except UndefinedMeasureError as error:
        alone = asked.single()
        if len(alone) == 1:
            notes.append(f"{alone[0].arguments['measures'][0]}: {error}")
            return []
        return [report for one in alone for report in _reports(model, one, notes)]


def _rescaled(model: nn.Module, inputs: Tensor, key: str, settings: Mapping[str, Any]) -> nn.Module:
    asked = settings["rescale"]
    # By key: networks that share a training seed must not share their factors.
    drawn = stream_seed(asked.get("seed", 0), "rescale", key) % 2**31
    with torch.no_grad():
        given = {name: asked[name] for name in ("kind", "low", "high") if name in asked}
        return rescale(model, inputs[:_EXAMPLE], seed=drawn, **given)


def _rows(report: Report) -> list[dict[str, Any]]:
    """Every value of a layer or the network; those of single units would make records large."""
    return [
        {
            "measure": row.measure,
            "layer": row.layer,
            "reduction": row.reduction,
            "value": row.value,
            "stderr": row.stderr,
            "method": row.method,
            "converged": row.converged,
        }
        for row in report.results
        if row.unit is None
    ]
