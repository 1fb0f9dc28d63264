"""Which networks train together."""

from __future__ import annotations

from collections.abc import Sequence

from flatness.study.configuration import Configuration, digest


def cohorts(configurations: Sequence[Configuration], at_once: int) -> list[Sequence[Configuration]]:
    """Networks of one shape, batch size and optimizer in groups of at most `at_once`.

    It does not depend on how many workers there are or on what is already done: the same study is divided in
    the same way wherever it runs.
    """
    groups: dict[str, list[Configuration]] = {}
    for one in configurations:
        tables = [dict(table) for table in (one.data, one.model, one.train)]
        axes = [one.axes.get(axis) for axis in ("batch_size", "optimizer")]
        groups.setdefault(digest([one.part, *tables, *axes]), []).append(one)
    return [
        group[start : start + at_once] for group in groups.values() for start in range(0, len(group), at_once)
    ]
