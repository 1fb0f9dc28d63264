"""Pages and pictures: self-contained, escaped, sortable, readable without colours."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from flatness.files import replacing, write_text
from flatness.report.report import Report, Result
from flatness.show.pages.page import Page, render
from flatness.show.pages.svg import profile, scatter
from flatness.show.plots.plots import save_layers, save_scatter
from flatness.show.plots.points import COLOURS, SHAPES, Point, looks, points_of
from flatness.show.plots.scales import scale_of
from html_checker import Checker

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&"


def report(scale: float = 1.0, name: str = "fc1") -> Report:
    rows = []
    for number, layer in enumerate((name, "fc2")):
        rows.append(
            Result(
                "relative_flatness",
                "layer",
                scale * (2.0 - number),
                layer=layer,
                stderr=0.1,
                method="sampled",
            )
        )
        rows.append(Result("weight_norm", "layer", 3.0 + number, layer=layer, notes=(f"because of {name}",)))
    rows.append(Result("relative_flatness", "network", 3.0 * scale, reduction="sum"))
    rows.append(Result("relative_flatness", "unit", 1.0, layer="fc2", unit=0))
    return Report(
        tuple(rows), {"model": name, "samples": 10, "risk": 0.5, "gap": 0.1 * scale, "setting": name}, (name,)
    )


@pytest.fixture
def page() -> str:
    reports = {HOSTILE: report(name=HOSTILE), "b": report(2.0)}
    figures = [
        scatter(points_of(reports, "relative_flatness", "sum", "gap", "setting"), HOSTILE, HOSTILE, HOSTILE)
    ]
    return render(Page(HOSTILE, reports, {"c": HOSTILE}, lead=[HOSTILE], figures=figures))


def test_everything_from_files_is_escaped(page):
    elements = Checker(page)
    assert elements.all("img") == []
    assert len(elements.all("script")) == 1
    assert page.count("onerror=alert(1)&gt;") == page.count("onerror=alert(1)")


def test_the_page_runs_its_own_script_only_and_loads_nothing(page):
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = next(
        m["content"] for m in Checker(page).all("meta") if m.get("http-equiv") == "Content-Security-Policy"
    )
    assert (
        policy
        == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    assert not re.search(r"https?://|//cdn|@import|url\(", page)
    assert all("src" not in attributes for _, attributes in Checker(page).elements)


def test_the_page_is_for_keyboards_and_screen_readers(page):
    elements = Checker(page)
    assert elements.all("html")[0]["lang"] == "en"
    assert any(link.get("class") == "skip" for link in elements.all("a"))
    assert len(elements.all("caption")) == len(elements.all("table")) == 5
    assert all(heading.get("scope") in ("col", "row") for heading in elements.all("th"))
    columns = [heading for heading in elements.all("th") if heading["scope"] == "col"]
    assert len(elements.all("button")) == len(columns)
    assert all(heading["aria-sort"] == "none" for heading in columns)
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in elements.all("div"))
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in elements.all("svg"))
    ids = [attributes["id"] for _, attributes in elements.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [link["href"].lstrip("#") for link in elements.all("a")]
    assert set(targets) <= set(ids)


def test_every_value_comes_with_its_method_and_error():
    html = render(Page("one", {"net": report()}))
    row = re.search(r"<tr><th scope=\"row\">fc1</th><td class=\"word\">relative_flatness</td>.*?</tr>", html)
    assert row is not None
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row[0])
    assert cells == ["relative_flatness", "", "2.000", "0.1000", "sampled", ""]
    assert "1 values of single units are in the JSON and CSV files" in html


def test_a_failure_is_a_row_with_its_reason(page):
    assert re.search(
        r'<th scope="row">c</th><td class="text failed" colspan="\d+">failed: &lt;/script&gt;', page
    )


def test_groups_differ_in_shape_and_not_only_in_colour():
    styles = looks(f"group {i}" for i in range(len(COLOURS)))
    assert len({shape for _, shape in styles.values()}) == len(SHAPES) == len(COLOURS)


@pytest.mark.parametrize(
    ("values", "ticks", "logarithmic"),
    [
        ([77, 82, 256], (100.0, 150.0, 200.0), True),
        ([0.001, 3000], (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0), True),
        ([-0.1, 0.4], (0.0, 0.2, 0.4), False),
        ([0.0, 0.0], None, False),
        ([5.0], None, True),
    ],
)
def test_axes_have_round_numbers(values, ticks, logarithmic):
    scale = scale_of(values)
    assert scale.logarithmic == logarithmic
    assert all(0 < scale.share(value) < 1 for value in values)
    if ticks is not None:
        assert scale.ticks == ticks


def test_pictures_are_written_whole(tmp_path):
    points = [Point(1.0, 0.1, "a", "one"), Point(10.0, 0.3, "b", "two"), Point(30.0, -0.1, "b", "three")]
    save_scatter(tmp_path / "scatter.png", points, "flatness", "gap", "title")
    save_layers(
        tmp_path / "layers.svg",
        {"a": [report()], "b": [report(2.0), report(3.0)]},
        "relative_flatness",
        "title",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers.svg", "scatter.png"]
    assert (tmp_path / "scatter.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "layers.svg").read_text()


def test_no_two_groups_look_alike():
    for names in ([f"group {i}" for i in range(40)], [f"group {i} of 40" for i in range(40)]):
        assert len(set(looks(names).values())) == 40


def test_many_values_of_a_number_go_from_dark_to_light():
    look = looks(f"random labels {share / 10}" for share in (3, 10, *range(3), *range(4, 10)))
    in_order = [look[f"random labels {share / 10}"][0] for share in range(11)]
    brightness = [sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in in_order]
    assert brightness == sorted(brightness)
    assert (in_order[0], in_order[-1]) == ("#00224e", "#fee838")


def test_pictures_in_pages_say_what_they_show():
    html = scatter(
        [Point(1.0, 0.1, "a", "one"), Point(10.0, 0.3, "b", "two")], "flatness", "gap", "A caption."
    )
    assert 'aria-label="Scatter of gap against flatness for 2 networks. A caption."' in html
    assert "<title>one: flatness 1, gap 0.1</title>" in html
    lines = profile({"a": [1.0, 2.0], "b": [3.0, 0.5]}, ["fc1", "fc2"], "flatness", "By layer.")
    assert "<title>b, fc2: 0.5</title>" in lines
    assert 'aria-label="flatness by layer: a, b. By layer."' in lines
    Checker(html + lines)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_file_is_written_at_once_or_not_at_all(error, tmp_path):
    path = tmp_path / "report.json"
    write_text(path, "old")

    def write_half():
        with replacing(path) as temporary:
            temporary.write_text("half", encoding="utf-8")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["report.json"]
