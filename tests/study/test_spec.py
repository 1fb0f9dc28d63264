"""Study files: what they expand to, and what is said about wrong ones."""

from __future__ import annotations

import pytest

from flatness.errors import MeasureError, SpecError
from flatness.study import names, read_spec
from flatness.study.configuration import digest
from flatness.study.experiments.experiment import unit_key
from flatness.study.spec.spec import Spec, make_spec, usual_scale
from studies import SMALL, configurations, study


def message(content, scale="paper"):
    with pytest.raises(SpecError) as caught:
        read_spec(content, scale)
    return str(caught.value)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("scale", ["smoke", "small", "gallery", "paper"])
def test_every_study_of_the_package_reads_at_every_scale(name, scale):
    spec = read_spec(name, scale)
    assert spec.title
    assert spec.content["claim"]
    if spec.experiment is not None:
        keys = [unit_key(spec.experiment.name, unit) for unit in spec.units]
        assert len(keys) == len(set(keys)) >= 4
        return
    keys = [one.key for one in spec.configurations]
    assert len(keys) == len(set(keys)) >= 6
    if scale == "smoke":
        assert len(keys) <= 16


@pytest.mark.parametrize("name", names())
def test_the_gallery_gives_no_network_more_epochs_than_the_paper(name):
    """A cap at scale paper would cut off what is known to converge."""
    gallery, paper = read_spec(name, "gallery"), read_spec(name)
    for part, settings in paper.parts.items():
        assert settings["stop"]["epochs"] >= gallery.parts[part]["stop"]["epochs"]


@pytest.mark.parametrize("name", ["rangamani2019-batch", "rangamani2019-lines"])
@pytest.mark.parametrize("scale", ["smoke", "small", "gallery"])
def test_small_and_large_batches_differ_also_with_few_samples(name, scale):
    """They are what the study compares; a batch is at most all samples."""
    spec = read_spec(name, scale)
    for part, settings in spec.parts.items():
        sizes = {one.axes["batch_size"] for one in spec.configurations if one.part == part}
        assert len({min(size, settings["data"].get("limit", size)) for size in sizes}) == 2


def test_sizes_are_those_of_the_papers():
    sizes = {name: len(read_spec(name).configurations) for name in names()}
    assert sizes["petzka2019-cifar10"] == 4 * 4 * 9
    assert sizes["petzka2021-cifar10"] == 5 * 3 * 3 * 10
    assert sizes["rangamani2019-batch"] == 4 * 2 * 5
    assert read_spec("petzka2021-labels").size == "10000 data sets"
    assert read_spec("petzka2021-bound").size == "800 data sets"
    assert read_spec("rangamani2019-invariance").size == "20 comparisons"
    assert {sizes[name] for name in sizes if name.startswith("tsuzuku2020")} == {99}
    assert sizes["beyond-cifar10"] == (36 + 10) * 5


def test_values_together_vary_together():
    content = study(grid={"together": [{"batch_size": [4, 512], "learning_rate": [0.001, 0.1]}], "seed": 2})
    del content["grid"]["learning_rate"], content["grid"]["batch_size"]
    spec = read_spec(content)
    found = [
        (one.axes["batch_size"], one.axes["learning_rate"], one.axes["seed"]) for one in spec.configurations
    ]
    assert found == [(4, 0.001, 0), (4, 0.001, 1), (512, 0.1, 0), (512, 0.1, 1)]
    assert spec.axes() == ["batch_size+learning_rate"]


def test_a_key_depends_on_what_decides_the_network_and_on_nothing_else():
    one = configurations()[0]
    assert one.key == configurations(data={"data_dir": "/elsewhere"})[0].key
    assert one.key == configurations(measure={"measures": "all"})[0].key
    assert one.key == configurations(train={"at_once": 3})[0].key
    for change in (
        {"data": {"limit": 119}},
        {"model": {"options": {"sizes": [64, 9, 10]}}},
        {"stop": {"epochs": 4}},
        {"grid": {"learning_rate": 0.2}},
        {"train": {"loss": "mse"}},
    ):
        assert one.key != configurations(**change)[0].key
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_the_smoke_scale_of_a_file_without_one_is_a_few_networks():
    spec = read_spec(study(grid={"seed": 40}), "smoke")
    assert isinstance(spec, Spec)
    assert len(spec.configurations) == 8
    assert spec.parts[""]["measure"]["which"] == "all"


@pytest.mark.parametrize(("scale", "limit", "epochs"), [("smoke", 512, 2), ("small", 5000, 20)])
def test_a_scale_takes_from_a_file_and_never_adds(scale, limit, epochs):
    large = study(data={"limit": 40000}, stop={"epochs": 100})
    shrunk = read_spec(large, scale).parts[""]
    assert (shrunk["data"]["limit"], shrunk["stop"]["epochs"]) == (limit, epochs)
    tiny = study(data={"limit": 120}, stop={"epochs": 1}, grid={"at_most": 4})
    for content in (tiny, {**tiny, "parts": {"one": {}}}):
        spec = read_spec(content, scale)
        (part,) = spec.parts.values()
        assert (part["data"]["limit"], part["data"]["test_limit"], part["stop"]["epochs"]) == (120, 60, 1)
        assert len(spec.configurations) == 4
    own = {**large, "parts": {"one": {"data": {"limit": 90}}}}
    assert read_spec(own, scale).parts["one"]["data"]["limit"] == 90
    experiment = {"experiment": {"name": "petzka2021_bound", "separations": [1.0], "datasets": 2}}
    assert read_spec(experiment, scale).size == "2 data sets"


def test_combinations_can_be_left_out():
    grid = {"learning_rate": [0.1, 0.2], "optimizer": ["sgd", "adam", "rmsprop"], "batch_size": 8, "seed": 2}
    without = [{"optimizer": ["adam", "rmsprop"], "learning_rate": 0.2}, {"optimizer": "sgd", "seed": 1}]
    left = read_spec(study(grid={**grid, "without": without})).configurations
    assert [(one.axes["optimizer"], one.axes["learning_rate"], one.axes["seed"]) for one in left] == [
        ("sgd", 0.1, 0),
        ("adam", 0.1, 0),
        ("adam", 0.1, 1),
        ("rmsprop", 0.1, 0),
        ("rmsprop", 0.1, 1),
        ("sgd", 0.2, 0),
    ]
    assert message(study(grid={**grid, "without": [{"learning_rate": 0.3}]})) == (
        "Expected [[grid.without]] to name combinations of the grid but the study has none with "
        "learning_rate 0.3 of the row {'learning_rate': 0.3}. Give values that the grid has, or leave the "
        "row out; a scale with another grid has its own rows, or without = []."
    )
    assert message(study(grid={**grid, "without": [{"batch_size": 8}]})) == (
        "Expected [[grid.without]] to leave some networks but the study leaves out every combination. Name "
        "more axes in a row, or leave one out."
    )
    misspelt = [{"optimizer": ["adam", "rmspop"], "learning_rate": 0.2}]
    assert "none with optimizer rmspop of the row" in message(study(grid={**grid, "without": misspelt}))
    smaller = study(grid={**grid, "without": [{"learning_rate": 0.2}]})
    smaller["scale"] = {"small": {"grid": {"learning_rate": 0.1, "without": []}}}
    assert len(read_spec(smaller, "small").configurations) == 6
    assert message(study(grid={**grid, "without": [{"learning_rte": 0.1}]})) == (
        "Expected a key of [[grid.without]] but the study has 'learning_rte'. Did you mean 'learning_rate'? "
        "Known: initialization, batch_size, learning_rate, optimizer, momentum, weight_decay, augmentation, "
        "random_labels, seed."
    )


def test_unknown_keys_are_answered_with_the_nearest():
    assert message({**SMALL, "grdi": {}}) == (
        "Expected a key of a study file but the study has 'grdi'. Did you mean 'grid'? Known: title, paper, "
        "claim, parts, scale, data, model, grid, stop, train, measure, gap, corruptions, rescale, analysis, "
        "checkpoints, lines, experiment."
    )
    assert message(study(grid={"learning_rat": 0.1})) == (
        "Expected a key of [grid] but the study has 'learning_rat'. Did you mean 'learning_rate'? Known: "
        "initialization, batch_size, learning_rate, optimizer, momentum, weight_decay, augmentation, "
        "random_labels, seed, together, without, at_most."
    )
    assert message({**SMALL, "scale": {"huge": {}}}) == (
        "Expected [scale.smoke], [scale.small] or [scale.gallery] but the study has [scale.huge]. The file "
        "itself is the scale 'paper'."
    )


def test_a_grid_of_size_zero_is_refused():
    assert message(study(grid={"batch_size": []})) == (
        "Expected at least one value for batch_size but the study has an empty list: a grid of size zero. "
        "Give a value or leave the key out."
    )
    assert message(study(grid={"seed": 0})) == (
        "Expected at least one value for seed but the study has 0: a grid of size zero. "
        "Give a value or leave the key out."
    )
    assert message(study(grid={"together": [{"momentum": [0.1], "weight_decay": [0.1, 0.2]}]})) == (
        "Expected lists of one length in [[grid.together]] but the study has 1 of momentum, 2 of "
        "weight_decay."
    )


def test_values_that_make_no_sense_are_refused():
    assert message(study(grid={"learning_rate": [0.1, -1]})) == (
        "Expected learning_rate in [grid] to be positive numbers but the study has -1."
    )
    assert message(study(grid={"optimizer": "adan"})) == (
        "Expected optimizer in [grid] to be one of sgd, adam, adamw, rmsprop, sam but the study has 'adan'. "
        "Did you mean 'adam'?"
    )
    assert message(study(grid={"initialization": "xavier"})) == (
        "Expected initialization in [grid] to be one of default, xavier_normal, xavier_uniform, "
        "kaiming_uniform, uniform, normal, narrow_normal but the study has 'xavier'. "
        "Did you mean 'xavier_normal'?"
    )
    assert message(study(stop={"epochs": "3"})) == (
        "Expected epochs in [stop] to be a whole number but the study has '3'."
    )
    assert message({**SMALL, "stop": {"loss": 0.1}}) == (
        "Expected epochs in [stop] but the study has none. Say when to give up: epochs = 100."
    )
    assert message(study(gap={"kind": "los"})) == (
        "Expected kind in [gap] to be one of loss, summed_loss, accuracy but the study has 'los'. "
        "Did you mean 'loss'?"
    )
    assert message(study(analysis={"keep": ["train_error"]})) == (
        "Expected conditions such as 'train_error <= 0.07' in keep but the study has 'train_error'."
    )
    with pytest.raises(MeasureError):
        read_spec(study(measure={"measures": ["relative_flatnes"]}))


@pytest.mark.parametrize(
    ("axis", "value", "wanted"),
    [
        ("momentum", 1.0, "numbers from 0 to below 1"),
        ("momentum", -0.1, "numbers from 0 to below 1"),
        ("learning_rate", 0.0, "positive numbers"),
        ("batch_size", 0, "whole numbers"),
        ("batch_size", -4, "whole numbers"),
        ("batch_size", True, "whole numbers"),
        ("weight_decay", -1e-4, "numbers of at least 0"),
        ("random_labels", 1.5, "shares from 0 to 1"),
        ("random_labels", -0.5, "shares from 0 to 1"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(axis, value, wanted):
    refusal = f"Expected {axis} in [grid] to be {wanted} but the study has {value!r}."
    assert message(study(grid={axis: value})) == refusal
    alone = {name: given for name, given in SMALL["grid"].items() if name != axis}
    assert message({**SMALL, "grid": {**alone, "together": [{axis: [value]}]}}) == refusal


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("rho", -0.1, "at least 0"),
        ("eps", float("nan"), "at least 0"),
        ("beta1", 1.0, "from 0 to below 1"),
        ("alpha", -0.5, "from 0 to below 1"),
    ],
)
def test_options_of_optimizers_out_of_range_are_refused(key, value, wanted):
    refusal = f"Expected {key} in [train] to be {wanted} but the study has {value!r}."
    assert message(study(train={key: value})) == refusal


def test_a_stored_study_with_an_option_that_nothing_takes_still_loads():
    content = study(train={"rho": 0.1})
    assert make_spec("stored", "paper", content, "study.json").configurations


def test_an_option_that_no_optimizer_of_the_file_takes_is_refused():
    refusal = (
        "Expected {} in [train] with an optimizer that takes it, {}, but the study has none in [grid]. Leave "
        "{} out."
    )
    assert message(study(train={"rho": 0.1})) == refusal.format("rho", "sam", "rho")
    rates = {**SMALL, "parts": {"one": {"train": {"beta1": 0.8}}}}
    assert message(rates) == refusal.format("beta1", "adam or adamw", "beta1")
    assert message(study(train={"alpha": 0.9}, grid={"optimizer": ["sgd", "adam"]})) == refusal.format(
        "alpha", "rmsprop", "alpha"
    )
    # What one part or scale takes may stand above all of them.
    taken = study(train={"rho": 0.1})
    for given in (
        study(train={"rho": 0.1}, grid={"optimizer": ["sgd", "sam"]}),
        study(train={"rho": 0.1}, grid={"together": [{"optimizer": ["sam"], "momentum": [0.9]}]}),
        {**taken, "parts": {"one": {}, "two": {"grid": {"optimizer": "sam"}}}},
        {**taken, "scale": {"small": {"grid": {"optimizer": "sam"}}}},
    ):
        assert read_spec(given).configurations


@pytest.mark.parametrize(
    ("table", "given", "least"),
    [
        ("measure", {"samples": -5}, 1),
        ("measure.subset", {"samples": 0}, 1),
        ("stop", {"epochs": 0}, 1),
        ("train", {"at_once": -2}, 1),
        ("grid", {"at_most": -1}, 1),
        ("lines", {"points": 1}, 2),
        ("analysis", {"permutations": -1}, 0),
    ],
)
def test_numbers_that_would_fail_every_network_are_refused_before_training(table, given, least):
    outer, _, inner = table.partition(".")
    ((key, value),) = given.items()
    changes = {inner: {**given, "measures": ["sam_sharpness"]}} if inner else given
    assert message(study(**{outer: changes})) == (
        f"Expected {key} in [{table}] to be at least {least} but the study has {value}."
    )


def test_names_and_ranges_that_would_fail_every_network_are_refused_before_training():
    assert message(study(rescale={"low": 5, "high": 1})) == (
        "Expected 0 < low ≤ high in [rescale] but the study has low = 5, high = 1."
    )
    assert message(study(rescale={"kind": "layrwise"})) == (
        "Expected kind in [rescale] to be one of attention, layerwise, neuronwise, output, permutation but "
        "the study has 'layrwise'. Did you mean 'layerwise'?"
    )
    assert message(study(lines={"span": -1})) == (
        "Expected span in [lines] to be positive but the study has -1."
    )
    assert message(study(lines={"directions": "layers"})) == (
        "Expected directions in [lines] to be one of layer, filter, eigenvectors, relative_flatness but the "
        "study has 'layers'. Did you mean 'layer'?"
    )
    assert message(study(measure={"method": "exct"})) == (
        "Expected method in [measure] to be one of auto, exact, sampled but the study has 'exct'. "
        "Did you mean 'exact'?"
    )
    assert message(study(measure={"curvature": "hesian"})) == (
        "Expected curvature in [measure] to be one of hessian, gauss_newton, finite_differences but the "
        "study has 'hesian'. Did you mean 'hessian'?"
    )
    assert message(study(measure={"precision": 2})) == (
        "Expected precision in [measure] to be a relative standard error between 0 and 1 but the study has "
        "2. For example precision = 0.01."
    )
    assert message({**SMALL, "corruptions": {"blur": [1, 6]}}) == (
        "Expected blur in [corruptions] to be strengths from 1 to 5 but the study has [1, 6]."
    )
    assert message({**SMALL, "corruptions": {"fog": [1]}}) == (
        "Expected a key of [corruptions] but the study has 'fog'. Known: noise, blur, contrast, jpeg."
    )
    wanted = study(analysis={"targets": ["blurr_gap"]})
    assert message({**wanted, "corruptions": {"blur": [1]}}) == (
        "Expected targets in [analysis] to be one of test_loss, test_error, blur_error, blur_gap, "
        "corrupted_error, corrupted_gap but the study has 'blurr_gap'. Did you mean 'blur_gap'?"
    )
    assert message(study(stop={"accuracy": 99})) == (
        "Expected accuracy in [stop] to be a share from 0 to 1 but the study has 99."
    )
    columns = (
        "part, initialization, batch_size, learning_rate, optimizer, momentum, weight_decay, augmentation, "
        "random_labels, seed, status, reason, epochs, training_seconds, measuring_seconds, train_loss, "
        "test_loss, train_accuracy, test_accuracy, test_samples, test_loss_deviation, train_error, "
        "test_error, gap"
    )
    assert message(study(analysis={"colour": "batchsize"})) == (
        f"Expected the column of colour in [analysis] to be one of {columns} but the study has 'batchsize'. "
        "Did you mean 'batch_size'?"
    )
    assert message(study(analysis={"keep": ["train_eror <= 0.1"]})) == (
        f"Expected the column of keep in [analysis] to be one of {columns} but the study has 'train_eror'. "
        "Did you mean 'train_error'?"
    )


@pytest.mark.parametrize("group", ["scale", "parts"])
def test_groups_that_would_be_passed_over_are_refused(group):
    inside = {group: {"smoke": {"stop": {"epochs": 1}}}}
    assert message({**SMALL, "parts": {"a": inside}}) == (
        f"Expected [{group}.NAME] at the top of the file but [parts.a] of the study has it inside. What a "
        "scale changes in a part is [scale.NAME.parts.PART]."
    )
    if group == "parts":
        read_spec({**SMALL, "parts": {"smoke": {}}, "scale": {"smoke": inside}}, "smoke")


def test_a_measure_is_asked_for_once_and_rescaled_only_if_measured():
    """The value on fewer samples took the place of that on all, in a column of the same name."""
    assert message(study(measure={"subset": {"samples": 50, "measures": ["hessian_trace"]}})) == (
        "Expected a measure either in [measure] or in [measure.subset] but the study has 'hessian_trace' in "
        "both. Name the measures of [measure] one by one and leave it out there."
    )
    assert message(study(measure={"subset": {"samples": 50}})) == (
        "Expected measures in [measure.subset] but the study has none. Name those that get fewer samples."
    )
    assert message(study(rescale={"measures": ["weight_norm"]})) == (
        "Expected a measure in [rescale] that is measured but the study has only weight_norm. "
        "Put it in [measure] too."
    )


def test_experiments_without_work_or_with_too_few_samples_are_refused():
    assert message({"experiment": {"name": "rangamani2019_invariance", "networks": []}}) == (
        "Expected at least one network in [[experiment.networks]] but got an empty list."
    )
    assert message({"experiment": {"name": "petzka2021_bound", "samples": 5}}) == (
        "Expected at least 2 folds in [experiment] and two samples for each but got folds = 3, samples = 5."
    )


def test_names_and_files_that_are_not_there():
    assert message("petzka2021-cifar").startswith(
        "Expected the name of a study, one of beyond-cifar10, petzka2019-cifar10, "
    )
    assert message("petzka2021-cifar").endswith("Did you mean 'petzka2021-cifar10'?")
    assert message("no/such.toml") == (
        "Expected a study file that can be read but got no/such.toml: No such file or directory."
    )
    assert message("petzka2019-mnist", "tiny") == (
        "Expected scale to be one of smoke, small, gallery, paper but got 'tiny'."
    )


def test_a_file_that_is_no_toml(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("[data\n")
    assert message(file).startswith(f"Expected TOML but {file} is not: ")


def test_own_studies_run_in_full_and_those_of_the_package_small(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("")
    assert [usual_scale(one) for one in (file, str(file), {"data": {}})] == ["paper"] * 3
    assert {usual_scale(name) for name in names()} == {"small"}
