"""Lines: exact parabolas, curvatures that are eigenvalues, directions as their sources define them."""

import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flatness
from flatness.landscape import Line, line
from flatness.landscape.points import Points
from flatness.problem.problem import Problem
from oracle import hessian, mean_risk
from untouched import untouched

QUIET = {"progress": False}


def smooth():
    """A tanh network in float64, with its data."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator))
    x = torch.randn(31, 4, generator=generator, dtype=torch.float64)
    return model, (x, torch.randint(3, (31,), generator=generator))


def convolutional():
    """Two convolutions, one grouped, batch norm, and a head."""
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).double()
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2.0)
        model[1].weight.uniform_(0.5, 1.5)
    data = torch.randn(20, 2, 6, 6, dtype=torch.float64), torch.randint(3, (20,))
    return model, data


def moved(model, direction, t):
    """The risk's model at θ + t·d, built the plain way."""
    import copy

    other = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name in direction:
                parameter.add_(t * direction[name])
    return other


def risk_and_accuracy(model, data):
    with torch.no_grad():
        output = model(data[0])
    return float(F.cross_entropy(output, data[1])), float((output.argmax(1) == data[1]).double().mean())


def test_a_quadratic_model_gives_exact_parabolas():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(17, 3).double(), torch.randn(17, 2).double()
    direction = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    found = line(model, (x, y), "squared_error", directions=direction, points=9, span=2.0, **QUIET)
    residual = model(x) - y
    along = x @ direction["weight"].T + direction["bias"]
    t = torch.from_numpy(found.positions)[:, None, None]
    expected = (residual + t * along).square().sum(2).mean(1).detach().numpy()
    np.testing.assert_allclose(found.loss[0], expected, rtol=1e-13)
    assert np.isnan(found.accuracy).all()
    second = 2 * along.square().sum(1).mean().item()
    np.testing.assert_allclose(found.curvatures(), [second], rtol=1e-10)
    np.testing.assert_allclose(found.curvatures(half_width=2.0), [second], rtol=1e-10)


def test_along_eigenvectors_of_a_smooth_network_the_curvature_is_the_eigenvalue():
    model, data = smooth()
    H = hessian(model, mean_risk(*data, F.cross_entropy), [name for name, _ in model.named_parameters()])
    top = torch.linalg.eigvalsh(H).flip(0)[:3].numpy()
    # Central differences at h = 1e-3 are off by E''''h²/12, and by rounding of about 1e-16/h².
    found = line(model, data, directions="eigenvectors", count=3, points=3, span=1e-3, **QUIET)
    np.testing.assert_allclose(found.meta["eigenvalues"], top, rtol=1e-6)
    np.testing.assert_allclose(found.curvatures(), top, rtol=1e-5)
    assert found.labels[0] == f"eigenvector 1 (λ = {top[0]:.4g})"


def test_weight_decay_adds_its_penalty_and_its_curvature():
    model, data = smooth()
    plain = line(model, data, directions="layer", count=1, points=3, span=0.1, **QUIET)
    decayed = line(model, data, count=1, points=3, span=0.1, weight_decay=0.3, **QUIET)
    lengths = [float(value.detach().square().sum()) for value in model.parameters()]
    # Each tensor moves by t of its own length, in a random direction: at t = 0 the penalty is 0.15 ‖θ‖².
    assert decayed.loss[0, 1] - plain.loss[0, 1] == pytest.approx(0.15 * sum(lengths), rel=1e-12)
    np.testing.assert_allclose(decayed.curvatures() - plain.curvatures(), 0.3 * sum(lengths), rtol=1e-6)


@pytest.mark.parametrize("directions", ["layer", "filter", "relative_flatness"])
def test_points_are_those_of_a_plain_loop_over_moved_models(directions):
    model, data = convolutional()
    found = line(model, data, directions=directions, count=2, points=5, span=0.7, seed=4, **QUIET)
    chosen = _directions_of(model, data, directions, 2, seed=4)
    for row, direction in enumerate(chosen):
        for place, t in enumerate(found.positions):
            risk, accuracy = risk_and_accuracy(moved(model, direction, t), data)
            assert found.loss[row, place] == pytest.approx(risk, rel=1e-12)
            assert found.accuracy[row, place] == pytest.approx(accuracy)
    assert found.loss[0, 2] == found.loss[1, 2]


def _directions_of(model, data, kind, count, seed=0, **options):
    from flatness.landscape.directions import Asked, choose_directions

    problem = Problem(model, data, progress=False)
    with problem.guarded():
        return choose_directions(problem, Asked(kind, count, seed=seed, **options), 0).vectors


def test_layer_normalised_directions_have_the_length_of_every_parameter():
    model, data = convolutional()
    for direction in _directions_of(model, data, "layer", 2):
        assert set(direction) == {name for name, _ in model.named_parameters()}
        for name, value in model.named_parameters():
            assert float(direction[name].norm()) == pytest.approx(float(value.detach().norm()), rel=1e-12)
    # Random and uniform on the sphere: the entries of a large tensor have the moments of normal ones.
    entries = torch.cat([d["6.weight"].flatten() for d in _directions_of(model, data, "layer", 50)])
    scale = float(model[6].weight.detach().norm()) / 72**0.5
    assert float((entries / scale).pow(4).mean()) == pytest.approx(3.0, abs=4 * (96 / 3600) ** 0.5)


def test_filter_normalised_directions_have_the_length_of_every_filter_and_leave_biases():
    model, data = convolutional()
    (direction,) = _directions_of(model, data, "filter", 1)
    assert set(direction) == {"0.weight", "3.weight", "6.weight"}
    for name, V in direction.items():
        W = dict(model.named_parameters())[name].detach()
        for row in range(len(W)):
            assert float(V[row].norm()) == pytest.approx(float(W[row].norm()), rel=1e-12)
    (everything,) = _directions_of(model, data, "filter", 1, parameters="all")
    torch.testing.assert_close(everything["1.weight"].abs(), model[1].weight.detach().abs())
    assert 0 < int((everything["0.bias"] == model[0].bias).sum()) < 4


def test_filters_of_transposed_layers_are_what_one_output_channel_sees():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(150, 3)).double()
    data = torch.randn(6, 4, 3, 3).double(), torch.randint(3, (6,))
    (direction,) = _directions_of(model, data, "filter", 1)
    V, W = direction["0.weight"], model[0].weight.detach()
    for group in range(2):
        inputs = slice(2 * group, 2 * group + 2)
        for output in range(3):
            length = float(W[inputs, output].norm())
            assert float(V[inputs, output].norm()) == pytest.approx(length, rel=1e-12)


def test_relative_flatness_directions_average_to_kappa_over_m():
    model, data = smooth()
    kappa = flatness.measure(model, data, measures="relative_flatness", layers="2", **QUIET)
    expected = kappa.value("relative_flatness", layer="2") / 5
    found = line(
        model, data, directions="relative_flatness", layers="2", count=400, points=3, span=1e-3, **QUIET
    ).curvatures()
    assert abs(found.mean() - expected) < 4 * found.std() / 400**0.5
    assert found.std() / 400**0.5 < 0.1 * expected


def test_between_two_networks_it_starts_and_ends_there_with_their_statistics():
    model, data = convolutional()
    other, _ = convolutional()
    with torch.no_grad():
        for value in other.parameters():
            value.add_(0.1 * torch.randn_like(value))
        other[1].running_mean.add_(0.5)
    found = line(model, data, between=other, points=9, **QUIET)
    assert found.positions[[0, 2, 6, 8]] == pytest.approx([-0.5, 0.0, 1.0, 1.5])
    assert found.loss[0, 2] == pytest.approx(risk_and_accuracy(model.eval(), data)[0], rel=1e-12)
    assert found.loss[0, 6] == pytest.approx(risk_and_accuracy(other.eval(), data)[0], rel=1e-12)
    assert "statistics are interpolated along the line" in found.caption()
    same = line(model, data, between=other.state_dict(), points=9, **QUIET)
    np.testing.assert_array_equal(same.loss, found.loss)


def test_beyond_two_networks_the_statistics_are_those_of_the_nearer_one():
    """Further along the line, variances would be negative and the loss NaN."""
    model, data = convolutional()
    other, _ = convolutional()
    with torch.no_grad():
        other[6].weight.add_(0.1 * torch.randn_like(other[6].weight))
        other[1].running_var.mul_(torch.tensor([9.0, 0.1, 1.0, 5.0]))
    found = line(model, data, between=other, points=5, span=(-1, 3), **QUIET)
    step = {"6.weight": (other[6].weight - model[6].weight).detach()}
    for place, t in enumerate((-1.0, 0.0, 1.0, 2.0, 3.0)):
        nearer = moved(model if t < 0.5 else other, step, t if t < 0.5 else t - 1)
        assert found.loss[0, place] == pytest.approx(risk_and_accuracy(nearer, data)[0], rel=1e-12)
    assert found.caption().endswith(
        "Batch norm statistics are interpolated along the line; beyond its ends they are those of the "
        "nearer network."
    )


@pytest.mark.parametrize("fixed", ["weight", "bias"])
def test_a_first_layer_with_a_buffer_in_it_goes_no_further_than_both_networks(fixed):
    class Fixed(nn.Module):
        def __init__(self, seed):
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            for name, shape in (("weight", (3, 4)), ("bias", (3,))):
                value = torch.randn(shape, generator=generator, dtype=torch.float64)
                if name == fixed:
                    self.register_buffer(name, value)
                else:
                    self.register_parameter(name, nn.Parameter(value))

        def forward(self, x):
            return F.linear(x, self.weight, self.bias)

    model, other, (_, data) = Fixed(0), Fixed(1), smooth()
    found = line(model, data, between=other, points=2, span=(0, 2), **QUIET)
    (name, start), (_, end) = *model.named_parameters(), *other.named_parameters()
    expected = risk_and_accuracy(moved(other, {name: (end - start).detach()}, 1.0), data)[0]
    assert found.loss[0, 1] == pytest.approx(expected, rel=1e-12)


def test_recomputed_batch_norm_statistics_are_those_of_the_data_at_every_point():
    model, data = convolutional()
    found = line(
        model, data, directions="filter", count=1, points=3, span=0.5, batch_norm="recomputed",
        batch_size=20, **QUIET,
    )  # fmt: skip
    (direction,) = _directions_of(model, data, "filter", 1)
    for place, t in enumerate(found.positions):
        other = moved(model, direction, t)
        # A whole batch in training mode: cumulative statistics with the unbiased variance, as torch keeps.
        other[1].momentum = 1.0
        other.train()(data[0])
        assert found.loss[0, place] == pytest.approx(risk_and_accuracy(other.eval(), data)[0], rel=1e-12)
    assert found.caption().endswith("recomputed at every point, in batches of 20.")
    alone = line(model, data, count=1, points=3, batch_norm="recomputed", **QUIET)
    assert alone.caption().endswith("in batches of 20.")
    small = line(
        model, data, directions="filter", count=1, points=3, span=0.5, batch_norm="recomputed",
        batch_size=16, **QUIET,
    )  # fmt: skip
    # Batches of 16 and 4 weigh by their samples.
    other = moved(model, direction, 0.5)
    features = other[0](data[0])
    mean = 0.8 * features[:16].mean((0, 2, 3)) + 0.2 * features[16:].mean((0, 2, 3))
    var = 0.8 * features[:16].transpose(0, 1).flatten(1).var(1)
    var = var + 0.2 * features[16:].transpose(0, 1).flatten(1).var(1)
    other[1].running_mean.copy_(mean.detach())
    other[1].running_var.copy_(var.detach())
    assert small.loss[0, 2] == pytest.approx(risk_and_accuracy(other.eval(), data)[0], rel=1e-12)


@pytest.mark.parametrize("batch_norm", ["as_is", "recomputed"])
def test_both_engines_agree(batch_norm):
    model, data = convolutional()
    directions = _directions_of(model, data, "layer", 2)
    found = []
    for name in ("looped", "together"):
        problem = Problem(model, data, batch_size=8, progress=False)
        with problem.guarded():
            points = Points(problem, batch_norm=batch_norm, engine=name, fixed_batch=True).along(directions)
            found.append(points(torch.tensor([[0.3, -0.2], [0.0, 0.5], [0.0, 0.0]])))
    torch.testing.assert_close(*found, rtol=1e-11, atol=0)


def test_several_networks_make_curves_with_mean_and_band():
    model, data = smooth()
    others = [smooth()[0] for _ in range(2)]
    with torch.no_grad():
        others[0][0].weight.mul_(1.5)
    found = line({"a": [model, others[0]], "b": others[1]}, data, count=2, points=5, **QUIET)
    assert found.groups == ("a", "a", "a", "a", "b", "b")
    assert found.labels[2] == "network 2, direction 1"
    np.testing.assert_allclose(found.mean("a"), found.loss[:4].mean(0))
    low, high = found.band("a")
    lines = found.loss[:4]
    mean, deviation = lines.mean(0), lines.std(0, ddof=1)
    np.testing.assert_allclose(high, np.minimum(mean + deviation, lines.max(0)), rtol=1e-12)
    np.testing.assert_allclose(low, np.maximum(mean - deviation, lines.min(0)), rtol=1e-12)
    # The first networks of both names are the same one and draw the same directions.
    np.testing.assert_array_equal(found.loss[:2], found.loss[4:])
    assert len(found.to_frame()) == 30


@pytest.mark.parametrize("directions", ["layer", "filter", "eigenvectors", "relative_flatness"])
def test_frozen_parameters_move_with_a_word_about_it(directions):
    model, data = smooth()
    model[0].requires_grad_(False)
    note = "frozen (requires_grad=False) but moved like the others: 0.weight"
    note += ", 0.bias" if directions in ("layer", "eigenvectors") else ""
    options = {"directions": directions, "count": 1, "points": 3, **QUIET}
    found = line(model, data, **options)
    assert note in found.notes
    assert found.loss[0, 0] != found.loss[0, 1]
    assert not any("frozen" in note for note in line(model, data, layers="2", **options).notes)


def test_only_parameters_of_the_layers_asked_for_move():
    model, data = smooth()
    (direction,) = _directions_of(model, data, "layer", 1, layers="2")
    assert set(direction) == {"2.weight", "2.bias"}
    (direction,) = _directions_of(model, data, "layer", 1, layers="2", parameters="weights")
    assert set(direction) == {"2.weight"}


def test_a_tied_weight_moves_once_under_its_first_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight
            self.double()

        def forward(self, x):
            return self.head(self.embedding(x))

    torch.manual_seed(0)
    model, data = Tied(), (torch.randint(6, (9,)), torch.randint(6, (9,)))
    for kind in ("layer", "filter", "relative_flatness"):
        (direction,) = _directions_of(model, data, kind, 1, layers="head")
        assert list(direction) == ["embedding.weight"]
        found = line(model, data, directions=kind, layers="head", count=1, points=3, **QUIET)
        expected = risk_and_accuracy(moved(model, direction, 1.0), data)[0]
        assert found.loss[0, 2] == pytest.approx(expected, rel=1e-12)
    other = Tied()
    found = line(model, data, between=other, points=3, span=(0, 1), **QUIET)
    assert found.loss[0, 2] == pytest.approx(risk_and_accuracy(other, data)[0], rel=1e-12)
    assert list(flatness.landscape.density(model, data, layers="head", runs=1, steps=2, **QUIET).spectra) == [
        "head"
    ]


def test_directions_may_be_given_in_several_forms():
    model, data = smooth()
    parameters = dict(model.named_parameters())
    one = {name: torch.randn_like(value) for name, value in parameters.items()}
    flat = torch.cat([value.flatten() for value in one.values()])
    forms = [one, flat, list(one.values()), [one], flat[None], [flat], [list(one.values())]]
    lines = [line(model, data, directions=form, points=3, **QUIET).loss for form in forms]
    for other in lines[1:]:
        np.testing.assert_array_equal(other, lines[0])
    part = line(model, data, directions={"2.bias": one["2.bias"]}, points=3, **QUIET)
    assert part.loss[0, 2] == pytest.approx(
        risk_and_accuracy(moved(model, {"2.bias": one["2.bias"]}, 1.0), data)[0], rel=1e-12
    )


def test_a_line_is_saved_and_loaded_without_the_network(tmp_path):
    model, data = smooth()
    found = line(model, data, count=2, points=5, **QUIET)
    found.save(tmp_path / "line.npz")
    again = Line.load(tmp_path / "line.npz")
    np.testing.assert_array_equal(again.loss, found.loss)
    assert (again.groups, again.labels, again.notes, again.meta) == (
        found.groups, found.labels, found.notes, found.meta,
    )  # fmt: skip
    assert str(again) == str(found)
    assert again.complete
    assert os.listdir(tmp_path) == ["line.npz"]


def test_ctrl_c_keeps_what_is_there_and_a_second_call_goes_on(tmp_path, monkeypatch):
    model, data = smooth()
    whole = line(model, data, count=2, points=20, **QUIET)
    calls = []

    def until_third(self, coefficients, ordinary=Points.__call__):
        calls.append(len(coefficients))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ordinary(self, coefficients)

    monkeypatch.setattr(Points, "__call__", until_third)
    with untouched(model, *data):
        part = line(model, data, count=2, points=20, resume=tmp_path / "line.npz", **QUIET)
    assert not part.complete
    assert part.notes[0] == "interrupted: 16 of 40 points were computed, the others are NaN"
    np.testing.assert_array_equal(part.loss[0, :16], whole.loss[0, :16])
    assert np.isnan(part.loss[0, 16:]).all()
    assert np.isnan(part.loss[1]).all()
    finished = line(model, data, count=2, points=20, resume=tmp_path / "line.npz", **QUIET)
    assert sum(calls[3:]) == 24
    assert finished.complete
    np.testing.assert_array_equal(finished.loss, whole.loss)
    before = len(calls)
    line(model, data, count=2, points=20, resume=tmp_path / "line.npz", **QUIET)
    assert len(calls) == before


def test_curves_that_ctrl_c_left_out_are_neither_described_as_nan_nor_in_the_legend(monkeypatch, tmp_path):
    from flatness.show.plots.landscape import save_line

    model, data = smooth()
    networks = {"first": model, "second": model, "third": model}
    calls = []

    def until_second(self, coefficients, ordinary=Points.__call__):
        calls.append(len(coefficients))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return ordinary(self, coefficients)

    monkeypatch.setattr(Points, "__call__", until_second)
    part = line(networks, data, count=1, points=5, **QUIET)
    described = str(part).splitlines()
    assert described[1].startswith("  first: loss ")
    assert described[2:4] == ["  second: not reached", "  third: not reached"]
    named = []
    monkeypatch.setattr(
        "flatness.show.plots.landscape.add_legend",
        lambda figure, axes: named.append(axes.get_legend_handles_labels()[1]),
    )
    save_line(tmp_path / "a.png", part)
    assert named == [["first"]]


def test_a_picture_of_no_curve_at_all_is_drawn(monkeypatch, tmp_path):
    from flatness.show.plots.landscape import save_line

    model, data = smooth()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Points, "__call__", interrupt)
    save_line(tmp_path / "a.png", line({"a": model, "b": model}, data, count=1, points=5, **QUIET))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_is_as_it_was_also_after_an_error():
    model, data = convolutional()
    model.train()
    with untouched(model, *data):
        line(model, data, count=1, points=3, batch_norm="recomputed", **QUIET)
    with untouched(model, *data), pytest.raises(flatness.FlatnessError):
        line(model, data, directions=torch.ones(3), points=3, **QUIET)


def test_a_loss_that_overflows_far_out_is_kept_as_it_is():
    model = nn.Linear(2, 1)
    data = torch.ones(4, 2), torch.ones(4, 1)
    direction = {"weight": torch.ones(1, 2)}
    found = line(model, data, "mse", directions=direction, points=3, span=1e30, **QUIET)
    assert np.isinf(found.loss[0, [0, 2]]).all()
    assert np.isfinite(found.loss[0, 1])
    assert found.complete


def test_where_the_loss_is_nan_there_is_no_accuracy():
    """Not the share of the class that argmax names when every output is NaN."""
    model = nn.Linear(2, 3)
    data = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 1])
    direction = {"weight": torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])}
    found = line(model, data, directions=direction, points=3, span=3e38, **QUIET)
    assert np.isnan(found.loss[0]).tolist() == np.isnan(found.accuracy[0]).tolist() == [True, False, True]


def refused(error, *arguments, **options):
    with pytest.raises(error) as caught:
        line(*arguments, **{**QUIET, **options})
    return str(caught.value)


def test_bad_input_gets_whole_sentences(tmp_path):
    from flatness.errors import CheckpointError, ModelError, OptionError

    model, data = smooth()
    tiny = nn.Linear(4, 3, bias=False)
    tiny.weight = nn.Parameter(torch.ones(3, 4))
    more = {"directions": "eigenvectors", "count": 14, "points": 3}
    for networks in ([tiny, model], [model, tiny]):
        assert refused(OptionError, networks, data, **more) == (
            "Expected as many directions for every network but one has no more than 12. Pass count=12."
        )
    assert refused(OptionError, model, data, directions={"0.weight": torch.ones(3, 4)}) == (
        "Expected a direction of shape [5, 4] for '0.weight' but got [3, 4]. Directions have the shapes "
        "of the "
        "parameters they move."
    )
    assert refused(OptionError, model, data, directions=torch.ones(7)) == (
        "Expected a direction to be a dict of tensors by parameter name or a vector of 43 numbers but got "
        "float32[7]. For example {name: torch.randn_like(p) for name, p in model.named_parameters()}."
    )
    assert refused(OptionError, model, data, directions={"0.wait": torch.ones(5, 4)}) == (
        "Expected directions of this network's parameters but got 0.wait. Did you mean '0.weight'? Its "
        "parameters: "
        "0.weight, 0.bias, 2.weight, 2.bias."
    )
    assert refused(OptionError, model, data, directions="filters") == (
        "Expected directions to be one of layer, filter, eigenvectors, relative_flatness, or the directions "
        "themselves, but got 'filters'. Did you mean 'filter'?"
    )
    for span in (0.0, (1.0, 1.0), -1, float("nan"), "wide"):
        assert refused(OptionError, model, data, span=span) == (
            f"Expected span to be a number > 0 or two ends, the lower one first, but got {span!r}. For "
            "example "
            "span=1.0 or span=(-0.5, 1.5)."
        )
    assert refused(OptionError, model, data, points=1) == (
        "Expected points to be a whole number of at least 2 but got 1. For example points=51."
    )
    assert refused(OptionError, model, data, batch_norm="fresh") == (
        "Expected batch_norm to be one of as_is, recomputed but got 'fresh'. 'as_is' keeps the model's "
        "statistics "
        "at every point."
    )
    wide = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    assert refused(CheckpointError, model, data, between=wide) == (
        "Expected between to be weights of the same network but they differ: other shapes: 0.weight [6, "
        "4] for "
        "[5, 4], 0.bias [6] for [5], 2.weight [3, 6] for [3, 5]. Pass checkpoints of one architecture."
    )
    assert refused(CheckpointError, model, data, between=nn.Linear(4, 3)) == (
        "Expected between to be weights of the same network but they differ: missing: 0.weight, 0.bias, "
        "2.weight, "
        "2.bias; unexpected: weight, bias. Pass checkpoints of one architecture."
    )
    assert refused(ModelError, {"a": 3}, data) == (
        "Expected networks to be torch.nn.Modules but 'a' holds int. Load checkpoints into models first."
    )
    path = tmp_path / "line.npz"
    line(model, data, count=1, points=3, resume=path, **QUIET)
    assert refused(OptionError, model, data, count=1, points=3, span=2.0, seed=1, resume=path) == (
        f"Expected resume to be a file of the same line but {path} was made with other settings: seed, span. "
        "Choose another name, or remove the file."
    )
    path.write_text("something")
    assert refused(OptionError, model, data, resume=path) == (
        f"Expected resume to be a file of an earlier line, or a new one, but {path} is something else. "
        "Choose "
        "another name."
    )
