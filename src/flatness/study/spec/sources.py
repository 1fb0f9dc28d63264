"""What a study names that only its data and networks can say is there, checked before anything trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from flatness.catalogue.measure import Measure
from flatness.catalogue.registry import select_measures
from flatness.errors import SpecError, listed, nearest
from flatness.network.layers import find_layers
from flatness.study.grid import digest
from flatness.study.objects import load_split, make_model
from flatness.study.spec.conditions import parse_condition
from flatness.study.spec.spec import Spec
from flatness.study.table import column_name
from flatness.study.training.cohorts import Unit


def check_sources(spec: Spec, work: Sequence[Unit]) -> dict[str, Mapping[str, str]]:
    """Load every data set and build every model once: what is missing is said now, not after an hour.

    Returns:
        `Split.mark` of every data set, by the digest of its table [data].

    Raises:
        SpecError: A layer or a column is named that there will not be.
        DataError: The data are not there.
    """
    data: dict[str, Mapping[str, str]] = {}
    models: list[tuple[str, Mapping[str, Any]]] = []
    columns: dict[str, None] = {}
    for unit in work:
        one = unit.configurations[0]
        if digest(dict(one.data)) not in data:
            data[digest(dict(one.data))] = load_split(one.data).mark
        if (one.part, one.model) not in models:
            models.append((one.part, one.model))
            # A scale may measure less than the file, whose headline then holds all the same.
            everything = spec.scale != "paper"
            columns |= dict.fromkeys(_columns(make_model(one), spec.parts[one.part], everything))
    if work:
        _check_analysis(spec, list(columns))
    return data


def _columns(model: nn.Module, settings: Mapping[str, Any], everything: bool) -> list[str]:
    """The columns that a network's measures, or all there are, have; every layer that is named exists."""
    measure = settings.get("measure", {})
    tables = {"measure": measure}
    if "subset" in measure:
        tables["measure.subset"] = {**measure, **measure["subset"]}
    found, again = [], []
    wanted = settings["rescale"].get("measures", "all") if "rescale" in settings else []
    rescaled = [one.name for one in select_measures(wanted)] if wanted else []
    for table, asked in tables.items():
        layers = _chosen(model, asked.get("layers"), table)
        for one in select_measures("all" if everything else asked.get("measures", "default")):
            found += columns_of(one, layers)
            again += [f"{name}:rescaled" for name in columns_of(one, layers) if one.name in rescaled]
    return [*found, *again]


def _chosen(model: nn.Module, layers: Any, table: str) -> list[str]:
    available = list(find_layers(model))
    for name in available:
        if ":" in name or not name.isprintable():
            raise SpecError(
                "Expected layers to have names without ':', which separates a measure from its layer in the "
                f"tables, and without control characters but the model has {name!r}. Rename it."
            )
    if layers is None or (layers == "last" and "last" not in available):
        return available
    names = [layers] if isinstance(layers, str) else layers
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise SpecError(
            f'Expected layers in [{table}] to be "last", a name or a list of names but the study has '
            f"{layers!r}. Leave it out to measure all: {listed(available)}."
        )
    for name in names:
        if name not in available:
            kinds = {known: type(module).__name__ for known, module in model.named_modules()}
            what = f", which is a {kinds[name]}." if name in kinds else f".{nearest(name, available)}"
            raise SpecError(
                f"Expected layers in [{table}] to be supported layers of the model but the study has "
                f"{name!r}{what} Known: {listed(available) or 'none'}."
            )
    return list(names)


def columns_of(measure: Measure, layers: Iterable[str]) -> list[str]:
    """What the values of a measure are called as columns.

    >>> from flatness.measures.catalogue import get_measure
    >>> columns_of(get_measure("relative_flatness"), ["fc1"])
    ['relative_flatness:fc1', 'relative_flatness:network:sum']
    """
    of_units = measure.units is not None
    places: list[tuple[str | None, str | None]] = []
    if "layer" in measure.levels:
        places += [(layer, way) for layer in layers for way in (measure.reductions if of_units else (None,))]
    if "network" in measure.levels:
        whole = measure.network is not None or measure.explore is not None
        places += [(None, way) for way in (*([None] if whole else []), *measure.reductions)]
    return [column_name({"measure": measure.name, "layer": layer, "reduction": way}) for layer, way in places]


def _check_analysis(spec: Spec, columns: Sequence[str]) -> None:
    """What is asked of measured values, which is what a colon stands for, is asked of some that will be."""
    for settings in spec.parts.values():
        analysis = settings.get("analysis", {})
        asked = {"keep": [parse_condition(text, "the study").column for text in analysis.get("keep", ())]}
        asked["colour"] = [analysis["colour"]] if "colour" in analysis else []
        for key, names in asked.items():
            for name in names:
                if ":" in name and name not in columns:
                    raise SpecError(
                        f"Expected the column of {key} in [analysis] to be one that is measured but the "
                        f"study has {name!r}.{nearest(name, columns)}"
                    )
        for name in analysis.get("headline", ()):
            if name not in columns:
                raise SpecError(
                    "Expected headline in [analysis] to be columns that are measured, as measure:layer, "
                    f"measure:network or with :max or :sum behind, but the study has {name!r}."
                    f"{nearest(name, columns)}"
                )
