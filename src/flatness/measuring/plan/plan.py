"""The plan: which layers are measured how, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from flatness.catalogue.measure import Measure
from flatness.curvature.sums.routes import LayerRoute, ParameterRoutes, Routes
from flatness.errors import listed
from flatness.measuring.plan.treatment import AFFORDABLE_PASSES, Treatment
from flatness.measuring.request import MeasureRequest
from flatness.network.layers import Layer


@dataclass(frozen=True)
class Estimate:
    """What running a plan takes, within a factor of about two.

    Attributes:
        fewest: Gradients of all samples, if few probes suffice.
        most: Gradients of all samples, if `max_passes` is used up; iterations may need fewer.
        samples: How many samples there are; None if the data does not say.
        seconds: What one gradient of all samples takes here; of one sample if their number is unknown.
        memory: Bytes that one micro-batch takes.
        apart: Measures whose iterations are not counted.
    """

    fewest: float
    most: float
    samples: int | None
    seconds: float
    memory: int
    apart: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The estimate in words."""
        times = [self.fewest * self.seconds, self.most * self.seconds]
        many = _between(_count(self.fewest), _count(self.most))
        whose = f"all {self.samples:,} samples" if self.samples else "all samples"
        each = "" if self.samples else " per sample"
        besides = f", {listed(self.apart, 4)} not counted" if self.apart else ""
        noun = "gradient" if many == "1" else "gradients"
        return (
            f"cost: about {many} {noun} of {whose}, {_between(*map(_span, times))}{each} here{besides}; "
            f"a micro-batch takes about {_size(self.memory)}"
        )


@dataclass(frozen=True)
class Plan:
    """What would run, and why. Print it.

    Attributes:
        request: What was asked for.
        layers: Names of the layers to measure, in network order.
        treatments: How every layer gets its curvature, by name: the layers to measure, and the layers and
            norm layers that only the network's trace needs.
        rank: Output directions per sample.
        network: Whether all parameters of the network are being traced.
        rest: Parameters that only that trace asks for and that take Hessian products.
        rest_complete: Whether those take all directions.
        repeated: Those of them that get a copy for every sample, of this shape, and go with the layers that
            are probed.
        copy_inputs: Whether the inputs of layers must be copied because the network overwrites them.
        gradient_routes: Layers and norm layers whose per-sample gradients come from one backward pass.
        called: Every layer that the forward pass calls, measured or not, by name.
        aliases: What `named_parameters` calls a parameter, by every name it has.
        loss: Name of the loss.
        graph_bytes: Rough size of one sample's graph of first derivatives.
        sample_bytes: Rough size of what one sample of a micro-batch takes.
        micro_batch: How many samples are worked on at a time.
        notes: What is left out, and why.
        others: Plans for measures that are defined with another loss; each is a pass of its own.
        estimate: What running it takes, where that was asked for.
    """

    request: MeasureRequest
    layers: list[str]
    treatments: dict[str, Treatment]
    rank: int
    network: bool
    rest: list[str]
    rest_complete: bool
    copy_inputs: bool
    gradient_routes: Routes
    called: dict[str, Layer]
    aliases: dict[str, str]
    loss: str
    graph_bytes: int = 0
    repeated: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sample_bytes: int = 0
    micro_batch: int = 0
    notes: tuple[str, ...] = ()
    others: tuple[Plan, ...] = field(default=())
    estimate: Estimate | None = None

    @property
    def measures(self) -> list[Measure]:
        """The measures to compute."""
        return self.request.measures

    @property
    def curvature(self) -> str:
        """The curvature as named in the results; finite differences count as "hessian"."""
        return "hessian" if self.request.differences else self.request.curvature

    @cached_property
    def routes(self) -> Routes:
        """What the exact engine does."""
        exact = [t for t in self.treatments.values() if not (t.sampled or t.through_parameter)]
        routes = self._engine_routes(exact)
        return replace(routes, passes=self.rank if routes.kind("passes") or routes.affine else 0)

    @cached_property
    def sampling(self) -> Routes:
        """What the sampled engine does."""
        sampled = [t for t in self.treatments.values() if t.sampled]
        curved = frozenset(t.name for t in sampled if t.residual)
        if curved:
            curved |= {*self.repeated}
        return self._engine_routes(sampled, curved=curved, repeated=self.repeated)

    @cached_property
    def by_parameters(self) -> ParameterRoutes:
        """What takes products with the Hessian of a parameter."""
        through = [t for t in self.treatments.values() if t.through_parameter]
        complete: set[str | None] = {t.name for t in through if t.complete}
        return ParameterRoutes(
            [t.route for t in through if t.route is not None],
            parameters={t.name: t.parameter for t in through},
            rest=self._products_rest,
            curvature=self.request.curvature,
            complete=frozenset(complete | ({None} if self.rest_complete else set())),
        )

    @property
    def _products_rest(self) -> list[str]:
        """Parameters of the rest that take products."""
        return [name for name in self.rest if name not in self.repeated]

    def _engine_routes(self, treatments: list[Treatment], **more: Any) -> Routes:
        return Routes(
            [t.route for t in treatments if t.route is not None],
            affine=[t.module for t in treatments if t.module is not None],
            network=self.network,
            copy_inputs=self.copy_inputs,
            **more,
        )

    @property
    def reasons(self) -> dict[str, str]:
        """Why every layer is treated as it is."""
        return {name: treatment.reason for name, treatment in self.treatments.items()}

    @property
    def methods(self) -> dict[str, str]:
        """The word "exact" or "sampled" for every layer."""
        return {name: treatment.method for name, treatment in self.treatments.items()}

    @property
    def complete(self) -> bool:
        """Whether the sampled engine takes all directions instead of random ones, and is exact."""
        return any(treatment.way == "all directions" for treatment in self.treatments.values())

    @property
    def layer_routes(self) -> dict[str, LayerRoute]:
        """The routes of all engines, by layer."""
        everywhere = [*self.routes.layers, *self.sampling.layers, *self.by_parameters.layers]
        return {route.name: route for route in everywhere}

    @property
    def needs_spread(self) -> list[str]:
        """Layers whose feature spreads are needed: one more forward pass."""
        white = self.needs_whitening
        return [name for name, route in self.layer_routes.items() if name in white or "spread" in route.units]

    @property
    def needs_whitening(self) -> list[str]:
        """Those of them whose features are whitened."""
        solved = [name for name, parts in self.spectra.items() if "whitened" in parts]
        routes = self.layer_routes.items()
        return [name for name, route in routes if name in solved or "whitened" in route.units]

    @property
    def spectra(self) -> dict[str, list[str]]:
        """The eigenvalue problems to solve ("whole", "rows"), by layer."""
        parts = self.request.layer_spectra
        return {name: list(parts) for name in self.layers if parts}

    @property
    def by_products(self) -> list[str]:
        """Layers whose eigenvalues take products with the Hessian, as few output directions do not say it."""
        many = self.rank > AFFORDABLE_PASSES
        routes = self.layer_routes
        return [
            name
            for name in self.spectra
            if self.treatments[name].differentiates_twice or (many and routes[name].kind == "passes")
        ]

    @property
    def differentiates_twice(self) -> bool:
        """Whether anything does, so that a sample's graph must fit into memory."""
        sampled = self.sampling.layers or self.sampling.affine or self.by_parameters
        return bool(self.request.explores or sampled or self.by_products)

    def __str__(self) -> str:
        """The plan in words."""
        return "\n".join([*self._passes(), *self._layers(), *self._iterations(), *self._notes()])

    __repr__ = __str__

    def _passes(self) -> Iterator[str]:
        backward = self.routes.passes
        passes = f"1 forward and {backward} backward passes" if backward else "1 forward pass"
        spread = " after 1 forward pass for the features' spread" if self.needs_spread else ""
        yield f"measures: {', '.join(measure.name for measure in self.measures)}"
        yield f"shared pass: {passes} per micro-batch of {self.micro_batch}{spread}"
        if (self.sampling and not self.complete) or self.by_parameters.random:
            yield (
                f"probes: aiming at a standard error of {self.request.precision:.2g} of each layer's value "
                "(or of its Gauss-Newton part, if that is larger), on average at most "
                f"{self.request.max_passes} per sample; a pilot run decides how many"
            )
        if self.by_parameters.rest:
            yield f"trace of {listed(self.by_parameters.rest, 6)}: products with their Hessian"
        if self.repeated:
            yield f"trace of {listed(self.repeated, 6)}: probes, with one copy per sample"
        if self.request.differences:
            yield "Hessian products are central differences of gradients"
        if self.estimate is not None:
            yield str(self.estimate)

    def _layers(self) -> Iterator[str]:
        routes = self.layer_routes
        for name in self.layers:
            treatment, positions = self.treatments[name], routes[name].positions
            G, *sizes = treatment.shape
            shape = " × ".join(str(size) for size in ([G, *sizes] if G > 1 else sizes))
            where = f"{positions} position{'s' * (positions > 1)}"
            yield f"  {_label(name)}  W {shape}, {where}: {treatment}; {treatment.reason}"

    def _iterations(self) -> Iterator[str]:
        if self.spectra:
            named = ((_label(name), parts) for name, parts in self.spectra.items())
            solved = ", ".join(f"{name} ({' and '.join(parts)})" for name, parts in named)
            yield f"eigenvalues by Lanczos, all layers in step: {solved}"
        for name, request in self.request.network_spectra.items():
            over = "all parameters" if request.parameters == "all" else "all weights"
            yield (
                f"{name} over {over}: {request.solver} in the {request.metric} metric, one forward and two "
                "backward passes per product, in step with the others"
            )
        for measure in self.measures:
            if measure.explore is not None:
                yield f"{measure.name}: {measure.cost or 'passes of its own'}"

    def _notes(self) -> Iterator[str]:
        yield from (f"note: {note}" for note in self.notes)
        yield from (f"and with {other.loss}:\n{other}" for other in self.others)

    def _repr_html_(self) -> str:
        from flatness.report.notebook import outline_html

        return outline_html(str(self))


def _label(name: str) -> str:
    return name or "the model itself"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _span(seconds: float) -> str:
    """A time in words, to about a digit."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{max(seconds, 0.01):.1g} s"


def _size(memory: int) -> str:
    """Bytes in words."""
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if memory >= size:
            return f"{memory / size:.2g} {unit}"
    return f"{max(1, memory // 1000)} kB"
