"""The bound: its terms, constants and assumptions."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from scipy import integrate
from torch import nn

import flatness
import oracle
import small
from flatness.errors import OptionError
from flatness.generalization.assumptions import TOLERANCE, extreme_eigenvalues, smooth_density
from flatness.generalization.chosen_layer import choose_layer
from flatness.generalization.kernels import kernel_of
from flatness.generalization.rate_constants import gaussian_laplacian, inverse_moment, rate_constants
from networks import CASES
from untouched import untouched


@pytest.fixture(scope="module")
def found():
    model, (x, y) = small.network(), small.data(60)
    with untouched(model, x, y):
        return flatness.generalization_bound(model, (x, y), delta=0.1, progress=False)


def test_the_terms_are_what_they_say(found):
    model, (x, y) = small.network(), small.data(60)
    W = oracle.weight_matrix(model.head)
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, F.cross_entropy), "head")
    flat, maximal = oracle.relative_flatness(W, H), oracle.maximal_relative_flatness(W, H)
    alone = flatness.representativeness(model, (x, y), delta=0.1, progress=False)
    rep = found.term("representativeness")
    assert (rep.value, rep.stderr) == pytest.approx((alone.value, alone.stderr))
    assert found.term("flatness term").value == pytest.approx(0.01 / 12 * flat, rel=1e-9)
    assert found.value == pytest.approx(alone.value + 0.01 / 12 * flat, rel=1e-9)
    sharper = found.term("with the kernel's radius").value
    assert sharper == pytest.approx(alone.value + 0.75 * 0.01 / 12 * flat, rel=1e-9)
    assert found.term("uniform flatness term").value == pytest.approx(0.01 * 3 / 2 * maximal, rel=1e-5)
    assert found.term("uniform bound").value == pytest.approx(alone.value + 0.015 * maximal, rel=1e-5)
    assert {term.kind for term in found.terms} == {"approximation"}


def test_the_rule_for_delta_can_be_asked_for():
    model = small.network()
    bound = flatness.generalization_bound(model, small.data(60), delta="rule", progress=False, draws=4)
    assert bound.delta == pytest.approx(60 ** (-1 / 10))
    assert bound.term("flatness term").value == pytest.approx(
        bound.delta**2 / 12 * bound.rate[0].flatness * 12
    )
    assert len(bound.terms) == 6


def confident():
    """Linear, with large weights."""
    torch.manual_seed(0)
    x = torch.randn(60, 3, dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    model.weight.data = torch.tensor([[-9.0, 0, 0], [9.0, 0, 0]], dtype=torch.float64)
    return model, (x, (x[:, 0] > 0).long())


def test_delta_is_the_largest_at_which_the_expansion_holds_and_the_rule_stands_beside_it():
    """All samples at one margin of 6 logits: flat until features move by as much, steep from there."""
    torch.manual_seed(0)
    x = 0.7 * torch.randn(60, 8, dtype=torch.float64)
    x[:, 0] = x[:, 0].sign()
    y = (x[:, 0] > 0).long()
    model = nn.Linear(8, 2, bias=False).double()
    model.weight.data = 3.0 * torch.eye(8, dtype=torch.float64)[[0, 0]] * torch.tensor([[-1.0], [1.0]])
    bound = flatness.generalization_bound(model, (x, y), penalty=1e-3, progress=False)
    rule = 60 ** (-1 / 12)
    halvings = math.log2(rule / bound.delta)
    assert halvings == pytest.approx(round(halvings))
    assert halvings >= 1
    assert bound.delta == bound.representativeness.delta
    # E_F over the uniform ball, by many more draws than the library takes, from the definition.
    generator = torch.Generator().manual_seed(7)
    # κ_Tr by hand: mean ‖x‖² (Σ p_k ‖w_k‖² − ‖Σ p_k w_k‖²) with p = 1/(1 + e⁶) of the wrong class.
    p = 1 / (1 + math.exp(6))
    flat = float(x.square().sum(1).mean()) * (9 - 9 * (1 - 2 * p) ** 2)

    def ratio(delta):
        normal = torch.randn(2000, *x.shape, generator=generator, dtype=torch.float64)
        radii = torch.rand(2000, len(x), 1, generator=generator, dtype=torch.float64) ** (1 / 8)
        xi = delta * x.norm(dim=1)[:, None] * radii * normal / normal.norm(dim=2, keepdim=True)
        with torch.no_grad():
            losses = [
                F.cross_entropy(model((x + sign * xi).flatten(0, 1)), y.repeat(2000)) for sign in (1, -1)
            ]
            change = float(sum(losses) / 2 - F.cross_entropy(model(x), y))
        return change / (delta**2 * 0.8 * flat / 16)

    assert abs(ratio(bound.delta) - 1) < TOLERANCE + 0.05
    assert abs(ratio(2 * bound.delta) - 1) > TOLERANCE - 0.05
    (named,) = [one for one in bound.assumptions if one.name == "second-order expansion"]
    assert named.holds
    assert named.value == pytest.approx(ratio(bound.delta), abs=0.15)
    wide = flatness.generalization_bound(model, (x, y), delta="rule", penalty=1e-3, progress=False)
    for name in ("representativeness", "flatness term", "bound"):
        beside = bound.term(f"{name} at the rule's δ")
        assert beside.value == pytest.approx(wide.term(name).value)
        assert beside.source == f"δ = |S|^(−1/(4+m)) = {rule:.3g}"
    assert wide.assumptions[-1].holds is False
    assert any(
        note.startswith("δ is the largest of |S|^(−1/(4+m)) = 0.711 and its halves") for note in bound.notes
    )


def test_where_nothing_moves_there_is_no_expansion_to_check():
    bound = flatness.generalization_bound(small.network(), small.data(60), kernel="point", progress=False)
    assert bound.delta == pytest.approx(60 ** (-1 / 10))
    assert len(bound.assumptions) == 4


def test_the_rate_is_infinite_for_a_gaussian_and_a_heuristic_from_the_sample(found):
    gaussian, plugin = found.rate
    assert (gaussian.alpha, gaussian.volume, gaussian.largest_loss) == (math.inf,) * 3
    assert gaussian.value == math.inf
    assert plugin.kind == "heuristic"
    assert plugin.rate == pytest.approx(60 ** (-2 / 10))
    expected = plugin.rate * (plugin.flatness + plugin.c1 + plugin.c2 / math.sqrt(0.05))
    assert plugin.value == pytest.approx(expected)
    text = str(found)
    assert "infinite [bound; features distributed like a Gaussian]" in text
    assert "α infinite" in text
    assert "Vol infinite" in text


def test_constants_of_a_sample():
    z = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.5]], dtype=torch.float64)
    assert inverse_moment(z) == pytest.approx((1 / 25 + 1 / 4 + 1 / 1.25) / 3)
    assert inverse_moment(torch.cat([z, torch.zeros(1, 2)])) == math.inf
    _, plugin = rate_constants(z, kernel_of("uniform"), 0.5, 2.0, 0.25)
    assert plugin.volume == pytest.approx(3 * 3.5)
    assert plugin.c1 == pytest.approx(0.5 * 0.5 * 2.0 * plugin.laplacian)
    assert plugin.c2 == pytest.approx(2.0 * math.sqrt(plugin.alpha / math.pi * 10.5))


def test_the_laplacian_of_a_gaussian_is_the_integral():
    """One dimension, by quadrature: p‖z‖² = z² N(μ, s²), whose second derivative is taken by hand."""
    mean, s = 0.7, 1.3

    def inside(z):
        p = math.exp(-((z - mean) ** 2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))
        u = (z - mean) / s**2
        return abs(p * (z**2 * (u**2 - 1 / s**2) - 4 * z * u + 2))

    exact = integrate.quad(inside, -15, 15, limit=400)[0]
    found = gaussian_laplacian(
        torch.tensor([mean]).double(), torch.tensor([[s**2]]).double(), draws=200_000, seed=1
    )
    assert found == pytest.approx(exact, rel=0.01)
    # The formula itself: second differences of z² N(μ, s²).
    f = lambda z: z**2 * math.exp(-((z - mean) ** 2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))  # noqa: E731
    for z in (-1.0, 0.4, 2.0):
        assert abs((f(z + 1e-4) - 2 * f(z) + f(z - 1e-4)) / 1e-8) == pytest.approx(inside(z), rel=1e-4)
    assert gaussian_laplacian(torch.zeros(2).double(), torch.ones(2, 2).double()) == math.inf


def test_extreme_eigenvalues_are_those_of_the_dense_hessian():
    for name in ("mlp_tanh", "mlp"):
        case = CASES[name]
        model = case.build()
        problem = flatness.Problem(model, (case.x, case.y), progress=False)
        with problem.guarded():
            smallest, largest, residual, ended = extreme_eigenvalues(
                choose_layer(problem, "fc2"), products=200
            )
        H = oracle.hessian(model, oracle.mean_risk(case.x, case.y, case.loss), ["fc2.weight"])
        values = torch.linalg.eigvalsh(H)
        assert ended
        assert smallest == pytest.approx(float(values[0]), abs=1e-2 * float(values.abs().max()))
        assert largest == pytest.approx(float(values[-1]), rel=0.05)
        # Some eigenvalue lies within the residual, up to rounding.
        assert float((values - smallest).abs().min()) <= residual + 1e-9


def test_what_is_assumed_is_measured(found):
    named = {assumption.name: assumption for assumption in found.assumptions}
    model, (x, y) = small.network(), small.data(60)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), model.head.weight)
    assert named["zero gradient"].value == pytest.approx(float(gradient.norm()))
    assert named["zero gradient"].holds is False
    assert named["positive semidefinite Hessian"].holds is True
    assert named["features with a density"].holds is False
    assert "exactly 0, as after a ReLU" in named["features with a density"].detail


def test_a_minimum_is_recognised():
    torch.manual_seed(0)
    x = torch.randn(80, 3, dtype=torch.float64)
    y = x @ torch.randn(3, 1).double() + torch.randn(80, 1).double()
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data = (torch.linalg.pinv(x) @ y).T.contiguous()
    bound = flatness.generalization_bound(model, (x, y), "squared_error", delta=0.1, progress=False)
    assert [assumption.holds for assumption in bound.assumptions[:2]] == [True, True]
    assert bound.assumptions[3].holds is True
    assert smooth_density(torch.cat([x, x[:, :1]], 1)).detail == "the features span 3 of 4 dimensions"


def test_a_sum_below_the_gap_is_not_called_a_bound():
    """A confident head and a δ of 0.7: the risk rises by far more than its second-order expansion."""
    model, (x, y) = confident()
    wide, narrow = (
        flatness.generalization_bound(model, (x, y), delta=delta, penalty=1e-3, progress=False)
        for delta in (0.7, 1e-4)
    )
    assert wide.value < wide.representativeness.gap
    assert "below the cross-validated" in wide.summary() or "is negative" in wide.summary()
    assert wide.notes[0].startswith("not a bound here: it lies below the cross-validated gap of ")
    assert narrow.notes == wide.notes[1:]


def test_constants_of_a_sample_without_volume_are_infinite_where_alpha_is():
    z = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z[:, 2] = 0
    z[0] = 0
    plugin = rate_constants(z, kernel_of("uniform"), 1.0, 2.0, 0.05)[1]
    assert (plugin.alpha, plugin.volume, plugin.c2, plugin.value) == (math.inf, 0.0, math.inf, math.inf)


def test_the_summary_says_what_the_sum_is_worth(found):
    held = sum(one.holds is True for one in found.assumptions)
    end = f"{held} of {len(found.assumptions)} assumptions hold."
    said = found.summary()
    assert str(found).splitlines()[1] == said
    assert said.endswith(end)

    def with_sum(value):
        terms = [dataclasses.replace(one, value=value) if one.name == "bound" else one for one in found.terms]
        return dataclasses.replace(found, terms=tuple(terms)).summary()

    gap = found.representativeness.gap
    assert "an approximation, not a guarantee" in with_sum(abs(gap) + 1)
    assert with_sum(-0.5).startswith("No statement about the gap: the sum is negative (-0.")
    assert with_sum(None).startswith("No statement about the gap: there is no flatness term.")
    negative = dataclasses.replace(found.term("bound"), value=-0.5, stderr=0.0)
    assert str(negative).startswith("bound: -0.5000 (negative, so no bound) [")


def test_it_is_saved_as_json_without_infinities(found, tmp_path):
    found.save(tmp_path / "bound.json")
    content = json.loads((tmp_path / "bound.json").read_text())
    assert content["format"] == "flatness bound"
    assert content["rate"][0]["alpha"] == "Infinity"
    assert content["terms"][2]["value"] == pytest.approx(found.value)


def test_bad_input_is_refused_in_words(found):
    with pytest.raises(OptionError) as error:
        flatness.generalization_bound(small.network(), small.data(), failure=1.5)
    assert str(error.value) == (
        "Expected failure to be a probability between 0 and 1 but got 1.5. For example failure=0.05."
    )
    with pytest.raises(OptionError) as error:
        found.term("nothing")
    assert str(error.value) == (
        "Expected the name of a term but got 'nothing'. There are: 'representativeness', 'flatness term', "
        "'bound', \"with the kernel's radius\", 'uniform flatness term', 'uniform bound'."
    )


def test_relative_flatness_of_a_linear_model_is_the_ridge_penalty():
    """petzka2021, §4: κ_Tr = c ‖w‖² with c = 2 mean‖x‖², whatever w is and wherever the minimum lies."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    c = 2 * float(x.square().sum(1).mean())
    model = nn.Linear(6, 1).double()
    for scale in (0.1, 1.0, 7.0):
        with torch.no_grad():
            model.weight.copy_(scale * torch.randn(1, 6, generator=generator, dtype=torch.float64))
        report = flatness.measure(
            model, (x, y), "squared_error", measures="relative_flatness", progress=False
        )
        assert report.value("relative_flatness", layer="") == pytest.approx(
            c * float(model.weight.detach().square().sum()), rel=1e-12
        )
