"""Points and lines of pictures, and how their groups look: in colour and in grey print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flatness.report.report import Report

# Okabe and Ito's palette without the yellow, which is too light on white. A group also has a shape.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777")
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star", "wedge")
# Dark to light, as brightness alone tells too: for more values of a number than there are colours.
_SHADES = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))


@dataclass(frozen=True)
class Point:
    """One network in a scatter."""

    x: float
    y: float
    group: str
    label: str


@dataclass(frozen=True)
class Line:
    """One curve of a picture, with the range of each of its points where it has one."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def points_of(
    reports: Mapping[str, Report], measure: str, reduction: str | None, against: str, group: str
) -> list[Point]:
    """A point per report: a measure of the network against a fact in its ``meta``, such as the test gap."""
    return [
        Point(
            report.value(measure, reduction=reduction),
            float(report.meta[against]),
            str(report.meta[group]),
            name,
        )
        for name, report in reports.items()
    ]


def looks(groups: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and shape of every group, in order of appearance.

    Many groups that are named by a number, such as "random labels 0.3", go from dark to light with it.
    """
    names = list(dict.fromkeys(groups))
    colours, shapes = len(COLOURS), len(SHAPES)
    numbers = {name: _number(name) for name in names}
    if len(names) > colours and None not in numbers.values():
        order = sorted(names, key=lambda name: numbers[name] or 0.0)
        return {name: (_shade(order.index(name) / (len(names) - 1)), SHAPES[0]) for name in names}
    # When colours come again, they come with other shapes.
    return {name: (COLOURS[i % colours], SHAPES[(i + i // colours) % shapes]) for i, name in enumerate(names)}


def _number(name: str) -> float | None:
    """The number at the end of a name."""
    try:
        return float(name.split()[-1])
    except (ValueError, IndexError):
        return None


def _shade(share: float) -> str:
    """A colour between dark (0) and light (1).

    >>> _shade(0.0), _shade(0.5), _shade(1.0)
    ('#00224e', '#7d7c74', '#fee838')
    """
    at = share * (len(_SHADES) - 1)
    below = min(int(at), len(_SHADES) - 2)
    pairs = zip(_SHADES[below], _SHADES[below + 1], strict=True)
    return "#" + "".join(f"{round(low + (at - below) * (high - low)):02x}" for low, high in pairs)
