"""Densities: moments are traces and Frobenius norms, small spectra are exact, rescaled copies coincide."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flatness
from flatness.curvature.operators.lanczos import LanczosRuns
from flatness.errors import LayerError, OptionError, ReportError
from flatness.landscape import Density, density
from flatness.landscape.density_result import SpectralQuadrature
from oracle import hessian, mean_risk
from untouched import untouched

QUIET = {"progress": False}


def network(activation=nn.Tanh):
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(
        nn.Linear(5, 7), activation(), nn.Linear(7, 6), activation(), nn.Linear(6, 3)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    return model, (x, torch.randint(3, (40,), generator=generator))


def dense(model, data, names=None):
    names = names or [name for name, _ in model.named_parameters()]
    return hessian(model, mean_risk(*data, F.cross_entropy), names)


def within(found, truth, errors=4.0):
    value, stderr = found
    assert abs(value - truth) < errors * stderr
    assert stderr < 0.2 * abs(truth)


def test_quadrature_of_one_vector_is_exact_for_polynomials_of_degree_2m_minus_1():
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(30, 30, generator=generator, dtype=torch.float64)
    A = A + A.T
    v = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    v = v / v.norm(dim=1, keepdim=True)
    runs = LanczosRuns(v, 5)
    while not runs.done:
        runs.tell(runs.query() @ A)
    nodes, weights = runs.quadrature()
    torch.testing.assert_close(weights.sum(1), torch.ones(2).double())
    for degree in range(10):
        truth = ((v @ torch.linalg.matrix_power(A, degree)) * v).sum(1)
        torch.testing.assert_close((weights * nodes**degree).sum(1), truth, rtol=1e-9, atol=1e-9)
    truth = ((v @ torch.linalg.matrix_power(A, 10)) * v).sum(1)
    assert ((weights * nodes**10).sum(1) / truth - 1).abs().min() > 1e-6


def test_a_run_over_the_whole_space_finds_all_eigenvalues_and_ends_without_ghosts():
    values = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 5.0, 1e4], dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(1)).double()).Q
    A = Q @ torch.diag(values) @ Q.T
    runs = LanczosRuns(torch.ones(1, 7).double(), 7)
    while not runs.done:
        runs.tell(runs.query() @ A)
    assert runs.made == 5  # as many as there are different eigenvalues
    np.testing.assert_allclose(runs.quadrature()[0][0], [0, 1, 2, 5, 1e4], atol=1e-9)


def test_moments_are_the_trace_and_the_squared_frobenius_norm():
    model, data = network()
    H = dense(model, data)
    with untouched(model, *data):
        found = density(model, data, runs=100, steps=2, **QUIET)
    own = found.spectra["network"]
    assert own.dimension == len(H)
    within(own.power_sum(1), float(H.trace()))
    within(own.power_sum(2), float(H.square().sum()))
    within(own.power_sum(3), float(torch.linalg.matrix_power(H, 3).trace()), 4.5)
    # Extreme nodes are extreme eigenvalues: Lanczos finds them first.
    full = density(model, data, runs=2, steps=100, **QUIET).spectra["network"]
    values = torch.linalg.eigvalsh(H)
    assert full.nodes.max() == pytest.approx(float(values[-1]), rel=1e-9)
    assert full.nodes.min() == pytest.approx(float(values[0]), rel=1e-9)


def test_power_sums_count_every_eigenvalue():
    own = SpectralQuadrature(np.full((2, 3), 2.0), np.full((2, 3), 1 / 3), 50)
    assert own.power_sum(1) == (pytest.approx(100), pytest.approx(0))
    assert own.power_sum(2) == (pytest.approx(200), pytest.approx(0))


def test_the_curve_is_the_smoothed_histogram_of_the_eigenvalues():
    model, data = network()
    values = torch.linalg.eigvalsh(dense(model, data)).numpy()
    found = density(model, data, runs=30, steps=40, **QUIET)
    grid, width = found.grid("network"), found.width("network")
    bumps = np.exp(-0.5 * ((grid[:, None] - values) / width) ** 2) / (width * np.sqrt(2 * np.pi))
    mean, error = found.curve("network", grid)
    assert np.trapezoid(mean, grid) == pytest.approx(1.0, abs=1e-3)
    wrong = np.abs(mean - bumps.mean(1)) > 4 * error + 1e-6 * bumps.mean(1).max()
    assert wrong.mean() < 0.02


def test_layers_have_spectra_of_their_own_blocks():
    model, data = network()
    found = density(model, data, layers="all", runs=100, steps=2, **QUIET)
    assert list(found.spectra) == ["0", "2", "4"]
    for layer, own in found.spectra.items():
        H = dense(model, data, [f"{layer}.weight"])
        assert own.dimension == len(H)
        within(own.power_sum(1), float(H.trace()))
        within(own.power_sum(2), float(H.square().sum()))
    assert list(density(model, data, layers="last", runs=1, steps=2, **QUIET).spectra) == ["4"]


def test_projections_that_share_a_packed_weight_have_no_spectrum_of_their_own():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(12, 3)
    )
    data = torch.randn(8, 3, 4), torch.randint(3, (8,))
    found = density(model.double(), (data[0].double(), data[1]), layers="all", runs=1, steps=2, **QUIET)
    assert list(found.spectra) == ["0.self_attn.out_proj", "0.linear1", "0.linear2", "2"]
    note = "left out, without a weight of their own: 0.self_attn.q, 0.self_attn.k, 0.self_attn.v"
    assert note in found.notes
    assert not any(note.startswith("not a supported layer") for note in found.notes)
    with pytest.raises(LayerError) as caught:
        density(model, (data[0].double(), data[1]), layers="0.self_attn.q", **QUIET)
    assert str(caught.value) == (
        "Expected layers whose weight is a parameter of its own but 0.self_attn.q share a packed one or "
        "compute "
        "theirs from others. Leave them out."
    )


def test_weights_of_what_is_no_known_layer_are_named_where_all_layers_are_asked_for():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True)
            self.norm = nn.LayerNorm(4)
            self.middle = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.head = nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.ones(1, 3))

        def forward(self, x):
            return self.scale * self.head(self.middle(self.norm(self.rnn(x)[0][:, -1])))

    torch.manual_seed(0)
    model, data = Reader().eval(), (torch.randn(8, 5, 3), torch.randint(3, (8,)))
    found = density(model, data, layers="all", runs=1, steps=2, **QUIET)
    assert list(found.spectra) == ["head"]
    assert found.notes == (
        "left out, without a weight of their own: middle",
        "left out, because the layer type is not supported: the model itself (Reader), rnn (LSTM); "
        "flatness.register_layer adds support",
    )
    assert density(model, data, layers="head", runs=1, steps=2, **QUIET).notes == ()


def test_metrics_and_weight_decay_enter_the_spectrum():
    model, data = network()
    H = dense(model, data)
    parameters = list(model.parameters())
    layerwise = torch.cat([value.detach().norm().expand(value.numel()) for value in parameters])
    nodewise = torch.cat([value.detach().abs().flatten() for value in parameters])
    for metric, root in (("layerwise", layerwise), ("nodewise", nodewise)):
        A = root[:, None] * H * root
        own = density(model, data, metric=metric, runs=100, steps=2, **QUIET).spectra["network"]
        within(own.power_sum(1), float(A.trace()))
        within(own.power_sum(2), float(A.square().sum()))
    decayed = density(model, data, runs=3, steps=100, weight_decay=0.5, **QUIET).spectra["network"]
    assert decayed.nodes.max() == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]) + 0.5, rel=1e-9)


def test_rescaled_copies_coincide_in_the_metric_and_differ_without_it():
    model, data = network(nn.ReLU)
    for kind, metric in (("layerwise", "layerwise"), ("neuronwise", "nodewise")):
        networks = {"original": model, "copy": flatness.rescale(model, data[0][:2], kind=kind, seed=3)}
        found = density(networks, data, metric=metric, runs=3, steps=12, **QUIET)
        grid = found.grid("original")
        same, _ = found.curve("original", grid)
        np.testing.assert_allclose(found.curve("copy", grid)[0], same, rtol=1e-5, atol=1e-8)
        plain = density(networks, data, runs=3, steps=12, **QUIET)
        tops = [own.nodes.max() for own in plain.spectra.values()]
        assert abs(tops[1] / tops[0] - 1) > 0.1


def test_parameters_that_are_zero_have_no_metric_and_are_left_out():
    model, data = network()
    with torch.no_grad():
        model[0].bias.zero_()
    own = density(model, data, metric="layerwise", runs=1, steps=3, **QUIET).spectra["network"]
    assert own.dimension == sum(value.numel() for value in model.parameters()) - 7


def test_a_density_without_one_of_its_arrays_is_refused(tmp_path):
    model, data = network()
    path = tmp_path / "density.npz"
    density(model, data, runs=1, steps=2, **QUIET).save(path)
    arrays = dict(np.load(path))
    for missing in ("weights 0", "nodes 0"):
        np.savez(path, **{name: own for name, own in arrays.items() if name != missing})
        with pytest.raises(ReportError) as caught:
            Density.load(path)
        assert str(caught.value) == (
            f"Expected a whole density but {path} is damaged: it has no '{missing}'. Compute it again."
        )


def test_a_density_is_saved_and_loaded_without_the_network(tmp_path):
    model, data = network()
    found = density({"a": model, "b": model}, data, runs=2, steps=5, **QUIET)
    found.save(tmp_path / "density.npz")
    again = Density.load(tmp_path / "density.npz")
    assert str(again) == str(found)
    assert (again.meta, again.notes) == (found.meta, found.notes)
    np.testing.assert_array_equal(again.spectra["b"].nodes, found.spectra["b"].nodes)
    assert len(found.to_frame()) == 20


def test_ctrl_c_keeps_the_steps_made_and_finished_networks_are_not_computed_again(tmp_path, monkeypatch):
    model, data = network()
    path = tmp_path / "density.npz"
    whole = density({"a": model, "b": model}, data, runs=2, steps=6, **QUIET)
    told = []

    def until_ninth(self, products, ordinary=LanczosRuns.tell):
        told.append(len(products))
        if len(told) == 9:
            raise KeyboardInterrupt
        ordinary(self, products)

    monkeypatch.setattr(LanczosRuns, "tell", until_ninth)
    part = density({"a": model, "b": model}, data, runs=2, steps=6, resume=path, **QUIET)
    assert part.notes[0] == "interrupted: b after 2 of 6 steps of Lanczos"
    np.testing.assert_array_equal(part.spectra["a"].nodes, whole.spectra["a"].nodes)
    assert part.spectra["b"].nodes.shape == (2, 2)
    assert "over 2 runs of Lanczos with 2 to 6 steps, " in part.caption()
    assert "over 2 runs of Lanczos with 6 steps, " in whole.caption()
    before = len(told)
    finished = density({"a": model, "b": model}, data, runs=2, steps=6, resume=path, **QUIET)
    assert len(told) - before == 6
    assert finished.notes == whole.notes
    np.testing.assert_array_equal(finished.spectra["b"].nodes, whole.spectra["b"].nodes)


def refused(*arguments, **options):
    with pytest.raises(OptionError) as caught:
        density(*arguments, **{**QUIET, **options})
    return str(caught.value)


def test_a_text_of_numpys_names_a_metric():
    model, data = network()
    asked = {"runs": 1, "steps": 2, **QUIET}
    found = density(model, data, metric=np.str_("layerwise"), **asked)
    assert str(found) == str(density(model, data, metric="layerwise", **asked))


def test_bad_input_gets_whole_sentences():
    model, data = network()
    assert refused(model, data, metric="layer") == (
        "Expected metric to be one of euclidean, layerwise, nodewise, fisher, relative, whitened but got "
        "'layer'. Did you mean 'layerwise'? The default is 'euclidean'."
    )
    assert refused(model, data, runs=0) == (
        "Expected runs to be a whole number of at least 1 but got 0. For example runs=10."
    )
    assert refused(model, data, steps=2.5) == (
        "Expected steps to be a whole number of at least 1 but got 2.5. For example steps=80."
    )
