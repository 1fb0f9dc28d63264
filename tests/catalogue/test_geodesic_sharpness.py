"""Geodesic sharpness: its metrics against their own definitions, its ascent, and what leaves its value."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import transformer_models as nets
from flatness.catalogue.engines.geodesic import GEOMETRIES, Curved, _block
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import OptionError, UndefinedMeasureError
from flatness.problem.problem import Problem
from flatness.symmetry.flow.groups import symmetries
from measuring.test_transformer_layers import MODELS, built, inputs
from networks import CASES
from untouched import refusal

METRICS = tuple(GEOMETRIES)
# Heads of three channels with seven and five inputs.
SHAPES = ((7, 3), (5, 3))


def pair(seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES)


def invertible(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.eye(3, dtype=torch.float64) + 0.5 * torch.randn(
        3, 3, generator=generator, dtype=torch.float64
    )


def product(metric, at, eta, zeta):
    """The definition, written down once more."""
    G, H = at
    M, N = G.T @ G, H.T @ H
    if metric == "mixed":
        return torch.trace(N @ eta[0].T @ zeta[0]) + torch.trace(M @ eta[1].T @ zeta[1])
    return torch.trace(M.inverse() @ eta[0].T @ zeta[0]) + torch.trace(N.inverse() @ eta[1].T @ zeta[1])


def plus(one, other, factor=1.0):
    return tuple(a + factor * b for a, b in zip(one, other, strict=True))


def vertical(at, L):
    return at[0] @ L, -at[1] @ L.T


def moved(pair_, A):
    """A head, or a direction, after its channels were mixed."""
    return pair_[0] @ A.inverse(), pair_[1] @ A.T


@pytest.mark.parametrize("metric", METRICS)
def test_lengths_are_those_of_the_coordinates(metric):
    at, u, v = pair(0), pair(1), pair(2)
    geometry = GEOMETRIES[metric](*at)
    xi, eta = geometry.vector(u), geometry.vector(v)
    plain = sum((a * b).sum() for a, b in zip(u, v, strict=True))
    assert float(product(metric, at, xi, eta)) == pytest.approx(float(plain), rel=1e-12)


@pytest.mark.parametrize("metric", METRICS)
def test_what_is_horizontal_is_orthogonal_to_all_that_leaves_the_function(metric):
    at, xi = pair(0), pair(1)
    geometry = GEOMETRIES[metric](*at)
    flat = geometry.horizontal(xi)
    size = math.sqrt(product(metric, at, xi, xi))
    for i in range(9):
        L = torch.zeros(9, dtype=torch.float64).index_fill(0, torch.tensor(i), 1.0).view(3, 3)
        down = vertical(at, L)
        length = math.sqrt(product(metric, at, down, down))
        assert abs(product(metric, at, flat, down)) < 1e-12 * size * length
        assert max(float(part.abs().max()) for part in geometry.horizontal(down)) < 1e-12 * length
    again = geometry.horizontal(flat)
    for one, other in zip(again, flat, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    # What was taken away is vertical: it changes no product G Hᵀ.
    gone = plus(xi, flat, -1.0)
    change = gone[0] @ at[1].T + at[0] @ gone[1].T
    assert float(change.abs().max()) < 1e-12 * size


@pytest.mark.parametrize("metric", METRICS)
def test_geodesics_satisfy_the_euler_lagrange_equations_of_the_energy(metric):
    """d/dt ⟨ẋ, ζ⟩ = ½ ∂_ζ⟨ẋ, ẋ⟩ for every ζ, with derivatives of the metric by central differences."""
    at, xi = pair(0), pair(1)
    geometry = GEOMETRIES[metric](*at)
    acceleration = [-part for part in geometry.connection(xi)]
    step = 1e-5

    def slope(along, eta, zeta):
        ends = [product(metric, plus(at, along, sign * step), eta, zeta) for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * step)

    for seed in range(2, 12):
        zeta = pair(seed)
        left = product(metric, at, acceleration, zeta) + slope(xi, xi, zeta)
        right = slope(zeta, xi, xi) / 2
        # Central differences of step h err by h² = 1e-10 times a third derivative.
        assert float(left - right) == pytest.approx(0, abs=1e-6 * float(abs(left) + abs(right)))


@pytest.mark.parametrize("metric", METRICS)
def test_mixing_channels_is_an_isometry(metric):
    at, xi, A = pair(0), pair(1), invertible(3)
    here, there = GEOMETRIES[metric](*at), GEOMETRIES[metric](*moved(at, A))
    length, same = product(metric, at, xi, xi), product(metric, moved(at, A), moved(xi, A), moved(xi, A))
    assert float(same) == pytest.approx(float(length), rel=1e-11)
    for name in ("horizontal", "connection"):
        expected = moved(getattr(here, name)(xi), A)
        for one, other in zip(getattr(there, name)(moved(xi, A)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# ---- the measure


def trained(name, steps=60):
    build, shape = MODELS[name]
    model, (x, y) = built(build), inputs(shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


def measured(model, data, **options):
    report = flatness.measure(
        model, data, measures="geodesic_sharpness", options={"geodesic_sharpness": options}, progress=False
    )
    return report.result("geodesic_sharpness")


@pytest.mark.parametrize("name", ["mlp", "cnn_max_pool", "residual_batch_norm", "mlp_gelu"])
def test_without_heads_to_mix_it_is_adaptive_sharpness(name):
    case = CASES[name]
    assert not symmetries(case.build(), case.x[:2]).attention.heads
    report = flatness.measure(
        case.build(),
        (case.x, case.y),
        measures=["geodesic_sharpness", "adaptive_sharpness"],
        options={"geodesic_sharpness": {"rho": 0.3}, "adaptive_sharpness": {"rho": 0.3}},
        progress=False,
    )
    geodesic, adaptive = (report.value(f"{which}_sharpness") for which in ("geodesic", "adaptive"))
    assert geodesic == pytest.approx(adaptive, rel=1e-12)
    assert geodesic > 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["attention", "gpt", "cross attention"])
def test_mixing_heads_leaves_it_to_rounding_and_moves_adaptive_sharpness(name, metric):
    model, x, y = trained(name)
    report = flatness.check_invariance(
        model,
        (x, y),
        measures=["geodesic_sharpness", "adaptive_sharpness"],
        kinds="attention",
        trials=2,
        options={"geodesic_sharpness": {"metric": metric, "batches": 2, "rho": 0.2}},
        progress=False,
    )
    rows = {row.measure: row for row in report.rows}
    assert rows["geodesic_sharpness"].declared
    assert rows["geodesic_sharpness"].drift < 1e-10
    assert rows["adaptive_sharpness"].verdict == "moves"


def dual_length(model, x, y, metric):
    """The length of the gradient in the metric: the largest slope of E over directions of length 1."""
    gradient = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    by_name = dict(zip((name for name, _ in model.named_parameters()), gradient, strict=True))
    values = {name: value.detach() for name, value in model.named_parameters()}
    heads = {"attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight"}
    total = sum(((by_name[name] * values[name]) ** 2).sum() for name in by_name.keys() - heads)

    def rows(of, first):
        return torch.cat(
            [of["attn.in_proj_weight"][first : first + 2].T, of["attn.in_proj_bias"][None, first : first + 2]]
        )

    for head in (0, 2):
        sides = [[rows(of, head + 4 * part) for part in range(3)] for of in (values, by_name)]
        for of, side in zip((values, by_name), sides, strict=True):
            side.append(of["attn.out_proj.weight"][:, head : head + 2])
        (q, k, v, o), (dq, dk, dv, do) = sides
        for (G, H), (dG, dH) in (((q, k), (dq, dk)), ((v, o), (dv, do))):
            M, N = G.T @ G, H.T @ H
            first, second = (N.inverse(), M.inverse()) if metric == "mixed" else (M, N)
            total = total + torch.trace(dG @ first @ dG.T) + torch.trace(dH @ second @ dH.T)
    return float(total.sqrt())


@pytest.mark.parametrize("metric", METRICS)
def test_in_a_small_ball_it_is_the_length_of_the_gradient_in_the_metric(metric):
    """The risk does not change along vertical directions, so that its gradient is horizontal as it is."""
    model, x, y = trained("attention", 5)
    rho = 1e-6
    found = measured(model, (x, y), metric=metric, rho=rho)
    # The second-order term is ρ² λ/2, of order ρ relative to the first.
    assert found.value == pytest.approx(rho * dual_length(model, x, y, metric), rel=1e-4)


@pytest.mark.parametrize("metric", METRICS)
def test_the_ascent_bends_with_the_geodesics_and_climbs_by_its_own_slope(metric):
    model, x, y = trained("attention", 5)
    problem = Problem(model, (x, y), progress=False)
    with problem.guarded():
        space = ParameterSpace(problem)
        blocks = [
            _block(space, head, GEOMETRIES[metric]) for head in symmetries(model, x[:2]).attention.heads
        ]
        chart = Curved(space.theta, blocks)
        generator = torch.Generator().manual_seed(1)
        u, v = 0.1 * torch.randn(2, space.dimension, generator=generator, dtype=torch.float64)
        there, back = chart.displacement(u), chart.displacement(-u)
        for block in blocks:
            xi = block.geometry.horizontal(block.geometry.vector((u[block.G], u[block.H])))
            bent = block.geometry.connection(xi)
            for places, along, turn in zip((block.G, block.H), xi, bent, strict=True):
                torch.testing.assert_close(there[places] - back[places], 2 * along)
                torch.testing.assert_close(there[places] + back[places], -turn)
        slope = chart.slope(u, space.gradient(there)[1]) @ v
        step = 1e-5
        ends = [space.risk(chart.displacement(u + sign * step * v)) for sign in (1, -1)]
        # Differences of numbers around 1 over 2e-5 are good to 1e-11; h² times a third derivative, to 1e-10.
        assert float(slope) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("metric", METRICS)
def test_no_random_direction_of_the_same_length_leads_higher(metric):
    model, x, y = trained("attention")
    found = measured(model, (x, y), metric=metric, rho=0.3, steps=40)
    problem = Problem(model, (x, y), progress=False)
    with problem.guarded():
        space = ParameterSpace(problem)
        blocks = [
            _block(space, head, GEOMETRIES[metric]) for head in symmetries(model, x[:2]).attention.heads
        ]
        chart, before = Curved(space.theta, blocks), space.risk()
        generator = torch.Generator().manual_seed(0)
        for _ in range(30):
            u = torch.randn(space.dimension, generator=generator, dtype=torch.float64)
            rise = space.risk(chart.displacement(0.3 * u / u.norm())) - before
            assert rise < found.value
    assert "for 4 pairs of matrices" in found.notes[0]


def test_the_value_is_the_mean_over_consecutive_batches():
    model, x, y = trained("attention")
    whole = measured(model, (x, y), batches=3)
    n = len(x)
    bounds = [i * n // 3 for i in range(4)]
    each = [measured(model, (x[a:b], y[a:b])).value for a, b in pairwise(bounds)]
    assert whole.value == pytest.approx(sum(each) / 3, rel=1e-12)
    assert "the mean over 3 batches" in whole.notes[0]
    ragged = measured(model, [(x[:1], y[:1]), (x[1:], y[1:])], batches=3)
    assert ragged.value == pytest.approx(whole.value, rel=1e-9)


def test_heads_without_full_rank_are_regularised_and_heads_of_zeros_stay():
    model, x, y = trained("attention")
    with torch.no_grad():
        model.attn.in_proj_weight[1] = model.attn.in_proj_weight[0]
        model.attn.in_proj_bias[1] = model.attn.in_proj_bias[0]
    found = measured(model, (x, y))
    assert math.isfinite(found.value)
    assert (
        "heads with fewer inputs than channels, or dependent channels: 1; 1e-06 of the mean eigenvalue is "
        "added to their metric, and mixing their channels may change the value"
    ) in found.notes
    with torch.no_grad():
        model.attn.out_proj.weight.zero_()
    found = measured(model, (x, y))
    assert "heads with a zero matrix, which do not move: 2" in found.notes
    assert math.isfinite(found.value)


def test_heads_that_may_not_be_mixed_are_in_the_adaptive_norm_with_the_reason():
    build, shape = MODELS["attention twice"]
    model, (x, y) = built(build), inputs(shape)
    found = measured(model, (x, y))
    assert (
        "in the adaptive norm: queries and keys of matmul in attn: attn.in_proj_weight is used 6 times"
    ) in found.notes
    adaptive = flatness.measure(model, (x, y), measures="adaptive_sharpness", progress=False)
    assert found.value == pytest.approx(adaptive.value("adaptive_sharpness"), rel=1e-12)


def refused(error, model, data, **options):
    return refusal(error, model, data, measures="geodesic_sharpness", options={"geodesic_sharpness": options})


def rotated(x):
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def test_rotary_embeddings_are_refused():
    model = built(
        lambda: nets.Compute(
            lambda self, x: self.head(
                F.scaled_dot_product_attention(rotated(self.q(x)), rotated(self.k(x)), self.v(x)).mean(1)
            ),
            **{name: nn.Linear(4, 4) for name in "qkv"},
            head=nn.Linear(4, 3),
        )
    )
    assert refused(UndefinedMeasureError, model, inputs((5, 4))) == (
        "Expected heads whose queries and keys any matrix may mix but rotary embeddings turn channels of q "
        "in pairs, for which geodesic_sharpness is not defined. Use relative_flatness, or adaptive_sharpness."
    )


def test_what_cannot_be_asked_for():
    model, x, y = trained("attention", 1)
    assert refused(UndefinedMeasureError, model, (x, y), batches=100) == (
        f"Expected at least one sample for each of 100 batches but got {len(x)}. Pass "
        f"options={{'geodesic_sharpness': {{'batches': {len(x)}}}}} or less."
    )
    assert refused(OptionError, model, (x, y), metric="other") == (
        "Expected metric to be one of mixed, own but got 'other'. The default is 'mixed'."
    )
