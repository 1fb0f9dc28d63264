"""The catalogue: which measures exist, how they are chosen, and how users add their own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from flatness.catalogue.measure import NETWORK_NEEDS, SPECTRA, Level, Measure
from flatness.curvature.sums.kinds import STATISTICS
from flatness.errors import MeasureError, OptionError, listed, nearest

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"max": torch.max, "sum": torch.sum}
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
    unknown = sorted(measure.needs - STATISTICS.keys() - SPECTRA)
    if unknown:
        raise MeasureError(
            f"Expected {measure.name!r} to need statistics the engine has but got {listed(unknown)}. "
            f"Known: {listed(sorted(STATISTICS.keys() | SPECTRA), 20)}."
        )
    for what, given, known, advice in (
        ("network_needs", measure.network_needs, sorted(NETWORK_NEEDS), "Leave it out."),
        ("levels", measure.levels, get_args(Level), "Say where it has values."),
        ("reductions", measure.reductions, sorted(_REDUCTIONS), "Leave it out."),
    ):
        odd = sorted(set(given) - set(known))
        if odd:
            raise MeasureError(
                f"Expected {what} out of {listed(known)} but {measure.name!r} has {listed(odd)}. {advice}"
            )
    given = (measure.layer, measure.units, measure.explore)
    if "layer" in measure.levels and all(way is None for way in given):
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


def known_measure(name: str) -> Measure | None:
    """What is declared about a measure; None of one that is not in the catalogue, as in old reports."""
    return _REGISTRY.get(name)


def select_measures(measures: str | Measure | Iterable[str | Measure]) -> list[Measure]:
    """Resolve the `measures` argument: a name, a list of names, "default" or "all"."""
    if measures in ("default", "all"):
        return [measure for measure in _REGISTRY.values() if measures == "all" or measure.by_default]
    if isinstance(measures, (str, Measure)):
        measures = [measures]
    if not isinstance(measures, Iterable):
        raise MeasureError(
            "Expected measures to be a name, a list of names, 'default' or 'all' but got "
            f"{type(measures).__name__}. Known: {listed(_REGISTRY, 40)}."
        )
    chosen: dict[str, Measure] = {}
    for name in measures:
        if name in ("all", "default"):
            raise MeasureError(
                f"Expected names of measures in a list but got {name!r}, which stands for many. Pass "
                f"measures={name!r} by itself."
            )
        measure = get_measure(name)
        chosen[measure.name] = measure
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
        _check_options(measure, values)
        resolved[name].update(values)
    return resolved


def _check_options(measure: Measure, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise OptionError(
            f"Expected the options of {measure.name!r} by name but got {values!r}. "
            f"For example options={{{measure.name!r}: {{'tolerance': 1e-9}}}}."
        )
    for key, value in values.items():
        if key not in measure.options:
            raise OptionError(
                f"Expected an option of {measure.name!r} but got {key!r}."
                f"{nearest(key, measure.options)} Known: {listed(measure.options) or 'none'}."
            )
        if measure.check_option is not None:
            measure.check_option(key, value)


def adapted_measures(
    measures: str | Measure | Iterable[str | Measure], options: Mapping[str, Mapping[str, Any]] | None
) -> tuple[list[Measure], dict[str, dict[str, Any]]]:
    """The requested measures, each as its options make it, and the options of all of them."""
    chosen = select_measures(measures)
    resolved = resolve_options(chosen, options)
    return [measure.under(resolved[measure.name]) for measure in chosen], resolved


@dataclass(frozen=True)
class LossGroup:
    """Measures that share a loss, and so their passes over the data.

    Attributes:
        loss: Name of the loss; None for the user's own.
        measures: The measures, each as its options make it.
        options: Their options, by measure.
    """

    loss: str | None
    measures: list[Measure]
    options: dict[str, dict[str, Any]]


def by_loss(
    measures: str | Iterable[str], options: Mapping[str, Mapping[str, Any]] | None
) -> list[LossGroup]:
    """The requested measures in groups that share a loss, the user's own loss first."""
    chosen, resolved = adapted_measures(measures, options)
    groups: dict[str | None, LossGroup] = {}
    for measure in chosen:
        own = resolved[measure.name]
        loss = measure.own_loss(own)
        group = groups.setdefault(loss, LossGroup(loss, [], {}))
        group.measures.append(measure)
        group.options[measure.name] = own
    return sorted(groups.values(), key=lambda group: group.loss is not None)


def reduce_values(reduction: str, values: Tensor) -> Tensor:
    """Aggregate values by name: "max" or "sum"."""
    return _REDUCTIONS[reduction](values)


class Catalogue(list[Measure]):
    """A list of measures that prints as a table."""

    def __repr__(self) -> str:
        """A line per measure, those first that are recommended."""
        width = max((len(measure.name) for measure in self), default=0)
        return "\n".join(f"{measure.name:<{width}}  {measure.summary}" for measure in self)

    def _repr_html_(self) -> str:
        # HTML is made by the room above; only a notebook asks for it.
        return importlib.import_module("flatness.report.notebook").catalogue_html(self)


def measures(name: str | None = None) -> Any:
    """The catalogue as a list of `Measure` objects that prints as a table, or the one called `name`.

    Example:
        >>> import flatness
        >>> flatness.measures("relative_flatness").formula
        'Σ_{s,s′} ⟨w_s, w_s′⟩ Tr H_{s,s′}'
    """
    return Catalogue(_REGISTRY.values()) if name is None else get_measure(name)
