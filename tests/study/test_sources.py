"""Names that only the data and the networks can judge are judged before anything trains."""

from __future__ import annotations

import sys

import numpy
import pytest
import torch

import flatness
from flatness.catalogue.registry import select_measures
from flatness.errors import DataError, FlatnessError, SpecError
from flatness.study.objects import load_corrupted, load_split
from flatness.study.spec.sources import columns_of
from studies import study


def refused(out, content, kind=SpecError):
    with pytest.raises(kind) as caught:
        flatness.study.run(content, out, jobs=1, progress=False)
    assert not (out / "records").exists()  # nothing was trained, nothing was written
    return str(caught.value)


@pytest.mark.parametrize("table", ["measure", "measure.subset"])
def test_a_layer_that_the_model_does_not_have_is_refused(tmp_path, table):
    named = {"layers": ["fc1", "fc02"]}
    if table == "measure.subset":
        named = {"subset": {"measures": ["sam_sharpness"], **named}}
    assert refused(tmp_path / "out", study(measure=named)) == (
        "Expected the name of a supported layer but got 'fc02'. Did you mean 'fc2'? Supported layers of this "
        f"model: fc1, fc2. The study asks for layers in [{table}]."
    )


def test_a_module_that_is_no_supported_layer_is_refused(tmp_path):
    content = study(measure={"layers": "relu1"})
    assert refused(tmp_path / "out", content) == (
        "Expected the name of a supported layer but got 'relu1', which is a ReLU. Supported layers of this "
        "model: fc1, fc2. The study asks for layers in [measure]."
    )


def test_layers_that_are_no_names_are_refused(tmp_path):
    assert refused(tmp_path / "out", study(measure={"layers": []})) == (
        "Expected layers in [measure] to be 'last', 'trainable', a name or a list of names but the study has "
        "[]. Leave it out to measure all: fc1, fc2."
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("relative_flatnes:fc2", "relative_flatness:fc2"),
        ("relative_flatness:fc3", "relative_flatness:fc2"),
        ("relative_flatness:network", "relative_flatness:network:sum"),
    ],
)
def test_a_headline_that_nothing_measures_is_refused(tmp_path, given, meant):
    content = study(analysis={"headline": ["hessian_trace:network", given]})
    assert refused(tmp_path / "out", content) == (
        "Expected headline in [analysis] to be columns that are measured, as measure:layer, measure:network "
        f"or with :max or :sum behind, but the study has {given!r}. Did you mean {meant!r}?"
    )


def test_a_scale_may_measure_less_than_its_headline(tmp_path):
    content = study(analysis={"headline": ["hessian_trace:network", "fisher_rao:network"]})
    content = {**content, "scale": {"smoke": {"measure": {"measures": ["hessian_trace"]}}}}
    found = flatness.study.run(content, tmp_path / "out", scale="smoke", jobs=1, progress=False)
    assert found.headline() == ["hessian_trace:network"]


def test_columns_are_those_of_a_report(tmp_path):
    content = study(grid={"learning_rate": 0.1, "seed": 1}, measure={"measures": "all"})
    frame = flatness.study.run(content, tmp_path / "out", jobs=1, progress=False).to_frame()
    found = [one for one in select_measures("all") if one.name != "preconditioned_sharpness"]  # no optimizer
    expected = [name for one in found for name in columns_of(one, ["fc1", "fc2"])]
    assert sorted(name for name in frame.columns if ":" in name) == sorted(expected)


@pytest.mark.parametrize("layers", [[["fc1"]], {"fc1": True}, 3, [1]])
def test_layers_of_other_kinds_are_refused(tmp_path, layers):
    assert refused(tmp_path / "out", study(measure={"layers": layers})) == (
        "Expected layers in [measure] to be 'last', 'trainable', a name or a list of names but the study has "
        f"{layers!r}. Leave it out to measure all: fc1, fc2."
    )


@pytest.mark.parametrize(
    ("key", "given"), [("keep", ["hessian_trce:network < 9"]), ("colour", "hessian_trce:network")]
)
def test_columns_of_conditions_and_colours_that_nothing_measures_are_refused(tmp_path, key, given):
    assert refused(tmp_path / "out", study(analysis={key: given})) == (
        f"Expected the column of {key} in [analysis] to be one that is measured but the study has "
        "'hessian_trce:network'. Did you mean 'hessian_trace:network'?"
    )


def test_data_without_pixels_are_neither_moved_nor_corrupted(tmp_path):
    x, y = numpy.zeros((9, 4), "float32"), numpy.arange(9) % 3
    numpy.savez(tmp_path / "flat.npz", x=x, y=y, x_test=x, y_test=y)
    small = {"data": {"name": str(tmp_path / "flat.npz")}, "model": {"options": {"sizes": [4, 3]}}}
    assert refused(tmp_path / "out", study(**small, grid={"augmentation": "crop+flip"}), DataError) == (
        "Expected images for augmentation 'crop+flip', (samples, channels, height, width), but got inputs of "
        "shape (9, 4). Leave augmentation out of [grid]."
    )
    assert refused(tmp_path / "out", {**study(**small), "corruptions": {"blur": [1]}}, DataError) == (
        "Expected images of one channel or three to corrupt, (samples, channels, height, width), but got "
        "inputs of shape (9, 4)."
    )
    own = study(data={"name": "torch:ones"})
    with pytest.raises(SpecError) as caught:
        next(load_corrupted(own["data"], {"blur": [1]}))
    assert str(caught.value) == (
        "Expected the name of a data set in [data] beside [corruptions] but it has 'torch:ones', whose "
        "pixels may have any range. Leave [corruptions] out, or put the data into a file: FILE.npz."
    )


def test_a_headline_of_a_copy_that_is_not_measured_is_refused(tmp_path):
    content = study(analysis={"headline": ["relative_flatness:fc2:rescaled"]}, rescale={})
    flatness.study.run({**content, "grid": {"seed": 1}}, tmp_path / "all", jobs=1, progress=False)
    said = refused(tmp_path / "out", {**content, "rescale": {"measures": ["hessian_trace"]}})
    assert said.endswith(
        "but the study has 'relative_flatness:fc2:rescaled'. Did you mean 'relative_flatness:fc2'?"
    )


def test_what_the_data_do_not_take_is_refused(tmp_path):
    assert refused(tmp_path / "out", study(data={"options": {"noise": 1}})) == (
        "Expected no options in [data] but there is one beside 'digits', which does not take it. "
        "Options are for package.module:factory."
    )
    own = study(data={"name": "flatness.data:load", "standardize": True})
    assert refused(tmp_path / "out", own) == (
        "Expected no standardize in [data] but there is one beside 'flatness.data:load', which does not take "
        "it. Give it as one of options."
    )


def test_inputs_are_as_a_published_script_has_them(tmp_path):
    plain = load_split({"name": "digits", "limit": 40, "test_limit": 20})
    moved = load_split({"name": "digits", "limit": 40, "test_limit": 20, "shift": 0.5, "scale": 2.0})
    for one, other in ((plain.train, moved.train), (plain.test, moved.test)):
        assert torch.equal(other[0], (one[0] - 0.5) * 2)
        assert torch.equal(other[1], one[1])
    assert moved.digest != plain.digest
    assert refused(tmp_path / "out", study(data={"standardize": True, "scale": 255})) == (
        "Expected standardize, or shift and scale, in [data] but got both. Each says how inputs are scaled."
    )


@pytest.mark.parametrize(
    ("table", "name", "said"),
    [
        ("model", "network", "Expected mine:network to work but it raised KeyError: 'width'"),
        ("data", "digits", "Expected mine:digits to give data but it raised OSError: no such disk"),
    ],
)
def test_what_ones_own_code_raises_says_whose_it_is(tmp_path, monkeypatch, table, name, said):
    (tmp_path / "mine.py").write_text(
        "def network(**options):\n    raise KeyError('width')\n\n"
        "def digits(split):\n    raise OSError('no such disk')\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    content = {**study(), table: {"name": f"mine:{name}"}}
    assert refused(tmp_path / "out", content, FlatnessError) == said


def test_a_network_that_does_not_take_the_data_is_refused(tmp_path):
    message = refused(tmp_path / "out", study(model={"options": {"sizes": [63, 16, 10]}}))
    assert message.startswith(
        "Expected mlp to take the samples of digits, of shape (1, 8, 8), but it raised "
    )
    assert message.endswith("Set its sizes with options in [model].")
