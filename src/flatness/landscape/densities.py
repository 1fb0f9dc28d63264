"""`flatness.landscape.density`: how the eigenvalues of the Hessian are distributed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.operators.lanczos import LanczosRuns, random_signs
from flatness.curvature.operators.network_spectrum import SpectrumRequest, inverse_metric_root
from flatness.curvature.parameters.hessian_operator import HessianOperator
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import OptionError, listed, nearest
from flatness.landscape.arguments import whole_number
from flatness.landscape.density_result import KIND, Density, SpectralQuadrature
from flatness.landscape.filling import identity_of, resumed
from flatness.landscape.networks import (
    Member,
    Networks,
    members_of,
    own_weights,
    unknown_layers,
    without_weight,
)
from flatness.landscape.points import LOOPED, Points
from flatness.landscape.storage import Array
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from flatness.network.layers import find_layers, select_layers
from flatness.problem.forward import Forward
from flatness.problem.problem import Problem
from flatness.problem.progress import ProgressBar
from flatness.problem.ranks import separately
from flatness.version import __version__

METRICS = ("euclidean", "layerwise", "nodewise")
"""D of D^½ H D^½: 1, ‖W_l‖² on every tensor (rangamani2019, Def. 3), or θ_i² (§6)."""
_CURVATURES = ("hessian", "gauss_newton")
_PARAMETERS = ("all", "weights")
_BASIS_BYTES = 1024 * 2**20


@separately()
def density(
    model: Networks,
    data: Any,
    loss: Any = "cross_entropy",
    *,
    metric: str = "euclidean",
    layers: str | list[str] | None = None,
    parameters: str = "all",
    runs: int = 10,
    steps: int = 80,
    curvature: str = "hessian",
    resume: str | os.PathLike[str] | None = None,
    forward: Forward | None = None,
    weight_decay: float = 0.0,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Density:
    """The density of the eigenvalues of the Hessian, or of D^½ H D^½, by stochastic Lanczos quadrature.

    With ``metric="layerwise"`` layer-wise rescaled copies of a network have the same density, with
    "nodewise" neuron-wise rescaled ones too; the Hessian's own density they do not share.

    Args:
        model: A network, or networks by name, a curve for each.
        data: As for `flatness.measure`.
        loss: As for `flatness.measure`.
        metric: One of `METRICS`. Parameters without a metric, which are zero, are left out.
        layers: None for the whole network; a name, a list of names or "all" for the Hessians of the weights
            of these layers, a curve for each.
        parameters: "all", or "weights" for those with two axes or more.
        runs: Random starting vectors; the band is over them.
        steps: Lanczos steps, each a product with the Hessian for every run.
        curvature: "hessian" or "gauss_newton".
        resume: A file: networks in it are not computed again, and what is computed is kept there.
        forward: ``forward(model, batch) -> (output, target)`` for batches of another structure.
        weight_decay: Adds weight_decay·I to the Hessian; rescaled copies then differ in every metric.
        batch_size: Samples per micro-batch; chosen by memory when None.
        device: Work on a copy of the model there.
        dtype: Work on a copy of the model in that precision.
        seed: Seed of the starting vectors.
        progress: Whether to show a bar on work of more than two seconds.

    Returns:
        A `Density`: print it; `.curve(name, grid)`, `.spectra[name].power_sum(2)`; `.save` it. After Ctrl-C
        it holds what the steps made so far say. `flatness.show.plots.landscape.save_density` draws it.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> data = torch.randn(50, 4), torch.randint(3, (50,))
        >>> density = flatness.landscape.density(model, data, runs=4, steps=20)
        >>> trace, stderr = density.spectra["network"].power_sum(1)
        >>> len(density.grid("network"))
        2001
    """
    _check(metric, parameters, curvature)
    runs, steps = whole_number("runs", runs, 1, 10), whole_number("steps", steps, 1, 80)
    members = members_of(model)
    setting = {
        "forward": forward,
        "weight_decay": weight_decay,
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "seed": seed,
        "progress": progress,
    }
    problems = [Problem(member.model, data, loss, **setting) for member in members]
    settings = {
        "metric": metric,
        "layers": layers,
        "parameters": parameters,
        "runs": runs,
        "steps": steps,
        "curvature": curvature,
    }
    return _Census(members, problems, settings, resume).run()


def _check(metric: Any, parameters: Any, curvature: Any) -> None:
    choices = {
        "metric": (metric, METRICS),
        "parameters": (parameters, _PARAMETERS),
        "curvature": (curvature, _CURVATURES),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            raise OptionError(
                f"Expected {name} to be one of {', '.join(known)} but got {value!r}.{nearest(value, known)}"
            )


@dataclass
class _Census:
    """One call: network after network."""

    members: list[Member]
    problems: list[Problem]
    asked: dict[str, Any]
    resume: str | os.PathLike[str] | None
    spectra: dict[str, SpectralQuadrature] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    def run(self) -> Density:
        self._go_on()
        for member, problem in zip(self.members, self.problems, strict=True):
            name = self._name(member)
            if name not in self.finished and not self.interrupted:
                with problem.guarded():
                    self._network(name, problem)
                if self.resume is not None and self.spectra:
                    self._density().save(self.resume)
        if not self.spectra:
            self._nothing()
        return self._density()

    def _nothing(self) -> None:
        """Say why there is no spectrum at all."""
        if self.interrupted:
            raise KeyboardInterrupt
        raise OptionError(
            f"Expected parameters that are not all zero, as metric={self.asked['metric']!r} has them in "
            "units of their own size, but got none. Pass metric='euclidean', or other layers."
        )

    def _go_on(self) -> None:
        """Take over the networks that an earlier run finished."""
        risk, first = None, self.problems[0]
        if self.resume is not None:
            with first.guarded():
                risk = Points(first, engine=LOOPED).loss
        self.asked = identity_of(self.problems, risk, **self.asked)
        if self.resume is None or resumed(self.resume, KIND, self.asked) is None:
            return
        before = Density.load(self.resume)
        self.facts = dict(before.meta)
        self.finished, self.owners = list(before.meta["finished"]), dict(before.meta["owners"])
        self.spectra = {
            label: own for label, own in before.spectra.items() if self.owners[label] in self.finished
        }
        # the first note of a run that Ctrl-C ended says where
        self.notes = list(before.notes[1:] if self.facts.pop("interrupted", False) else before.notes)

    def _name(self, member: Member) -> str:
        several = sum(other.group == member.group for other in self.members) > 1
        return f"{member.group} {member.number + 1}" if several else member.group

    def _density(self) -> Density:
        meta = {**self.facts, "asked": self.asked, "finished": self.finished, "owners": self.owners}
        meta["interrupted"] = self.interrupted
        return Density(dict(self.spectra), meta, tuple(dict.fromkeys(self.notes)))

    def _network(self, name: str, problem: Problem) -> None:
        request = measure_request("riemannian_spectral_norm", curvature=self.asked["curvature"])
        plan = make_plan(problem, request)
        space = ParameterSpace(problem)
        operator = HessianOperator(space, curvature=self.asked["curvature"], graph_bytes=plan.graph_bytes)
        parts = _parts(space, self.asked)
        several = len(parts) > 1 or self.asked["layers"] is not None
        for part, root in parts.items():
            label = (part if name == "network" else f"{name}: {part}") if several else name
            self.owners[label] = name
            if not self.interrupted:
                self._spectrum(label, operator, root)
        self.facts |= {
            "metric": self.asked["metric"],
            "loss": problem.loss.name,
            "steps": self.asked["steps"],
            "samples": problem.samples,
            "model": type(problem.model).__name__,
            "curvature": self.asked["curvature"],
            "flatness": __version__,
        }
        self.notes += problem.notes
        if not self.interrupted:
            self.finished.append(name)

    def _spectrum(self, label: str, operator: HessianOperator, root: Tensor) -> None:
        """All runs of one spectrum, as many side by side as their bases leave room for."""
        runs, steps = self.asked["runs"], self.asked["steps"]
        mask = root > 0
        dimension = int(mask.sum())
        if not dimension:
            self.notes.append(f"{label}: left out, as all its parameters are zero")
            return
        start = random_signs(runs, mask, operator.space.problem.seed)
        together = max(1, _BASIS_BYTES // (8 * len(root) * min(steps, dimension)))
        found = []
        shown = operator.space.problem.progress
        with ProgressBar(f"density of {label}", runs * min(steps, dimension), shown) as bar:
            for first in range(0, runs, together):
                lanczos = LanczosRuns(start[first : first + together], steps)
                self._drive(lanczos, operator, root, bar, label)
                if lanczos.made:
                    found.append(lanczos.quadrature())
                if self.interrupted:
                    break
        if found:
            nodes, weights = (_stacked(parts) for parts in zip(*found, strict=True))
            self.spectra[label] = SpectralQuadrature(nodes, weights, dimension)

    def _drive(
        self, lanczos: LanczosRuns, operator: HessianOperator, root: Tensor, bar: ProgressBar, label: str
    ) -> None:
        """Make the steps, until Ctrl-C."""
        try:
            while not lanczos.done:
                asked = [root * vector for vector in lanczos.query()]
                lanczos.tell(torch.stack([root * product for product in operator(asked)]))
                bar.advance(len(asked))
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.insert(
                0, f"interrupted: {label} after {lanczos.made} of {lanczos.steps} steps of Lanczos"
            )


def _stacked(parts: Sequence[Tensor]) -> Array:
    """Rows of several runs, with zeros after the end of shorter ones."""
    most = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, most - part.shape[1])) for part in parts]).numpy()


def _parts(space: ParameterSpace, asked: dict[str, Any]) -> dict[str, Tensor]:
    """D^½ by the name of what is looked at; 0 on what is not part of it."""
    request = SpectrumRequest(metric=asked["metric"], parameters=asked["parameters"])
    root = inverse_metric_root(space, request)
    if asked["layers"] is None:
        return {"network": root}
    available = find_layers(space.problem.model)
    everything = asked["layers"] == "all" and "all" not in available
    names = select_layers(available, list(available), None if everything else asked["layers"])
    weights, without = own_weights(space.problem.model, [available[name] for name in names])
    if without and not (everything and weights):
        raise without_weight(without)
    if without:
        space.problem.notes.append(f"left out, without a weight of their own: {listed(without)}")
    unknown = unknown_layers(space.problem.model, available.values()) if everything else []
    if unknown:
        space.problem.notes.append(
            f"not a supported layer and left out: {listed(unknown)}; flatness.register_layer can teach it"
        )
    masks = {
        name: space.per_parameter(
            lambda own, value, weight=weight: torch.tensor(float(own == weight), device=value.device)
        )
        for name, weight in weights.items()
    }
    return {name: root * mask for name, mask in masks.items()}
