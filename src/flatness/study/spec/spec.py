"""A study file, read and checked: what to train, when to stop, what to measure and hold it against."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from flatness.errors import SpecError, check_known, nearest
from flatness.study.configuration import Configuration
from flatness.study.experiments.catalogue import experiment
from flatness.study.experiments.experiment import Experiment
from flatness.study.spec.grid import expanded, thinned
from flatness.study.spec.layout import (
    AXES,
    EXPERIMENT,
    SCALES,
    TABLES,
    check_layout,
    check_options,
    check_settings,
    merged,
)
from flatness.study.spec.origin import received_with

# What a scale changes where the file has no section for it: at most to these values, never upwards.
_USUAL: dict[str, dict[str, Any]] = {
    "smoke": {
        "data": {"limit": 512, "test_limit": 512},
        "stop": {"epochs": 2},
        "measure": {"which": "all"},
        "grid": {"at_most": 8},
    },
    "small": {
        "data": {"limit": 5000, "test_limit": 2000},
        "stop": {"epochs": 20},
        "measure": {"which": "all"},
        "grid": {"at_most": 40},
    },
}
# What it changes also where the file has one.
_ALWAYS: dict[str, dict[str, Any]] = {"smoke": {"measure": {"which": "all"}}}


@dataclass(frozen=True)
class Spec:
    """A study at one scale.

    Attributes:
        name: What the study is called: the stem of its file.
        scale: "smoke", "small", "gallery" or "paper".
        content: The file with the scale's changes in place, as plain dictionaries.
        parts: The same for every part; a study without parts has one, named "".
        configurations: Every network to train (or to load), in the order of the grid.
        units: The work of an experiment, for a study that is one; it then has neither parts nor networks.
        received: The folder or archive from elsewhere that it came with; empty for a study of your own.
    """

    name: str
    scale: str
    content: Mapping[str, Any]
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    configurations: tuple[Configuration, ...] = ()
    units: tuple[Mapping[str, Any], ...] = ()
    received: str = field(default="", compare=False)

    @property
    def experiment(self) -> Experiment | None:
        """The experiment that this study is; None for a study of networks."""
        named = self.content.get(EXPERIMENT)
        return None if named is None else experiment(named.get("name"), self.name)

    @property
    def size(self) -> str:
        """How much there is: "450 networks"."""
        if self.experiment is None:
            return f"{len(self.configurations)} networks"
        return f"{sum(unit.get('count', 1) for unit in self.units)} {self.experiment.counted}"

    @property
    def title(self) -> str:
        """One line about the study."""
        return str(self.content.get("title", self.name))

    @property
    def heading(self) -> str:
        """Title, name and how much of the study runs: "in full" for the user's own at scale "paper"."""
        whole = self.scale == "paper" and self.name not in names()
        return f"{self.title} ({self.name}, {'in full' if whole else f'scale {self.scale}'})"

    def gap(self, part: str) -> str:
        """The kind of gap of a part, a key of `table.GAPS`."""
        return self.parts[part].get("gap", {}).get("kind", "loss")

    def axes(self) -> list[str]:
        """The hyperparameters that vary, seeds left out; those that only vary together count as one.

        They are joined by ``+``: ``batch_size+learning_rate``.
        """
        return list(dict.fromkeys(axis for part in self.parts.values() for axis in _axes(part)))


def _axes(part: Mapping[str, Any]) -> list[str]:
    grid = part.get("grid", {})
    joint = ["+".join(row) for row in grid.get("together", ()) if len(next(iter(row.values()), [])) > 1]
    plain = [
        axis
        for axis, values in grid.items()
        if axis in AXES and axis != "seed" and isinstance(values, list) and len(values) > 1
    ]
    return [*joint, *plain]


def names() -> list[str]:
    """List the studies that come with the package."""
    folder = resources.files("flatness.study") / "specs"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def usual_scale(source: str | os.PathLike[str] | Mapping[str, Any]) -> str:
    """The scale of a run that names none: "small" for a study of the package, in full for the user's own."""
    return "small" if not isinstance(source, Mapping) and os.fspath(source) in names() else "paper"


def read_spec(source: str | os.PathLike[str] | Mapping[str, Any], scale: str = "paper") -> Spec:
    """Read a study: the name of one that comes with the package, the path of a file, or its content.

    Nothing runs yet. A study file is code nevertheless: `run` imports and calls what it names as
    ``package.module:factory``.

    Args:
        source: ``"petzka2021-cifar10"``, ``"mine.toml"`` or a dictionary like such a file.
        scale: "smoke", "small", "gallery" or "paper".

    Raises:
        SpecError: Something in it is unknown or makes no sense; nothing has been trained.
    """
    check_known(scale, SCALES, "scale", SpecError)
    name, where, content = _content(source)
    spec = make_spec(name, scale, content, where)
    check_options(content, where)  # of files; stored studies load as they are
    own = isinstance(source, Mapping) or not os.path.exists(where)  # content, or a study of this package
    return spec if own else replace(spec, received=received_with(where))


def make_spec(name: str, scale: str, content: Mapping[str, Any], where: str) -> Spec:
    """The study that the content of a file describes, checked."""
    check_layout(content, where)
    if EXPERIMENT in content:
        return _experiment_spec(name, scale, content, where)
    usual = _USUAL.get(scale, {})
    if "checkpoints" in content:
        usual = {table: changes for table, changes in usual.items() if table == "grid"}
    at_scale = _scaled(content, scale, usual, _ALWAYS.get(scale, {}))
    parts = {
        part: {key: value for key, value in merged(at_scale, over).items() if key != "parts"}
        for part, over in (at_scale.get("parts") or {"": {}}).items()
    }
    configurations: list[Configuration] = []
    for part, settings in parts.items():
        check_settings(settings, where)
        configurations += thinned(expanded(part, settings, where), settings)
    return Spec(name, scale, at_scale, parts, tuple(configurations))


def _experiment_spec(name: str, scale: str, content: Mapping[str, Any], where: str) -> Spec:
    others = [table for table in TABLES if table in content]
    if others:
        raise SpecError(
            f"Expected [{EXPERIMENT}] instead of a grid of networks but {where} has [{others[0]}] too. "
            "Leave one of them out."
        )
    found = experiment(content[EXPERIMENT].get("name"), where)
    at_scale = _scaled(content, scale, {EXPERIMENT: found.scales.get(scale, {})}, {})
    given = {key: value for key, value in at_scale[EXPERIMENT].items() if key != "name"}
    options = found.chosen(given, where)
    at_scale[EXPERIMENT] = {"name": found.name, **options}
    return Spec(name, scale, at_scale, units=tuple(found.units(options)))


def _content(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """The name of a study, what messages call its file, and what is in it."""
    if isinstance(source, Mapping):
        return str(source.get("title", "study")), "the study", dict(source)
    text = os.fspath(source)
    own = not text.endswith(".toml") and os.path.sep not in text
    if own and text not in names():
        raise SpecError(
            f"Expected the name of a study, one of {', '.join(names())}, or the path of a .toml file but "
            f"got {text!r}.{nearest(text, names())}"
        )
    where = f"{text}.toml" if own else text
    file = resources.files("flatness.study") / "specs" / where if own else Path(text)
    try:
        return Path(where).stem, where, tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise SpecError(
            f"Expected a study file that can be read but got {text}: {error.strerror or error}."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"Expected TOML but {where} is not: {error}.") from error


def _scaled(
    content: Mapping[str, Any], scale: str, usual: Mapping[str, Any], always: Mapping[str, Any]
) -> dict[str, Any]:
    """The content with the changes of a scale: those of its section, or the package's where it has none."""
    base = {key: value for key, value in content.items() if key != "scale"}
    given = content.get("scale", {}).get(scale)
    over = usual if given is None else merged(always, given)
    general = {key: value for key, value in over.items() if key != "parts"}

    def changed(own: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        return merged(own, _no_more(general, whole) if given is None else general)

    result = changed(base, base)
    if "parts" in base:  # the scale's word counts, also over what a part says
        parts = {part: changed(own, merged(base, own)) for part, own in base["parts"].items()}
        result["parts"] = merged(parts, over.get("parts", {}))
    return result


def _no_more(usual: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The package's changes for a scale, with the file's own number where that is smaller.

    >>> _no_more({"stop": {"epochs": 20}, "data": {"limit": 512}}, {"stop": {"epochs": 3}, "data": {}})
    {'stop': {'epochs': 3}, 'data': {'limit': 512}}
    """
    found: dict[str, Any] = {}
    for key, value in usual.items():
        said = own.get(key)
        if isinstance(value, Mapping):
            found[key] = _no_more(value, said) if isinstance(said, Mapping) else value
        else:
            found[key] = min(value, said) if isinstance(value, int) and isinstance(said, int) else value
    return found
