"""The synthetic experiments of petzka2021, small."""

import math

import pytest
import torch

import flatness
from flatness.generalization.fitting import Ridge
from flatness.study.experiments.four_gaussians import FourGaussians
from flatness.study.experiments.petzka2021_bound import BOUND, published_script_bound
from flatness.study.experiments.petzka2021_labels import LABELS
from flatness.study.experiments.reversed_network import SCALE, reversed_network


def rows_of(experiment, separations, datasets, **options):
    """What a study keeps of all its units of work."""
    chosen = experiment.chosen({"separations": separations, "datasets": datasets, **options}, "a test")
    return [row for unit in experiment.units(chosen) for row in experiment.work(unit)]


def test_data_are_four_gaussians_with_two_redundant_features():
    distribution = FourGaussians.draw(2.0, 7)
    z, y = distribution.sample(40_000, 1)
    assert z.shape == (40_000, 8)
    assert torch.linalg.matrix_rank(z) == 6
    assert torch.allclose(z[:, 6:], z[:, :6] @ distribution.mixing)
    assert float(y.mean()) == 0
    # The clusters of one class: their mean is that of its two centroids.
    own = z[y[:, 0] == 1, :6]
    error = own.std(0) / math.sqrt(len(own))
    assert bool(((own.mean(0) - distribution.means[1::2].mean(0)).abs() < 4 * error).all())
    assert torch.equal(distribution.sample(50, 3)[0], distribution.sample(50, 3)[0])


def test_inputs_propagated_back_have_the_features_they_came_from():
    z, y = FourGaussians.draw(1.0, 0).sample(300, 0)
    predictor = Ridge()(z, y)
    network = reversed_network(z, predictor, seed=1)
    assert network.inputs.shape == (300, 784)
    assert network.error < 1e-5
    with torch.no_grad():
        features = network.model[:-1](network.inputs)
        outputs = network.model(network.inputs).double()
    scaled = z * SCALE / z.abs().max()
    assert float((features - scaled).abs().max()) < 1e-5
    assert torch.allclose(outputs[:, :1], predictor(z), atol=1e-3)
    assert torch.allclose(outputs[:, 1:], -predictor(z), atol=1e-3)
    # Scaling features down and weights up has not changed relative flatness: 2 mean‖z‖² ‖w‖².
    pair = torch.cat([y, -y], dim=1).float()
    report = flatness.measure(
        network.model,
        (network.inputs, pair),
        "mse",
        measures="relative_flatness",
        layers="fc5",
        progress=False,
    )
    expected = 2 * float(z.square().sum(1).mean() * predictor.weight.square().sum())
    assert report.value("relative_flatness", layer="fc5") == pytest.approx(expected, rel=1e-4)


def test_rows_hold_the_gap_and_come_again_with_the_same_seed():
    rows = rows_of(LABELS, [1.0], 3, training=60, test=200)
    assert [row["dataset"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["gap"] == pytest.approx(row["test_risk"] - row["training_risk"])
        assert row["relative_flatness"] > 0
        assert row["error"] < 1e-5
    assert rows_of(LABELS, [1.0], 3, training=60, test=200) == rows


def test_correlations_come_with_intervals(tmp_path):
    small = {"separations": [0.5, 3.0], "datasets": 6, "training": 50, "test": 100}
    content = {"experiment": {"name": "petzka2021_labels", **small}}
    found = flatness.study.run(content, tmp_path, jobs=1, progress=False)
    assert [row["separation"] for row in found.summary] == [0.5, 3.0]
    for kind in ("pearson", "spearman", "kendall"):
        assert all(row[f"{kind}_low"] <= row[kind] <= row[f"{kind}_high"] for row in found.summary)
    frame = found.to_frame()
    direct = frame[frame.separation == 3.0][["relative_flatness", "gap"]].corr().iloc[0, 1]
    assert found.summary[1]["pearson"] == pytest.approx(direct)
    assert (tmp_path / "rows.csv").read_text().startswith("separation,dataset,relative_flatness,gap")


def test_the_bound_is_the_sum_of_its_terms_and_near_its_direct_estimate():
    rows = rows_of(BOUND, [1.0], 6, samples=150, draws=40)
    for row in rows:
        assert row["bound"] == pytest.approx(row["representativeness"] + row["flatness_term"])
        assert row["flatness_term"] == pytest.approx(0.01 / 16 * row["relative_flatness"])
        # gap = E_Rep + E_F for the fitted ψ, E_F = δ²τ₂κ/(2m) exactly for a quadratic loss
        assert row["direct_representativeness"] + 0.8 * row["flatness_term"] == pytest.approx(
            row["gap"], abs=0.03
        )
    (summary,) = BOUND.summary(rows)
    assert summary["bound"] == pytest.approx(sum(row["bound"] for row in rows) / 6)
    plain = rows_of(BOUND, [1.0], 2, samples=60, draws=5, published_script=False)
    assert "published_script" not in plain[0]
    assert "published_holds" not in BOUND.summary(plain)[0]


def test_the_published_script_computes_the_error_rate():
    """Its kernel term is of order 1/n: what is left is the share of wrong classes, plus the flatness term."""
    z, y = FourGaussians.draw(0.5, 1).sample(300, 1)
    found = published_script_bound(z, y, relative_flatness=6.4, delta=0.1, seed=2)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    wrong = 0.0
    for part in torch.tensor_split(order, 10):
        rest = order[~torch.isin(order, part)]
        wrong += float((Ridge()(z[rest], y[rest])(z[part]).sign() != y[part]).double().mean()) / 10
    assert found == pytest.approx(wrong + 0.01 * 6.4 / 64, abs=2e-3)
    assert found < wrong + 0.01 * 6.4 / 64


def test_the_label_function_is_bayes_rule():
    distribution = FourGaussians.draw(3.0, 2)
    z, y = distribution.sample(4000, 3)
    agreement = float((distribution.label(z) == y).double().mean())
    assert agreement > 0.99
    # A scaled copy of the rule for one point, by densities.
    logs = torch.stack(
        [
            torch.distributions.MultivariateNormal(mean, factor.T @ factor).log_prob(z[:50, :6])
            for mean, factor in zip(distribution.means, distribution.factors, strict=True)
        ],
        dim=1,
    ).exp()
    expected = torch.where(logs[:, 1::2].sum(1) > logs[:, ::2].sum(1), 1.0, -1.0)
    assert torch.equal(distribution.label(z[:50])[:, 0], expected.double())
