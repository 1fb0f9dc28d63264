"""The catalogue: what a measure is, which ones exist, and how users add their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from flatness.curvature.spectrum import Spectrum
from flatness.curvature.statistics import LAYER_STATISTICS
from flatness.errors import MeasureError, OptionError, listed, nearest

Level = Literal["unit", "layer", "network"]
Invariance = Literal["layerwise", "neuronwise", "neuronwise except own features", "output"]
SPECTRA = frozenset({"layer_eigenvalue", "row_eigenvalues"})
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"max": torch.max, "sum": torch.sum}


def squared_norm(values: Tensor) -> Tensor:
    """‖·‖² accumulated in float64 without a float64 copy."""
    return torch.linalg.vector_norm(values.detach(), dtype=torch.float64).square().cpu()


@dataclass(frozen=True)
class LayerView:
    """What a measure gets to see of one layer: its weight and its curvature in float64.

    Attributes:
        name: The layer's name.
        weight: The weight (G, d, m) in the dtype it was measured in; `W` is the same in float64.
        statistics: Means over the data, penalty included, by name (see `flatness.curvature.statistics`).
        spectra: Largest eigenvalues, penalty included: "layer_eigenvalue", "row_eigenvalues".
        options: The measure's own options.
        taps: Columns of W per input unit (kernel positions of a convolution).
    """

    name: str
    weight: Tensor
    statistics: Mapping[str, Tensor]
    spectra: Mapping[str, Spectrum] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    taps: int = 1

    @cached_property
    def W(self) -> Tensor:
        """The weight (G, d, m) in float64, on the host."""
        return self.weight.double().cpu()

    @property
    def trace(self) -> Tensor:
        """Tr H_l."""
        return self.statistics["row_traces"].sum()

    @property
    def squared_norm(self) -> Tensor:
        """‖W‖²_F."""
        return squared_norm(self.weight)


@dataclass(frozen=True)
class Valued:
    """A layer's value with what there is to say about it."""

    value: float
    notes: tuple[str, ...] = ()
    converged: bool = True


@dataclass(frozen=True)
class NetworkView:
    """What a measure gets to see of the whole network.

    Attributes:
        traces: Tr H of every parameter tensor, by name, penalty included.
        squared_norms: ‖·‖² of every parameter tensor, by name.
    """

    traces: Mapping[str, Tensor]
    squared_norms: Mapping[str, Tensor]


@dataclass(frozen=True)
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
        network_needs: "traces" when `network` needs the trace of every parameter.
        reductions: How layers (and units) are aggregated.
        flatness: Whether smaller means flatter; False for quantities that are no flatness.
        options: Names and defaults of the options it takes.
        loss: Name of the loss it is defined with, whatever the user's; None for the user's own. A measure
            with a loss of its own gets a pass of its own; its option ``loss="same"`` takes the user's.
        check_option: Called with an option's name and value; raises `OptionError` when the value is no good.
    """

    name: str
    symbol: str
    formula: str
    source: str
    summary: str
    levels: tuple[Level, ...]
    invariances: frozenset[Invariance] = frozenset()
    needs: frozenset[str] = frozenset()
    layer: Callable[[LayerView], Tensor | float | Valued] | None = None
    units: Callable[[LayerView], Tensor] | None = None
    unit_name: str = "row"
    network: Callable[[NetworkView], Tensor | float] | None = None
    network_needs: frozenset[str] = frozenset()
    reductions: tuple[str, ...] = ()
    flatness: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    check_option: Callable[[str, Any], None] | None = None
    loss: str | None = None

    @property
    def one_pass(self) -> bool:
        """Whether the shared streaming pass is all it needs."""
        return not self.needs & SPECTRA and self.loss is None

    def __str__(self) -> str:
        """The card of the measure."""
        invariant = ", ".join(sorted(self.invariances)) or "nothing"
        return (
            f"{self.name}  {self.symbol}  ({self.source})\n  {self.formula}\n  {self.summary}\n  levels: "
            f"{', '.join(self.levels)}; invariant to: {invariant}; needs: "
            f"{', '.join(sorted(self.needs)) or 'weights only'}"
        )


_REGISTRY: dict[str, Measure] = {}


def register_measure(measure: Measure, *, replace: bool = False) -> Measure:
    """Add a measure to the catalogue, so that `flatness.measure` knows it by name.

    Example:
        >>> import flatness
        >>> _ = flatness.register_measure(
        ...     flatness.Measure(
        ...         name="mean_curvature",
        ...         symbol="Tr H / dim",
        ...         formula="Tr H_l / (d·m)",
        ...         source="mine",
        ...         summary="Average eigenvalue of a layer.",
        ...         levels=("layer",),
        ...         needs=frozenset({"row_traces"}),
        ...         layer=lambda view: view.trace / view.W.numel(),
        ...     ),
        ...     replace=True,
        ... )
        >>> flatness.measures("mean_curvature").source
        'mine'
    """
    if not isinstance(measure, Measure):
        raise MeasureError(
            f"Expected a flatness.Measure but got {type(measure).__name__}. "
            "Build one: flatness.Measure(name=..., ...)."
        )
    _check_declaration(measure)
    if measure.name in _REGISTRY and not replace:
        raise MeasureError(
            f"Expected a new name but {measure.name!r} is taken. Pass replace=True to replace it."
        )
    _REGISTRY[measure.name] = measure
    return measure


def _check_declaration(measure: Measure) -> None:
    if measure.name in ("default", "all"):
        raise MeasureError(
            f"Expected a name that means nothing else but got {measure.name!r}. Choose another."
        )
    unknown = sorted(measure.needs - LAYER_STATISTICS - SPECTRA)
    if unknown:
        raise MeasureError(
            f"Expected {measure.name!r} to need statistics the engine has but got {listed(unknown)}. "
            f"Known: {listed(sorted(LAYER_STATISTICS | SPECTRA), 20)}."
        )
    odd = [level for level in measure.levels if level not in ("unit", "layer", "network")]
    if odd:
        raise MeasureError(
            f"Expected levels out of unit, layer, network but {measure.name!r} has {listed(odd)}. "
            "Say where it has values."
        )
    missing = sorted(set(measure.reductions) - set(_REDUCTIONS))
    if missing:
        raise MeasureError(
            f"Expected reductions out of max, sum but {measure.name!r} has {listed(missing)}. Leave it out."
        )
    if "layer" in measure.levels and measure.layer is None and measure.units is None:
        raise MeasureError(
            f"Expected {measure.name!r} to say how a layer's value is computed but it has neither layer= nor "
            "units=. Give one."
        )


def unregister_measure(name: str) -> None:
    """Remove a measure that was added with `register_measure`."""
    _REGISTRY.pop(get_measure(name).name)


def get_measure(name: str | Measure) -> Measure:
    """The measure of that name; a measure of the catalogue stands for itself."""
    if isinstance(name, Measure):
        name = name.name
    if name not in _REGISTRY:
        raise MeasureError(
            f"Expected the name of a measure but got {name!r}.{nearest(name, _REGISTRY)} Known: "
            f"{listed(_REGISTRY, 40)}."
        )
    return _REGISTRY[name]


def select_measures(measures: str | Measure | Iterable[str | Measure]) -> list[Measure]:
    """Resolve the `measures` argument: a name, a list of names, "default" or "all"."""
    if isinstance(measures, str):
        if measures == "all":
            return list(_REGISTRY.values())
        if measures == "default":
            return [measure for measure in _REGISTRY.values() if measure.one_pass]
        return [get_measure(measures)]
    if isinstance(measures, Measure):
        return [get_measure(measures)]
    if not isinstance(measures, Iterable):
        raise MeasureError(
            "Expected measures to be a name, a list of names, 'default' or 'all' but got "
            f"{type(measures).__name__}. Known: {listed(_REGISTRY, 40)}."
        )
    chosen = {measure.name: measure for measure in map(get_measure, measures)}
    if not chosen:
        raise MeasureError(
            f"Expected at least one measure but got an empty list. Known: {listed(_REGISTRY, 40)}."
        )
    return list(chosen.values())


def resolve_options(
    measures: list[Measure], options: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, dict[str, Any]]:
    """Options of every measure: its defaults, overridden by what the user gave."""
    resolved = {measure.name: dict(measure.options) for measure in measures}
    if not isinstance(options or {}, Mapping):
        raise OptionError(
            f"Expected options by measure but got {type(options).__name__}. "
            "For example options={'layer_flatness': {'tolerance': 1e-9}}."
        )
    for name, values in (options or {}).items():
        measure = get_measure(name)
        if name not in resolved:
            raise OptionError(
                f"Expected options for measured quantities only but {name!r} is not measured here. Add it to "
                "measures=."
            )
        if not isinstance(values, Mapping):
            raise OptionError(
                f"Expected the options of {name!r} by name but got {values!r}. "
                f"For example options={{{name!r}: {{'tolerance': 1e-9}}}}."
            )
        for key, value in values.items():
            if key not in measure.options:
                known = listed(measure.options) or "none"
                raise OptionError(
                    f"Expected an option of {name!r} but got {key!r}.{nearest(key, measure.options)} Known: "
                    f"{known}."
                )
            if measure.check_option is not None:
                measure.check_option(key, value)
            resolved[name][key] = value
    return resolved


@dataclass(frozen=True)
class LossGroup:
    """Measures that share a loss, and so their passes over the data.

    Attributes:
        loss: Name of the loss; None for the user's own.
        names: The measures.
        options: What the user gave for them.
    """

    loss: str | None
    names: list[str]
    options: dict[str, Mapping[str, Any]]


def by_loss(
    measures: str | Iterable[str], options: Mapping[str, Mapping[str, Any]] | None
) -> list[LossGroup]:
    """The requested measures in groups that share a loss, the user's own loss first."""
    chosen = select_measures(measures)
    resolved = resolve_options(chosen, options)
    names: dict[str | None, list[str]] = {}
    for measure in chosen:
        wanted = resolved[measure.name].get("loss", measure.loss)
        names.setdefault(None if wanted == "same" else wanted, []).append(measure.name)
    given = dict(options or {})
    return [
        LossGroup(loss, group, {name: given[name] for name in group if name in given})
        for loss, group in sorted(names.items(), key=lambda item: item[0] is not None)
    ]


def reduce_values(reduction: str, values: Tensor) -> Tensor:
    """Aggregate values by name: "max" or "sum"."""
    return _REDUCTIONS[reduction](values)


def measures(name: str | None = None) -> Any:
    """The catalogue as a list of `Measure` objects, or the one called `name`.

    Example:
        >>> import flatness
        >>> flatness.measures("relative_flatness").formula
        'Σ_{s,s′} ⟨w_s, w_s′⟩ Tr H_{s,s′}'
    """
    return list(_REGISTRY.values()) if name is None else get_measure(name)
