"""The plan: which layers are measured how, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatness.catalogue.measure import Measure
from flatness.curvature.operators.network_spectrum import SpectrumRequest
from flatness.curvature.sums.parameter_probes import ParameterRoutes
from flatness.curvature.sums.routes import LayerRoute, Routes
from flatness.errors import listed
from flatness.network.layers import Layer


@dataclass
class Plan:
    """What would run, and why. Print it.

    Attributes:
        measures: The measures to compute.
        layers: Names of the layers to measure, in network order.
        routes: How the shared pass treats every layer.
        reasons: For every layer, why its curvature is exact.
        spectra: For every layer, the eigenvalue problems to solve ("whole", "rows").
        options: Options by measure.
        curvature: "hessian" or "gauss_newton".
        notes: What is left out, and why.
        loss: Name of the loss.
        others: Plans for measures that are defined with another loss; each is a pass of its own.
        kept_bytes: Bytes per sample that the eigenvalue iterations keep if they fit.
        network_spectra: Spectra of the network's Hessian to find, by measure.
        gradient_routes: Layers and norm layers whose per-sample gradients come from one backward pass.
        graph_bytes: Rough size of one sample's graph of first derivatives.
        called: Every layer that the forward pass calls, measured or not, by name.
        sampling: Layers and norm layers that go through the sampled engine.
        complete: Whether it takes all directions instead of random ones, and is exact.
        methods: "exact" or "sampled", for every layer.
        precision: The relative standard error that sampled values of layers aim at.
        max_passes: The most probes per sample.
        rank: Output directions per sample.
        by_parameters: Layers and parameters that take products with the Hessian of a parameter.
        differences: Whether those products are central differences of gradients.
        aliases: What `named_parameters` calls a parameter, by every name it has.
        by_products: Layers whose eigenvalues take Hessian products by two backward passes each.
        shapes: (G, d, m) of every measured layer, so that a plan is printed without a look at the model.
    """

    measures: list[Measure]
    layers: list[str]
    routes: Routes
    reasons: dict[str, str]
    spectra: dict[str, list[str]]
    options: dict[str, dict[str, Any]]
    curvature: str
    micro_batch: int
    notes: list[str] = field(default_factory=list)
    kept_bytes: int = 0
    loss: str = ""
    others: list[Plan] = field(default_factory=list)
    network_spectra: dict[str, SpectrumRequest] = field(default_factory=dict)
    gradient_routes: Routes = field(default_factory=lambda: Routes([]))
    graph_bytes: int = 0
    called: dict[str, Layer] = field(default_factory=dict)
    sampling: Routes = field(default_factory=lambda: Routes([]))
    complete: bool = False
    methods: dict[str, str] = field(default_factory=dict)
    precision: float = 0.01
    max_passes: int = 100
    rank: int = 1
    by_products: frozenset[str] = frozenset()
    by_parameters: ParameterRoutes = field(default_factory=ParameterRoutes)
    differences: bool = False
    aliases: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def layer_routes(self) -> dict[str, LayerRoute]:
        """The routes of all engines, by layer."""
        everywhere = [*self.routes.layers, *self.sampling.layers, *self.by_parameters.layers]
        return {route.name: route for route in everywhere}

    @property
    def samples(self) -> bool:
        """Whether the sampled engine has anything to compute."""
        return bool(self.sampling.affine) or any(route.needs for route in self.sampling.layers)

    @property
    def needs_spread(self) -> list[str]:
        """Layers whose feature spreads are needed: one more forward pass."""
        return [name for name, route in self.layer_routes.items() if "relative_normalized" in route.needs]

    @property
    def streams(self) -> bool:
        """Whether the shared pass has anything to compute beyond the risk."""
        return any(route.needs for route in self.routes.layers) or bool(self.routes.affine)

    def __str__(self) -> str:
        """The plan in words."""
        passes = (
            f"1 forward and {self.routes.passes} backward passes" if self.routes.passes else "1 forward pass"
        )
        spread = " after 1 forward pass for the features' spread" if self.needs_spread else ""
        lines = [f"measures: {', '.join(measure.name for measure in self.measures)}"]
        lines.append(f"shared pass: {passes} per micro-batch of {self.micro_batch}{spread}")
        if (self.samples and not self.complete) or self.by_parameters.random:
            lines.append(
                f"probes: aiming at a standard error of {self.precision:.2g} of each layer's value, at most "
                f"{self.max_passes} per sample; how many says a pilot"
            )
        if self.by_parameters.rest:
            lines.append(f"trace of {listed(self.by_parameters.rest, 6)}: products with their Hessian")
        if self.differences:
            lines.append("Hessian products are central differences of gradients")
        routes = self.layer_routes
        for name in self.layers:
            route = routes[name]
            G, *sizes = self.shapes[name]
            shape = " × ".join(str(size) for size in ([G, *sizes] if G > 1 else sizes))
            where = f"{route.positions} position{'s' * (route.positions > 1)}"
            label = name or "the model itself"
            how = self._how(route)
            lines.append(f"  {label}  W {shape}, {where}: {how}; {self.reasons[name]}")
        if self.spectra:
            named = ((name or "the model itself", parts) for name, parts in self.spectra.items())
            solved = ", ".join(f"{name} ({' and '.join(parts)})" for name, parts in named)
            lines.append(f"eigenvalues by Lanczos, all layers in step: {solved}")
        for name, request in self.network_spectra.items():
            over = "all parameters" if request.parameters == "all" else "all weights"
            lines.append(
                f"{name} over {over}: {request.solver} in the {request.metric} metric, one forward and two "
                "backward passes per product, in step with the others"
            )
        for measure in self.measures:
            if measure.explore is not None:
                lines.append(f"{measure.name}: {measure.cost or 'passes of its own'}")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"and with {other.loss}:\n{other}" for other in self.others]
        return "\n".join(lines)

    __repr__ = __str__

    def _how(self, route: LayerRoute) -> str:
        if route.name in self.by_parameters.parameters:
            complete = route.name in self.by_parameters.complete
            return "exact, every entry" if complete else "sampled, through its parameter"
        if route.name not in {sampled.name for sampled in self.sampling.layers}:
            return f"exact, {route.kind}"
        return "exact, all directions" if self.complete else "sampled"

    def _repr_html_(self) -> str:
        from flatness.report.notebook import outline_html

        return outline_html(str(self))
