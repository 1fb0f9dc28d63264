"""Sampled curvature: unbiased, with standard errors that mean what they say, and exact in all directions."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from test_agreement import assert_layer_agrees, sizes
from torch import nn

import flatness
import oracle
from flatness.curvature.sums import sampled
from flatness.curvature.sums.exact import exact_statistics
from flatness.curvature.sums.folds import FOLDS
from flatness.curvature.sums.kinds import STATISTICS
from flatness.curvature.sums.sampled import Budget, _rounds, sampled_statistics
from flatness.curvature.sums.spread import feature_spreads
from flatness.losses.signs import Signs
from flatness.measuring.plan import plan as plan_module
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from flatness.measuring.rows import finalise
from flatness.measuring.run.run import Run
from flatness.measuring.scatter import Scatter
from flatness.measuring.views import Outline
from flatness.problem.problem import Problem
from networks import CASES, ragged_batches
from small import Net, data, measure
from untouched import refusal, untouched

SMOOTH = [
    "mlp_tanh",
    "mlp_gelu",
    "smooth_then_relu",
    "layer_norm",
    "cnn_tanh",
    "attention",
    "attention_projections",
]
OF_LAYERS = [
    "hessian_trace",
    "hessian_top_eigenvalue",
    "weight_norm",
    "layer_flatness",
    "layer_flatness_trace",
    "neuron_flatness",
    "neuron_flatness_incoming",
    "relative_flatness",
    "relative_flatness_normalized",
    "maximal_relative_flatness",
]


# All directions


@pytest.mark.parametrize("name", SMOOTH)
def test_every_measure_of_small_smooth_layers_is_exact(name):
    case = CASES[name]
    model = case.build()
    batches = ragged_batches(case.x, case.y, sizes(len(case.x)))
    with untouched(model, case.x, case.y):
        report = flatness.measure(model, batches, measures=OF_LAYERS, method="exact", progress=False)
    for layer in case.layers:
        assert_layer_agrees(report, model, case.x, case.risk, layer)
    assert {row.method for row in report.results} == {"exact"}
    assert {row.stderr for row in report.results} == {0.0}
    if name != "attention":  # its projections are no layers here
        total = report.value("hessian_trace", layer=None, reduction=None)
        assert total == pytest.approx(oracle.total_trace(model, case.risk), rel=1e-8)


def routed(problem, **arguments):
    """A plan with all statistics of all layers, and the features' spreads."""
    chosen = make_plan(problem, measure_request(**{"measures": "default", "method": "sampled"} | arguments))
    for route in chosen.layer_routes.values():
        route.needs = frozenset(STATISTICS)
    layers = {name: route.layer for name, route in chosen.layer_routes.items()}
    return chosen, feature_spreads(problem, layers, False, whitened=layers)


@pytest.mark.parametrize("name", ["cnn_grouped", "token_mixer", "residual_batch_norm", "log_softmax"])
def test_both_engines_agree_on_piecewise_linear_networks(name):
    case = CASES[name]
    loss = "nll" if name == "log_softmax" else "cross_entropy"
    problem = Problem(case.build(), (case.x, case.y), loss, batch_size=5, progress=False)
    with problem.guarded():
        chosen, spreads = routed(problem)
        found = sampled_statistics(problem, chosen.sampling, spreads, Budget(None, None, folds=0)).statistics
        exact, _ = routed(problem, method="exact")
        expected = exact_statistics(problem, exact.routes, spreads)
    assert set(found.sums) == set(expected.sums)
    for owner, statistics in expected.sums.items():
        for key, value in statistics.items():
            torch.testing.assert_close(found.sums[owner][key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_tanh", "shared_module", "siamese", "tied_parameters"])
def test_diagonal_and_block_traces_in_all_directions(name):
    case = CASES[name]
    model = case.build()
    problem = Problem(model, (case.x, case.y), batch_size=5, progress=False)
    with problem.guarded():
        chosen, spreads = routed(problem)
        found = sampled_statistics(problem, chosen.sampling, spreads, Budget(None, None, folds=0)).statistics
    for layer in chosen.layers:
        H = oracle.layer_hessian(model, case.risk, layer)
        torch.testing.assert_close(found.mean(layer, "diagonal"), oracle.diagonal(H), rtol=1e-8, atol=1e-12)
        blocks = found.mean(layer, "block_traces")
        torch.testing.assert_close(blocks, torch.einsum("gstut->gsu", H), rtol=1e-8, atol=1e-12)


def test_gauss_newton_leaves_the_residual_out_and_says_how_much_that_is():
    case = CASES["mlp_tanh"]
    model = case.build()
    full = measure(model, (case.x, case.y), measures="hessian_trace").result("hessian_trace", layer="fc1")
    part = measure(model, (case.x, case.y), measures="hessian_trace", curvature="gauss_newton")
    gauss_newton = part.value("hessian_trace", layer="fc1")
    loss_hessian = oracle.output_hessian(case.y, F.cross_entropy)
    dense = oracle.gauss_newton(model, case.x, ["fc1.weight"], loss_hessian).trace().item()
    assert gauss_newton == pytest.approx(dense, rel=1e-8)
    residual = full.value - gauss_newton
    assert full.notes[-1] == (
        f"residual_share {residual / full.value:.3g}: of the trace, {gauss_newton:.4g} is the Gauss-Newton "
        f"part and {residual:.4g} the residual"
    )


# Random directions


def wide(classes=12, n=60, scale=0.7):
    """A smooth network with more classes than a pass or two would take, and its data."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.GELU(), nn.Linear(6, classes)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        y = model(x).argmax(1)
    # Some labels are wrong, but few: then the residual does not drown everything else.
    wrong = torch.rand(n, generator=generator) < 0.1
    return model.eval(), x, torch.where(wrong, torch.randint(classes, (n,), generator=generator), y)


def rows_over_seeds(model, x, y, measures, budget, seeds, **asked):
    """Rows of `seeds` estimates, each with its own probes."""
    problem = Problem(model, (x, y), progress=False)
    rows = []
    with problem.guarded():
        chosen = make_plan(problem, measure_request(measures, method="sampled", **asked))
        outline = Outline.of(problem, chosen)
        routes = chosen.sampling.layers
        spreads = feature_spreads(
            problem,
            {route.name: route.layer for route in routes if route.units},
            False,
            whitened={route.name for route in routes if "whitened" in route.units},
        )
        for seed in range(seeds):
            problem.seed = seed
            sums = sampled_statistics(problem, chosen.sampling, spreads, budget)
            run = Run(sums.statistics, chosen.methods, spreads, scatter=Scatter.of(sums))
            rows.append(finalise(outline, run))
    return rows


def test_standard_errors_are_calibrated_over_200_seeds():
    model, x, y = wide(n=100, scale=0.5)
    measures = ["hessian_trace", "relative_flatness", "matrix_normalized_sharpness"]
    truth = flatness.measure(model, (x, y), measures=measures, method="exact", progress=False)
    rows = rows_over_seeds(model, x, y, measures, Budget(2, 4, folds=FOLDS), 200)
    checked = 0
    for index, first in enumerate(rows[0]):
        if first.level == "unit" or first.reduction == "max":
            continue
        true = truth.value(first.measure, layer=first.layer, reduction=first.reduction)
        errors = torch.tensor([run[index].stderr for run in rows], dtype=torch.float64)
        values = torch.tensor([run[index].value for run in rows], dtype=torch.float64)
        z = (values - true) / errors
        where = (first.measure, first.where(), float(z.mean()), float(z.var()))
        # Unbiased: the mean of 200 scores has a standard error of 0.07.
        assert abs(z.mean()) < 0.25, where
        # Few samples say most about an error, so that the variance of scores is about 1.1, give or take 0.12.
        assert 0.8 < z.var() < 1.4, where
        # 0.94 for errors of few samples; a share of 200 has a standard error of 0.017.
        assert 0.9 <= (z.abs() < 1.96).double().mean() <= 0.98, where
        # And the errors are those that the values show.
        assert float(errors.square().mean().sqrt() / values.std()) == pytest.approx(1, abs=0.15), where
        checked += 1
    assert checked == 12


def test_statistics_of_convolutions_and_attention_are_unbiased():
    for name in ("cnn_tanh", "attention_projections"):
        case = CASES[name]
        model = case.build()
        measures = ["hessian_trace", "relative_flatness", "neuron_flatness", "neuron_flatness_incoming"]
        truth = flatness.measure(model, (case.x, case.y), measures=measures, method="exact", progress=False)
        rows = rows_over_seeds(model, case.x, case.y, measures, Budget(2, 8), 20)
        for index, first in enumerate(rows[0]):
            if first.level == "layer" and first.reduction != "max":
                values = torch.tensor([run[index].value for run in rows], dtype=torch.float64)
                true = truth.value(first.measure, layer=first.layer, reduction=first.reduction)
                # 4.5 standard errors of the mean of 20, over some 30 values.
                assert abs(values.mean() - true) <= 4.5 * values.std() / math.sqrt(20) + 1e-12, (
                    name,
                    first.where(),
                )


def test_precision_decides_the_number_of_probes():
    model, x, y = wide(n=400, scale=0.5)
    asked = {"measures": ["hessian_trace", "relative_flatness"], "method": "sampled", "progress": False}
    truth, part = (
        flatness.measure(
            model, (x, y), measures=asked["measures"], method="exact", curvature=curvature, progress=False
        )
        for curvature in ("hessian", "gauss_newton")
    )
    probes = []
    for precision in (0.04, 0.01):
        report = flatness.measure(model, (x, y), precision=precision, max_passes=1000, **asked)
        rows = [row for row in report.results if row.level == "layer" and row.stderr]
        assert rows
        sizes = [max(abs(row.value), part.value(row.measure, layer=row.layer)) for row in rows]
        errors = [row.stderr / size for row, size in zip(rows, sizes, strict=True)]
        # A pilot of 50 samples knows an error to about 20 %.
        assert max(errors) < 1.4 * precision
        for row in rows:
            assert abs(row.value - truth.value(row.measure, layer=row.layer)) < 4 * row.stderr
        probes.append(report.result("hessian_trace", layer="0").notes[1])
        assert not [note for note in report.notes if note.startswith("aimed at")]
    assert probes[0] != probes[1]


def test_passes_are_bounded_and_what_was_reached_is_said():
    model, x, y = wide()
    report = flatness.measure(
        model,
        (x, y),
        measures="hessian_trace",
        method="sampled",
        precision=1e-4,
        max_passes=6,
        progress=False,
    )
    rows = [row for row in report.results if row.level == "layer"]
    part = flatness.measure(
        model, (x, y), measures="hessian_trace", curvature="gauss_newton", method="exact", progress=False
    )

    def size(row):
        return max(abs(row.value), abs(part.value("hessian_trace", layer=row.layer)))

    worst = max(rows, key=lambda row: row.stderr / size(row))
    (note,) = [note for note in report.notes if note.startswith("aimed at")]
    reached = note.split(", at ")[1].split(". ")[0]
    assert note == (
        "aimed at a standard error of 0.0001 of each layer's value (or of its Gauss-Newton part, if that is "
        f"larger), but 3 of 3 values exceed it; the worst is hessian_trace of {worst.layer}, at {reached}. "
        "Raise max_passes, now 6"
    )
    # The part is known from the same probes, to some percent.
    assert float(reached) == pytest.approx(worst.stderr / size(worst), rel=0.1)


@pytest.mark.parametrize("n, most", [(1, 100), (2, 100), (21, 10), (60, 4)])
def test_no_more_probes_are_drawn_than_are_allowed(n, most):
    model, x, y = wide(n=n)
    report = flatness.measure(
        model, (x, y), measures="hessian_trace", method="sampled", max_passes=most, progress=False
    )
    said = report.result("hessian_trace", layer="0").notes[1].replace("all directions", "11 probes")
    first, second = (float(number) for number in re.findall(r"(\d[\d.]*) (?:probes|of the residual)", said))
    assert first + second <= most


def test_a_default_device_elsewhere_changes_nothing():
    model, x, y = wide()
    asked = {"measures": ["hessian_trace", "relative_flatness"], "method": "sampled", "progress": False}
    expected = flatness.measure(model, (x, y), **asked)
    with torch.device("meta"):
        report = flatness.measure(model, (x, y), **asked)
    assert [row.value for row in report.results] == [row.value for row in expected.results]


def test_layers_are_probed_one_by_one_where_that_is_without_noise():
    # With one nonlinearity the residual of each layer is diagonal: signs of its own find it exactly, while
    # one probe for all has the terms between them.
    torch.manual_seed(0)
    x, y = torch.randn(48, 5, dtype=torch.float64), torch.randint(3, (48,))
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    for _ in range(20):
        model(x)
    asked = {"measures": "hessian_trace", "progress": False}
    report = flatness.measure(model.eval(), (x, y), method="sampled", precision=0.05, **asked)
    exact = flatness.measure(model, (x, y), method="exact", **asked)
    row = report.result("hessian_trace", layer="0")
    assert row.notes[1].endswith(" of the residual, layer by layer")
    assert row.value == pytest.approx(exact.value("hessian_trace", layer="0"), rel=1e-9)


def test_errors_are_honest_where_few_samples_carry_the_noise():
    # A network trained until one sample of 64 has most of the loss: errors must rest on enough of its probes.
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    ).double()
    x, y = torch.randn(64, 6, dtype=torch.float64), torch.randint(3, (64,))
    optimizer, loss = torch.optim.Adam(model.parameters(), 1e-2), math.inf
    while loss > 0.008:
        optimizer.zero_grad()
        value = F.cross_entropy(model(x), y)
        value.backward()
        optimizer.step()
        loss = value.item()
    model.zero_grad()
    asked = {"measures": ["neuron_flatness_incoming", "relative_flatness"], "progress": False}
    truth = flatness.measure(model.eval(), (x, y), method="exact", **asked)
    scores = {}
    for seed in range(40):
        report = flatness.measure(model, (x, y), method="sampled", precision=0.5, seed=seed, **asked)
        for row in report.results:
            if row.level == "layer" and row.stderr:
                true = truth.value(row.measure, layer=row.layer, reduction=row.reduction)
                z = (row.value - true) / row.stderr
                scores.setdefault((row.measure, row.layer, row.reduction), []).append(z)
    for where, found in scores.items():
        # 40 scores have a root mean square of 1 ± 0.11; with two probes each it was 2.7 for a maximum.
        assert math.sqrt(sum(z * z for z in found) / len(found)) < 1.6, where


def test_a_pilot_looks_at_samples_that_count():
    model, x, y = wide(n=400, scale=0.5)
    ignored = y.clone()
    ignored[:100] = -100
    asked = {"measures": "hessian_trace", "method": "sampled", "precision": 0.05, "progress": False}
    report = flatness.measure(model, (x, ignored), **asked)
    rows = [row for row in report.results if row.level == "layer" and row.stderr]
    assert rows
    assert not [note for note in report.notes if note.startswith("aimed at")]


def test_every_sample_gets_every_probe_once():
    counts = torch.tensor([2, 8, 2, 32, 4, 2, 2, 2])
    drawn = [[] for _ in counts]
    for rows, numbers in _rounds(counts):
        assert numbers.shape[1] == len(rows) <= len(counts)
        for row in numbers.tolist():
            for sample, number in zip(rows.tolist(), row, strict=True):
                drawn[sample].append(number)
    assert [sorted(found) for found in drawn] == [list(range(count)) for count in counts.tolist()]


def test_a_sample_whose_loss_is_nan_is_named():
    # Its slope says how often it is probed: that must not fail first.
    model, x, y = wide(n=100)
    x[70, 0] = math.nan
    message = (
        "Expected a finite loss for every sample but sample 70 of batch 0 (number 70 of the data) has loss "
        "nan. Look for NaN or infinite inputs, or for outputs that overflow in torch.float64."
    )
    assert refusal(flatness.errors.NotFiniteError, model, (x, y), method="sampled") == message


def test_ignored_samples_change_nothing():
    # Probes are shared out among samples that count.
    model, x, y = wide(n=100)
    few = y.clone()
    few[10:] = -100
    asked = {"measures": "hessian_trace", "method": "sampled", "max_passes": 60, "progress": False}
    alone = flatness.measure(model, (x[:10], y[:10]), **asked).result("hessian_trace", layer="0")
    among = flatness.measure(model, (x, few), **asked).result("hessian_trace", layer="0")
    assert among.value == pytest.approx(alone.value, rel=1e-12)
    assert among.stderr == pytest.approx(alone.stderr, rel=1e-12)


def test_many_classes_are_sampled_and_agree_with_the_exact_engine():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 300)).double()
    x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(300, (80,), generator=generator)
    report = flatness.measure(model, (x, y), measures="hessian_trace", progress=False)
    exact = flatness.measure(model, (x, y), measures="hessian_trace", method="exact", progress=False)
    row = report.result("hessian_trace", layer="0")
    assert (row.method, report.result("hessian_trace", layer="2").method) == ("sampled", "exact")
    assert 0 < row.stderr < 0.0125 * row.value
    assert abs(row.value - exact.value("hessian_trace", layer="0")) < 4 * row.stderr
    network = report.result("hessian_trace", layer=None, reduction=None)
    assert network.method == "sampled"
    assert abs(network.value - exact.value("hessian_trace", layer=None, reduction=None)) < 4 * network.stderr


def test_eigenvalues_of_many_classes_take_products(monkeypatch):
    case = CASES["cnn_grouped"]
    monkeypatch.setattr(plan_module, "AFFORDABLE_PASSES", 1)
    model = case.build()
    for curvature in ("hessian", "gauss_newton"):
        report = flatness.measure(
            model, (case.x, case.y), measures=["hessian_top_eigenvalue", "maximal_relative_flatness"],
            layers=["conv1", "conv2"], curvature=curvature, progress=False,
        )  # fmt: skip
        for layer in ("conv1", "conv2"):
            W, H = (
                oracle.weight_matrix(model.get_submodule(layer)),
                oracle.layer_hessian(model, case.risk, layer),
            )
            whole = oracle.hessian(model, case.risk, [f"{layer}.weight"])
            top = report.value("hessian_top_eigenvalue", layer=layer)
            assert top == pytest.approx(oracle.top_eigenvalue(whole), rel=1e-6)
            rows = report.value("maximal_relative_flatness", layer=layer)
            assert rows == pytest.approx(oracle.maximal_relative_flatness(W, H), rel=1e-6)


# Mistakes of others


def test_a_short_batch_weighs_as_many_samples_as_it_has():
    model, x, y = wide(classes=3, n=34)
    parts = ragged_batches(x, y, (16, 16, 2))
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    true = oracle.hessian(model, risk, ["0.weight"]).trace().item()
    by_batch = (
        sum(
            oracle.hessian(model, oracle.mean_risk(*part, F.cross_entropy), ["0.weight"]).trace().item()
            for part in parts
        )
        / 3
    )
    assert abs(by_batch / true - 1) > 0.02
    exact = flatness.measure(model, parts, measures="hessian_trace", method="exact", progress=False)
    assert exact.value("hessian_trace", layer="0") == pytest.approx(true, rel=1e-8)
    sampled = flatness.measure(
        model, parts, measures="hessian_trace", method="sampled", max_passes=400, progress=False
    )
    row = sampled.result("hessian_trace", layer="0")
    assert row.stderr < abs(by_batch - true)
    assert abs(row.value - true) < 4 * row.stderr


def test_the_number_of_probes_is_settled_before_they_are_drawn(monkeypatch):
    # Stopping when the running mean looks stable is biased. Here the pilot's budget is final: one pass, whose
    # probes are counted.
    model, x, y = wide()
    drawn = []
    original = sampled.sampled_statistics

    def counted(problem, routes, spreads, budget, groups=None):
        drawn.append(budget)
        return original(problem, routes, spreads, budget, groups)

    monkeypatch.setattr(sampled, "sampled_statistics", counted)
    report = flatness.measure(model, (x, y), measures="hessian_trace", method="sampled", progress=False)
    (budget,) = drawn
    first = "all directions" if budget.gauss_newton is None else f"{budget.gauss_newton} probes per sample"
    first += " of the Gauss-Newton part"
    more = f"on average {budget.average:.3g}" if budget.per_slope else f"{budget.residual}"
    expected = f"{first}, and {more} of the residual{', layer by layer' if budget.alone else ''}"
    assert report.result("hessian_trace", layer="0").notes[1] == expected


# The other standard error


def test_data_errors_are_those_of_a_mean_over_samples():
    generator = torch.Generator().manual_seed(5)
    model = nn.Linear(4, 3).double()
    x = torch.randn(2000, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (2000,), generator=generator)
    # Sorted, so that groups of neighbours would differ far more than samples do.
    x = x[x.norm(dim=1).argsort()]
    with torch.no_grad():
        p = model(x).softmax(1)
    each = x.square().sum(1) * (1 - p.square().sum(1))
    report = flatness.measure(
        model, (x, y), measures="hessian_trace", layers="", data_stderr=True, progress=False
    )
    row = report.result("hessian_trace", layer="")
    true = float(each.std() / math.sqrt(2000))
    assert row.value == pytest.approx(float(each.mean()), rel=1e-9)
    assert row.stderr == 0
    # A standard error from 20 groups is known to 1/√38 = 16 %.
    assert row.data_stderr == pytest.approx(true, rel=0.5)
    wanted = math.ceil(2000 * (row.data_stderr / row.value / 0.01) ** 2)
    assert row.notes[-1] == (
        f"as an estimate for the distribution of the data: ± {row.data_stderr:.3g} "
        f"({row.data_stderr / row.value:.1%}); 1 % would take about {wanted:,} samples"
    )
    assert "data_stderr" in report.to_frame().columns
    assert (
        "data_stderr"
        not in flatness.measure(model, (x, y), measures="hessian_trace", progress=False).to_frame().columns
    )


def test_data_errors_cover_a_fresh_sample():
    model, _, _ = wide(classes=3)
    scores = []
    for seed in range(24):
        generator = torch.Generator().manual_seed(100 + seed)
        x = torch.randn(300, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (300,), generator=generator)
        report = flatness.measure(
            model, (x, y), measures="relative_flatness", layers="2", data_stderr=True, progress=False
        )
        scores.append(report.result("relative_flatness", layer="2"))
    values = torch.tensor([row.value for row in scores], dtype=torch.float64)
    stated = torch.tensor([row.data_stderr for row in scores], dtype=torch.float64)
    # A standard deviation of 24 values is known to 15 %.
    assert float(stated.mean() / values.std()) == pytest.approx(1, abs=0.45)


# Losses


@pytest.mark.parametrize(
    "loss, classes",
    [
        ("cross_entropy", 5),
        ("normalized_cross_entropy", 4),
        ("normalized_cross_entropy", 66),
        ("mse", 3),
        ("bce", 3),
    ],
)
def test_probes_have_the_output_hessian_as_their_mean(loss, classes):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 1, classes, generator=generator, dtype=torch.float64)
    target = (
        torch.zeros(1, dtype=torch.int64)
        if "cross" in loss
        else torch.full((1, classes), 0.3, dtype=torch.float64)
    )
    problem = Problem(nn.Linear(2, classes).double(), (torch.zeros(1, 2), target), loss, progress=False)
    repeats = 20_000 if classes < 10 else 3_000
    many = logits[0].expand(repeats, classes)
    items = problem.loss.items(many, target.expand(repeats, *target.shape[1:]))
    single = problem.loss.items(logits[0], target)
    H = sum(
        (1 if c is None else c[..., None, None]) * s[..., :, None] * s[..., None, :]
        for s, c in problem.loss.factors(single)
    )[0, 0]
    drawn = torch.zeros(repeats, classes, classes, dtype=torch.float64)
    for s, sign in problem.loss.probes(items, Signs(2, torch.arange(repeats))):
        drawn += sign * s[:, 0, :, None] * s[:, 0, None, :]
    error = drawn.std(0) / math.sqrt(repeats)
    assert ((drawn.mean(0) - H).abs() <= 5 * error + 1e-12).all()


def test_probes_of_confident_predictions_do_not_cancel():
    logits = torch.tensor([[25.0, 0.0, 1.0, -3.0]])
    single, double = (
        Problem(nn.Linear(2, 4).to(dtype), (torch.zeros(1, 2), torch.zeros(1).long()), progress=False).loss
        for dtype in (torch.float32, torch.float64)
    )
    target = torch.zeros(1).long()
    ((s, _),) = single.probes(single.items(logits, target), Signs(0, torch.arange(1)))
    ((t, _),) = double.probes(double.items(logits.double(), target), Signs(0, torch.arange(1)))
    torch.testing.assert_close(s.double(), t, rtol=1e-5, atol=0)


def test_a_loss_of_ones_own_with_very_many_outputs_is_probed():
    """600 outputs per sample, more than K×K Hessians are formed for; some curvature is negative."""
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 600)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = model(x).detach() + 0.3 * torch.randn(30, 600, generator=generator, dtype=torch.float64)

    def waves(output, target):
        return ((output - target).square() + 1.5 * output.cos()).mean(1)

    measures = ["hessian_trace", "layer_flatness"]
    report = flatness.measure(model, (x, y), waves, measures=measures, precision=0.02, progress=False)
    risk = oracle.mean_risk(x, y, lambda output, target: waves(output, target).mean())
    H = oracle.hessian(model, risk, ["0.weight"])
    row = report.result("hessian_trace", layer="0")
    assert row.method == "sampled"
    assert row.stderr < 0.03 * row.value
    assert abs(row.value - float(H.trace())) < 4 * row.stderr
    W = model[0].weight.detach()
    assert report.value("layer_flatness", layer="0") == pytest.approx(oracle.layer_flatness(W, H), rel=1e-6)
    # The last layer: Σ_k ∂²ℓ/∂f_k² ‖φ‖².
    hidden = model[:2](x).detach()
    second = (2 - 1.5 * model(x).detach().cos()) / 600
    true = float((second.sum(1) * hidden.square().sum(1)).mean())
    row = report.result("hessian_trace", layer="2")
    assert row.method == "sampled"
    # The output's Hessian is diagonal: signs have no error in its trace.
    assert row.value == pytest.approx(true, rel=1e-9)
    with pytest.raises(flatness.errors.LossError) as caught:
        flatness.measure(model, (x, y), waves, method="exact", progress=False)
    assert str(caught.value) == (
        "Expected at most 512 outputs per sample for exact curvature of waves, which takes a 600 × 600 "
        "matrix for each, but got 600. Use a named loss if it is one of them, or measure with "
        "method='sampled'."
    )


# What cannot be differentiated twice


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


def test_an_operator_without_second_derivative_is_named_and_gauss_newton_offered():
    model = Net(lambda self, x: self.head(OnceOnly.apply(self.fc1(x))))
    assert refusal(flatness.errors.DifferentiabilityError, model, data()) == (
        "Expected operators that can be differentiated twice but OnceOnly is not. Write its backward "
        "with differentiable operations, or pass curvature='finite_differences', which takes first "
        "derivatives at two points, or curvature='gauss_newton' for that part of the Hessian."
    )
    x, y = data()
    report = measure(model, (x, y), measures="hessian_trace", curvature="gauss_newton")
    plain = Net(lambda self, x: self.head(self.fc1(x).sin()))
    expected = oracle.gauss_newton(
        plain, x, ["fc1.weight"], oracle.output_hessian(y, F.cross_entropy)
    ).trace()
    assert report.value("hessian_trace", layer="fc1") == pytest.approx(float(expected), rel=1e-8)
