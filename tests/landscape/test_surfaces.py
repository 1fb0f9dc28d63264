"""Surfaces: exact paraboloids, planes of trajectories, and what happens on Ctrl-C."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from flatness.errors import CheckpointError, ModelError, OptionError
from flatness.landscape import Surface, surface
from flatness.landscape.points import Points
from flatness.landscape.surfaces import principal_plane
from untouched import untouched

QUIET = {"progress": False}


def regression():
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator))
    x = torch.randn(11, 3, generator=generator, dtype=torch.float64)
    return model, (x, torch.randn(11, 2, generator=generator, dtype=torch.float64))


def shifted(model, *directions, by):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for direction, amount in zip(directions, by, strict=True):
            for name, value in other.named_parameters():
                value.add_(amount * direction[name])
    return other


def orthonormal(model, count):
    generator = torch.Generator().manual_seed(2)
    shapes = {name: value.shape for name, value in model.named_parameters()}
    size = sum(shape.numel() for shape in shapes.values())
    Q = torch.linalg.qr(torch.randn(size, count, generator=generator, dtype=torch.float64)).Q
    sizes = [shape.numel() for shape in shapes.values()]
    return [
        {name: part.view(shape) for (name, shape), part in zip(shapes.items(), q.split(sizes), strict=True)}
        for q in Q.T
    ]


def test_a_quadratic_model_gives_an_exact_paraboloid():
    model, (x, y) = regression()
    d1, d2 = orthonormal(model, 2)
    with untouched(model, x, y):
        found = surface(
            model,
            (x, y),
            "squared_error",
            directions=[d1, d2],
            points=(5, 3),
            span=((-1, 3), (-2, 2)),
            **QUIET,
        )
    assert found.x.tolist() == [-1, 0, 1, 2, 3]
    assert found.y.tolist() == [-2, 0, 2]
    residual = (model(x) - y).detach()
    moves = [x @ d["weight"].T + d["bias"] for d in (d1, d2)]
    for row, b in enumerate(found.y):
        for column, a in enumerate(found.x):
            expected = float((residual + a * moves[0] + b * moves[1]).square().sum(1).mean())
            assert found.loss[row, column] == pytest.approx(expected, rel=1e-13)


def test_the_plane_of_a_trajectory_holds_it_and_the_path_has_its_coordinates():
    model, _ = regression()
    d1, d2, d3 = orthonormal(model, 3)
    spots = [(4.0, 1.0), (2.5, -1.0), (1.0, 0.5), (0.0, 0.0)]
    plane = principal_plane(model, {"sgd": [shifted(model, d1, d2, by=spot) for spot in spots]})
    assert plane.shares["sgd"] == pytest.approx(1.0, abs=1e-12)
    # Distances on the plane are those in parameter space, whatever its axes.
    expected = np.linalg.norm(np.diff(np.array(spots), axis=0), axis=1)
    np.testing.assert_allclose(
        np.linalg.norm(np.diff(plane.paths["sgd"], axis=0), axis=1), expected, rtol=1e-12
    )
    np.testing.assert_allclose(plane.paths["sgd"][-1], 0, atol=1e-12)
    # The first axis is that of the larger singular value, and the farthest checkpoint is on its right.
    values = np.linalg.svd(np.array(spots), compute_uv=False)
    np.testing.assert_allclose(np.linalg.norm(plane.paths["sgd"], axis=0), values[:2], rtol=1e-12)
    assert plane.paths["sgd"][0, 0] > 0
    # What leaves the plane is said: a third direction with a share of the squared distance.
    spots = [(3.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.0, 0.0, 1.0)]
    away = principal_plane(model, {"a": [shifted(model, d1, d2, d3, by=spot) for spot in spots]})
    assert away.shares["a"] == pytest.approx(13 / 14, rel=1e-12)


def test_several_trajectories_share_a_plane_on_which_the_loss_is_that_of_the_checkpoints():
    model, data = regression()
    d1, d2 = orthonormal(model, 2)
    trajectories = {
        "sgd": [shifted(model, d1, d2, by=by).state_dict() for by in ((2.0, 0.0), (1.0, 1.0))],
        "adam": [shifted(model, d1, d2, by=by) for by in ((-1.0, 2.0), (0.5, 0.5))],
    }
    found = surface(model, data, "squared_error", trajectory=trajectories, points=4, **QUIET)
    assert list(found.paths) == ["sgd", "adam"]
    # Put a corner of a second grid exactly on a checkpoint.
    (a, b) = found.paths["sgd"][1]
    again = surface(
        model,
        data,
        "squared_error",
        trajectory=trajectories,
        points=2,
        span=((a, a + 1), (b, b + 1)),
        **QUIET,
    )
    other = shifted(model, d1, d2, by=(1.0, 1.0))
    risk = (other(data[0]) - data[1]).square().sum(1).mean().item()
    assert again.loss[0, 0] == pytest.approx(risk, rel=1e-12)
    everything = np.concatenate([*found.paths.values(), [[0, 0]]])
    assert found.x[0] < everything[:, 0].min()
    assert found.x[-1] > everything[:, 0].max()
    assert found.y[0] < everything[:, 1].min()
    assert found.y[-1] > everything[:, 1].max()
    assert found.caption() == (
        "squared_error on 11 samples on the principal plane of training trajectories. The plane holds "
        "100 % of "
        "sgd, 100 % of adam (squared distances from the network)."
    )


def test_a_surface_is_saved_loaded_interrupted_and_resumed(tmp_path, monkeypatch):
    model, data = regression()
    options = {"loss": "mse", "trajectory": None, "points": 6, **QUIET}
    whole = surface(model, data, **options)
    calls = []

    def until_second(self, coefficients, ordinary=Points.__call__):
        calls.append(len(coefficients))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return ordinary(self, coefficients)

    monkeypatch.setattr(Points, "__call__", until_second)
    path = tmp_path / "surface.npz"
    part = surface(model, data, resume=path, **options)
    assert part.notes[0] == "interrupted: 8 of 36 points were computed, the others are NaN"
    assert int(np.isfinite(part.loss).sum()) == 8
    again = Surface.load(path)
    np.testing.assert_array_equal(again.done, part.done)
    finished = surface(model, data, resume=path, **options)
    assert sum(calls[2:]) == 28
    np.testing.assert_array_equal(finished.loss, whole.loss)
    loaded = Surface.load(path)
    np.testing.assert_array_equal(loaded.loss, whole.loss)
    assert (loaded.labels, loaded.meta, loaded.notes) == (finished.labels, finished.meta, finished.notes)
    assert str(loaded) == str(finished)
    assert len(loaded.to_frame()) == 36


def test_paths_survive_saving(tmp_path):
    model, data = regression()
    d1, d2 = orthonormal(model, 2)
    steps = [shifted(model, d1, d2, by=by) for by in ((2.0, 0.0), (1.0, 1.0))]
    found = surface(model, data, "mse", trajectory={"a/b": steps}, points=2, **QUIET)
    found.save(tmp_path / "surface.npz")
    np.testing.assert_array_equal(Surface.load(tmp_path / "surface.npz").paths["a/b"], found.paths["a/b"])


def refused(error, *arguments, **options):
    with pytest.raises(error) as caught:
        surface(*arguments, "mse", **{**QUIET, **options})
    return str(caught.value)


def test_bad_input_gets_whole_sentences():
    model, data = regression()
    (d1,) = orthonormal(model, 1)
    assert refused(ModelError, [model], data) == (
        "Expected one network in the middle of the surface but got list. Pass the model, and others as "
        "trajectory=."
    )
    assert refused(OptionError, model, data, directions=d1) == (
        "Expected two directions for a surface but got 1. Pass a list of two, or draw a line."
    )
    assert refused(OptionError, model, data, span=((0, 0), (1, 2))) == (
        "Expected span to be a number > 0 or two ends, the lower one first, but got (0, 0). For example "
        "span=1.0 "
        "or span=(-0.5, 1.5)."
    )
    assert refused(OptionError, model, data, trajectory=[model, shifted(model, d1, by=(1.0,))]) == (
        "Expected checkpoints that span a plane with the network but they lie on one line. Pass at least "
        "two that "
        "differ from the network and from each other."
    )
    assert refused(CheckpointError, model, data, trajectory={"sgd": [model, nn.Linear(2, 2)]}) == (
        "Expected checkpoint 2 of 'sgd' to be weights of the same network but they differ: other shapes: "
        "weight "
        "[2, 2] for [2, 3]. Pass checkpoints of one architecture."
    )
    assert refused(OptionError, model, data, trajectory=model) == (
        "Expected a trajectory to be a list of networks or state dicts, or a dict of such lists by name, but "
        "'trajectory' is Linear. For example trajectory=[torch.load(p) for p in paths]."
    )
