"""`flatness.landscape.density`: how the eigenvalues of the Hessian are distributed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatness.catalogue.options import choice
from flatness.curvature.metrics import Root
from flatness.curvature.operators.lanczos import lanczos_runs, side_by_side
from flatness.curvature.operators.network_spectrum import metric_root
from flatness.curvature.parameters.hessian_operator import HessianOperator
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.spectra import METRICS, PARAMETERS, SpectrumRequest
from flatness.curvature.sums.squared_gradients import squared_gradients
from flatness.errors import OptionError, listed
from flatness.landscape.arguments import whole_number
from flatness.landscape.density_result import Density, SpectralQuadrature
from flatness.landscape.networks import (
    Member,
    Networks,
    chosen_layers,
    members_of,
    own_weights,
    unknown_layers,
)
from flatness.landscape.resumption import facts_of, identity_of, resumed
from flatness.measuring.plan.plan import Plan
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from flatness.measuring.run.layer_metrics import metric_blocks
from flatness.network.layers import find_layers
from flatness.problem import setting_of
from flatness.problem.model import Forward
from flatness.problem.problem import Problem
from flatness.problem.progress import ProgressBar
from flatness.problem.ranks import separately

_CHOICES = {
    "metric": choice(*METRICS),
    "parameters": choice(*PARAMETERS),
    "curvature": choice("hessian", "gauss_newton"),
}


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
    "nodewise" neuron-wise rescaled ones too, with "whitened" all whose features are mixed by linear maps;
    but not the same density of the Hessian itself.

    Args:
        model: A network, or networks by name, a curve for each.
        data: As for `flatness.measure`.
        loss: As for `flatness.measure`.
        metric: D of D^½ H D^½: "euclidean" for 1, "layerwise" for ‖W_l‖² on every tensor (rangamani2019,
            Def. 3), "nodewise" for θ_i² (§6), "fisher" for 1/E(∂_i ℓ)²; on the weights of layers, "relative"
            for W Wᵀ ⊗ 1, whose trace is relative flatness, and "whitened" for W C Wᵀ ⊗ C⁺. Parameters
            without a metric, such as those that are zero, are left out.
        layers: None for the whole network; a name, a list of names or "all" for the Hessians of the weights
            of these layers, a curve for each.
        parameters: "all", or "weights" for those with two axes or more.
        runs: Random starting vectors; the band is over them.
        steps: Lanczos steps, each a product with the Hessian for every run.
        curvature: "hessian" or "gauss_newton".
        resume: A file to resume from: networks in it are not computed again, and new ones are saved there.
        forward: ``forward(model, batch) -> (output, target)`` for batches with another structure.
        weight_decay: Adds weight_decay·I to the Hessian; rescaled copies then differ in every metric.
        batch_size: Samples per micro-batch; chosen by memory when None.
        device: Work on a copy of the model there.
        dtype: Work on a copy of the model in that precision.
        seed: Seed of the starting vectors.
        progress: Whether to show a bar on work of more than two seconds.

    Returns:
        A `Density`: print it; `.curve(name, grid)`, `.spectra[name].power_sum(2)`; `.save` it. After Ctrl-C
        it holds the result of the steps made so far. `flatness.show.plots.landscape.save_density` draws it.

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
    setting = setting_of(locals())
    asked = {
        "metric": metric,
        "layers": layers,
        "parameters": parameters,
        "runs": whole_number("runs", runs, 1, 10),
        "steps": whole_number("steps", steps, 1, 80),
        "curvature": curvature,
    }
    for name, option in _CHOICES.items():
        value = asked[name]
        asked[name] = str(value) if isinstance(value, str) else value  # NumPy's texts, too
        option.check(name, asked[name])
    members = members_of(model)
    problems = [Problem(member.model, data, loss, **setting) for member in members]
    return _Census(members, problems, asked, resume).run()


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
            if member.name in self.finished or self.interrupted:
                continue
            try:
                with problem.guarded():
                    self._network(member.name, problem)
            except KeyboardInterrupt:
                if not (self.interrupted and self.spectra):
                    raise
            if self.resume is not None and self.spectra:
                self._density().save(self.resume)
        if not self.spectra:
            raise OptionError(
                f"Expected parameters that are not all zero, as metric={self.asked['metric']!r} has them in "
                "units of their own size, but got none. Pass metric='euclidean', or other layers."
            )
        return self._density()

    def _go_on(self) -> None:
        """Take over the networks that an earlier run finished."""
        risk, first = None, self.problems[0]
        if self.resume is not None:
            with first.guarded():
                risk = ParameterSpace(first).risk()
        self.asked = identity_of(self.problems, risk, **self.asked)
        before = resumed(self.resume, Density, self.asked)
        if before is None:
            return
        self.facts = dict(before.meta)
        self.finished, self.owners = list(before.meta["finished"]), dict(before.meta["owners"])
        self.spectra = {
            label: own for label, own in before.spectra.items() if self.owners[label] in self.finished
        }
        # the first note of a run that Ctrl-C ended says where
        self.notes = list(before.notes[1:] if self.facts.pop("interrupted", False) else before.notes)

    def _density(self) -> Density:
        meta = {**self.facts, "asked": self.asked, "finished": self.finished, "owners": self.owners}
        meta["interrupted"] = self.interrupted
        return Density(dict(self.spectra), meta, tuple(dict.fromkeys(self.notes)))

    def _network(self, name: str, problem: Problem) -> None:
        plan = make_plan(
            problem, measure_request("riemannian_spectral_norm", curvature=self.asked["curvature"])
        )
        space = ParameterSpace(problem)
        operator = HessianOperator(space, curvature=plan.curvature, graph_bytes=plan.graph_bytes)
        parts = _parts(space, plan, self.asked)
        several = len(parts) > 1 or self.asked["layers"] is not None
        try:
            for part, root in parts.items():
                label = (part if name == "network" else f"{name}: {part}") if several else name
                self.owners[label] = name
                self._spectrum(label, operator, root)
            self.finished.append(name)
        finally:
            self.facts |= {word: self.asked[word] for word in ("metric", "steps", "curvature")}
            self.facts |= facts_of(problem)
            self.notes += problem.notes

    def _spectrum(self, label: str, operator: HessianOperator, root: Root) -> None:
        """All runs of one spectrum, as many side by side as their bases leave room for; or till Ctrl-C."""
        runs, steps, problem = self.asked["runs"], self.asked["steps"], operator.space.problem
        dimension = int(root.mask.sum())
        if not dimension:
            self.notes.append(f"{label}: left out, because all its parameters are zero")
            return
        found = []
        with ProgressBar(f"density of {label}", runs * min(steps, dimension), problem.progress) as bar:
            for lanczos in lanczos_runs(runs, root.mask, steps, problem.seed):
                try:
                    while not lanczos.done:
                        asked = [root(vector) for vector in lanczos.query()]
                        lanczos.tell(torch.stack([root(product) for product in operator(asked)]))
                        bar.advance(len(asked))
                except KeyboardInterrupt:
                    self.interrupted = True
                    made = f"after {lanczos.made} of {lanczos.steps} steps of Lanczos"
                    self.notes.insert(0, f"interrupted: {label} {made}")
                    raise
                finally:
                    if lanczos.made:
                        found.append(lanczos.quadrature())
                        nodes, weights = (part.numpy() for part in side_by_side(found))
                        self.spectra[label] = SpectralQuadrature(nodes, weights, dimension)


def _parts(space: ParameterSpace, plan: Plan, asked: dict[str, Any]) -> dict[str, Root]:
    """D^½ by the name of what is looked at; 0 on what is not part of it."""
    request = SpectrumRequest(metric=asked["metric"], parameters=asked["parameters"])
    squares = partial(squared_gradients, space, plan.gradient_routes)
    root = metric_root(space, request, squares, partial(metric_blocks, space, plan))
    if asked["layers"] is None:
        return {"network": root}

    def only(weight: str) -> Tensor:
        return space.per_parameter(lambda own, value: torch.tensor(float(own == weight), device=value.device))

    return {name: root.on(only(weight)) for name, weight in _weights(space.problem, asked["layers"]).items()}


def _weights(problem: Problem, wanted: Any) -> dict[str, str]:
    """The weights of layers, by their names; with notes on what is left out where all are asked for."""
    model = problem.model
    everything = wanted == "all" and "all" not in find_layers(model)
    layers = chosen_layers(model, None if everything else wanted)
    weights = own_weights(model, layers, lenient=everything)
    without = [layer.name for layer in layers if layer.name not in weights]
    if without:
        problem.notes.append(f"left out, without a weight of their own: {listed(without)}")
    unknown = unknown_layers(model, layers) if everything else []
    if unknown:
        problem.notes.append(
            f"left out, because the layer type is not supported: {listed(unknown)}; flatness.register_layer "
            f"adds support"
        )
    return weights
