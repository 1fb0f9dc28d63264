"""What a study file may say: its tables, their keys, and what each key takes.

One description, from which come the checks, the messages and the defaults of a grid. Everything is checked
before anything runs: a mistake costs a second, not an hour.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flatness.catalogue.registry import resolve_options, select_measures
from flatness.errors import SpecError, nearest
from flatness.landscape.directions import KINDS as DIRECTIONS
from flatness.measuring import CURVATURES, METHODS
from flatness.study.key import Key
from flatness.study.table import GAPS, OUTCOMES, Condition, corrupted_columns
from flatness.study.training.augmentation import AUGMENTATIONS, NONE
from flatness.study.training.optimizers import OPTIMIZERS
from flatness.study.training.program import LOSSES
from flatness.symmetry.rewriting.kinds import KINDS as RESCALINGS
from flatness.symmetry.rewriting.rescaling import rescale
from flatness.zoo.data.corruption import CORRUPTIONS, STRENGTHS
from flatness.zoo.models.initial import SCHEMES

SCALES = ("smoke", "small", "gallery", "paper")
"""How much of a study runs: the whole pipeline on a few networks, an afternoon on a laptop, all of it."""
_WRITTEN_SCALES = SCALES[:-1]  # a file has sections for these; it is itself the last

_RESCALE = inspect.signature(rescale).parameters  # whose defaults hold where a file is silent

EXPERIMENT = "experiment"
"""The table that stands in the place of data, model and grid."""


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _count(least: int) -> Key:
    return Key("a whole number", least)


_NUMBER, _WHOLE, _TEXT, _YES_NO = map(Key, ("a number", "a whole number", "text", "true or false"))
_TABLE, _ANY = Key("a table"), Key()
_STRENGTHS = Key(
    "a list",
    wanted=f"strengths from {STRENGTHS[0]} to {STRENGTHS[-1]}",
    right=lambda values: len(values) > 0 and all(type(n) is int and n in STRENGTHS for n in values),
)


def _table(**inner: Key) -> Key:
    return Key("a table", inner=inner)


AXES: dict[str, Key] = {
    "initialization": Key(default="default", known=("default", *SCHEMES)),
    "batch_size": Key(default=64, wanted="whole numbers", right=lambda n: type(n) is int and n >= 1),
    "learning_rate": Key(default=0.01, wanted="positive numbers", right=lambda x: _number(x) and x > 0),
    "optimizer": Key(default="sgd", known=OPTIMIZERS),
    "momentum": Key(
        default=0.0, wanted="numbers from 0 to below 1", right=lambda x: _number(x) and 0 <= x < 1
    ),
    "weight_decay": Key(default=0.0, wanted="numbers of at least 0", right=lambda x: _number(x) and x >= 0),
    "augmentation": Key(default=NONE, known=AUGMENTATIONS),
    "random_labels": Key(
        default=0.0, wanted="shares from 0 to 1", right=lambda x: _number(x) and 0 <= x <= 1
    ),
    "seed": Key(default=0, wanted="whole numbers", right=lambda n: type(n) is int and n >= 0),
}
"""The axes of a grid: what a value must be, and the value of one that the file does not mention."""

_FILE: dict[str, Key] = {
    **dict.fromkeys(("title", "paper", "claim"), _TEXT),
    **dict.fromkeys(("parts", "scale"), _TABLE),
    "data": _table(
        name=_TEXT,
        options=_TABLE,
        standardize=_YES_NO,
        shift=_NUMBER,
        scale=_NUMBER,
        limit=_WHOLE,
        test_limit=_WHOLE,
        data_dir=_TEXT,
    ),
    "model": _table(name=_TEXT, options=_TABLE),
    "grid": _table(
        **dict.fromkeys(AXES, _ANY),
        together=Key("a list", inner=dict.fromkeys(AXES, Key("a list"))),
        without=Key("a list", inner=dict.fromkeys(AXES, _ANY)),
        at_most=_count(1),
    ),
    "stop": _table(
        loss=_NUMBER,
        accuracy=Key("a number", wanted="a share from 0 to 1", right=lambda x: 0 <= x <= 1),
        epochs=_count(1),
        stalled=_count(1),
    ),
    "train": _table(
        loss=Key("text", known=LOSSES),
        at_once=_count(1),
        tf32=_YES_NO,
        bfloat16=_YES_NO,
        decay_every=_count(1),  # epochs, as torch's StepLR
        decay=Key("a number", wanted="a factor above 0", right=lambda x: x > 0),
        **dict.fromkeys(
            ("beta1", "beta2", "alpha"),
            Key("a number", wanted="from 0 to below 1", right=lambda x: 0 <= x < 1),
        ),
        **dict.fromkeys(("eps", "rho"), Key("a number", wanted="at least 0", right=lambda x: x >= 0)),
    ),
    "measure": _table(
        measures=_ANY,
        layers=_ANY,
        which=Key("text", known=("converged", "all")),
        samples=_count(1),
        precision=Key(
            "a number",
            wanted="a relative standard error between 0 and 1",
            right=lambda x: 0 < x < 1,
            example=" For example precision = 0.01.",
        ),
        method=Key("text", known=METHODS),
        curvature=Key("text", known=CURVATURES),
        options=_TABLE,
        batch_size=_count(1),
        # Measures that are too expensive for all samples, and how many they get.
        subset=_table(measures=_ANY, samples=_count(1), layers=_ANY, options=_TABLE),
    ),
    "gap": _table(kind=Key("text", known=GAPS)),
    # Kinds with their strengths: the test data are evaluated with each, too.
    "corruptions": _table(**dict.fromkeys(CORRUPTIONS, _STRENGTHS)),
    "rescale": _table(
        kind=Key("text", known=RESCALINGS),
        low=_NUMBER,
        high=_NUMBER,
        condition=_NUMBER,
        seed=_WHOLE,
        measures=_ANY,
    ),
    "analysis": _table(
        keep=Key("a list"),
        headline=Key("a list"),
        targets=Key("a list"),
        colour=_TEXT,
        resamples=_count(1),
        permutations=_count(0),
    ),
    "checkpoints": _table(paths=_ANY, pattern=_TEXT, table=_TEXT),
    "lines": _table(
        directions=Key("text", known=DIRECTIONS),
        count=_count(1),
        points=_count(2),
        span=Key("a number", wanted="positive", right=lambda x: x > 0),
        samples=_count(1),
        seed=_WHOLE,
    ),
    EXPERIMENT: _TABLE,  # its name, and options that are checked once the experiment is known
}
"""What stands at the top of a study file: its tables above all, with what their keys take."""

TABLES = [name for name, key in _FILE.items() if key.inner is not None]
"""The tables of a study of networks."""


def check_layout(content: Mapping[str, Any], where: str, groups: Sequence[str] = ("scale", "parts")) -> None:
    """Refuse unknown tables and keys, naming the nearest, and values that their keys cannot have.

    Args:
        content: A file, or one of its scales or parts.
        where: What messages call it.
        groups: Which groups of tables it may have: a scale has parts, a part has neither.
    """
    _check_table(content, _FILE, "", where)
    for group in ("scale", "parts"):
        if group in content and group not in groups:
            raise SpecError(
                f"Expected [{group}.NAME] at the top of the file but {where} has it inside. What a scale "
                "changes in a part is [scale.NAME.parts.PART]."
            )
        for name, part in content.get(group, {}).items():
            _check_member(group, name, where)
            _TABLE.check(part, f"[{group}.{name}]", where)
            check_layout(part, f"[{group}.{name}] of {where}", ("parts",) if group == "scale" else ())


def _check_table(table: Mapping[str, Any], keys: Mapping[str, Key], shown: str, where: str) -> None:
    """Check the keys of a table and what they hold; `shown` is how messages name it, "" for the file."""
    for key, value in table.items():
        if key not in keys:
            raise SpecError(
                f"Expected a key of {shown or 'a study file'} but {where} has {key!r}.{nearest(key, keys)} "
                f"Known: {', '.join(keys)}."
            )
        own = keys[key]
        place = f"{shown.strip('[]')}.{key}".lstrip(".")
        if shown:
            own.check(value, f"{key} in {shown}", where)
        else:
            own.check(value, f"[{key}]" if own.kind == "a table" else key, where)
            _check_text(value, key, where)
        if own.inner is not None and own.kind == "a list":
            for row in value:
                _TABLE.check(row, f"[[{place}]]", where)
                _check_table(row, own.inner, f"[[{place}]]", where)
        elif own.inner is not None:
            _check_table(value, own.inner, f"[{place}]", where)


def _check_member(group: str, name: str, where: str) -> None:
    """Refuse a scale that there is not, and the name of a part that no file can have."""
    if group == "scale" and name not in _WRITTEN_SCALES:
        raise SpecError(
            f"Expected [scale.smoke], [scale.small] or [scale.gallery] but {where} has "
            f"[scale.{name}].{nearest(name, _WRITTEN_SCALES)} The file itself is the scale 'paper'."
        )
    if group == "parts" and not re.fullmatch(r"[^\W_][\w.+-]{0,63}", name):
        raise SpecError(
            "Expected the name of a part to be at most 64 letters, digits and _ . + -, a letter or digit "
            f"first, since files are named after it, but {where} has {name!r}."
        )


def _check_text(value: Any, what: str, where: str) -> None:
    """Refuse text that a terminal would obey instead of showing."""
    text = value if isinstance(value, str) else ""
    wrong = next((letter for letter in text if not letter.isprintable() and letter not in "\n\t"), None)
    if wrong is not None:
        raise SpecError(
            f"Expected {what} to be text that can be shown but {where} has the character {wrong!r} in it."
        )


def check_options(content: Mapping[str, Any], where: str) -> None:
    """Refuse an option that no optimizer of a file takes, at any of its scales."""
    grids = [row for grid in _tables(content, "grid") for row in (grid, *grid.get("together", ()))]
    for option in [key for train in _tables(content, "train") for key in train]:
        takers = [name for name, kind in OPTIMIZERS.items() if option in kind.takes]
        if takers and not any(name in as_list(row.get("optimizer", ())) for name in takers for row in grids):
            raise SpecError(
                f"Expected {option} in [train] with an optimizer that takes it, {' or '.join(takers)}, but "
                f"{where} has none in [grid]. Leave {option} out."
            )


def _tables(content: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """A table wherever a file has it: at the top, in its parts and at its scales."""
    yield content.get(name, {})
    for group in ("scale", "parts"):
        for inner in content.get(group, {}).values():
            yield from _tables(inner, name)


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Check what the tables of one part of a study say together.

    Raises:
        SpecError: Something is missing, or does not go with something else.
        MeasureError: A measure or an option of one does not exist.
    """
    if "checkpoints" not in settings and "epochs" not in settings.get("stop", {}):
        raise SpecError(f"Expected epochs in [stop] but {where} has none. Say when to give up: epochs = 100.")
    for table in ("data", "model"):
        if "name" not in settings.get(table, {}):
            raise SpecError(f'Expected name in [{table}] but {where} has none. For example name = "digits".')
    asked = settings.get("rescale", {})
    low, high = (asked.get(name, _RESCALE[name].default) for name in ("low", "high"))
    if not 0 < low <= high:
        raise SpecError(f"Expected 0 < low ≤ high in [rescale] but {where} has low = {low}, high = {high}.")
    _check_measures(settings.get("measure", {}), asked, where)
    named = asked_columns(settings, where)
    if "checkpoints" not in settings:  # checkpoints may add columns
        _check_columns(named, settings, where)


def _check_columns(named: Sequence[tuple[str, str]], settings: Mapping[str, Any], where: str) -> None:
    """Check that the table of networks will have the columns that [analysis] names."""
    corrupted = corrupted_columns(settings.get("corruptions", {}))
    columns = Key(known=("part", *AXES, *OUTCOMES, *corrupted))
    for key, column in named:
        if ":" not in column:
            columns.check(column, f"the column of {key} in [analysis]", where)
    for name in settings.get("analysis", {}).get("targets", ()):
        Key(known=("test_loss", "test_error", *corrupted)).check(name, "targets in [analysis]", where)


def _check_measures(measure: Mapping[str, Any], rescaled: Mapping[str, Any], where: str) -> None:
    """Every measure exists, is asked for once, and something that is measured is rescaled."""
    main, again = _measures(measure), _measures(rescaled)
    subset: list[str] = []
    if "subset" in measure:
        if "measures" not in measure["subset"]:
            raise SpecError(
                f"Expected measures in [measure.subset] but {where} has none. Name those that get fewer "
                "samples."
            )
        subset = _measures(measure["subset"])
    twice = [name for name in subset if name in main]
    if twice:
        raise SpecError(
            f"Expected a measure either in [measure] or in [measure.subset] but {where} has {twice[0]!r} in "
            "both. Name the measures of [measure] one by one and leave it out there."
        )
    if "measures" in rescaled and not set(again) & {*main, *subset}:
        raise SpecError(
            f"Expected a measure in [rescale] that is measured but {where} has only {', '.join(again)}. "
            "Put it in [measure] too."
        )


def _measures(table: Mapping[str, Any]) -> list[str]:
    chosen = select_measures(table.get("measures", "default"))
    resolve_options(chosen, table.get("options"))
    return [one.name for one in chosen]


def asked_columns(settings: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """The columns that [analysis] filters and colours by, each with the key that names it."""
    analysis = settings.get("analysis", {})
    colour = [("colour", analysis["colour"])] if "colour" in analysis else []
    return [("keep", Condition.parse(text, where).column) for text in analysis.get("keep", ())] + colour


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `over` in their place; tables are merged, lists replaced.

    >>> merged({"grid": {"seed": 3, "batch_size": [8]}}, {"grid": {"seed": 1}})
    {'grid': {'seed': 1, 'batch_size': [8]}}
    """
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping) and key != "options"
        result[key] = merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


def as_list(value: Any) -> list[Any]:
    """A list as it is, anything else as a list of one."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
