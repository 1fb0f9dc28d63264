"""The analysis of a study is computed once, kept in its folder, and never believed when anything differs."""

from __future__ import annotations

import json

import pandas
import pytest

from flatness.show.plots.study import write_figures
from flatness.study.analysis import results
from made_up import made_up_study

GRID = {"optimizer": ["sgd", "adam"], "batch_size": [16, 64], "seed": 5}


def study(folder, **settings):
    """A study that lives in a folder, as `load` returns it."""
    made = made_up_study(GRID, 1, analysis={"resamples": 30, "permutations": 30, **settings})
    return type(made)(made.spec, made.networks, made.records, folder)


@pytest.fixture
def computed(monkeypatch):
    """Names of the tables that are computed, not remembered."""
    found = []
    for name in ("correlation_table", "baseline_table"):
        original = getattr(results, name)

        def counted(*arguments, _name=name, _original=original, **options):
            found.append(_name)
            return _original(*arguments, **options)

        monkeypatch.setattr(results, name, counted)
    return found


def tables(made):
    return {
        "correlations": made.correlations(""),
        "all": made.correlations(),
        "baselines": made.baselines(""),
    }


def same(one, other):
    for name, table in one.items():
        pandas.testing.assert_frame_equal(other[name], table, check_exact=True)


def test_a_study_is_analysed_once(tmp_path, computed):
    first = tables(study(tmp_path))
    # One part: all networks are those of the part.
    assert computed == ["correlation_table", "baseline_table"]
    again = tables(study(tmp_path))
    assert computed == ["correlation_table", "baseline_table"]
    same(first, again)
    assert study(tmp_path).text(120) == study(tmp_path / "elsewhere").text(120)


def changed_value(made):
    record = next(one for one in made.records.values() if "measuring" in one)
    record["measuring"]["results"][0]["value"] *= 1 + 1e-12


def fewer(made):
    del made.records[next(key for key, one in made.records.items() if "measuring" in one)]


def other_gap(made):
    next(one for one in made.records.values() if "evaluation" in one)["evaluation"]["test_loss"] += 1e-9


@pytest.mark.parametrize("change", [changed_value, fewer, other_gap])
def test_other_records_are_analysed_anew(tmp_path, computed, change):
    tables(study(tmp_path))
    computed.clear()
    other = study(tmp_path)
    change(other)
    found = tables(other)
    assert computed == ["correlation_table", "baseline_table"]
    fresh = study(tmp_path / "elsewhere")
    change(fresh)
    same(tables(fresh), found)


def test_other_settings_and_other_code_are_analysed_anew(tmp_path, computed, monkeypatch):
    tables(study(tmp_path))
    computed.clear()
    tables(study(tmp_path, permutations=31))
    assert computed == ["correlation_table"]  # what is known without a measure has no permutations
    tables(study(tmp_path, resamples=31))
    assert computed == ["correlation_table", "correlation_table", "baseline_table"]
    computed.clear()
    monkeypatch.setattr(results, "code_digest", lambda: "another version")
    tables(study(tmp_path))
    assert computed == ["correlation_table", "baseline_table"]


def flipped(path):
    content = json.loads(path.read_text())
    columns = next(iter(content["kept"]["tables"].values()))
    column = next(column for column in columns if column[0] == "kendall")
    column[2][0] += 1e-6
    path.write_text(json.dumps(content))


DAMAGE = {
    "cut": lambda path: path.write_text(path.read_text()[:-20]),
    "empty": lambda path: path.write_text(""),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "another file": lambda path: path.write_text("[1, 2]"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "another value": flipped,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.rename(path.with_name("x")), path.symlink_to(path.with_name("x"))),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_computed_again(tmp_path, computed, damage):
    first = tables(study(tmp_path))
    computed.clear()
    damage(tmp_path / results.MEMORY)
    same(first, tables(study(tmp_path)))
    assert computed == ["correlation_table", "baseline_table"]


def test_a_linked_memory_is_replaced_and_what_it_points_at_left_alone(tmp_path):
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    (tmp_path / results.MEMORY).symlink_to(target)
    tables(study(tmp_path))
    assert target.read_text() == "mine"
    assert not (tmp_path / results.MEMORY).is_symlink()


def test_a_folder_that_takes_no_file_does_not_matter(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "write_text", full)
    assert len(study(tmp_path).correlations("")) == 6
    assert len(study(tmp_path / "not" / "there").correlations("")) == 6
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_comes_later_is_written_to_with_the_tables(tmp_path, computed):
    late = study(tmp_path / "late")
    late.text(100)
    late.path.mkdir()
    late.write_tables()
    computed.clear()
    study(tmp_path / "late").text(100)
    assert computed == []


def test_old_tables_are_forgotten(tmp_path):
    memory = results.Memory(tmp_path)
    for number in range(40):
        memory.put("tables", str(number), [["n", "int64", [number]], ["tau", "float64", [float("nan")]]])
        memory.save()
    kept = json.loads((tmp_path / results.MEMORY).read_text())["kept"]["tables"]
    assert list(kept) == [str(number) for number in range(8, 40)]


def test_a_picture_is_drawn_again_only_where_it_would_differ(tmp_path):
    made = study(tmp_path)
    names = write_figures(made)
    assert len(names) > 2
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in names}

    def drawn(again):
        assert write_figures(again) == names
        found = {name for name in names if (tmp_path / name).stat().st_mtime_ns != times[name]}
        times.update({name: (tmp_path / name).stat().st_mtime_ns for name in names})
        return found

    assert drawn(study(tmp_path)) == set()
    first, *others = names
    (tmp_path / first).write_bytes(b"damaged")
    (tmp_path / others[0]).unlink()
    times[others[0]] = 0
    assert drawn(study(tmp_path)) == {first, others[0]}
    assert (tmp_path / first).read_bytes() != b"damaged"
    (tmp_path / results.MEMORY).write_text("[1]")
    assert drawn(study(tmp_path)) == set(names)
    other = made_up_study(GRID, 2, analysis={"resamples": 30, "permutations": 30})
    assert drawn(type(other)(other.spec, other.networks, other.records, tmp_path)) == set(names)
