"""What a study file may say: its tables, their keys, and what each key takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flatness.errors import SpecError, nearest

SCALES = ("smoke", "small", "gallery", "paper")
_WRITTEN_SCALES = SCALES[:-1]  # a file has sections for these; it is itself the last
"""How much of a study runs: the whole pipeline on a few networks, an afternoon on a laptop, all of it."""

NUMBER, WHOLE, TEXT, YES_NO, LIST, TABLE, ANY = (
    "a number",
    "a whole number",
    "text",
    "true or false",
    "a list",
    "a table",
    "anything",
)
_TYPES: dict[str, tuple[type, ...]] = {
    NUMBER: (int, float),
    WHOLE: (int,),
    TEXT: (str,),
    YES_NO: (bool,),
    LIST: (list,),
    TABLE: (dict,),
    ANY: (object,),
}

EXPERIMENT = "experiment"
"""The table that stands in the place of data, model and grid."""

AXES: dict[str, Any] = {
    "initialization": "default",
    "batch_size": 64,
    "learning_rate": 0.01,
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "random_labels": 0.0,
    "seed": 0,
}
"""The axes of a grid, with the value that an axis has when the file does not mention it."""

TABLES: dict[str, dict[str, str]] = {
    "": {"title": TEXT, "paper": TEXT, "claim": TEXT, "parts": TABLE, "scale": TABLE},
    "data": {
        "name": TEXT,
        "options": TABLE,
        "standardize": YES_NO,
        "limit": WHOLE,
        "test_limit": WHOLE,
        "data_dir": TEXT,
    },
    "model": {"name": TEXT, "options": TABLE},
    "grid": {**dict.fromkeys(AXES, ANY), "together": LIST, "without": LIST, "at_most": WHOLE},
    "stop": {"loss": NUMBER, "accuracy": NUMBER, "epochs": WHOLE, "stalled": WHOLE},
    "train": {
        "loss": TEXT,
        "at_once": WHOLE,
        "tf32": YES_NO,
        "beta1": NUMBER,
        "beta2": NUMBER,
        "alpha": NUMBER,
        "eps": NUMBER,
    },
    "measure": {
        "measures": ANY,
        "layers": ANY,
        "which": TEXT,
        "samples": WHOLE,
        "precision": NUMBER,
        "method": TEXT,
        "curvature": TEXT,
        "options": TABLE,
        "batch_size": WHOLE,
        "subset": TABLE,
    },
    "gap": {"kind": TEXT},
    "rescale": {"kind": TEXT, "low": NUMBER, "high": NUMBER, "seed": WHOLE, "measures": ANY},
    "analysis": {"keep": LIST, "headline": LIST, "colour": TEXT, "resamples": WHOLE, "permutations": WHOLE},
    "checkpoints": {"paths": ANY, "pattern": TEXT, "table": TEXT},
    "lines": {
        "directions": TEXT,
        "count": WHOLE,
        "points": WHOLE,
        "span": NUMBER,
        "samples": WHOLE,
        "seed": WHOLE,
    },
    EXPERIMENT: {},  # its name, and options that are checked once the experiment is known
}
"""Every table of a study file and what its keys take; the nameless one is the top of the file."""

SUBSET = {"measures": ANY, "samples": WHOLE, "layers": ANY, "options": TABLE}
"""What [measure.subset] takes: measures that are too expensive for all samples, and how many they get."""

_FREE = {"together"}


def check_layout(content: Mapping[str, Any], where: str, groups: Sequence[str] = ("scale", "parts")) -> None:
    """Refuse unknown tables and keys, naming the nearest, and values of the wrong kind.

    Args:
        content: A file, or one of its scales or parts.
        where: What messages call it.
        groups: Which groups of tables it may have: a scale has parts, a part has neither.
    """
    known = [*TABLES[""], *(name for name in TABLES if name)]
    for name, value in content.items():
        if name in TABLES and name:
            _expect(value, TABLE, f"[{name}]", where)
            if name != EXPERIMENT:
                _check_table(value, TABLES[name], f"[{name}]", where)
        elif name in TABLES[""]:
            _expect(value, TABLES[""][name], name, where)
            if isinstance(value, str):
                check_text(value, name, where)
        else:
            raise SpecError(
                f"Expected a key of a study file but {where} has {name!r}.{nearest(name, known)} "
                f"Known: {', '.join(known)}."
            )
    for group in ("scale", "parts"):
        if group in content and group not in groups:
            raise SpecError(
                f"Expected [{group}.NAME] at the top of the file but {where} has it inside. What a scale "
                "changes in a part is [scale.NAME.parts.PART]."
            )
        for name, part in content.get(group, {}).items():
            if group == "scale" and name not in _WRITTEN_SCALES:
                raise SpecError(
                    f"Expected [scale.smoke], [scale.small] or [scale.gallery] but {where} has "
                    f"[scale.{name}].{nearest(name, _WRITTEN_SCALES)} The file itself is the scale 'paper'."
                )
            if group == "parts":
                check_name(name, "the name of a part", where)
            _expect(part, TABLE, f"[{group}.{name}]", where)
            check_layout(part, f"[{group}.{name}] of {where}", ("parts",) if group == "scale" else ())


def check_text(value: str, what: str, where: str) -> None:
    """Refuse text that a terminal would obey instead of showing."""
    wrong = next((letter for letter in value if not letter.isprintable() and letter not in "\n\t"), None)
    if wrong is not None:
        raise SpecError(
            f"Expected {what} to be text that can be shown but {where} has the character {wrong!r} in it."
        )


def check_name(name: str, what: str, where: str) -> None:
    """Refuse a name that cannot be part of a file's name: tables and pictures are named after it at the end.

    Raises:
        SpecError: It is empty, too long, or has other characters than letters, digits and ``_ . + -``.
    """
    if not re.fullmatch(r"[^\W_][\w.+-]{0,63}", name):
        raise SpecError(
            f"Expected {what} to be at most 64 letters, digits and _ . + -, a letter or digit first, since "
            f"files are named after it, but {where} has {name!r}."
        )


def _check_table(table: Mapping[str, Any], known: Mapping[str, str], name: str, where: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise SpecError(
                f"Expected a key of {name} but {where} has {key!r}.{nearest(key, known)} "
                f"Known: {', '.join(known)}."
            )
        _expect(value, known[key], f"{key} in {name}", where)
    if name == "[measure]" and "subset" in table:
        _check_table(table["subset"], SUBSET, "[measure.subset]", where)
    for row in table.get("together", ()) if name == "[grid]" else ():
        _expect(row, TABLE, "[[grid.together]]", where)
        _check_table(row, dict.fromkeys(AXES, LIST), "[[grid.together]]", where)
    for row in table.get("without", ()) if name == "[grid]" else ():
        _expect(row, TABLE, "[[grid.without]]", where)
        _check_table(row, dict.fromkeys(AXES, ANY), "[[grid.without]]", where)


def _expect(value: Any, kind: str, what: str, where: str) -> None:
    right = isinstance(value, _TYPES[kind]) and not (isinstance(value, bool) and kind in (NUMBER, WHOLE))
    if not right:
        raise SpecError(f"Expected {what} to be {kind} but {where} has {value!r}.")


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
