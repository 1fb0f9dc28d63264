"""Parts of the data measured by separate jobs, merged: against one measurement of everything."""

import re
import stat

import pytest
import torch
from torch import nn

import flatness
from flatness.errors import DataError, MeasureError, OptionError
from flatness.measuring import merge


def network(activation=nn.ReLU, seed=0):
    torch.manual_seed(seed)
    return (
        nn.Sequential(
            nn.Conv2d(1, 3, 3),
            activation(),
            nn.BatchNorm2d(3),
            nn.Flatten(),
            nn.Linear(48, 6),
            activation(),
            nn.Linear(6, 4),
        )
        .double()
        .eval()
    )


def samples(n=60):
    torch.manual_seed(1)
    return torch.randn(n, 1, 6, 6).double(), torch.randint(4, (n,))


def parts_of(data, sizes):
    return zip(data[0].split(sizes), data[1].split(sizes), strict=True)


def measured(folder, model, data, sizes=(10, 30, 20), seeds=None, **arguments):
    """One file for each part."""
    paths = []
    for number, part in enumerate(parts_of(data, list(sizes))):
        paths.append(folder / f"part-{number}.pt")
        seed = number if seeds is None else seeds[number]
        flatness.measure(model, part, statistics_to=paths[-1], seed=seed, progress=False, **arguments)
    return paths


def assert_same_rows(merged, whole, rel=1e-9):
    assert [(r.measure, r.where(), r.method, r.loss) for r in merged.results] == [
        (r.measure, r.where(), r.method, r.loss) for r in whole.results
    ]
    for mine, theirs in zip(merged.results, whole.results, strict=True):
        assert mine.value == pytest.approx(theirs.value, rel=rel, abs=1e-12), mine
        assert all(note in theirs.notes for note in mine.notes)


SUMS = [
    "hessian_trace",
    "layer_flatness_trace",
    "relative_flatness",
    "neuron_flatness",
    "neuron_flatness_incoming",
    "matrix_normalized_sharpness",
    "minimum_sharpness",
    "normalized_sharpness",
    "weight_norm",
]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_exact_values_are_those_of_all_the_data(tmp_path, activation, weight_decay):
    model, data = network(activation), samples()
    asked = {"measures": SUMS, "method": "exact", "weight_decay": weight_decay}
    whole = flatness.measure(model, data, progress=False, **asked)
    merged = flatness.merge(measured(tmp_path, model, data, **asked))
    assert_same_rows(merged, whole)
    for key in (
        "samples",
        "model_fingerprint",
        "data_fingerprint",
        "options",
        "parameters",
        "loss",
        "curvature",
    ):
        assert merged.meta[key] == whole.meta[key]
    assert merged.meta["risk"] == pytest.approx(whole.meta["risk"])
    assert [part["samples"] for part in merged.meta["parts"]] == [10, 30, 20]
    assert merged.notes[0] == "merged from 3 parts of 10, 30, 20 samples"


def test_the_default_leaves_out_what_is_no_sum_and_says_so(tmp_path):
    model, data = network(), samples()
    paths = measured(tmp_path, model, data)
    merged, whole = flatness.merge(paths), flatness.measure(model, data, progress=False)
    left = {row.measure for row in whole.results} - {row.measure for row in merged.results}
    assert left == {"relative_flatness_normalized"}
    assert (
        "left out, as statistics_to= saves sums over samples: relative_flatness_normalized (needs the spread "
        "of features over all the data)" in merged.notes
    )
    kept = flatness.Report(tuple(row for row in whole.results if row.measure not in left))
    assert_same_rows(merged, kept)


def test_class_weights_normalise_over_all_the_data(tmp_path):
    model, data = network(), samples()
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5, 2.0]).double())
    whole = flatness.measure(model, data, loss, measures=SUMS[:3], progress=False)
    assert_same_rows(flatness.merge(measured(tmp_path, model, data, loss=loss, measures=SUMS[:3])), whole)


def test_a_measure_with_a_loss_of_its_own_keeps_the_users_risk(tmp_path):
    model, data = network(), samples()
    asked = {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5, 2.0]).double())}
    asked["measures"] = "normalized_sharpness"
    whole = flatness.measure(model, data, progress=False, **asked)
    merged = flatness.merge(measured(tmp_path, model, data, **asked))
    assert_same_rows(merged, whole)
    assert merged.meta["loss"] == whole.meta["loss"] == "cross_entropy"
    assert merged.meta["risk"] == pytest.approx(whole.meta["risk"])


def test_the_standard_error_of_the_data_is_that_of_all_groups(tmp_path):
    model, data = network(), samples(400)
    asked = {"measures": ["hessian_trace", "relative_flatness"], "data_stderr": True}
    whole = flatness.measure(model, data, progress=False, **asked)
    merged = flatness.merge(measured(tmp_path, model, data, sizes=(100, 200, 100), **asked))
    for mine, theirs in zip(merged.results, whole.results, strict=True):
        # Samples go to groups by lot within each part: other groups, an error of about the same size.
        assert mine.data_stderr == pytest.approx(theirs.data_stderr, rel=0.6)


@pytest.mark.parametrize("same_seed", [False, True])
def test_sampled_values_are_unbiased_and_their_errors_combine(tmp_path, same_seed):
    """Scores of many merged measurements against the exact value: mean 0, root mean square 1."""
    model, data = network(nn.Tanh), samples()
    asked = {"measures": ["hessian_trace", "relative_flatness"], "max_passes": 4, "precision": 0.01}
    exact = flatness.measure(model, data, measures=asked["measures"], method="exact", progress=False)
    scores = []
    for trial in range(12):
        folder = tmp_path / str(trial)
        folder.mkdir()
        seeds = [100 * trial] * 3 if same_seed else [100 * trial + part for part in range(3)]
        merged = flatness.merge(measured(folder, model, data, method="sampled", seeds=seeds, **asked))
        for row, truth in zip(merged.results, exact.results, strict=True):
            if row.method == "exact":  # all directions cost no more here
                assert row.value == pytest.approx(truth.value)
            else:
                scores.append((row.value - truth.value) / row.stderr)
        together = "some parts were sampled with the same seed"
        assert any(note.startswith(together) for note in merged.notes) == same_seed
    assert len(scores) >= 48
    scores = torch.tensor(scores)
    assert abs(scores.mean()) < 0.6
    assert 0.6 < scores.square().mean().sqrt() < 1.5


def test_a_precision_that_all_parts_together_miss_is_said(tmp_path):
    model, data = network(nn.Tanh), samples()
    asked = {"measures": "hessian_trace", "method": "sampled", "max_passes": 2, "precision": 1e-6}
    merged = flatness.merge(measured(tmp_path, model, data, **asked))
    (note,) = [note for note in merged.notes if note.startswith("aimed")]
    assert re.fullmatch(
        r"aimed at a standard error of 1e-06 of each layer's value \(or of its Gauss-Newton part, if that is "
        r"larger\), but 3 of 3 values exceed it; the worst is hessian_trace of \d, at 0\.\d+\. Raise "
        r"max_passes, now 2",
        note,
    )


def test_a_merged_report_is_saved_and_compared_like_any_other(tmp_path):
    model, data = network(), samples()
    merged = flatness.merge(measured(tmp_path, model, data, measures=SUMS[:3]))
    merged.save(tmp_path / "report.json")
    loaded = flatness.Report.load(tmp_path / "report.json")
    assert loaded.results == merged.results
    whole = flatness.measure(model, data, measures=SUMS[:3], progress=False)
    assert flatness.compare(merged, whole) is not None


NOT_SUMS = {
    "layer_flatness": "eigenvalues",
    "riemannian_spectral_norm": "eigenvalues",
    "epsilon_sharpness": (
        "computed apart, with gradients of all the data: restarts × steps at most, and one eigenvalue for "
        "several starts"
    ),
    "pac_bayes_flatness": "computed apart, with about 12 forward passes per draw of the noise",
    "path_norm": "computed apart, with one forward pass of one sample",
    "relative_flatness_normalized": "needs the spread of features over all the data",
    "relative_flatness_whitened": "needs the spread of features over all the data",
}


@pytest.mark.parametrize("name", NOT_SUMS)
def test_what_is_no_sum_is_refused_before_anything_runs(tmp_path, name):
    with pytest.raises(MeasureError) as caught:
        flatness.measure(
            network(), samples(), measures=["hessian_trace", name], statistics_to=tmp_path / "a.pt"
        )
    assert str(caught.value) == (
        "Expected measures that are functions of sums over samples, as statistics_to= saves those, but got "
        f"{name} ({NOT_SUMS[name]}). Leave them out, or measure them on all the data in one call."
    )
    assert list(tmp_path.iterdir()) == []


def test_finite_differences_of_the_diagonal_are_no_sum(tmp_path):
    options = {"normalized_sharpness": {"diagonal": "finite_differences"}}
    with pytest.raises(MeasureError):
        flatness.measure(
            network(),
            samples(),
            measures="normalized_sharpness",
            options=options,
            statistics_to=tmp_path / "a.pt",
        )


OTHERS = {
    "weights": {"model": network(seed=1)},
    "measures": {"measures": ["hessian_trace"]},
    "loss": {"loss": "mse", "data": (samples()[0], torch.randn(60, 4).double())},
    "curvature": {"curvature": "gauss_newton"},
    "weight_decay": {"weight_decay": 0.5},
    "options": {"options": {"matrix_normalized_sharpness": {"biases": True}}},
    "layers": {"layers": "6"},
    "dtype": {"dtype": torch.float32},
}


@pytest.mark.parametrize("what", OTHERS)
def test_parts_that_were_not_measured_alike_are_refused(tmp_path, what):
    usual = {
        "model": network(),
        "data": samples(),
        "measures": ["hessian_trace", "matrix_normalized_sharpness"],
    }
    first, second = tmp_path / "a.pt", tmp_path / "b.pt"
    flatness.measure(**usual, statistics_to=first, progress=False)
    x, y = OTHERS[what].get("data", samples(50))
    flatness.measure(
        **{**usual, **OTHERS[what], "data": (x[:20], y[:20])}, statistics_to=second, progress=False
    )
    with pytest.raises(DataError) as caught:
        flatness.merge([first, second])
    start = rf"Expected parts of one measurement but {second} and {first} differ in their "
    first = {"loss": "losses", "layers": "measured layers"}.get(what, what)
    assert re.match(
        f"{re.escape(start)}{first}: .* and .*. Measure all parts in the same way.",
        str(caught.value),
        re.DOTALL,
    )


def test_another_version_of_flatness_is_refused(tmp_path, monkeypatch):
    model, data = network(), samples()
    paths = measured(tmp_path, model, data, measures="hessian_trace")
    (tmp_path / "old").mkdir()
    monkeypatch.setattr(merge, "__version__", "0.0.1")
    older = measured(tmp_path / "old", model, data, sizes=(20, 40), measures="hessian_trace")
    with pytest.raises(DataError, match=r"version of flatness: 0\.0\.1 and"):
        flatness.merge([paths[0], older[0]])


def test_a_part_that_is_given_twice_is_refused(tmp_path):
    model, data = network(), samples()
    first, second, third = measured(tmp_path, model, data, measures="hessian_trace")
    copied = tmp_path / "copy.pt"
    copied.write_bytes(second.read_bytes())
    for paths in ([first, second, second], [second, third, copied]):
        with pytest.raises(DataError) as caught:
            flatness.merge(paths)
        assert str(caught.value) == (
            f"Expected every part of the data once, but {paths[2]} and {second} hold the same "
            "samples. Leave one out, or give each job its own part."
        )


def test_files_that_are_no_parts_or_damaged_are_refused(tmp_path):
    (path, *_) = measured(tmp_path, network(), samples(), measures="hessian_trace")
    raw = path.read_bytes()
    broken = tmp_path / "broken.pt"
    for content in (b"", b"nonsense", raw[: len(raw) // 2]):
        broken.write_bytes(content)
        with pytest.raises(DataError) as caught:
            flatness.merge([path, broken])
        assert str(caught.value) == (
            f"Expected statistics that flatness.measure(..., statistics_to=path) wrote but {broken} holds "
            "something else, or is damaged. Measure this part again with statistics_to=."
        )
    with pytest.raises(DataError) as caught:
        flatness.merge([path, tmp_path / "missing.pt"])
    assert str(caught.value) == (
        "Expected a file that flatness.measure(..., statistics_to=path) wrote but there is no "
        f"{tmp_path / 'missing.pt'}."
    )
    content = torch.load(path, weights_only=True)
    content["parts"][0]["statistics"]["samples"] += 1
    torch.save(content, broken)
    with pytest.raises(DataError, match="has changed since, on the disk or on the way here"):
        flatness.merge([broken])
    del content["checksum"]
    torch.save(content, broken)
    with pytest.raises(DataError, match="has changed since, on the disk or on the way here"):
        flatness.merge([broken])
    with pytest.raises(DataError, match=r"but got none\. Check the pattern\."):
        flatness.merge([])
    for strange in (None, 3, [path, b"part.pt"]):
        with pytest.raises(OptionError, match="Expected paths of files but got"):
            flatness.merge(strange)


def test_a_path_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(OptionError, match="Expected a path in an existing folder but got"):
        flatness.measure(network(), samples(), statistics_to=tmp_path / "nowhere" / "a.pt")
    with pytest.raises(OptionError) as caught:
        flatness.measure(network(), samples(), statistics_to=3)
    assert str(caught.value) == (
        "Expected statistics_to to be a path but got int. For example statistics_to='part-3.pt'."
    )
    for path in ("", tmp_path):
        with pytest.raises(OptionError, match="Expected statistics_to to name a file but got"):
            flatness.measure(network(), samples(), statistics_to=path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    model, data = network(), samples()
    (path,) = measured(tmp_path, model, data, sizes=(60,), measures="hessian_trace")
    before = path.read_bytes()

    def broken(content, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, model, data, sizes=(60,), measures="hessian_trace")
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_saved_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "usual").write_text("")
    (path,) = measured(tmp_path, network(), samples(), sizes=(60,), measures="hessian_trace")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_a_flipped_bit_is_found_out(tmp_path):
    (path,) = measured(tmp_path, network(), samples(), sizes=(60,), measures="hessian_trace")
    raw = path.read_bytes()
    weight = network()[4].weight.detach().numpy().tobytes()
    at = raw.index(weight) + 11
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    with pytest.raises(DataError, match=r"has changed since|holds something else, or is damaged"):
        flatness.merge([path])
