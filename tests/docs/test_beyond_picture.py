"""The opening figure of the gallery: what it draws, where."""

from __future__ import annotations

from beyond_picture import Dot, Row, save_beyond

MARGINAL = {"a": Dot(0.5, 0.3, 0.6, 0.45), "b": Dot(0.4, 0.2, 0.5, 0.4)}
ROWS = [
    Row("relative flatness", "invariant", MARGINAL, {"a": Dot(0.3, 0.1, 0.4)}),
    Row("Hessian trace", "changes", {"a": Dot(0.2, 0.0, 0.4, 0.2)}, {"a": Dot(-0.1, -0.2, 0.1)}),
    Row("batch size", "known", {"a": Dot(-0.7, -0.8, -0.6)}, {}),
]


def marks(axes, marker):
    return [(line.get_xdata()[0], line.get_color()) for line in axes.lines if line.get_marker() == marker]


def test_dots_intervals_and_what_the_setting_alone_gives():
    left, right = save_beyond(None, ROWS, {"a": "one", "b": "another"}, {"a": 0.15, "b": 0.2}).axes
    assert [x for x, _ in marks(left, "o")] == [0.5, 0.2, -0.7]
    assert marks(left, "s") == [(0.4, marks(left, "o")[0][1])]  # a study has a shape, a kind a colour
    assert len({colour for _, colour in marks(left, "o")}) == 3
    assert [x for x, _ in marks(left, "|")] == [0.45, 0.4, 0.2]
    assert [x for x, _ in marks(right, "o")] == [0.3, -0.1]
    assert marks(right, "|") == []
    bars = [
        list(line.get_xdata())
        for line in right.lines
        if len(line.get_xdata()) == 2 and line.get_marker() == "None"
    ]
    assert [0.1, 0.4] in bars
    assert [-0.2, 0.1] in bars
    # A dot lies on what 95 % of permutations stay below in its own study: there are dots of the first alone.
    assert bars.count([-0.15, 0.15]) == 2
    assert [-0.2, 0.2] not in bars


def test_what_is_known_without_a_measure_stands_below_a_line():
    left, _ = save_beyond(None, ROWS, {"a": "one", "b": "another"}, {"a": 0.15}).axes
    assert [text.get_text() for text in left.get_yticklabels()] == [row.name for row in ROWS]
    places = list(left.get_yticks())
    assert places == [0, 1, 2.6]
    [rule] = {
        line.get_ydata()[0]
        for line in left.lines
        if list(line.get_xdata()) == [0, 1] and line.get_ydata()[0] > 1
    }
    assert 1 < rule < 2.6
