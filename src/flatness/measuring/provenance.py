"""Where a report comes from: fingerprints of model and data, settings, versions."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flatness.curvature.sums.exact import exact_statistics
from flatness.curvature.sums.routes import Routes
from flatness.curvature.sums.statistics import Statistics
from flatness.files import digest
from flatness.measuring.plan.plan import Plan
from flatness.problem.batches import describe, on_host
from flatness.problem.problem import Problem
from flatness.problem.snapshot import dense_parts
from flatness.report.report import Report
from flatness.version import __version__

# Entries of an optimizer's groups that do not affect its mathematics.
_NO_SETTINGS = {"params", "foreach", "fused", "capturable", "differentiable"}
# Numbers of a tensor up to which it is brought to the host as a whole.
_SMALL = 1 << 16


def provenance(problem: Problem, plan: Plan, statistics: Statistics, seconds: float) -> dict[str, Any]:
    """The `meta` of a report."""
    return {
        "model": type(problem.model).__name__,
        "model_fingerprint": model_fingerprint(problem.model),
        "data_fingerprint": f"{problem.fingerprint or 0:x}",
        "samples": statistics.samples,
        "risk": float(statistics.risk / statistics.normaliser),
        "loss": problem.loss.name,
        "loss_options": problem.loss.options(),
        **({} if problem.alignment is None else {"alignment": str(problem.alignment)}),
        "curvature": plan.curvature,
        "weight_decay": problem.weight_decay,
        "options": _plain({measure.name: plan.request.options[measure.name] for measure in plan.measures}),
        "parameters": {name: list(value.shape) for name, value in problem.model.named_parameters()},
        "dtype": str(problem.dtype).removeprefix("torch."),
        "device": problem.device.type,
        "seed": problem.seed,
        "seconds": round(seconds, 4),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "flatness": __version__,
        "torch": str(torch.__version__),
    }


def _plain(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Options as JSON keeps them, of the measures that have any; what it cannot keep, in words."""
    given = {name: dict(own) for name, own in options.items() if own}
    return json.loads(json.dumps(given, default=_in_words))


def _in_words(value: Any) -> str:
    """What an object is: an optimizer's settings, a tensor's content, else how it writes itself."""
    if hasattr(value, "param_groups"):
        groups = (
            ", ".join(f"{key}={setting}" for key, setting in group.items() if key not in _NO_SETTINGS)
            for group in value.param_groups
        )
        return f"{type(value).__name__}({'; '.join(groups)})"
    if isinstance(value, Tensor):
        return f"{describe(value)} {digest(value)[:8]}"
    # Without addresses in memory, which differ from run to run.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def risk_of(problem: Problem) -> dict[str, Any]:
    """The summed losses of all samples, their normaliser, and what `meta` says of the loss; one pass."""
    with problem.guarded():
        found = exact_statistics(problem, Routes([]), {})
    loss = {"loss": problem.loss.name, "loss_options": problem.loss.options()}
    return {"loss": loss, "risk": float(found.risk), "normaliser": float(found.normaliser)}


def with_risk(report: Report, parts: Sequence[Mapping[str, Any]]) -> Report:
    """The report with the risk that `risk_of` found of all parts of the data; as it is without any."""
    if not parts:
        return report
    risk = sum(part["risk"] for part in parts) / sum(part["normaliser"] for part in parts)
    return replace(report, meta={**report.meta, **parts[0]["loss"], "risk": risk})


def facts(problem: Problem, plan: Plan) -> dict[str, Any]:
    """What must be the same in all processes that measure together."""
    return {
        "dtype": str(problem.dtype),
        "weights": model_fingerprint(problem.model),
        "measures": [measure.name for measure in plan.measures],
        "options": repr(_plain(plan.request.options)),
        "layers": [(route.name, route.kind, sorted(route.needs)) for route in plan.layer_routes.values()],
        "norm layers": [t.name for t in plan.treatments.values() if t.module is not None],
        "loss": repr(problem.loss),
        "alignment": str(problem.alignment),
        "curvature": plan.curvature,
        "weight_decay": problem.weight_decay,
        "seed": problem.seed,
    }


def shares(problem: Problem) -> dict[str, Any]:
    """How the data was spread over several processes, for `meta`; a note says so too."""
    parts = problem.ranks.gathered((problem.samples, problem.fingerprint or 0))
    counts = [samples for samples, _ in parts]
    note = f"summed over {len(parts)} processes with {', '.join(map(str, counts))} samples"
    if len({code for _, code in parts}) == 1:
        note += ", which are all the same: give each process its own part of the data"
    problem.notes.append(note)
    return {"processes": len(parts), "data_fingerprint": joint_fingerprint(code for _, code in parts)}


def joint_fingerprint(codes: Iterable[int]) -> str:
    """The fingerprint of all the data, whatever the parts: codes of samples add up modulo 2^64."""
    return f"{(sum(codes) + 2**63) % 2**64 - 2**63:x}"


def model_fingerprint(model: nn.Module) -> str:
    """Depends on names, shapes and values of parameters and buffers: sums, and up to 256 entries each."""
    digest = hashlib.sha256()
    parts: list[Tensor] = []
    for name, value in model.state_dict().items():
        digest.update(f"{name}{tuple(getattr(value, 'shape', ()))}".encode())
        parts += [part.detach() for part in dense_parts(value) if not part.is_complex()]
    # Devices sum large tensors where they are, each in its own order.
    small = iter(on_host([part for part in parts if part.numel() <= _SMALL]))
    numbers: list[Tensor] = []
    for part in parts:
        flat = (next(small) if part.numel() <= _SMALL else part).reshape(-1)
        if flat.numel():
            numbers += [flat.sum(dtype=torch.float64).reshape(1), flat[:: -(-flat.numel() // 256)].double()]
    digest.update(torch.cat(on_host(numbers)).numpy().tobytes())
    return digest.hexdigest()[:16]
