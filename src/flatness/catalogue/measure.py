"""What a measure is: a declared quantity, and what it gets to see of layers, network and surroundings."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flatness.curvature.spectra import NetworkSpectrum, Spectrum, SpectrumRequest
from flatness.network.layers import Layer

if TYPE_CHECKING:
    from flatness.curvature.metrics import Root
    from flatness.curvature.parameters.hessian_operator import HessianOperator
    from flatness.curvature.parameters.parameter_space import ParameterSpace
    from flatness.curvature.sums.spread import Whitening
    from flatness.curvature.sums.squared_gradients import SquaredGradients

Level = Literal["unit", "layer", "network"]
Clips = Literal["entries", "sums"]
SPECTRA = frozenset({"layer_eigenvalue", "row_eigenvalues", "relative_eigenvalue", "whitened_eigenvalue"})
NETWORK_NEEDS = frozenset({"traces", "spectrum"})


def squared_norm(values: Tensor) -> Tensor:
    """‖·‖² accumulated in float64 without a float64 copy."""
    return torch.linalg.vector_norm(values.detach(), dtype=torch.float64).square().cpu()


@dataclass(frozen=True)
class LayerView:
    """What a measure receives of one layer: its weight and its curvature in float64.

    Attributes:
        name: The layer's name.
        weight: The weight (G, d, m) in the dtype it was measured in; `W` is the same in float64.
        statistics: Means over the data, penalty included, by name (see `flatness.curvature.sums.kinds`).
        spectra: Largest eigenvalues, penalty included: "layer_eigenvalue", "row_eigenvalues",
            "relative_eigenvalue", "whitened_eigenvalue".
        options: The measure's own options.
        taps: Columns of W per input unit (kernel positions of a convolution).
        layer: The layer itself, for what moves its weight.
        whitening: Coordinates in which the layer's features are white, for what is measured in them.
    """

    name: str
    weight: Tensor
    statistics: Mapping[str, Tensor]
    spectra: Mapping[str, Spectrum] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    taps: int = 1
    layer: Layer | None = None
    whitening: Whitening | None = None

    @cached_property
    def W(self) -> Tensor:
        """The weight (G, d, m) in float64, on the host."""
        return self.weight.double().cpu()

    @property
    def trace(self) -> Tensor:
        """Tr H_l."""
        return self.statistics["row_traces"].sum()

    @cached_property
    def squared_norm(self) -> Tensor:
        """‖W‖²_F."""
        return squared_norm(self.weight)

    def per_unit(self, values: Tensor) -> Tensor:
        """Sums of numbers like W (G, d, m) over the columns of each input unit: (G, d, units)."""
        return values.unflatten(2, (-1, self.taps)).sum(3)


@dataclass(frozen=True)
class Valued:
    """A value with its error, method and notes.

    Attributes:
        value: The number.
        notes: How it was computed, and caveats.
        converged: Whether an iteration behind it met its tolerance.
        stderr: Standard error of the estimator; 0 when there is none.
        method: "exact", "sampled" if noise is drawn, "ascent" if a maximum is searched for, "bisection" if a
            crossing is.
        residual: ‖Hv − λv‖ of the eigenvalue behind it, if any.
        terms: What the value is made of, by name: numbers, texts, lists and dictionaries of them.
        over: What a value of the network is about, in words, where that is not all parameters.
    """

    value: float
    notes: tuple[str, ...] = ()
    converged: bool = True
    stderr: float = 0.0
    method: str = "exact"
    residual: float | None = None
    terms: Mapping[str, Any] | None = None
    over: str | None = None


def averaged(draws: Sequence[float]) -> tuple[float, float]:
    """The mean over independent draws, and its standard error."""
    values = torch.tensor(draws, dtype=torch.float64, device="cpu")
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))


@dataclass(frozen=True)
class NetworkView:
    """What a measure receives of the whole network.

    Attributes:
        traces: Tr H of every parameter tensor, by name, penalty included.
        squared_norms: ‖·‖² of every parameter tensor, by name.
        layer_traces: Tr H of every layer's weight, by layer, in network order, penalty included.
        spectrum: Extreme eigenvalues in the metric that the measure's options name, for "spectrum".
        options: The measure's own options.
    """

    traces: Mapping[str, Tensor]
    squared_norms: Mapping[str, Tensor]
    layer_traces: Mapping[str, Tensor] = field(default_factory=dict)
    spectrum: NetworkSpectrum | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Surroundings:
    """What a measure that walks around in parameter space gets to see.

    Attributes:
        space: The parameters as one vector; E, ∇E and the accuracy anywhere near.
        layers: The measured layers, with the statistics that the measure `needs`.
        weights: W (G, d, m) of every layer that the forward pass calls, measured or not, by name.
        gradient: Gives E and ∇E at θ; computed once for all measures that ask, like the next two.
        squared_gradients: Gives E(∂_i ℓ)² for every parameter.
        metric_root: Gives D^½ of a diagonal metric that a request names, as a vector.
        root: Gives D^½ of any metric that a request names.
        spectrum: Gives extreme eigenvalues of the network's Hessian in a metric.
        hessian: Products with the Hessian of all parameters.
        options: The measure's own options.
        seed: Seed of everything random.
    """

    space: ParameterSpace
    layers: Sequence[LayerView]
    weights: Mapping[str, Tensor]
    gradient: Callable[[], tuple[float, Tensor]]
    squared_gradients: Callable[[], SquaredGradients]
    metric_root: Callable[[SpectrumRequest], Tensor]
    root: Callable[[SpectrumRequest], Root]
    spectrum: Callable[[SpectrumRequest], NetworkSpectrum]
    hessian: HessianOperator
    options: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, repr=False)
class Measure:
    """A declared quantity. The engine computes what it `needs`; its functions turn that into numbers.

    Attributes:
        name: What users type.
        symbol: As in the source.
        formula: The definition in one line.
        source: Paper and number.
        summary: What it is, in plain words.
        levels: "unit", "layer", "network".
        invariances: Rewritings of the network that leave the value unchanged.
        needs: Statistics and spectra of a layer that it is computed from.
        layer: Value of one layer; None when units are reduced instead.
        units: Values of one layer's units.
        unit_name: What a unit is, for messages and pages.
        network: Value over all parameters of the network.
        network_needs: "traces" when `network` needs the trace of every parameter, "spectrum" when it needs
            extreme eigenvalues of the network's Hessian (options metric, parameters, solver, tolerance and
            max_products say which and how).
        explore: Values that take passes of their own through parameter space, by layer, None for the
            network.
        cost: What it takes, in words; see `price`.
        when: When to use it, in plain words, for the reference.
        misleads: When it misleads.
        reductions: How layers (and units) are aggregated.
        flatness: Whether smaller means flatter; False for quantities that do not measure flatness.
        options: Names and defaults of the options it takes.
        loss: Name of the loss it is defined with, whatever the user's; None for the user's own. A measure
            with its own loss gets its own pass; its option ``loss="same"`` takes the user's.
        loss_of: The same where it depends on the options: called with them.
        check_option: Called with an option's name and value; raises `OptionError` if the value is invalid.
        on_request: Whether "default" leaves it out even though it needs only the shared pass.
        clips: What the value clips at 0: "entries" of statistics, or "sums" of them, which are then under a
            root; None for nothing.
        adapted: Called with all options; the fields that these options change, by name, or the measure as
            they make it.
    """

    name: str
    symbol: str
    formula: str
    source: str
    summary: str
    levels: tuple[Level, ...]
    invariances: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    layer: Callable[[LayerView], Tensor | float | Valued] | None = None
    units: Callable[[LayerView], Tensor] | None = None
    unit_name: str = "row"
    network: Callable[[NetworkView], Tensor | float | Valued] | None = None
    network_needs: frozenset[str] = frozenset()
    explore: Callable[[Surroundings], Mapping[str | None, Valued]] | None = None
    cost: str = ""
    when: str = ""
    misleads: str = ""
    reductions: tuple[str, ...] = ()
    flatness: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    check_option: Callable[[str, Any], None] | None = None
    loss: str | None = None
    loss_of: Callable[[Mapping[str, Any]], str | None] | None = None
    on_request: bool = False
    clips: Clips | None = None
    adapted: Callable[[Mapping[str, Any]], Measure | Mapping[str, Any]] | None = None

    def own_loss(self, options: Mapping[str, Any]) -> str | None:
        """Name of the loss it is defined with under these options; None for the user's own."""
        if self.loss_of is not None:
            return self.loss_of(options)
        wanted = options.get("loss", self.loss)
        return None if wanted == "same" else wanted

    def under(self, options: Mapping[str, Any]) -> Measure:
        """The measure as these options make it."""
        changed = {} if self.adapted is None else self.adapted(options)
        return changed if isinstance(changed, Measure) else replace(self, **changed)

    @property
    def invariant(self) -> bool:
        """Whether rescaling layers leaves it unchanged, at least in chains; tables mark what it changes."""
        return any(kind.startswith("layerwise") for kind in self.invariances)

    @property
    def one_pass(self) -> bool:
        """Whether it needs only the shared streaming pass."""
        return self.of_sums and self.loss is None

    @property
    def by_default(self) -> bool:
        """Whether "default" includes it."""
        return self.one_pass and not self.on_request

    @property
    def of_sums(self) -> bool:
        """Whether its values are functions of sums over the samples, and no eigenvalues or explorations."""
        return not (self.needs & SPECTRA or "spectrum" in self.network_needs or self.explore)

    @property
    def price(self) -> str:
        """What it costs, in words."""
        if self.cost:
            return self.cost
        if self.one_pass and (self.needs or self.network_needs):
            return "the shared pass over the data"
        if self.needs & SPECTRA:
            return "eigenvalue iterations: about 20 to 60 products with the layers' Hessians"
        return "a pass of its own, with a loss of its own" if self.needs else "nothing: the weights alone"

    @property
    def of_layers(self) -> bool:
        """Whether it has values of layers or units that come from their curvature."""
        return bool(self.needs)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        """The card of the measure."""
        invariant = ", ".join(sorted(self.invariances)) or "nothing"
        needs = ", ".join(sorted(self.needs)) or self.cost or "weights only"
        return (
            f"{self.name}  {self.symbol}  ({self.source})\n  {self.formula}\n  {self.summary}\n  levels: "
            f"{', '.join(self.levels)}; invariant to: {invariant}; needs: {needs}"
        )

    __repr__ = __str__
