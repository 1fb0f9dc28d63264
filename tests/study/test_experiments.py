"""Studies that are experiments: one record per unit of work, resumed, summed up and drawn."""

from __future__ import annotations

import json

import pytest
from scipy.stats import pearsonr

import flatness
from flatness.errors import SpecError
from flatness.show.plots.study import write_figures
from flatness.study import ExperimentStudy, read_spec
from flatness.study.analysis.experiment import summary_table
from flatness.study.experiments.experiment import trend
from flatness.study.experiments.petzka2021_labels import labels_of_one
from flatness.study.run import tasks

LABELS = {
    "title": "labels",
    "experiment": {
        "name": "petzka2021_labels",
        "separations": [1.0, 3],
        "datasets": 12,
        "training": 30,
        "test": 40,
    },
}


def run(content, out, **options):
    return flatness.study.run(content, out, **{"jobs": 1, "progress": False, **options})


def labels(**changes):
    return {**LABELS, "experiment": {**LABELS["experiment"], **changes}}


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder / "records").iterdir()}


def test_rows_are_those_of_the_function_in_one_process_or_two(tmp_path):
    direct = [
        labels_of_one(separation, number, training=30, test=40)
        for separation in (1.0, 3.0)
        for number in range(12)
    ]
    found = run(LABELS, tmp_path / "one")
    assert isinstance(found, ExperimentStudy)
    assert found.counts() == {"done": 4}  # two separations, chunks of ten and two data sets
    assert found.rows == direct
    second = [[row[name] for row in direct[12:]] for name in ("relative_flatness", "gap")]
    assert found.summary[1]["pearson"] == pytest.approx(pearsonr(*second)[0])
    assert [row["n"] for row in found.summary] == [12, 12]
    record = next(iter(found.records.values()))
    assert (record["experiment"], record["unit"]["count"], len(record["rows"])) == (
        "petzka2021_labels",
        10,
        10,
    )
    assert len(record["environment"]["code"]) == 16
    assert run(LABELS, tmp_path / "two", jobs=2).rows == found.rows


def test_what_is_done_is_not_done_again_and_more_data_sets_add_records(tmp_path):
    run(labels(separations=[1.0]), tmp_path)
    before = times(tmp_path)
    again = run(labels(separations=[1.0]), tmp_path)
    assert times(tmp_path) == before
    more = run(labels(separations=[1.0], datasets=20), tmp_path)
    assert len(before.items() & times(tmp_path).items()) == 2
    assert more.rows[:12] == again.rows
    assert more.others == 1  # the chunk of two, now one of ten
    late = run(labels(separations=[1.0, 2.0], datasets=20), tmp_path, minutes=1e-9)
    assert late.counts() == {"done": 2, "pending": 2}
    assert "40 data sets in 4 units of work: 2 done, 2 pending." in str(late)
    assert late.notes == [
        "Stopped after 1e-09 min with everything saved. Run the same command again to go on."
    ]
    assert late.notes[0] in late.text(200)
    assert again.notes == more.notes == []


def test_a_failed_unit_is_a_record_with_its_reason_and_can_be_tried_again(tmp_path, monkeypatch):
    def fails(unit):
        raise RuntimeError("no luck\nat all")

    with monkeypatch.context() as broken:
        one = tasks.experiment("petzka2021_labels", "a test")
        broken.setattr(tasks, "experiment", lambda *_: type("Broken", (), {"work": staticmethod(fails)}))
        failed = run(labels(separations=[1.0]), tmp_path)
    assert failed.counts() == {"failed": 2}
    assert failed.failures() == {"RuntimeError: no luck": 2}
    assert "2 failed: RuntimeError: no luck" in str(failed)
    assert run(labels(separations=[1.0]), tmp_path).counts() == {"failed": 2}
    mended = run(labels(separations=[1.0]), tmp_path, retry=True)
    assert mended.counts() == {"done": 2}
    assert mended.experiment is one


def test_a_record_that_is_cut_off_is_never_there(tmp_path):
    found = run(labels(separations=[1.0]), tmp_path)
    for path in (tmp_path / "records").iterdir():
        assert path.suffix == ".json"
        assert json.loads(path.read_text())["status"] == "done"
    loaded = flatness.study.load(tmp_path)
    assert loaded.rows == found.rows
    assert str(loaded) == str(found)
    packed = flatness.study.load(flatness.study.pack(tmp_path, tmp_path / "kept.json.xz"))
    assert packed.rows == found.rows


def test_tables_and_figures_are_written(tmp_path):
    small = {"name": "petzka2021_bound", "separations": [1.0, 2.0], "datasets": 2, "samples": 60, "draws": 5}
    found = run({"experiment": small}, tmp_path)
    assert (tmp_path / "rows.csv").read_text().startswith("separation,dataset,gap,cross_validated_gap,")
    assert (tmp_path / "summary.csv").read_text().startswith("separation,n,gap,gap_stderr,bound,")
    figures = write_figures(found)
    assert figures == [
        f"figures/bound{which}{form}" for form in (".png", ".svg") for which in ("", "-published")
    ]
    for name in figures:
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in content
    above = sum(row["bound"] > row["gap"] for row in found.summary)
    assert f"the mean gap at {above} of 2 separations" in str(found).replace("\n", " ")
    net = {"model": "mlp", "options": {"sizes": [4, 3, 10]}, "shape": [4], "factors": [[2]]}
    other = run(
        {
            "experiment": {
                "name": "rangamani2019_invariance",
                "networks": [net],
                "samples": 20,
                "repetitions": 1,
            }
        },
        tmp_path / "other",
    )
    assert write_figures(other) == ["figures/invariance.png", "figures/invariance.svg"]


def test_scales_change_options():
    assert read_spec(LABELS, "smoke").content["experiment"]["separations"] == [0.5, 1.0, 2.0, 5.0]
    own = {**LABELS, "scale": {"smoke": {"experiment": {"datasets": 3}}}}
    spec = read_spec(own, "smoke")
    assert (spec.content["experiment"]["datasets"], spec.content["experiment"]["training"]) == (3, 30)
    assert spec.size == "6 data sets"


def message(content):
    with pytest.raises(SpecError) as caught:
        read_spec(content)
    return str(caught.value)


def test_wrong_options_are_refused_before_anything_runs():
    assert message(labels(separation=[1.0])) == (
        "Expected an option of petzka2021_labels in [experiment] but the study has 'separation'. Did you "
        "mean 'separations'? Known: separations, datasets, training, test, penalty, seed."
    )
    assert message(labels(datasets="ten")) == (
        "Expected datasets in [experiment] to be a whole number but the study has 'ten'."
    )
    assert message(labels(datasets=0)) == "Expected datasets in [experiment] to be at least 1 but got 0."
    assert message(labels(separations=[])) == (
        "Expected positive numbers for separations in [experiment] but got []."
    )
    assert message(labels(name="petzka2021_label")) == (
        "Expected name in [experiment] to be one of petzka2021_labels, petzka2021_bound, "
        "rangamani2019_invariance but the study has 'petzka2021_label'. Did you mean 'petzka2021_labels'?"
    )
    assert message({**LABELS, "grid": {"seed": 3}}) == (
        "Expected [experiment] instead of a grid of networks but the study has [grid] too. Leave one of them "
        "out."
    )


def test_a_trend_needs_points_and_a_table_keeps_its_width():
    assert trend([1, 2, 3], [1, 2, 3]) == "cannot be decided from 3 points"
    assert trend([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]).startswith("falls (Kendall τ = -1.00, p = 0.017")
    assert trend([1, 2, 3, 4], [1, 3, 2, 4]).startswith("neither rises nor falls clearly")
    rows = [
        {
            "at": 0.5,
            "n": 3,
            "value": 1 / 3,
            "value_stderr": 0.01,
            "r": 0.5,
            "r_low": -1.0,
            "r_high": 1.0,
            "p": None,
        }
    ]
    assert summary_table(rows, 24).split("\n") == [
        " at  n         value",
        "────────────────────",
        "0.5  3  0.333 ± 0.01",
        "",
        " at            r  p",
        "───────────────────",
        "0.5  0.5 [-1, 1]  –",
    ]
