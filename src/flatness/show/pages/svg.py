"""Pictures inside a page: SVG that takes the page's colours, light or dark, with words for screen readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from flatness.errors import listed
from flatness.show.plots.points import Point, looks
from flatness.show.plots.scales import Scale, scale_of

_WIDTH, _HEIGHT = 780, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 230, 14, 56


def scatter(points: Sequence[Point], x_label: str, y_label: str, caption: str) -> str:
    """A figure with a point per network."""
    x = scale_of([point.x for point in points])
    y = scale_of([point.y for point in points])
    look = looks(point.group for point in points)
    parts = [_frame(y, y_label, x_label, {_across(x.share(tick)): f"{tick:g}" for tick in x.ticks})]
    for point in points:
        told = escape(f"{point.label}: {x_label} {point.x:.4g}, {y_label} {point.y:.4g}")
        mark = _mark(_across(x.share(point.x)), _up(y.share(point.y)), *look[point.group])
        parts.append(f"<g><title>{told}</title>{mark}</g>")
    summary = f"Scatter of {y_label} against {x_label} for {len(points)} networks. {caption}"
    return _figure([*parts, _legend(look)], summary, caption)


def profile(
    groups: Mapping[str, Sequence[float]],
    places: Sequence[str],
    y_label: str,
    caption: str,
    x_label: str = "layer",
) -> str:
    """A figure with a line per group over named places, such as layers."""
    y = scale_of([value for values in groups.values() for value in values])
    across = [_across((index + 0.5) / len(places)) for index in range(len(places))]
    look = looks(groups)
    parts = [_frame(y, y_label, x_label, dict(zip(across, places, strict=True)))]
    for group, values in groups.items():
        spots = [(x, _up(y.share(value))) for x, value in zip(across, values, strict=True)]
        path = "L".join(f"{x:.1f} {height:.1f}" for x, height in spots)
        parts.append(f'<path fill="none" stroke="{look[group][0]}" stroke-width="1.6" d="M{path}"/>')
        for (x, height), value, place in zip(spots, values, places, strict=True):
            told = escape(f"{group}, {place}: {value:.4g}")
            parts.append(f"<g><title>{told}</title>{_mark(x, height, *look[group])}</g>")
    summary = f"{y_label} by {x_label}: {listed(groups)}. {caption}"
    return _figure([*parts, _legend(look)], summary, caption)


def _figure(parts: Sequence[str], summary: str, caption: str) -> str:
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(summary)}">'
        f"{''.join(parts)}</svg><figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def _across(share: float) -> float:
    return _LEFT + share * (_WIDTH - _RIGHT - _LEFT)


def _up(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _frame(y: Scale, y_label: str, x_label: str, x_ticks: Mapping[float, str]) -> str:
    """Axes with their rules, ticks and labels."""
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [_rule(_LEFT, _up(y.share(tick)), right, _up(y.share(tick))) for tick in y.ticks]
    parts += [_rule(x, _TOP, x, bottom) for x in x_ticks]
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
    parts += [_text(x, bottom + 18, text, "middle") for x, text in x_ticks.items()]
    parts += [_text(_LEFT - 8, _up(y.share(tick)) + 4, f"{tick:g}", "end") for tick in y.ticks]
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 12, x_label, "middle"))
    middle = (_TOP + bottom) / 2
    turned = f'transform="rotate(-90 16 {middle:.1f})" x="16" y="{middle:.1f}" text-anchor="middle"'
    return "".join([*parts, f"<text {turned}>{escape(y_label)}</text>"])


def _legend(look: Mapping[str, tuple[str, str]]) -> str:
    x = _WIDTH - _RIGHT + 24
    heights = {group: _TOP + 16 + 24 * row for row, group in enumerate(look)}
    marks = [_mark(x, heights[group], *style) for group, style in look.items()]
    return "".join(
        [*marks, *(_text(x + 16, height + 4, group, "start") for group, height in heights.items())]
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


_OUTLINES = {
    "square": "M-5 -5H5V5H-5Z",
    "triangle": "M0 -6.5L6 5H-6Z",
    "diamond": "M0 -7L6 0L0 7L-6 0Z",
    "cross": "M-5.5 -5.5L5.5 5.5M-5.5 5.5L5.5 -5.5",
    "star": "M0 -7V7M-6 -3.5L6 3.5M-6 3.5L6 -3.5",
    "wedge": "M0 6.5L6 -5H-6Z",
}


def _mark(x: float, y: float, colour: str, shape: str) -> str:
    if shape == "circle":
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="5.5" stroke="{colour}"/>'
    place = f"translate({x:.1f} {y:.1f})"
    return f'<path class="mark" transform="{place}" d="{_OUTLINES[shape]}" stroke="{colour}"/>'
