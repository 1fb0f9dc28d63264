"""What a scatter prints, marks and leaves out."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flatness.show.plots.scatter import Scatter, save_scatter

GENERATOR = np.random.default_rng(0)


def scatter(x, y, fitted=None, colour=None, name=""):
    colour = [64] * len(x) if colour is None else colour
    fitted = [True] * len(x) if fitted is None else fitted
    points = [(a, b, c, "sgd", fine) for a, b, c, fine in zip(x, y, colour, fitted, strict=True)]
    return save_scatter(None, Scatter("a study: n = 8", "trace", "gap", points, list(range(len(x))), name))


def test_r_is_of_the_axes_that_are_drawn():
    x = np.exp(GENERATOR.normal(size=8) * 3)
    y = np.log(x) + GENERATOR.normal(size=8)
    axes = scatter(x, y).axes[0]
    assert axes.get_xscale() == "log"
    name, told = axes.get_title("left").split("\n")
    assert name == "a study: n = 8"
    assert told.startswith(f"τ = {stats.kendalltau(x, y)[0]:.2f} (")
    assert told.endswith(f"r = {stats.pearsonr(np.log(x), y)[0]:.2f} on these axes")
    narrow = scatter(1 + x / x.max(), y).axes[0]
    assert narrow.get_xscale() == "linear"
    r = stats.pearsonr(x, y)[0]
    assert f"r = {r:.2f} on".replace("-", "−") in narrow.get_title("left")


def test_networks_that_did_not_fit_are_hollow_and_leave_no_empty_decades():
    x = np.array([100.0, 200, 400, 3000, 0.1, 60])
    axes = scatter(x, np.arange(6.0), fitted=[True] * 4 + [False] * 2).axes[0]
    marks = [(line.get_xdata()[0], line.get_marker(), line.get_markerfacecolor()) for line in axes.lines]
    assert marks[4] == (pytest.approx(100 / 3), "<", "none")
    assert marks[5] == (60.0, "o", "none")
    assert all(face != "none" for _, _, face in marks[:4])
    assert axes.get_xlim()[0] > 20
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend == ["not fitted", "1 beyond the edge"]


def test_many_values_of_a_number_have_a_colour_bar_and_few_a_legend():
    shares = [i / 10 for i in range(11)]
    figure = scatter(range(1, 12), range(11), colour=shares, name="random labels")
    assert [axes.get_ylabel() for axes in figure.axes] == ["gap", "random labels"]
    few = scatter(range(1, 5), range(4), colour=[64, 128, 64, 128], name="batch size")
    assert [text.get_text() for text in few.legends[0].get_texts()] == ["batch size 64", "batch size 128"]
    assert len(few.axes) == 1
