"""Where a report comes from: fingerprints of model and data, settings, versions."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatness.curvature.sums.exact import exact_statistics
from flatness.curvature.sums.routes import Routes
from flatness.curvature.sums.statistics import Statistics
from flatness.measuring.plan.plan import Plan
from flatness.network.parts import buffers, dense_parts, named_parameters, parameters
from flatness.problem import batches
from flatness.problem.problem import Problem
from flatness.version import __version__

# Numbers of a tensor up to which it is brought to the host as a whole.
_SMALL = 1 << 16


def provenance(
    problem: Problem, chosen: Plan, statistics: Statistics, seconds: float, fingerprint: str
) -> dict[str, Any]:
    """The `meta` of a report."""
    return {
        "model": type(problem.model).__name__,
        "model_fingerprint": fingerprint,
        "data_fingerprint": f"{problem.fingerprint or 0:x}",
        "samples": statistics.samples,
        "risk": float(statistics.risk / statistics.normaliser),
        "loss": problem.loss.name,
        "loss_options": problem.loss.options(),
        **({} if problem.alignment is None else {"alignment": str(problem.alignment)}),
        "curvature": chosen.curvature,
        "weight_decay": problem.weight_decay,
        "options": _plain({measure.name: chosen.options[measure.name] for measure in chosen.measures}),
        "parameters": {name: list(value.shape) for name, value in named_parameters(problem.model).items()},
        "dtype": str(problem.dtype).removeprefix("torch."),
        "device": problem.device.type,
        "seed": problem.seed,
        "seconds": round(seconds, 4),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "flatness": __version__,
        "torch": torch.__version__,
    }


def _plain(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Options as JSON keeps them, of the measures that have any; what it cannot keep, in words."""
    given = {name: dict(own) for name, own in options.items() if own}
    # Without addresses in memory, which differ from run to run.
    return json.loads(json.dumps(given, default=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value))))


def with_own_risk(meta: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """`meta` with the user's loss and its risk, where all measures are defined with another; one pass."""
    with problem.guarded():
        statistics = exact_statistics(problem, Routes([]), {})
    risk = float(statistics.risk / statistics.normaliser)
    return {**meta, "loss": problem.loss.name, "loss_options": problem.loss.options(), "risk": risk}


def facts(problem: Problem, chosen: Plan) -> dict[str, Any]:
    """What must be the same in all processes that measure together."""
    return {
        "weights": model_fingerprint(problem.model),
        "dtype": str(problem.dtype),
        "measures": [measure.name for measure in chosen.measures],
        "options": repr(chosen.options),
        "layers": [(route.name, route.kind, sorted(route.needs)) for route in chosen.layer_routes.values()],
        "norm layers": [module.name for module in chosen.routes.affine],
        "loss": repr(problem.loss),
        "alignment": str(problem.alignment),
        "curvature": chosen.curvature,
        "weight_decay": problem.weight_decay,
        "seed": problem.seed,
    }


def shares(problem: Problem) -> dict[str, Any]:
    """How the data was spread over several processes, for `meta`; a note says so too."""
    parts = problem.ranks.gathered((problem.samples, problem.fingerprint or 0))
    counts = [samples for samples, _ in parts]
    note = f"summed over {len(parts)} processes with {', '.join(map(str, counts))} samples"
    if len({code for _, code in parts}) == 1:
        note += ", all of them the same: pass each process its own part of the data"
    problem.notes.append(note)
    # Codes of samples add up modulo 2^64, whatever the parts: the fingerprint is that of all the data.
    code = (sum(code for _, code in parts) + 2**63) % 2**64 - 2**63
    return {"processes": len(parts), "data_fingerprint": f"{code:x}"}


def model_fingerprint(model: nn.Module) -> str:
    """Depends on names, shapes and values of parameters and buffers: sums, and up to 256 entries each."""
    digest = hashlib.sha256()
    flat: list[Tensor] = []
    for name, value in model.state_dict().items():
        digest.update(f"{name}{tuple(getattr(value, 'shape', ()))}".encode())
        for part in dense_parts(value) if isinstance(value, Tensor) else []:
            if part.numel() and not part.is_complex():
                flat.append(part.detach().reshape(-1))
    # The small ones are brought to the host together, of the others what is needed.
    small = iter(batches.on_host([value for value in flat if value.numel() <= _SMALL]))
    numbers: list[Tensor] = []
    for value in flat:
        value = next(small) if value.numel() <= _SMALL else value
        numbers.append(value.sum(dtype=torch.float64).reshape(1))
        numbers.append(value[:: -(-value.numel() // 256)].double())
    digest.update(torch.cat(batches.on_host(numbers)).numpy().tobytes())
    return digest.hexdigest()[:16]


class ModelFingerprint:
    """The fingerprint of a model that is being measured, taken while a device works.

    Buffers that the network writes to and modules that it makes are gone only when measuring ends: with such,
    it is taken then.

    Args:
        model: The model, before it is measured.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._state()
        self._found: str | None = None

    def take(self) -> None:
        """Take it now, if the model is as it was."""
        if self._state() == self._before:
            self._found = model_fingerprint(self._model)

    def result(self) -> str:
        """The fingerprint; the model must be as it was."""
        return self._found or model_fingerprint(self._model)

    def _state(self) -> list[tuple[int, int]]:
        held = (*parameters(self._model), *buffers(self._model))
        return [(id(value), value._version) for value in held]
