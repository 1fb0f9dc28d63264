"""Landscapes at the edges of what can be asked: few points, one sample, NumPy's numbers."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatness.errors import ModelError, NondeterministicError, NotFiniteError, OptionError
from flatness.landscape import Line, Surface, density, line, surface
from flatness.landscape.arguments import span_between
from flatness.zoo.models import mlp
from untouched import untouched

QUIET = {"progress": False}


def small(seed=0):
    return mlp([4, 5, 3], seed=seed).double()


def data(samples=12):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def refused(call, *arguments, **options):
    with pytest.raises(OptionError) as caught:
        call(*arguments, **QUIET, **options)
    return str(caught.value)


@pytest.mark.parametrize("points", [2, 3, 4, 11, 20, 51])
def test_between_two_networks_points_lie_at_both_however_many_there_are(points):
    model, other, (x, y) = small(), small(1), data()
    found = line(model, (x, y), between=other, points=points, **QUIET)
    assert len(found.positions) == points
    for network, t in ((model, 0.0), (other, 1.0)):
        (place,) = np.flatnonzero(found.positions == t)
        assert found.loss[0, place] == pytest.approx(
            float(F.cross_entropy(network(x), y).detach()), rel=1e-12
        )
    assert np.diff(found.positions) == pytest.approx(np.diff(found.positions)[0])


def test_the_usual_span_between_networks_goes_about_half_as_far_beyond_them():
    assert span_between(51) == pytest.approx((-12 / 26, 38 / 26))
    for points in range(6, 60):
        low, high = span_between(points)
        assert low + high == pytest.approx(1)
        assert 0.2 <= -low <= 0.5


def test_a_line_without_a_point_at_0_names_the_nearest_one():
    text = str(line(small(), data(), count=1, points=4, **QUIET))
    assert " at -1, " in text
    assert " at 0.333, " in text
    assert " at 0, " not in text


def test_a_curvature_needs_three_points():
    found = line(small(), data(), count=1, points=2, **QUIET)
    with pytest.raises(OptionError) as caught:
        found.curvatures()
    assert str(caught.value) == (
        "Expected at least 3 points near 0 for a curvature but got 2. Compute the line with more points, or "
        "pass a larger half_width."
    )


def test_one_sample_is_one_sample():
    assert (
        line(small(), data(1), count=1, points=3, **QUIET).caption().startswith("cross_entropy on 1 sample ")
    )
    found = density(small(), data(1), runs=1, steps=1, **QUIET)
    assert "on 1 sample; mean and two standard errors over 1 run of Lanczos with 1 step, " in found.caption()


def test_numbers_and_arrays_may_be_those_of_numpy(tmp_path):
    model, pair = small(), data()
    flat = np.linspace(-1, 1, sum(value.numel() for value in model.parameters()))
    options = {"points": np.int64(3), "span": np.float32(0.5), "resume": tmp_path / "line.npz", **QUIET}
    found = line(model, pair, directions=flat, count=np.int32(1), **options)
    expected = line(model, pair, directions=torch.from_numpy(flat), points=3, span=0.5, **QUIET)
    np.testing.assert_array_equal(found.loss, expected.loss)
    # Other numbers are another line: the file is not taken for this one.
    other = {**options, "directions": 2 * flat, "count": 1}
    del other["progress"]
    assert "was made with other settings: directions. " in refused(line, model, pair, **other)
    assert surface(model, pair, points=[3, 2], **QUIET).loss.shape == (2, 3)
    assert (
        len(density(model, pair, runs=np.int64(2), steps=np.int64(2), **QUIET).spectra["network"].nodes) == 2
    )


def test_what_would_be_ignored_is_refused():
    model, other, pair = small(), small(1), data()
    assert refused(line, model, pair, between=other, layers="fc1") == (
        "Expected between alone but got layers or parameters too: everything that differs moves. Leave them "
        "out."
    )
    for extra in ({"directions": "layer"}, {"layers": "fc1"}, {"parameters": "all"}):
        assert refused(surface, model, pair, trajectory=[other, small(2)], **extra) == (
            "Expected trajectory alone but got directions, layers or parameters too: the checkpoints say "
            "where the plane lies. Leave one out."
        )


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def test_a_batch_of_one_has_no_statistics_and_is_left_out_of_them():
    model, (x, y) = normalised(), data(13)
    options = {"count": 1, "points": 3, "batch_norm": "recomputed", "batch_size": 12, **QUIET}
    with untouched(model, x, y):
        found = line(model, (x, y), **options)
    assert "batch norm statistics leave out batches of a single sample" in found.notes
    model.train()
    model[1].momentum = 1.0
    model(x[:12])
    expected = float(F.cross_entropy(model.eval()(x), y).detach())
    assert found.loss[0, 1] == pytest.approx(expected, rel=1e-12)
    assert refused(line, model, data(1), batch_norm="recomputed", points=3) == (
        "Expected batches of at least 2 samples to compute batch norm's statistics from but got single "
        "samples. Pass a larger batch_size, more data, or batch_norm='as_is'."
    )


def test_a_file_to_go_on_with_is_looked_at_before_anything_is_computed(tmp_path, monkeypatch):
    model, pair = small(), data()
    again = {"layers": ("fc1",), "count": 1, "points": 3, "resume": tmp_path / "line.npz", **QUIET}
    np.testing.assert_array_equal(line(model, pair, **again).loss, line(model, pair, **again).loss)
    assert refused(line, model, pair, resume=tmp_path) == (
        f"Expected the name of a file but got the folder {str(tmp_path)!r}. Add a file name."
    )
    (tmp_path / "other").write_text("something else")
    assert refused(line, model, pair, resume=tmp_path / "other") == (
        f"Expected resume to be a file of an earlier line, or a new one, but {tmp_path / 'other'} is "
        "something "
        "else. Choose another name."
    )
    computed = []
    monkeypatch.setattr("flatness.landscape.points.Points.__call__", lambda *given: computed.append(given))
    assert refused(surface, model, pair, resume=tmp_path / "none" / "s.npz") == (
        f"Expected a path in an existing folder but got '{tmp_path}/none/s.npz'. Make the folder first."
    )
    monkeypatch.setattr("os.access", lambda folder, how: False)
    assert refused(surface, model, pair, resume=tmp_path / "s.npz") == (
        f"Expected a path in a folder that can be written to but got '{tmp_path}/s.npz'. Choose "
        "another folder."
    )
    assert computed == []


def test_statistics_in_other_batches_are_not_taken_over(tmp_path):
    model, pair = normalised(), data()
    options = {"count": 1, "points": 3, "batch_norm": "recomputed", "resume": tmp_path / "l.npz"}
    line(model, pair, batch_size=12, **options, **QUIET)
    assert "made with other settings: batch size." in refused(line, model, pair, batch_size=6, **options)


def test_statistics_are_recomputed_though_nothing_moves():
    model, (x, y) = normalised(), data()
    still = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    options = {"points": 3, "batch_norm": "recomputed", **QUIET}
    found = line(model, (x, y), directions=still, **options)
    other = line(model, (x, y), between=normalised(), **options)
    model.train()
    model[1].momentum = 1.0
    model(x)
    expected = float(F.cross_entropy(model.eval()(x), y).detach())
    assert found.loss.tolist() == [[pytest.approx(expected, rel=1e-12)] * 3]
    assert other.loss.tolist() == found.loss.tolist()


def test_a_file_made_with_another_function_is_not_taken_over(tmp_path):
    """Neither functions nor modules without parameters can be told apart but by what they compute."""
    model, (x, y) = small(), data()
    targets = F.one_hot(y, 3).double()
    huber = {"points": 3, "resume": tmp_path / "huber.npz"}
    doubled = {**huber, "resume": tmp_path / "doubled.npz"}
    spectrum = {"runs": 1, "steps": 2, "resume": tmp_path / "density.npz"}
    surface(model, (x, targets), nn.HuberLoss(delta=1.0), **huber, **QUIET)
    line(model, (x, y), **doubled, **QUIET)
    density(model, (x, y), **spectrum, **QUIET)

    def twice(model, batch):
        return 2 * model(batch[0]), batch[1]

    changed = "was made with other settings: value of the loss. Choose another name, or remove the file."
    assert refused(surface, model, (x, targets), nn.HuberLoss(delta=0.1), **huber).endswith(changed)
    assert refused(line, model, (x, y), forward=twice, **doubled).endswith(changed)
    assert refused(density, model, (x, y), forward=twice, **spectrum).endswith(changed)
    # Sums in another order are the same loss.
    line(model, (x, y), batch_size=5, **doubled, **QUIET)


@pytest.mark.parametrize("call", [line, surface])
def test_noise_and_samples_that_depend_on_their_batch_are_refused(call):
    class Odd(nn.Sequential):
        def forward(self, x):
            return super().forward(F.dropout(x, 0.5) if self.noisy else x - x.mean(0))

    model = Odd(small())
    for model.noisy, error, words in (
        (True, NondeterministicError, "Expected the same output for the same batch but two runs in "),
        (False, ModelError, "Expected each sample's output to depend on that sample alone but "),
    ):
        with untouched(model), pytest.raises(error, match=words):
            call(model, data(), points=2, **QUIET)


@pytest.mark.parametrize("call", [line, surface])
def test_a_model_that_cannot_run_on_one_sample_is_refused_in_words(call):
    """Batch norm that stays in training mode has no statistics of one sample."""

    class Stubborn(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(True)

    model = nn.Sequential(nn.Linear(4, 5), Stubborn(5), nn.Linear(5, 3))
    batch = (torch.randn(6, 4), torch.randint(3, (6,)))
    with untouched(model), pytest.raises(ModelError) as refusal:
        call(model, batch, points=2, **QUIET)
    assert str(refusal.value) == (
        "The model runs on several samples, but on a single sample "
        "it raises ValueError: Expected more than 1 value per channel when training, got input size "
        "torch.Size([1, 5]). A squeeze() without dim also drops the batch dimension: write squeeze(-1), for "
        "example."
    )


def moved_by(model, step):
    other = {name: value.clone() for name, value in model.state_dict().items()}
    other["fc1.weight"] += step
    return other


def test_a_network_that_diverged_is_no_place_to_go_to():
    model = small()
    broken = moved_by(model, 1.0)
    broken["fc1.weight"][0, 0] = torch.nan
    for what, options in (
        ("between", {"between": broken}),
        ("checkpoint 2 of 'trajectory'", {"trajectory": [moved_by(model, 1.0), broken]}),
    ):
        with pytest.raises(NotFiniteError) as caught:
            (line if "between" in options else surface)(model, data(), points=3, **options, **QUIET)
        assert str(caught.value) == (
            f"Expected {what} to be finite weights but got NaN or infinity in fc1.weight. Training "
            "diverged, or the checkpoint is damaged: leave it out."
        )


class Masked(nn.Module):
    """A network with −∞ in a buffer, as masks of attention have, and something beside its tensors to save."""

    def __init__(self, seed):
        super().__init__()
        self.inner = small(seed)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64))

    def forward(self, x):
        return self.inner(x) * (self.mask + 1).exp()

    def get_extra_state(self):
        return {"steps": 3}


def test_what_both_networks_have_in_common_may_be_infinite_or_no_tensor_and_either_may_be_wrapped():
    model, other, (x, y) = Masked(0), Masked(1), data()
    losses = [float(F.cross_entropy(network(x), y).detach()) for network in (model, other)]
    for start, end in ((model, other), (nn.DataParallel(model), nn.DataParallel(other))):
        found = line(start, (x, y), between=end, points=2, **QUIET)
        assert found.loss[0].tolist() == pytest.approx(losses, rel=1e-12)
    steps = [other, Masked(2).state_dict()]
    plane = surface(model, (x, y), trajectory=steps, points=3, span=((-1, 1), (-1, 1)), **QUIET)
    assert plane.loss[1, 1] == pytest.approx(losses[0], rel=1e-12)


def test_densities_of_nothing_are_refused_and_ctrl_c_before_the_first_step_is_ctrl_c(monkeypatch):
    model = small()
    with torch.no_grad():
        model.fc1.weight.zero_()
    assert refused(density, model, data(), layers="fc1", metric="layerwise") == (
        "Expected parameters that are not all zero, as metric='layerwise' has them in units of their own "
        "size, but got none. Pass metric='euclidean', or other layers."
    )

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("flatness.curvature.parameters.hessian_operator.HessianOperator.__call__", interrupt)
    with untouched(model), pytest.raises(KeyboardInterrupt):
        density(model, data(), runs=2, steps=3, **QUIET)


def test_results_are_plain_enough_to_be_made_by_hand(tmp_path):
    """Losses near the end of float64 have means and bands; a surface without a point has a description."""
    loss = np.array([[1e308, 1.0, np.inf], [1e308, 2.0, 1.0]])
    found = Line(np.array([-1.0, 0, 1]), loss, loss * np.nan, loss > 0, ("a", "a"), ("1", "2"))
    assert found.mean("a").tolist() == [np.inf, 1.5, np.inf]
    assert found.band("a")[1][1] == pytest.approx(2.0)
    with pytest.raises(OptionError) as caught:
        found.mean("network")
    assert str(caught.value) == "Expected the name of a curve, a, but got 'network'."
    nothing = np.full((2, 2), np.nan)
    empty = Surface(np.arange(2.0), np.arange(2.0), nothing, nothing, nothing > 0)
    assert str(empty) == "loss on the plane of two given directions."
