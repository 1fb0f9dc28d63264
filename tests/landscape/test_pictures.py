"""Pictures and pages of landscapes, drawn from arrays alone."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from flatness.errors import ReportError
from flatness.landscape import Density, Line, Surface
from flatness.landscape.density_result import SpectralQuadrature
from flatness.show.pages.landscape_page import load_landscape, write_landscape
from flatness.show.plots.landscape import _alone, save_density, save_line
from flatness.show.plots.surfaces import _few_digits, _round_numbers, _scaled, save_contour, save_relief
from flatness.show.plots.themes import DARK, DASHES, LIGHT, add_legend, colour_on, looks, settings
from flatness.show.plots.themes import written as short

NAMES = ("数据", "a" * 120, "")
HOSTILE = "</figcaption><script>alert(1)</script>\"'&"


def a_line(loss=None):
    t = np.linspace(-1, 1, 9)
    rows = np.stack([1 + scale * t**2 for scale in (1.0, 1.5, 4.0)]) if loss is None else loss
    return Line(
        positions=t,
        loss=rows,
        accuracy=1 / (1 + np.abs(rows)),
        done=np.isfinite(rows) | np.isinf(rows),
        groups=("small", "small", "large"),
        labels=("direction 1", "direction 2", "direction 1"),
        meta={"loss": "cross_entropy", "directions": "layer", "samples": 10},
    )


def a_surface(**changes):
    x, y = np.linspace(-1, 1, 9), np.linspace(-1, 1, 7)
    loss = 0.5 + x**2 + 2 * y[:, None] ** 2
    given = {
        "x": x, "y": y, "loss": loss, "accuracy": 1 / (1 + loss), "done": np.ones(loss.shape, dtype=bool),
        "meta": {"loss": "mse", "directions": "filter", "samples": 10},
    }  # fmt: skip
    return Surface(**{**given, **changes})


def a_density():
    own = SpectralQuadrature(np.array([[0.0, 1.0], [0.1, 1.2]]), np.array([[0.9, 0.1], [0.95, 0.05]]), 100)
    far = SpectralQuadrature(100 * own.nodes, own.weights, 100)
    return Density(
        {"network": own, "copy": far}, {"loss": "mse", "metric": "layerwise", "steps": 2, "samples": 10}
    )


def a_hostile_surface():
    """A surface with names that would be markup, or formulas."""
    path = np.array([[0.1, 0.2], [0.5, 0.5]])
    surface = a_surface(paths={HOSTILE: path, "_$a$b$": path}, notes=(HOSTILE,))
    surface.meta["plane_shares"] = {HOSTILE: 0.5}
    return surface


MADE = {"line": a_line, "surface": a_hostile_surface, "density": a_density}
DRAW = {
    "line": (save_line, "line"),
    "contour": (save_contour, "surface"),
    "relief": (save_relief, "surface"),
    "density": (save_density, "density"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of each landscape, by its name, and the names of the files in it."""
    made = {}
    for name, make in MADE.items():
        folder = tmp_path_factory.mktemp(name) / "out"
        made[name] = folder, write_landscape(folder, make())
    return made


@pytest.mark.parametrize("name", DRAW)
def test_pictures_are_a_column_wide_on_their_ground_and_the_same_every_time(written, tmp_path, name):
    draw, kind = DRAW[name]
    folder, _ = written[kind]
    for file, ground in ((f"{name}.png", (255, 255, 255)), (f"{name}-dark.png", (22, 24, 28))):
        with Image.open(folder / file) as picture:
            assert picture.width == 840  # 3.5 inches
            assert picture.convert("RGB").getpixel((2, 2)) == ground
    draw(tmp_path / "again.svg", MADE[kind]())
    assert (tmp_path / "again.svg").read_bytes() == (folder / f"{name}.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "again.svg").getroot().tag.endswith("svg")


def test_a_surface_reads_in_grey_lighter_is_higher(tmp_path):
    save_contour(tmp_path / "a.png", a_surface())
    with Image.open(tmp_path / "a.png") as picture:
        grey = np.asarray(picture.convert("L"))
    height, width = grey.shape
    middle = grey[int(0.45 * height), int(0.46 * width)]
    corner = grey[int(0.06 * height), int(0.22 * width)]
    assert int(corner) > int(middle) + 50


def test_losses_that_are_not_finite_are_clipped_in_the_picture_and_kept_in_the_data(tmp_path):
    surface = a_surface()
    loss = surface.loss.copy()
    loss[0, 0], loss[0, 1], loss[3, 4] = np.inf, np.nan, np.nan
    done = surface.done.copy()
    done[3, 4] = False
    broken = a_surface(loss=loss, done=done)
    values, levels, _ = _scaled(broken, "loss")
    top = float(loss[np.isfinite(loss)].max())
    assert levels[-1] == top
    # Overflow to infinity or NaN is as high as the scale goes; what was not computed is left empty.
    assert values[0, 0] == values[0, 1] == top
    assert values.mask[3, 4]
    assert values.mask.sum() == 1
    accuracy = np.where(np.isnan(loss), np.nan, surface.accuracy)
    values, _, _ = _scaled(a_surface(accuracy=accuracy), "accuracy")
    assert np.argwhere(values.mask).tolist() == [[0, 1], [3, 4]]
    save_contour(tmp_path / "a.png", broken)
    save_relief(tmp_path / "a.png", broken)
    assert np.isinf(broken.loss[0, 0])
    line = a_line()
    rows = line.loss.copy()
    rows[0, 0], rows[2, 5:] = np.inf, np.nan
    save_line(tmp_path / "a.png", a_line(rows))


def test_a_point_between_others_that_are_not_finite_is_seen(tmp_path):
    """No line goes to it: the middle of one curve, the first point of the other get a dot."""
    rows = np.full((3, 9), np.inf)
    rows[:2, 4], rows[2] = 1.0, 1.0
    rows[2, 1] = np.inf
    save_line(tmp_path / "a.svg", a_line(rows))
    dots = re.findall(
        r'<use [^>]*x="([\d.]+)"[^>]*style="fill: (#\w+); stroke: \2"/>', (tmp_path / "a.svg").read_text()
    )
    assert len(dots) == 2
    (middle, small), (first, large) = dots
    assert float(first) < float(middle)
    assert small != large
    assert _alone(np.array([1.0, np.nan, 2.0, 3.0, np.nan, np.inf, 4.0])).nonzero()[0].tolist() == [0, 6]
    assert _alone(np.array([5.0])).tolist() == [True]


def test_a_few_far_points_do_not_take_all_colours():
    loss = a_surface().loss.copy()
    loss[0, 0] = 1e9
    _, levels, _ = _scaled(a_surface(loss=loss), "loss")
    assert levels[-1] == pytest.approx(1e4 * loss.min())
    accuracy = np.full(loss.shape, 0.5)
    _, levels, norm = _scaled(a_surface(accuracy=accuracy), "accuracy")
    assert levels[-1] > levels[0]
    assert (norm.vmin, norm.vmax) == (levels[0], levels[-1])


def test_levels_are_round_numbers_inside_the_scale():
    for low, high in ((1.363, 9.26), (1e-4, 30.0), (0.1, 0.5)):
        surface = a_surface(loss=np.linspace(low, high, 63).reshape(7, 9))
        _, levels, norm = _scaled(surface, "loss")
        found = _round_numbers(norm, levels)
        assert 3 <= len(found) <= 12
        assert all(low < level < high for level in found)
        assert all(float(f"{level:.2g}") == level for level in found)


def test_an_interrupted_surface_with_one_row_is_drawn(tmp_path):
    surface = a_surface()
    loss = np.full(surface.loss.shape, np.nan)
    loss[0] = surface.loss[0]
    save_contour(tmp_path / "a.png", a_surface(loss=loss, done=~np.isnan(loss)))
    save_relief(tmp_path / "b.png", a_surface(loss=loss, done=~np.isnan(loss)))
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", MADE)
def test_a_folder_holds_data_pictures_and_a_page_that_needs_no_network(written, name):
    folder, files = written[name]
    assert sorted(files) == sorted(path.name for path in folder.iterdir())
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href|srcset)=\"(?!data:|#)", page)
    assert page.count("<figure>") == sum(name.endswith(".svg") for name in files)
    assert str(load_landscape(folder / f"{name}.npz")) == str(MADE[name]())


def test_text_of_users_is_escaped_in_the_page(written):
    folder, _ = written["surface"]
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert" in page
    assert "<script>alert" not in page


def test_what_no_axis_reaches_is_drawn_without_a_warning(tmp_path):
    """Losses at the end of float64, names without end or in scripts that the font lacks, no point at all."""
    save_line(tmp_path / "a.png", replace(a_line(np.geomspace(1, 1e308, 27).reshape(3, 9)), groups=NAMES))
    nothing = np.full((7, 9), np.nan)
    empty = a_surface(loss=nothing, accuracy=nothing, done=nothing > 0)
    for draw in (save_contour, save_relief):
        draw(tmp_path / "a.png", empty)
    assert _scaled(a_surface(loss=np.geomspace(1e-300, 1e300, 63).reshape(7, 9)), "loss")[1][-1] == 1e-296


@pytest.mark.parametrize(
    ("names", "columns", "rows"),
    [
        (["a" * 30, "b"], 1, 2),
        ([f"batch {size}" for size in (4, 8, 16, 32, 64)], 3, 2),
        ([f"learning rate {i}" for i in range(5)], 2, 3),
        ([f"run of {i:060}" for i in range(10)], 1, 10),
    ],
    ids=["long", "many", "many in two columns", "both"],
)
def test_many_or_long_names_stand_below_the_curves(names, columns, rows):
    with matplotlib.rc_context(settings(LIGHT)):
        figure = Figure(figsize=(3.5, 2.6), layout="constrained")
        axes = figure.add_subplot()
        for name in names:
            axes.plot([0, 1], [0, 1], label=short(name))
        height = add_legend(figure, axes)
        figure.draw_without_rendering()
    assert figure.get_figheight() == pytest.approx(2.6 + height) == pytest.approx(2.6 + 0.15 * (rows + 1))
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.y1 < axes.get_tightbbox().y0
    assert box.y0 >= 0
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    # The curves keep the room that they had.
    assert axes.get_window_extent().height / figure.dpi > 2.0
    lefts = {round(text.get_window_extent().x0) for text in legend.get_texts()}
    assert len(lefts) == columns


def test_few_short_names_stand_among_the_curves_but_not_on_a_surface(tmp_path):
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], label="a")
    assert add_legend(figure, axes) == 0
    assert axes.get_legend() is not None
    assert not figure.legends
    add_legend(figure, axes, inside=False)
    assert len(figure.legends) == 1
    path = np.array([[0.1, 0.2], [0.5, 0.5]])
    heights = {}
    for name, paths in (("none", {}), ("one", {"a": path}), ("six", {f"{i:030}": path for i in range(6)})):
        save_contour(tmp_path / "a.png", a_surface(paths=paths))
        with Image.open(tmp_path / "a.png") as picture:
            heights[name] = picture.height / 240
    # A row is 0.15 inches high, and one more is the room around them.
    assert heights["one"] - heights["none"] == pytest.approx(0.3, abs=0.01)
    assert heights["six"] - heights["none"] == pytest.approx(1.05, abs=0.01)


def test_curves_differ_in_colour_or_dashes_on_either_ground():
    names = [f"network {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    for theme in (LIGHT, DARK):
        shown = {
            (colour_on(theme, colour), DASHES[number % len(DASHES)])
            for number, (colour, _) in enumerate(looks(names).values())
        }
        assert len(shown) == len(names)
    # The first and the sixth are two light blues on dark ground.
    assert DASHES[0] not in DASHES[1:6]


def drawn(monkeypatch, draw, surface):
    """The axes of a picture of a surface, as it would be saved."""
    figures = []
    monkeypatch.setattr("flatness.show.plots.themes.save", lambda figure, path: figures.append(figure))
    with matplotlib.rc_context(settings(LIGHT)):
        draw("a.png", surface)
        figures[0].draw_without_rendering()
    return figures[0].axes


RANGES = {
    "wide": (1.3, 25.0),
    "powers": (2.0, 3e9),
    "narrow": (1.12057, 1.12064),
    "large": (1e12, 1e12 + 2e5),
}


@pytest.mark.parametrize("name", RANGES)
def test_numbers_and_names_in_a_relief_keep_apart_and_inside(monkeypatch, name):
    low, high = RANGES[name]
    labels = tuple(f"eigenvector {i} (λ = 2.416e+05)" for i in (1, 2))
    between = np.geomspace if name in ("wide", "powers") else np.linspace
    surface = a_surface(loss=between(low, high, 63).reshape(7, 9), labels=labels)
    surface.meta.update(loss="cross_entropy", directions="eigenvectors")
    (axes,) = drawn(monkeypatch, save_relief, surface)
    numbers = [text.get_window_extent() for text in axes.get_zticklabels()]
    assert len(numbers) >= 3
    for i, number in enumerate(numbers):
        assert not any(number.overlaps(other) for other in numbers[i + 1 :])
        assert not number.overlaps(axes.zaxis.label.get_window_extent())
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        box, page = axis.label.get_window_extent(), axes.figure.bbox
        assert page.x0 <= box.x0 < box.x1 <= page.x1
        assert page.y0 <= box.y0 < box.y1 <= page.y1
    assert axes.get_xlabel() == "eigenvector 1\n(λ = 2.416e+05)"


def test_a_relief_has_the_names_of_its_contours_and_the_paths_on_its_surface(monkeypatch):
    path = np.array([[0.1, 0.2], [-0.625, 0.5], [2.0, 0.0]])
    surface = a_surface(paths={"sgd": path})
    (axes,) = drawn(monkeypatch, save_relief, surface)
    contours = drawn(monkeypatch, save_contour, surface)[0]
    assert axes.get_xlabel().replace("\n", " ") == contours.get_xlabel() == "direction 1, filter-normalised"
    walk, network = axes.lines
    x, y, z = (np.asarray(values) for values in walk.get_data_3d())
    assert walk.get_label() == "sgd"
    np.testing.assert_allclose(np.stack([x, y], 1)[[0, 20, 40]], path)
    # Heights are logarithms, as 0.5 to 3.5 is wide. The second checkpoint is in the middle of a cell.
    np.testing.assert_allclose(z[20], np.log10(surface.loss[4:6, 1:3]).mean(), rtol=1e-12)
    assert np.isnan(z[40])
    # Between checkpoints it follows the surface, not the straight line.
    assert abs(z[10] - (z[0] + z[20]) / 2) > 0.01
    assert [float(values[0]) for values in network.get_data_3d()[:2]] == [0, 0]


@pytest.mark.parametrize(
    ("ticks", "labels", "base"),
    [
        ([1.5, 3.0, 10.0, 1e4, 3e6], ["1.5", "3", "10", "10000", "3e6"], ""),
        ([0.0125, 0.015, 0.0175], ["0.0125", "0.015", "0.0175"], ""),
        ([1e12, 1e12 + 5e4, 1e12 + 1e5], ["0", "5e4", "1e5"], " − 1e12"),
        ([1.120575, 1.12058, 1.120585], ["0", "5e−6", "1e−5"], " − 1.120575"),
        ([3.0], ["3"], ""),
        ([], [], ""),
    ],
)
def test_scales_have_few_digits_and_say_what_was_taken_off(ticks, labels, base):
    assert _few_digits(ticks) == (labels, base)


def test_levels_of_large_losses_that_hardly_differ_can_be_told_apart(monkeypatch):
    surface = a_surface(loss=np.linspace(1e12, 1e12 + 2e5, 63).reshape(7, 9))
    axes, bar = drawn(monkeypatch, save_contour, surface)
    numbers = [text.get_text() for text in bar.get_yticklabels()]
    assert len(set(numbers)) == len(numbers) >= 4
    assert max(map(len, numbers)) <= 6
    assert bar.get_ylabel().startswith("mse − 1.00000")
    written = {text.get_text() for text in axes.texts}
    assert written
    assert written <= set(numbers)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, loss=np.ones(3))
    for load in (Line.load, Surface.load, Density.load, load_landscape):
        with pytest.raises(ReportError) as caught:
            load(path)
    assert str(caught.value) == (
        f"Expected a line or surface or density saved by flatness but {path} is something else. Pass a file "
        "written by save()."
    )
    a_surface().save(path)
    with pytest.raises(ReportError) as caught:
        Line.load(path)
    assert str(caught.value) == (
        f"Expected a line saved by flatness but {path} holds surface. Pass a file written by save()."
    )
