"""Whole studies: what a run leaves behind, does not do twice, and says about what went wrong."""

from __future__ import annotations

import errno
import json
import lzma
import os
import time

import pandas
import pytest
import torch
from safetensors.torch import load_file

import flatness
from flatness.errors import DataError, OptionError, StudyError
from flatness.problem.problem import Problem
from flatness.show.pages.study_page import study_data
from flatness.study.folder import records
from flatness.study.run import measurement, tasks
from flatness.study.table import GAPS
from flatness.zoo.checkpoints import fit_checkpoint, read_checkpoint
from flatness.zoo.data import load
from flatness.zoo.models import mlp
from studies import SMALL, study


def run(content, out, **options):
    return flatness.study.run(content, out, **{"jobs": 1, "progress": False, **options})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "study"
    content = study(rescale={"low": 5.0, "high": 25.0}, grid={"batch_size": [16, 64]})
    return run(content, out), content


def files(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder / "records").iterdir()}


def test_values_are_those_of_flatness_measure_on_the_saved_weights(finished):
    found, content = finished
    frame = found.to_frame()
    assert len(frame) == 12
    assert found.counts() == {"finished": 12}
    row = frame.iloc[3]
    record = found.records[row["key"]]
    network = mlp(**content["model"]["options"])
    fit_checkpoint(network, read_checkpoint(found.path / "weights" / f"{row['key']}.safetensors"), "weights")
    train, test = load("digits", limit=120), load("digits", split="test", limit=60)
    report = flatness.measure(network.eval(), train.pair, measures=["relative_flatness"], progress=False)
    assert row["relative_flatness:fc2"] == pytest.approx(
        report.value("relative_flatness", layer="fc2"), rel=1e-6
    )
    with torch.no_grad():
        losses = [
            float(torch.nn.functional.cross_entropy(network(data.inputs), data.targets))
            for data in (train, test)
        ]
        right = float((network(test.inputs).argmax(1) == test.targets).float().mean())
    assert row["gap"] == pytest.approx(losses[1] - losses[0], abs=1e-6)
    assert row["test_accuracy"] == pytest.approx(right)
    assert record["environment"]["torch"] == torch.__version__
    assert record["environment"]["flatness"] == flatness.__version__
    assert len(record["environment"]["code"]) == 16
    assert record["configuration"]["axes"]["seed"] == row["seed"]


def test_rescaling_moves_the_trace_and_not_the_relative_flatness(finished):
    frame = finished[0].to_frame()
    same, moved = "relative_flatness:fc1", "hessian_trace:fc1"
    assert all(abs(frame[f"{same}:rescaled"] / frame[same] - 1) < 1e-3)
    assert all(abs(frame[f"{moved}:rescaled"] / frame[moved] - 1) > 0.5)
    # Every network has factors of its own, also where training seeds are the same.
    factors = (frame[f"{moved}:rescaled"] / frame[moved]).to_numpy()
    assert len({round(float(factor), 6) for factor in factors}) == len(frame)
    table = finished[0].correlations().set_index("quantity")
    assert table.loc[same, "kendall_rescaled"] == pytest.approx(table.loc[same, "kendall"])


def test_dear_measures_get_a_subset_and_undefined_ones_are_left_out(tmp_path):
    """[measure.subset] is a pass of its own; pac_bayes_flatness has no value without an accuracy to drop."""
    subset = {"measures": ["sam_sharpness", "pac_bayes_flatness"], "samples": 40}
    options = {"pac_bayes_flatness": {"drop": 0.999}}
    content = study(
        measure={"measures": ["hessian_trace"], "subset": {**subset, "options": options}},
        rescale={"low": 5.0, "high": 25.0, "measures": ["sam_sharpness"]},
    )
    found = run(content, tmp_path / "study")
    record = next(iter(found.records.values()))
    rows = {(row["measure"], row["layer"]): row for row in record["measuring"]["results"]}
    assert {measure for measure, _ in rows} == {"hessian_trace", "sam_sharpness"}
    assert {row["measure"] for row in record["measuring"]["rescaled"]} == {"sam_sharpness"}
    assert rows["sam_sharpness", None]["samples"] == 40
    assert "samples" not in rows["hessian_trace", None]
    assert any(
        note.startswith("pac_bayes_flatness: Expected an accuracy") for note in record["measuring"]["notes"]
    )
    network = mlp(**content["model"]["options"])
    saved = found.path / "weights" / f"{record['key']}.safetensors"
    fit_checkpoint(network, read_checkpoint(saved), "weights")
    inputs, targets = load("digits", limit=120).pair
    for measure, samples in (("hessian_trace", 120), ("sam_sharpness", 40)):
        data = (inputs[:samples], targets[:samples])
        report = flatness.measure(network.eval(), data, measures=[measure], progress=False)
        value = rows[measure, None]["value"]
        assert value == pytest.approx(report.value(measure, layer=None), rel=1e-6)


def test_tables_hold_what_they_should(finished):
    found = finished[0]
    table = found.correlations()
    assert set(table["n"]) == {12}
    for column in (
        "pearson_low",
        "spearman_high",
        "p_value",
        "p_family",
        "granulated",
        "psi_batch_size",
        "psi_seed",
        "worst_sign_error",
        "information_learning_rate",
        "least_information",
    ):
        assert column in table
    assert (table["p_family"] >= table["p_value"]).all()
    groups = found.groups()
    assert list(groups["n"]) == [3, 3, 3, 3]
    assert {path.name for path in found.path.glob("*.csv")} == {
        "networks.csv",
        "correlations.csv",
        "differences.csv",
        "groups.csv",
    }
    assert "n = 12. Left out: none." in str(found)


def test_a_second_run_trains_and_measures_nothing(finished):
    found, content = finished
    before = files(found.path)
    run(content, found.path)
    assert files(found.path) == before


def test_other_measures_are_measured_without_training_again(tmp_path):
    first = run(study(), tmp_path)
    weights = {path: path.stat().st_mtime_ns for path in (tmp_path / "weights").iterdir()}
    second = run(study(measure={"measures": ["weight_norm"]}), tmp_path)
    assert "weight_norm:fc1" in second.to_frame()
    assert "relative_flatness:fc1" in first.to_frame()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "weights").iterdir()} == weights
    wider = run(study(grid={"seed": 4}), tmp_path)
    assert wider.counts() == {"finished": 8}
    assert {path: path.stat().st_mtime_ns for path in weights} == weights
    assert run(study(grid={"seed": 1}), tmp_path).others == 6


def test_a_folder_that_held_another_study_is_said(tmp_path):
    first = run(study(grid={"seed": 1}), tmp_path)
    assert first.notes == run(study(grid={"seed": 2}), tmp_path).notes == []
    other = run({**study(), "title": "other"}, tmp_path)
    said = (
        f"{tmp_path} held the study digits. Its networks are kept; tables and figures of the same name now "
        "show other."
    )
    assert other.notes == [said]
    assert said in other.text(400)
    assert first.records.keys() <= other.records.keys()


def test_two_processes_give_the_records_of_one(finished, tmp_path):
    found, content = finished
    other = run(content, tmp_path, jobs=2)
    mine, theirs = (
        s.to_frame().drop(columns=["training_seconds", "measuring_seconds"]) for s in (found, other)
    )
    assert mine.equals(theirs)


def test_diverged_and_unconverged_networks_are_rows_with_a_reason(tmp_path):
    content = study(grid={"learning_rate": [0.3, 1e30]}, stop={"loss": 1e-9, "epochs": 2})
    found = run(content, tmp_path)
    assert found.counts() == {"not_converged": 3, "diverged": 3}
    frame = found.to_frame()
    assert all(frame[frame["status"] == "diverged"]["reason"].str.startswith("the loss of epoch 1 is "))
    assert found.filtered_out() == {"diverged": 3, "not converged, so not measured": 3}
    told = " ".join(str(found).split())  # lines end where the terminal does
    assert "In the analysis: n = 0. Left out: 3 diverged; 3 not converged, so not measured." in told
    assert frame["gap"].notna().sum() == 3
    every = run(study(grid=content["grid"], stop=content["stop"], measure={"which": "all"}), tmp_path)
    assert len(every.kept()) == 3


def test_networks_without_a_target_have_finished_those_that_reach_one_have_converged(tmp_path):
    """Parts may differ; records keep one word for both."""
    parts = {"counted": {"stop": {"epochs": 1}}, "reached": {"stop": {"loss": 100.0}}}
    found = run({**study(grid={"seed": 2}), "parts": parts}, tmp_path)
    assert {record["status"] for record in found.records.values()} == {"converged"}
    assert found.counts() == {"finished": 4, "converged": 4}
    assert list(found.to_frame()["status"]) == ["finished"] * 4 + ["converged"] * 4
    assert "8 networks: 4 finished, 4 converged." in str(found)
    [axis] = [one for one in study_data(found)["axes"] if one["name"] == "status"]
    assert [axis["values"][code] for code in axis["codes"]] == ["finished"] * 4 + ["converged"] * 4


def test_networks_are_evaluated_on_corrupted_test_data_too(tmp_path, monkeypatch):
    content = study(grid={"learning_rate": 0.4}, analysis={"targets": ["test_error", "blur_gap"]})
    content["corruptions"] = {"blur": [1, 5], "jpeg": [3]}
    run({key: table for key, table in content.items() if key not in ("corruptions", "analysis")}, tmp_path)
    monkeypatch.setattr(tasks, "train_cohort", None)  # what is trained and measured is only evaluated anew
    monkeypatch.setattr(tasks, "measured", None)
    found = run(content, tmp_path)
    frame = found.to_frame()
    row = frame.iloc[1]
    network = mlp(**content["model"]["options"])
    fit_checkpoint(network, read_checkpoint(tmp_path / "weights" / f"{row['key']}.safetensors"), "weights")
    errors, losses = {}, {}
    for kind, strength in (("blur", 1), ("blur", 5), ("jpeg", 3)):
        x, y = load("digits", split="test", limit=60, corruption=(kind, strength)).pair
        with torch.no_grad():
            output = network.eval()(x)
        errors.setdefault(kind, []).append(float((output.argmax(1) != y).double().mean()))
        losses.setdefault(kind, []).append(float(torch.nn.functional.cross_entropy(output, y)))
    blur, jpeg = sum(errors["blur"]) / 2, errors["jpeg"][0]
    assert (row["blur_error"], row["jpeg_error"]) == pytest.approx((blur, jpeg))
    assert row["corrupted_error"] == pytest.approx((blur + jpeg) / 2)
    gaps = [sum(own) / len(own) - row["train_loss"] for own in losses.values()]
    assert (row["blur_gap"], row["jpeg_gap"]) == pytest.approx(gaps, rel=1e-5)
    assert row["corrupted_gap"] == pytest.approx(sum(gaps) / 2, rel=1e-5)
    assert row["gap"] == pytest.approx(row["test_loss"] - row["train_loss"])
    assert found.targets() == ["test_error", "blur_gap"]
    tau = found.correlations("", "blur_gap").set_index("quantity")["kendall"]["hessian_trace:network"]
    assert tau == pytest.approx(frame["hessian_trace:network"].corr(frame["blur_gap"], "kendall"))
    assert not [name for name in found.correlations("", "blur_gap") if name.endswith("_filtered")]
    table = pandas.read_csv(tmp_path / "correlations-blur_gap.csv").set_index("quantity")
    assert table["kendall"]["hessian_trace:network"] == pytest.approx(tau)
    with pytest.raises(StudyError) as caught:
        found.correlations("", "blur_gp")
    assert str(caught.value) == (
        "Expected target to be a column of the study but got 'blur_gp'. Did you mean 'blur_gap'?"
    )


def test_conditions_filter_and_are_counted(tmp_path):
    found = run(study(analysis={"keep": ["train_error <= 0.4", "seed != 1"]}), tmp_path)
    frame = found.to_frame()
    good = frame["train_error"] <= 0.4
    assert len(found.kept()) == int((good & (frame["seed"] != 1)).sum())
    told = {
        "not train_error <= 0.4": int((~good).sum()),
        "not seed != 1": int((good & (frame["seed"] == 1)).sum()),
    }
    assert found.filtered_out() == {reason: n for reason, n in told.items() if n}


def test_a_network_that_fails_is_a_row_and_may_be_tried_again(tmp_path, monkeypatch):
    measured = tasks.measured

    def fail_on_seed_1(model, train, loss, seed, *others):
        if seed == 1:
            raise ValueError("no luck\nreally")
        return measured(model, train, loss, seed, *others)

    monkeypatch.setattr(tasks, "measured", fail_on_seed_1)
    found = run(study(), tmp_path)
    assert found.counts() == {"finished": 4, "failed": 2}
    assert found.filtered_out() == {"failed: measuring: ValueError: no luck": 2}
    assert set(found.to_frame().query("status == 'failed'")["reason"]) == {"measuring: ValueError: no luck"}
    monkeypatch.setattr(tasks, "measured", measured)
    assert run(study(), tmp_path).counts() == {"finished": 4, "failed": 2}
    assert run(study(), tmp_path, retry=True).counts() == {"finished": 6}


def test_a_network_whose_weights_are_gone_fails_and_is_trained_anew_when_asked(tmp_path):
    content = study()
    first = run(content, tmp_path).to_frame().set_index("key")
    lost = first.index[2]
    path = tmp_path / "weights" / f"{lost}.safetensors"
    path.unlink()
    assert run(content, tmp_path).counts() == {"finished": 6}, "nothing of it was needed"
    content["measure"] = {**content["measure"], "measures": [*content["measure"]["measures"], "weight_norm"]}
    found = run(content, tmp_path)
    assert found.counts() == {"finished": 5, "failed": 1}
    assert found.records[lost]["reason"] == (
        f"measuring: CheckpointError: Expected its weights in {path} but they are missing. "
        "--retry trains it again."
    )
    again = run(content, tmp_path, retry=True).to_frame().set_index("key")
    assert set(again["status"]) == {"finished"}
    assert again.at[lost, "relative_flatness:fc2"] == pytest.approx(
        first.at[lost, "relative_flatness:fc2"], rel=1e-4
    ), "the same seed, alone this time: rounding in another order, over all of training"


def test_a_model_that_cannot_run_as_a_stack_trains_one_by_one(tmp_path, monkeypatch):
    (tmp_path / "branching.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = torch.nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        y = self.fc(x.flatten(1))\n"
        "        return y if float(y.detach().sum()) < 1e9 else 2 * y\n"
        "def digits(split):\n"
        "    from flatness.data import load\n"
        "    return load('digits', split=split, limit=80).pair\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    content = {**SMALL, "model": {"name": "branching:Net"}, "data": {"name": "branching:digits"}}
    found = run(content, tmp_path / "out")
    assert found.counts() == {"finished": 6}
    assert {record["training"]["engine"] for record in found.records.values()} == {"looped"}


def test_checkpoints_are_a_study_without_training(finished, tmp_path):
    found, content = finished
    folder = tmp_path / "runs"
    folder.mkdir()
    for _, row in found.to_frame().iterrows():
        name = f"bs{row['batch_size']}-lr{row['learning_rate']}-{row['seed']}.pt"
        torch.save(load_file(found.path / "weights" / f"{row['key']}.safetensors"), folder / name)
    existing = {
        "data": content["data"],
        "model": content["model"],
        "checkpoints": {"paths": str(folder), "pattern": "bs{batch_size}-lr{learning_rate}-{seed}.pt"},
        "measure": content["measure"],
        "analysis": content["analysis"],
    }
    loaded = run(existing, tmp_path / "out")
    by = ["batch_size", "learning_rate", "seed"]
    ours, theirs = (s.to_frame().sort_values(by).reset_index(drop=True) for s in (loaded, found))
    for column in ("gap", "relative_flatness:fc1", "hessian_trace:network"):
        assert ours[column].to_numpy() == pytest.approx(theirs[column].to_numpy(), rel=1e-5)
    assert "psi_batch_size" in loaded.correlations()
    assert loaded.counts() == {"finished": 12}


def test_gaps_of_the_papers():
    found = {"train_loss": 0.25, "test_loss": 1.0, "train_accuracy": 0.75, "test_accuracy": 0.5,
             "train_samples": 50, "test_samples": 10}  # fmt: skip
    assert GAPS["loss"](found) == 0.75
    assert GAPS["summed_loss"](found) == 5 * 10.0 - 12.5
    assert GAPS["accuracy"](found) == 0.25


def test_two_runs_in_one_folder_are_kept_apart(tmp_path):
    with records.Folder(tmp_path).locked(), pytest.raises(StudyError) as caught:
        run(study(), tmp_path)
    assert str(caught.value) == (
        f"Expected a folder that no other run works in but {tmp_path} is in use by process {os.getpid()}. "
        "Wait for it, or choose another folder."
    )


def test_records_of_another_version_are_refused(tmp_path):
    found = run(study(grid={"seed": 1, "learning_rate": 0.1}), tmp_path)
    file = tmp_path / "records" / f"{next(iter(found.records))}.json"
    content = {**json.loads(file.read_text()), "version": 0}
    del content["checksums"]  # of another version's record; with one that does not fit, this would be damage
    file.write_text(json.dumps(content))
    for action in (lambda: run(study(), tmp_path), lambda: flatness.study.load(tmp_path)):
        with pytest.raises(StudyError) as caught:
            action()
        assert str(caught.value) == (
            f"Expected records of version 1 but {file} has version 0. "
            "Read them with the version of flatness that wrote them, or run the study in another folder."
        )


def test_a_full_disk_is_said_and_what_is_there_stays(tmp_path, monkeypatch):
    written = records.write_text
    calls = []

    def full(path, text):
        if path.parent.name == "records":
            calls.append(path)
            if len(calls) > 2:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written(path, text)

    monkeypatch.setattr(records, "write_text", full)
    with pytest.raises(StudyError) as caught:
        run(study(), tmp_path)
    assert str(caught.value) == (
        f"Expected space on the disk for {tmp_path} but it is full. Free some space and run the same command "
        "again: finished networks are kept."
    )
    monkeypatch.setattr(records, "write_text", written)
    kept = files(tmp_path)
    assert len(kept) == 2
    assert run(study(), tmp_path).counts() == {"finished": 6}


def test_data_that_are_not_there_are_said_before_anything_is_made(tmp_path, monkeypatch):
    for variable in ("FLATNESS_DATA", "XDG_CACHE_HOME", "XDG_DATA_DIRS"):
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    with pytest.raises(DataError) as caught:
        run(study(data={"name": "cifar10"}), tmp_path / "out")
    assert "CIFAR-10 is published at" in str(caught.value)
    assert str(tmp_path / "nowhere") in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_study(tmp_path):
    with pytest.raises(StudyError) as caught:
        flatness.study.load(tmp_path)
    assert str(caught.value) == (
        f"Expected a folder that 'flatness study run' wrote but {tmp_path} has no readable study.json. "
        "Run the study first, or name its folder."
    )


def test_time_that_is_over_leaves_a_study_to_go_on_with(tmp_path):
    content = study(stop={"epochs": 40_000})  # more than fit into a second on any machine
    part = run(content, tmp_path, minutes=1 / 60)
    assert part.counts() == {"pending": 6}
    said = "Stopped after 0.0166667 min with everything saved. Run the same command again to go on."
    assert part.notes == [said]
    assert said in part.text(200)
    assert flatness.study.load(tmp_path).notes == []
    assert len(list((tmp_path / "training").iterdir())) >= 1
    with pytest.raises(OptionError):
        run(content, tmp_path, minutes=0)


def test_unknown_executors_are_refused(tmp_path):
    with pytest.raises(OptionError) as caught:
        run(study(), tmp_path, executor="lokal")
    assert str(caught.value) == (
        "Expected executor to be one of local, ray but got 'lokal'. Did you mean 'local'?"
    )


def test_an_archive_is_the_study_without_weights(finished, tmp_path):
    found, _ = finished
    file = flatness.study.pack(found.path, tmp_path / "kept.json.xz")
    again = flatness.study.load(file)
    pandas.testing.assert_frame_equal(again.to_frame(), found.to_frame())
    pandas.testing.assert_frame_equal(again.correlations(), found.correlations())
    assert again.spec == found.spec
    assert again.path == tmp_path / "kept"
    assert not again.path.exists()
    assert file.stat().st_size < sum(path.stat().st_size for path in (found.path / "records").iterdir()) / 4
    with pytest.raises(StudyError) as caught:
        flatness.study.pack(found.path, tmp_path / "kept.zip")
    assert str(caught.value) == "Expected the name of an archive to end with .json.xz but got kept.zip."
    broken = tmp_path / "broken.json.xz"
    broken.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(
        StudyError, match=r"^Expected an archive that 'flatness study pack' wrote but .* is not"
    ):
        flatness.study.load(broken)
    for read in (flatness.study.load, flatness.study.unpack):
        with pytest.raises(StudyError) as caught:
            read(tmp_path / "gone.json.xz")
        assert str(caught.value) == (
            f"Expected an archive that 'flatness study pack' wrote but there is no {tmp_path}/gone.json.xz."
        )


def test_a_packed_study_goes_on_in_a_folder_of_its_own(tmp_path, monkeypatch):
    first = run(study(), tmp_path / "here")
    file = flatness.study.pack(first.path, tmp_path / "there.json.xz")
    assert flatness.study.unpack(file) == tmp_path / "there"
    pandas.testing.assert_frame_equal(flatness.study.load(tmp_path / "there").to_frame(), first.to_frame())
    trained = []
    monkeypatch.setattr(tasks, "_keep_trained", _noting(trained, tasks._keep_trained))
    more = run(study(grid={"seed": 4}), tmp_path / "there")
    assert more.counts() == {"finished": 8}
    assert sorted(one.axes["seed"] for one in trained) == [3, 3]
    old = more.to_frame().query("seed < 3").reset_index(drop=True)
    pandas.testing.assert_frame_equal(old, first.to_frame(), check_like=True)
    with pytest.raises(StudyError) as caught:
        flatness.study.unpack(file)
    assert str(caught.value) == (
        f"Expected a folder without a study but there is one in {tmp_path / 'there'}. Choose another folder."
    )


def _noting(found, function):
    def noted(one, *others, **options):
        found.append(one)
        return function(one, *others, **options)

    return noted


@pytest.mark.parametrize("read", [flatness.study.load, flatness.study.unpack])
def test_an_archive_that_was_tampered_with_is_refused(tmp_path, read):
    """Above all one whose records would be written elsewhere."""
    file = flatness.study.pack(run(study(grid={"seed": 1}), tmp_path / "here").path, tmp_path / "a.json.xz")
    content = json.loads(lzma.decompress(file.read_bytes()))
    first = content["records"][0]
    keys = "Expected records with a key each but {} has others."
    for changed, said in (
        ({"records": [{**first, "key": "../../elsewhere"}]}, keys),
        ({"records": [first, {}]}, keys),
        ({"records": None}, keys),
        (
            {"study": {}},
            "Expected an archive that says what its study is but {} does not: study has no 'name'.",
        ),
        (
            {"records": [{**first, "evaluation": {"train_loss": "high"}}]},
            "Expected whole records but {} has others: records[0].evaluation.train_loss is 'high' instead of "
            "a number.",
        ),
    ):
        file.write_bytes(lzma.compress(json.dumps({**content, **changed}).encode()))
        with pytest.raises(StudyError) as caught:
            read(file)
        assert str(caught.value) == said.format(file)
    assert not list(tmp_path.rglob("elsewhere*"))
    assert not (tmp_path / "a").exists()


def test_measuring_goes_on_after_its_last_pass(tmp_path, monkeypatch):
    """Killed between two passes over a network, the first is not done again, nothing is lost or doubled."""
    content = study(
        grid={"seed": 1, "learning_rate": 0.1},
        measure={"measures": ["hessian_trace"], "subset": {"measures": ["sam_sharpness"], "samples": 40}},
        rescale={"low": 5.0, "high": 25.0},
    )
    whole = run(content, tmp_path / "whole")
    asked = []

    def interrupted(model, data, **arguments):
        asked.append(arguments["measures"])
        if len(asked) == 3:
            raise KeyboardInterrupt
        return flatness.measure(model, data, **arguments)

    monkeypatch.setattr(measurement, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(content, tmp_path / "cut")
    assert flatness.study.load(tmp_path / "cut").filtered_out() == {"not measured yet": 1}
    cut = run(content, tmp_path / "cut")
    assert asked == [
        ["hessian_trace"],
        ["sam_sharpness"],
        ["hessian_trace"],
        ["hessian_trace"],
        ["sam_sharpness"],
    ]
    (expected,), (found,) = whole.records.values(), cut.records.values()
    assert records.SO_FAR not in found
    for part in ("results", "rescaled", "notes", "risk", "key"):
        assert found["measuring"][part] == expected["measuring"][part]


def test_time_that_is_up_while_measuring_ends_the_run_and_loses_nothing(tmp_path, monkeypatch):
    subset = {"samples": 20, "measures": "hessian_trace"}
    content = study(
        grid={"learning_rate": 0.1, "seed": 1},
        measure={"measures": "riemannian_spectral_norm", "subset": subset},
    )
    whole = flatness.study.run(content, tmp_path / "whole", jobs=1, progress=False).to_frame()
    clock = time.time
    steps = Problem._steps

    def a_year_later(*arguments):
        monkeypatch.setattr(time, "time", lambda: clock() + 3e7)
        return steps(*arguments)

    monkeypatch.setattr(Problem, "_steps", a_year_later)
    out = tmp_path / "out"
    stopped = flatness.study.run(content, out, jobs=1, progress=False, minutes=600)
    (record,) = stopped.records.values()
    assert record[records.SO_FAR]["passes"] == 1
    monkeypatch.undo()
    found = flatness.study.run(content, out, jobs=1, progress=False).to_frame()
    assert list((out / "measuring").iterdir()) == []
    assert list(found["riemannian_spectral_norm:network"]) == list(whole["riemannian_spectral_norm:network"])
