"""Numbers with the right digits, tables that fit, LaTeX that compiles, safe fragments for notebooks."""

from __future__ import annotations

import re

import pytest
import torch

import flatness
from flatness.errors import ReportError
from flatness.report.latex import latex_report
from flatness.report.report import Report, Result
from flatness.report.tables import Column, format_report, format_table, format_value
from flatness.show.pages.page import Page, render
from small import data, network


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (0.0, 0.0, "0"),
        (173.04, 0.0, "173.0"),
        (-0.5, 0.0, "-0.5000"),
        (98765.4, 0.0, "98765"),
        (1234567.0, 0.0, "1.235e+06"),
        (1.23456e-7, 0.0, "1.235e-07"),
        (float("nan"), 0.0, "nan"),
        (float("inf"), 1.0, "inf"),
        (3.14159, 0.02, "3.14 ± 0.02"),
        (3.14159, 0.0123, "3.142 ± 0.012"),
        (3.14159, 0.0096, "3.142 ± 0.010"),
        (3.14159, 0.0996, "3.14 ± 0.10"),
        (12345.0, 321.0, "12300 ± 300"),
        (0.3, 4.0, "0 ± 4"),
        (1.2345e-7, 3e-9, "(1.23 ± 0.03)e-07"),
        (1.2345e9, 1.5e7, "(1.234 ± 0.015)e+09"),
        (3.0, float("nan"), "3.000"),
    ],
)
def test_a_value_has_the_digits_its_error_leaves(value, stderr, text):
    assert format_value(value, stderr) == text


def report(layers=("fc1", "fc2"), stderr=0.0) -> Report:
    rows = []
    for measure in (
        "hessian_trace",
        "relative_flatness_normalized",
        "neuron_flatness_incoming",
        "weight_norm",
    ):
        for number, layer in enumerate(layers):
            rows.append(
                Result(
                    measure,
                    "layer",
                    1.5 + number,
                    layer=layer,
                    stderr=stderr,
                    method="sampled" if stderr else "exact",
                )
            )
        rows.append(Result(measure, "network", 7.25, reduction="sum", stderr=stderr))
        rows.append(Result(measure, "unit", 3.0, layer=layers[0], unit=0))
    meta = {"model": "Net", "samples": 60000, "loss": "cross_entropy", "risk": 0.0123456}
    return Report(
        tuple(rows), meta, ("a note about something that is long enough to be wrapped in a narrow terminal",)
    )


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("stderr", [0.0, 0.0123])
def test_a_report_fits_the_width(width, stderr):
    layers = [f"encoder.blocks.{i}.attention.projection.linear" for i in range(12)]
    text = format_report(report(layers, stderr), width)
    assert max(map(len, text.splitlines())) <= width
    assert (text.count("…") >= 12) == (width < 120)  # cut where the columns need the room
    assert ("1.500 ± 0.012" if stderr else "1.500") in text


def test_a_report_at_80_columns():
    assert format_report(report(), 80).splitlines() == [
        "Net: 60,000 samples, cross_entropy, risk 0.01235, all values exact",
        "",
        "                      relative    neuron",
        "           hessian    flatness  flatness  weight",
        "layer       trace†  normalized  incoming   norm†",
        "────────────────────────────────────────────────",
        "fc1          1.500       1.500     1.500   1.500",
        "fc2          2.500       2.500     2.500   2.500",
        "network Σ    7.250       7.250     7.250   7.250",
        "",
        "† changes when layers are rescaled: an equivalent network can have any value",
        "",
        "note: a note about something that is long enough to be wrapped in a narrow",
        "      terminal",
    ]


def test_what_did_not_converge_is_marked():
    row = Result("layer_flatness", "layer", 2.0, layer="fc1", converged=False)
    text = format_report(Report((row,)), 80)
    assert "2.000*" in text
    assert "* an eigenvalue iteration did not reach its tolerance" in text


def test_the_terminal_shows_a_result_as_a_sentence():
    row = Result(
        "relative_flatness",
        "layer",
        39.15,
        layer="fc3",
        stderr=0.2,
        method="sampled",
        loss="mse",
        notes=("why",),
    )
    assert str(row) == repr(row) == "relative_flatness of fc3: 39.1 ± 0.2 (sampled, hessian of mse)\n  why"
    assert str(Result("m", "unit", 1.0, layer="fc1", unit=3)) == "m of unit 3 of fc1: 1.000 (exact)"
    assert str(Result("m", "network", 1.0, reduction="sum")) == "m of the network (sum): 1.000 (exact)"


def test_str_of_a_report_is_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")
    assert max(map(len, str(report()).splitlines())) <= 44


def test_latex_escapes_and_sets_numbers_in_math_mode():
    rows = (
        Result("weight_norm", "layer", 1.5e-9, layer="block_1 & 5%#$~^{x}\\", stderr=2e-11, method="sampled"),
        Result("weight_norm", "layer", 3.0, layer="fc", converged=False),
    )
    assert latex_report(Report(rows)).splitlines() == [
        r"\begin{tabular}{lr@{}l@{}l}",
        r"\toprule",
        r"layer & \multicolumn{3}{c}{weight norm$^\dagger$} \\",
        r"\midrule",
        r"block\_1 \& 5\%\#\$\textasciitilde{}\textasciicircum{}\{x\}\textbackslash{} "
        r"& $(1$ & $.50$ & ${}\pm 0.02) \times 10^{-9}$ \\",
        r"fc & $3$ & $.000^*$ & \\",
        r"\bottomrule",
        r"\multicolumn{4}{l}{\footnotesize $^\dagger$ changes when layers are rescaled: an equivalent "
        r"network can have any value}",
        r"\end{tabular}",
    ]


def test_notebooks_show_tables_and_escape_names():
    hostile = "<script>alert(1)</script>"
    shown = Report(
        (Result("weight_norm", "layer", 2.0, layer=hostile),), {"model": hostile, "samples": 3}, (hostile,)
    )
    for html in (shown._repr_html_(), shown.results[0]._repr_html_()):
        assert "<script" not in html
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
        assert "2.000" in html
    assert _balanced(shown._repr_html_())


def test_notebooks_show_a_plan():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    data = torch.randn(20, 4), torch.randint(3, (20,))
    html = flatness.plan(model, data)._repr_html_()
    assert "<b>measures:</b>" in html
    assert html.count("<li>") >= 2
    assert _balanced(html)


def _balanced(html: str) -> bool:
    """Whether every element that opens also closes, but for line breaks and pictures."""
    tags = re.findall(r"<(/?)(\w+)[^>]*>", html)
    names = {name for _, name in tags} - {"br", "img"}
    return all(
        sum(name == found and not slash for slash, found in tags)
        == sum(name == found and slash == "/" for slash, found in tags)
        for name in names
    )


def test_what_an_ascent_did_not_reach_is_marked_as_such():
    row = Result("epsilon_sharpness", "network", 2.0, method="ascent", converged=False)
    text = format_report(Report((row,)), 80)
    assert "2.000*" in text
    assert "* a search or iteration did not converge: see report.result(...).notes" in text


def test_errors_of_the_data_are_in_every_table():
    rows = (
        Result("relative_flatness", "layer", 3.14159, layer="fc1", data_stderr=0.02, loss="mse"),
        Result("relative_flatness", "layer", 2.71828, layer="fc2", stderr=0.3, data_stderr=0.02),
        Result("weight_norm", "layer", 1234.5, layer="fc1", data_stderr=1e-13),
    )
    report = Report(rows, {"model": "Net", "samples": 10, "loss": "mse"})
    text = format_report(report, 120)
    assert text.splitlines()[0] == (
        "Net: 10 samples, mse, all values exact, ± is the standard error, that of the data included"
    )
    cells = [line.split("  ") for line in text.splitlines()[-4:-2]]
    assert [[cell.strip() for cell in line if cell.strip()] for line in cells] == [
        ["fc1", "3.14 ± 0.02", "1234"],
        ["fc2", "2.7 ± 0.3"],
    ]
    latex = report.to_latex()
    assert latex.splitlines()[0] == "% ± is the standard error, that of the data included"
    assert r"fc1 & $3$ & $.14$ & ${}\pm 0.02$ & $1234$ & \\" in latex
    assert r"fc2 & $2$ & $.7$ & ${}\pm 0.3$ &  & \\" in latex
    assert str(rows[0]) == (
        "relative_flatness of fc1: 3.14 ± 0.02 (exact, hessian of mse, ± with that of the data)"
    )
    page = render(Page("One", {"net": report}))
    assert ">that of the data</button>" in page
    assert '<td data-value="0.02">0.02000</td>' in page
    assert "3.14 ± 0.02" in page


def test_a_table_has_aligned_columns_rules_and_sections():
    columns = ["term", Column("value", "right"), Column("kind", "center")]
    rows = [["flatness", "3.1", "a"], ["noise", "12", "bcd"], [], ["sum", "15.1", ""]]
    assert format_table(columns, rows).splitlines() == [
        "term      value  kind",
        "─────────────────────",
        "flatness    3.1   a",
        "noise        12  bcd",
        "─────────────────────",
        "sum        15.1",
    ]
    assert format_table([Column(), Column()], [["a", "b"]]) == "a  b"


@pytest.mark.parametrize(
    ("narrow", "text"),
    [("start", "…he Hessian"), ("middle", "trace…ssian"), ("end", "trace of t…"), ("wrap", "trace of")],
)
def test_a_column_gives_way_where_the_terminal_is_narrow(narrow, text):
    shown = format_table(["layer", Column("", narrow=narrow)], [["fc1", "trace of the Hessian"]], width=18)
    assert shown.splitlines()[2] == f"fc1    {text}"
    assert max(map(len, shown.splitlines())) == 18


def test_what_does_not_fit_goes_below_without_empty_rows():
    columns = ["layer", Column("first", "right"), Column("second", "right")]
    rows = [["fc1", "1", "2"], ["fc2", "3", ""], ["fc3", "", "4"]]
    assert format_table(columns, rows, width=16).splitlines() == [
        "layer  first",
        "────────────",
        "fc1        1",
        "fc2        3",
        "",
        "layer  second",
        "─────────────",
        "fc1         2",
        "fc3         4",
    ]


def test_cells_are_text_and_never_markup_or_colours():
    shown = format_table(["name"], [["[red]fc1[/red] :smile: 3.14"]])
    assert shown.splitlines()[2] == "[red]fc1[/red] :smile: 3.14"


def test_what_is_recommended_comes_first_and_what_rescaling_changes_last_and_marked():
    names = [measure.name for measure in flatness.measures() if measure.by_default]
    assert names[:3] == ["relative_flatness", "relative_flatness_normalized", "layer_flatness_trace"]
    assert names[-2:] == ["hessian_trace", "weight_norm"]
    shown = flatness.measure(network(), data(), progress=False)
    assert list(dict.fromkeys(row.measure for row in shown.results)) == names
    lines = format_report(shown, 80).splitlines()
    first_block = lines[: lines.index("", 2)]
    assert "relative" in " ".join(first_block).split()
    assert any("trace†" in line and "norm†" in line for line in lines)
    # One order and one mark, whatever shows the table.
    headings = ["relative flatness", "hessian trace", "weight norm"]
    latex = shown.to_latex().splitlines()[2]
    html, page = shown._repr_html_().replace("<br>", " "), render(Page("One", {"net": shown}))
    for text, mark in ((latex, r"$^\dagger$"), (html, "†"), (page, "†")):
        places = [text.index(heading) for heading in headings]
        assert places == sorted(places)
        assert text.count(f"hessian trace{mark}") == text.count(f"weight norm{mark}") == 1
        assert f"relative flatness{mark}" not in text
    for text in (shown.to_latex(), html, page):
        assert "changes when layers are rescaled: an equivalent network can have any value" in text


def test_latex_has_the_columns_that_are_asked_for():
    shown = report(stderr=0.0123)
    latex = shown.to_latex(measures=["weight_norm", "hessian_trace"])
    assert latex.splitlines()[2] == (
        r"layer & \multicolumn{3}{c}{weight norm$^\dagger$} & \multicolumn{3}{c}{hessian trace$^\dagger$} \\"
    )
    assert "relative" not in latex
    assert (
        shown.to_latex(measures="hessian_trace").splitlines()[4] == r"fc1 & $1$ & $.500$ & ${}\pm 0.012$ \\"
    )
    with pytest.raises(ReportError) as error:
        shown.to_latex(measures=["hesian_trace"])
    assert str(error.value) == (
        "Expected a measure of this report but got 'hesian_trace'. Did you mean 'hessian_trace'? It holds: "
        "hessian_trace, relative_flatness_normalized, neuron_flatness_incoming, weight_norm."
    )


def test_every_latex_row_has_as_many_cells_as_the_table_has_columns():
    latex = report(stderr=0.0123).to_latex()
    kinds = re.search(r"\\begin\{tabular\}\{(.*)\}", latex)[1].replace("@{}", "")
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    for line in rows[1:]:
        assert line.count("&") + 1 == len(kinds)
    spans = sum(int(width) for width in re.findall(r"\\multicolumn\{(\d)\}\{c\}", rows[0]))
    assert spans + 1 == len(kinds)


def test_names_of_layers_are_cut_only_where_the_columns_need_the_room():
    name = "encoder.layers.11.self_attention.output.dense_projection"
    shown = Report((Result("relative_flatness", "layer", 1.5, layer=name),))
    assert f"{name}     1.500" in format_report(shown, 120)
    assert name in format_report(shown, 80)
    narrow = format_report(shown, 60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "….layers.11.self_attention.output.dense_projection" in narrow
    many = [Result(f"measure_{i}", "layer", 1.5, layer=name) for i in range(12)]
    assert max(map(len, format_report(Report(tuple(many)), 120).splitlines())) <= 120


def test_notebooks_show_comparisons_bounds_landscapes_and_the_catalogue():
    hostile = "<script>alert(1)</script>"
    model, pair = network(), data(60)
    given = {"progress": False}
    shown = flatness.measure(model, pair, measures=["relative_flatness", "hessian_trace"], **given)
    comparison = flatness.compare(shown, shown, names=(hostile, "B"))
    bound = flatness.generalization_bound(model, pair, delta=0.1, **given)
    line = flatness.landscape.line(model, pair, points=5, **given)
    catalogue = flatness.measures()
    parts = [one._repr_html_() for one in (comparison, bound, line, catalogue, catalogue[0])]
    for html in parts:
        assert "<script" not in html
        assert _balanced(html)
    assert comparison.verdict in parts[0]
    assert "relative flatness, network Σ" in parts[0]
    assert "hessian trace†, head" in parts[0]
    for text in (bound.summary(), "representativeness", "positive semidefinite Hessian"):
        assert text.replace("'", "&#x27;") in parts[1]
    assert 'src="data:image/png;base64,iVBOR' in parts[2]
    assert parts[3].count("<tr>") == len(catalogue) + 1
    assert repr(catalogue).splitlines()[0].split("  ")[0] == "relative_flatness"
    assert len(repr(catalogue).splitlines()) == len(catalogue)
    assert repr(catalogue[0]).startswith("relative_flatness  κ_Tr^φ  (petzka2021, Def. 3)\n")
