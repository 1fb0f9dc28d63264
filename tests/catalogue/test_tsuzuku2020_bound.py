"""The PAC-Bayes bound: every term against its formula and the dense Hessian, and the table around it."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from test_balancing import by_descent
from test_tsuzuku2020 import normalized
from torch.func import functional_call

import flatness
import oracle
from flatness.catalogue.engines.pac_bayes_bound import grid_of, positive_numbers
from flatness.catalogue.engines.weight_noise import matrix_scales, row_column_scales
from flatness.catalogue.measure import LayerView
from networks import CASES
from untouched import untouched

FLOATS = 255 * 2**23 - 1  # positive finite float32
FLOATS_64 = 2047 * 2**52 - 1


def trained(name="mlp", steps=150):
    case = CASES[name]
    model = case.build()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(case.x), case.y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return case, model


def bounded(case, model, **arguments):
    return flatness.pac_bayes_bound(model, (case.x, case.y), progress=False, **arguments)


def dense(case, model, layer):
    H = oracle.layer_hessian(model, oracle.mean_risk(case.x, case.y, normalized), layer)
    return oracle.weight_matrix(model.get_submodule(layer))[0], oracle.diagonal(H)[0]


def term(bound, begins):
    (row,) = [row for row in bound.terms if row["term"].startswith(begins)]
    return row


def test_the_terms_that_are_counted():
    case, model = trained()
    bound = bounded(case, model, delta=0.1, sigma="rows_and_columns")
    strength, n = bound.settings["lambda"], len(case.x)
    assert strength in [8 * n / 2**k for k in range(10)]
    rows = sum(sum(model.get_submodule(layer).weight.shape) for layer in case.layers)
    biases = sum(len(model.get_submodule(layer).bias) for layer in case.layers)
    assert term(bound, f"(B) choice of the scales ({rows})")["value"] == pytest.approx(
        rows * math.log(FLOATS) / strength, rel=1e-12
    )
    assert term(bound, f"(B) parameters without noise ({biases})")["value"] == pytest.approx(
        biases * math.log(2 * FLOATS_64 + 1) / strength, rel=1e-12
    )
    assert term(bound, "confidence")["value"] == pytest.approx(math.log(10) / strength, rel=1e-12)
    assert term(bound, "choice of λ")["value"] == pytest.approx(
        math.log(math.floor(math.log2(8 * n)) + 1) / strength, rel=1e-12
    )
    assert term(bound, "Ψ")["value"] == pytest.approx(strength / (2 * n), rel=1e-12)
    wrong = float((model(case.x).argmax(1) != case.y).double().mean())
    assert term(bound, "training error")["value"] == pytest.approx(wrong, abs=1e-12)
    assert bound.value == pytest.approx(sum(row["value"] for row in bound.terms), rel=1e-12)
    assert bound.stderr == term(bound, "(C)")["stderr"]
    tight = bounded(case, model, psi="hoeffding")
    assert term(tight, "Ψ")["value"] == pytest.approx(tight.settings["lambda"] / (8 * n), rel=1e-12)


def test_one_sigma_for_each_matrix_is_equation_11_with_the_half_restored():
    case, model = trained()
    bound = bounded(case, model, sigma="matrices", draws=100)
    strength = bound.settings["lambda"]
    variances, distance, rise = {}, 0.0, 0.0
    for layer in case.layers:
        W, h = dense(case, model, layer)
        variances[layer] = math.sqrt(float(W.square().sum() / h.sum()) / strength)
        distance += float(W.square().sum()) / (2 * variances[layer])
        rise += 0.5 * float(h.clamp(min=0).sum()) * variances[layer]
    # σ is rounded to float32
    assert term(bound, "(B) weights over noise")["value"] == pytest.approx(distance / strength, rel=1e-6)
    assert bound.settings["expected rise"] == pytest.approx(rise, rel=1e-6)
    generator = torch.Generator().manual_seed(77)
    rates = []
    for _ in range(300):
        moved = dict(model.named_parameters())
        for layer, variance in variances.items():
            W = model.get_parameter(f"{layer}.weight")
            noise = torch.randn(W.shape, generator=generator, dtype=torch.float64)
            moved[f"{layer}.weight"] = W + math.sqrt(variance) * noise
        rates.append(float((functional_call(model, moved, (case.x,)).argmax(1) != case.y).double().mean()))
    rates = torch.tensor(rates)
    ours = term(bound, "training")["value"] + term(bound, "(C)")["value"]
    spread = math.hypot(float(rates.std()) / 300**0.5, bound.stderr)
    assert bound.stderr == pytest.approx(float(rates.std()) / 10, rel=0.3)
    assert abs(ours - float(rates.mean())) < 4 * spread


def test_noise_by_rows_and_columns_is_that_of_equation_17():
    """Both halves are equal: KL/λ = S/(4√λ), S by a general optimiser on the dense diagonal."""
    case, model = trained()
    bound = bounded(case, model)
    strength, total = bound.settings["lambda"], 0.0
    for layer in case.layers:
        W, h = dense(case, model, layer)
        a = h.clamp(min=0).numpy()
        alive = a.sum(1) > 0
        total += by_descent(a[alive][:, a.sum(0) > 0], W.square().numpy()[alive][:, a.sum(0) > 0])
    # entries without curvature count as a hundredth of the mean: a few per cent
    expected = total / (4 * math.sqrt(strength))
    assert term(bound, "(B) weights over noise")["value"] == pytest.approx(expected, rel=0.1)
    assert bound.settings["expected rise"] == pytest.approx(expected, rel=0.1)


def test_the_chosen_lambda_is_the_best_of_the_grid():
    case, model = trained()
    bound = bounded(case, model, draws=10)
    frame = bound.grid_frame()
    assert list(frame["lambda"]) == grid_of(len(case.x))
    tried = frame.dropna()
    totals = tried["error under noise"] + tried["rest"]
    assert float(tried["lambda"][totals.idxmin()]) == bound.settings["lambda"]
    left_out = frame[frame["error under noise"].isna()]
    assert (left_out["rest"] >= totals.min()).all()


def test_it_can_say_something():
    """Many samples, few parameters: below 1, and above the error on new data."""
    generator = torch.Generator().manual_seed(0)
    centres = 4 * torch.eye(3)
    y = torch.randint(3, (6000,), generator=generator)
    x = centres[y] + torch.randn(6000, 3, generator=generator)
    model = torch.nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    bound = flatness.pac_bayes_bound(model, (x[:4000], y[:4000]), hyperprior="bfloat16", progress=False)
    assert not bound.vacuous
    fresh = float((model(x[4000:]).argmax(1) != y[4000:]).double().mean())
    assert fresh < bound.value < 0.5


def test_the_table_its_frame_its_file_and_its_page(tmp_path):
    case, model = trained()
    with untouched(model):
        bound = bounded(case, model)
    lines = str(bound).splitlines()
    assert lines[0].startswith("PAC-Bayes bound (tsuzuku2020, eq. 4): λ = ")
    assert lines[0].endswith(
        f"δ = 0.05, {len(case.x)} samples, noise by rows_and_columns from normalized_cross_entropy"
    )
    shown = [line.split("  ")[0] for line in lines[1:4]]
    assert shown == [
        "training error of the network",
        "(C) its rise under the noise",
        "(B) weights over noise",
    ]
    assert lines[10].startswith("bound of the error with noise")
    assert lines[11].startswith("(A) network without noise instead of with it")
    assert lines[11].endswith("not computable")
    frame = bound.to_frame()
    assert list(frame.columns) == ["term", "value", "stderr"]
    assert frame.value.iloc[-2] == bound.value
    assert math.isnan(frame.value.iloc[-1])
    assert "<caption" in bound._repr_html_()
    bound.save(tmp_path / "bound.json")
    assert flatness.PacBayesBound.load(tmp_path / "bound.json") == bound
    (tmp_path / "other.json").write_text(json.dumps({"format": "flatness report"}))
    with pytest.raises(flatness.FlatnessError) as caught:
        flatness.PacBayesBound.load(tmp_path / "other.json")
    assert str(caught.value) == (
        f"Expected a PAC-Bayes bound saved by flatness but {tmp_path / 'other.json'} holds something else. "
        "Pass a file written by PacBayesBound.save()."
    )


def test_as_a_measure_its_notes_list_the_terms():
    case, model = trained()
    report = flatness.measure(model, (case.x, case.y), measures="pac_bayes_bound", progress=False)
    row = report.result("pac_bayes_bound")
    bound = bounded(case, model)
    assert (row.value, row.stderr, row.method) == (bound.value, bound.stderr, "sampled")
    assert row.notes[-1] == "terms: " + "; ".join(f"{r['term']} {r['value']:.4g}" for r in bound.terms)
    assert any(note.startswith("not computable and left out: (A)") for note in row.notes)
    assert any(note.startswith(f"λ = {bound.settings['lambda']:g}, δ = 0.05") for note in row.notes)


def test_rescaling_neurons_changes_nothing():
    case, model = trained()
    changed = copy.deepcopy(model)
    factors = torch.linspace(0.2, 5.0, changed.fc1.out_features, dtype=torch.float64)
    with torch.no_grad():
        changed.fc1.weight *= factors[:, None]
        changed.fc1.bias *= factors
        changed.fc2.weight /= factors
        changed.fc3.weight *= 7
        changed.fc3.bias *= 7
    # scales are rounded to float32
    assert bounded(case, changed).value == pytest.approx(bounded(case, model).value, rel=1e-6)


def test_without_positive_curvature_the_noise_is_as_large_as_the_weights():
    W = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    view = LayerView("", W, {"diagonal": -torch.ones_like(W)})
    torch.testing.assert_close(row_column_scales(view).deviations(), W)
    torch.testing.assert_close(matrix_scales(view).deviations(), torch.full_like(W, 12.5**0.5))
    torch.testing.assert_close(matrix_scales(view).deviations(16.0), torch.full_like(W, 12.5**0.5 / 2))


def test_dead_rows_and_pruned_weights_get_finite_noise_that_scales_with_them():
    """Rows without curvature, weights that are 0, and both: s is finite and follows the weights."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(1, 5, 4, generator=generator, dtype=torch.float64)
    h = torch.rand(1, 5, 4, generator=generator, dtype=torch.float64)
    h[:, 1] = 0
    W[:, 2] = 0
    W[:, :, 3] = 0
    h[:, 4], W[:, 4] = 0, 0
    rows, columns = torch.rand(5, generator=generator) + 0.5, torch.rand(4, generator=generator) + 0.5
    factor = (rows[:, None] * columns).double()
    plain = row_column_scales(LayerView("", W, {"diagonal": h})).deviations()
    scaled = row_column_scales(LayerView("", W * factor, {"diagonal": h / factor**2})).deviations()
    assert bool(plain.isfinite().all())
    assert bool((plain > 0).all())
    torch.testing.assert_close(scaled[:, :4], (plain * factor)[:, :4])
    assert float(plain[:, 4].max()) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delta": 1.5}, "Expected delta to be a probability between 0 and 1 but got 1.5. For example 0.05."),
        ({"draws": 1}, "Expected draws to be an integer of at least 2 but got 1. For example 20."),
        (
            {"sigma": "matrix"},
            "Expected sigma to be one of rows_and_columns, matrices but got 'matrix'. Did you mean "
            "'matrices'? The default is 'rows_and_columns'.",
        ),
        (
            {"hyperprior": "int8"},
            "Expected hyperprior to be one of float32, float64, float16, bfloat16 but got 'int8'. The "
            "default is 'float32'.",
        ),
        (
            {"psi": "none"},
            "Expected psi to be one of paper, hoeffding but got 'none'. The default is 'paper'.",
        ),
        (
            {"loss": "mse"},
            "Expected a classification loss, as an accuracy is needed, but got 'mse'. Use 'cross_entropy' or "
            "'bce' with class targets.",
        ),
    ],
)
def test_bad_input(arguments, message):
    case, model = trained(steps=1)
    targets = F.one_hot(case.y, 4).double() if arguments.get("loss") == "mse" else case.y
    with pytest.raises(flatness.FlatnessError) as caught:
        flatness.pac_bayes_bound(model, (case.x, targets), progress=False, **arguments)
    assert str(caught.value) == message


def test_two_classes_are_refused():
    model, data = torch.nn.Linear(3, 2), (torch.randn(9, 3), torch.randint(2, (9,)))
    with pytest.raises(flatness.FlatnessError) as caught:
        flatness.pac_bayes_bound(model, data, progress=False)
    assert str(caught.value).startswith("Expected at least 3 classes")


def test_numbers_of_a_floating_point_type():
    assert positive_numbers(torch.float16) == sum(
        1 for bits in range(1, 2**15) if torch.tensor(bits, dtype=torch.int16).view(torch.float16).isfinite()
    )
    assert positive_numbers(torch.float32) == FLOATS
