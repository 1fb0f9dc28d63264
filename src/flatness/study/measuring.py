"""Measure one trained network, as it is and after a random rescaling that leaves its function alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatness.measuring import measure
from flatness.result import Report
from flatness.study.grid import digest
from flatness.study.objects import stream_seed
from flatness.symmetry.rescaling import rescale

_PASSED_ON = ("layers", "method", "curvature", "precision", "options", "batch_size")
_EXAMPLE = 64


def measuring_key(settings: Mapping[str, Any]) -> str:
    """Digest of how a study measures: a record measured otherwise is measured again, not trained again."""
    asked = {table: settings.get(table, {}) for table in ("measure", "rescale")}
    return digest({**asked, "which": None})


def measured(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    loss: str,
    seed: int,
    key: str,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The `measuring` part of a record: values of layers and network, perhaps also of a rescaled copy."""
    started = time.perf_counter()
    asked = settings.get("measure", {})
    samples = asked.get("samples")
    data = (train[0][:samples], train[1][:samples])
    arguments = {key: asked[key] for key in _PASSED_ON if key in asked}
    arguments |= {"loss": loss, "measures": asked.get("measures", "default"), "progress": False, "seed": seed}
    report = measure(model, data, **arguments)
    found = {
        "key": measuring_key(settings),
        "samples": len(data[0]),
        "risk": report.meta["risk"],
        "results": _rows(report),
        "notes": list(report.notes),
    }
    if "rescale" in settings:
        found["rescaled"] = _rows(measure(_rescaled(model, data[0], key, settings), data, **arguments))
    return {**found, "seconds": round(time.perf_counter() - started, 3)}


def _rescaled(model: nn.Module, inputs: Tensor, key: str, settings: Mapping[str, Any]) -> nn.Module:
    asked = settings["rescale"]
    # By key: networks that share a training seed must not share their factors.
    drawn = stream_seed(asked.get("seed", 0), "rescale", key) % 2**31
    with torch.no_grad():
        return rescale(
            model,
            inputs[:_EXAMPLE],
            kind=asked.get("kind", "layerwise"),
            seed=drawn,
            low=asked.get("low", 0.2),
            high=asked.get("high", 5.0),
        )


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
