"""Pages and pictures: self-contained, escaped, sortable, readable without colours."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from matplotlib.figure import Figure

from flatness.files import replacing, write_text
from flatness.report.report import Report, Result
from flatness.show.charts import Chart, Mark, layers_chart
from flatness.show.pages.page import Page, render
from flatness.show.plots.charts import save_chart
from flatness.show.plots.themes import COLOURS, SHAPES, looks, scale_axis
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
    charts = [Chart(HOSTILE, HOSTILE, HOSTILE, {HOSTILE: [Mark(1.0, 2.0, HOSTILE)]}, caption=HOSTILE)]
    return render(Page(HOSTILE, reports, {"c": HOSTILE}, lead=[HOSTILE], charts=charts))


def test_everything_from_files_is_escaped(page):
    elements = Checker(page)
    assert elements.all("img") == []
    assert len(elements.all("script")) == 2
    escaped = page.count("onerror=alert(1)&gt;") + page.count("onerror=alert(1)\\u003e")
    assert escaped == page.count("onerror=alert(1)")


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
    regions = [region for region in elements.all("div") if region["class"] != "plot"]
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in regions)
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
        ([77, 82, 256], [100.0, 150.0, 200.0], True),
        ([0.001, 3000], [0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0], True),
        ([-0.1, 0.4], [0.0, 0.2, 0.4], False),
        ([0.0, 0.0], None, False),
        ([5.0], None, True),
    ],
)
def test_axes_have_round_numbers(values, ticks, logarithmic):
    axes = Figure().add_subplot()
    scale_axis(axes, "y", values, logarithmic)
    low, high = axes.get_ylim()
    assert axes.get_yscale() == ("log" if logarithmic else "linear")
    assert all(low < value < high for value in values)
    if ticks is not None:
        assert axes.get_yticks().tolist() == ticks


def test_pictures_are_written_whole(tmp_path):
    marks = {"a": [Mark(1.0, 0.1, "one")], "b": [Mark(10.0, 0.3, "two"), Mark(30.0, -0.1, "three")]}
    save_chart(tmp_path / "scatter.png", Chart("title", "flatness", "gap", marks))
    groups = {"a": [report()], "b": [report(2.0), report(3.0)]}
    save_chart(tmp_path / "layers.svg", layers_chart(groups, "relative_flatness", "title"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers.svg", "scatter.png"]
    assert (tmp_path / "scatter.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "layers.svg").read_text()


def test_a_chart_of_layers_has_means_and_ranges():
    chart = layers_chart({"b": [report(2.0), report(3.0)]}, "relative_flatness", "title")
    assert chart.places == ["fc1", "fc2"]
    assert chart.series == {"b": [Mark(0, 5.0, "fc1", 4.0, 6.0), Mark(1, 2.5, "fc2", 2.0, 3.0)]}


def test_no_two_groups_look_alike():
    for names in ([f"group {i}" for i in range(40)], [f"group {i} of 40" for i in range(40)]):
        assert len(set(looks(names).values())) == 40


def test_many_values_of_a_number_go_from_dark_to_light():
    look = looks(f"random labels {share / 10}" for share in (3, 10, *range(3), *range(4, 10)))
    in_order = [look[f"random labels {share / 10}"][0] for share in range(11)]
    brightness = [sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in in_order]
    assert brightness == sorted(brightness)
    assert (in_order[0], in_order[-1]) == ("#481e70", "#fde725")


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
