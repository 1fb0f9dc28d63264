"""ε-sharpness: ascent against dense trust regions, the quadratic form against dense eigenvalues."""

import copy

import pytest
import torch
from torch import nn

import flatness
import oracle
from flatness.curvature.operators.ascent import Diagonal, ascend
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import OptionError, UndefinedMeasureError
from flatness.problem.problem import Problem
from networks import CASES
from untouched import refusal, untouched

NAME = "epsilon_sharpness"


def measured(model, data, loss="cross_entropy", **options):
    return flatness.measure(model, data, loss, measures=NAME, options={NAME: options}, progress=False).result(
        NAME
    )


def regression(at_minimum=False):
    """A linear model under squared error, whose risk is a quadratic function of its 9 parameters."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    model = nn.Linear(2, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        if at_minimum:
            extended = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1)
            solved = torch.linalg.lstsq(extended, y).solution
            model.weight.copy_(solved[:2].T)
            model.bias.copy_(solved[2])
    return model, (x, y)


def derivatives(model, data):
    """E, ∇E and H of the mean squared distance, dense."""
    x, y = data

    def risk(network):
        return (network(x) - y).square().sum(1).mean()

    E = risk(model)
    g = torch.cat([part.flatten() for part in torch.autograd.grad(E, list(model.parameters()))])
    return float(E.detach()), g, oracle.hessian(model, risk, ["weight", "bias"])


def root_of(model, metric):
    """D^½ from its definition."""
    theta = oracle.all_parameters(model)
    if metric == "euclidean":
        return torch.ones_like(theta)
    if metric == "nodewise":
        return theta.abs()
    return torch.cat([p.detach().norm().expand(p.numel()) for p in model.parameters()])


@pytest.mark.parametrize("metric", ["euclidean", "layerwise", "nodewise"])
@pytest.mark.parametrize("epsilon", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("at_minimum", [False, True])
def test_ascent_reaches_the_maximum_of_a_trust_region_and_no_more(metric, epsilon, at_minimum):
    model, data = regression(at_minimum)
    E, g, H = derivatives(model, data)
    root = root_of(model, metric)
    rise = oracle.trust_region_maximum(root * g, root[:, None] * H * root, epsilon)
    row = measured(model, data, "squared_error", metric=metric, epsilon=epsilon)
    assert 0.99 * rise / (1 + E) <= row.value <= (1 + 1e-9) * rise / (1 + E)
    assert row.method == "ascent"
    assert row.converged
    assert row.notes[0].startswith("a lower bound: the best of 3 ascents in ")
    assert row.notes[0].endswith(f"; ε = {epsilon:g}, {metric} metric")


def test_one_start_is_a_weaker_bound_and_one_step_a_weaker_one_still():
    model, data = regression(at_minimum=True)
    with torch.no_grad():
        model.bias += 0.01
    full, one, step = (
        measured(model, data, "squared_error", epsilon=1.0, **options)
        for options in ({}, {"restarts": 1, "steps": 3}, {"restarts": 1, "steps": 1})
    )
    assert step.value < one.value < full.value
    assert not step.converged
    assert step.notes[1].startswith("still climbing: displacement and gradient are aligned to 0.")


def test_more_starts_than_three_are_random_and_never_worse():
    model, data = regression()
    three, six = (measured(model, data, "squared_error", restarts=count) for count in (3, 6))
    assert six.value >= three.value
    assert six.notes[0].startswith("a lower bound: the best of 6 ascents")


@pytest.mark.parametrize("metric", ["euclidean", "layerwise", "nodewise"])
@pytest.mark.parametrize("name", ["mlp", "cnn_grouped", "residual_batch_norm", "mlp_tanh"])
def test_the_quadratic_form_is_the_dense_eigenvalue(name, metric):
    case = CASES[name]
    model = case.build()
    H = oracle.hessian(model, case.risk, [name for name, _ in model.named_parameters()])
    root = root_of(model, metric)
    E = float(case.risk(model).detach())
    row = measured(model, (case.x, case.y), form="quadratic", epsilon=0.1, metric=metric)
    expected = 0.1**2 * oracle.top_eigenvalue(root[:, None] * H * root) / (2 * (1 + E))
    assert row.value == pytest.approx(expected, rel=1e-8)
    assert row.method == "exact"
    assert row.residual is not None
    assert row.residual < 1e-5 * row.value


def test_ascent_and_quadratic_form_meet_at_a_minimum():
    model, data = regression(at_minimum=True)
    ascent, quadratic = (
        measured(model, data, "squared_error", form=form) for form in ("ascent", "quadratic")
    )
    assert ascent.value == pytest.approx(quadratic.value, rel=1e-6)


@pytest.mark.parametrize("form", ["ascent", "quadratic"])
@pytest.mark.parametrize("metric, kind", [("layerwise", "layerwise"), ("nodewise", "neuronwise")])
@pytest.mark.parametrize("name", ["mlp", "cnn_grouped", "residual_batch_norm"])
def test_on_the_manifold_rescaling_leaves_it(name, metric, kind, form):
    case = CASES[name]
    model = case.build()
    equal = flatness.rescale(model, case.x, kind, seed=5)
    data = (case.x, case.y)
    options = {"form": form, "epsilon": 0.05}
    before, after = (measured(net, data, metric=metric, **options).value for net in (model, equal))
    # Batch norm's eps makes the factor of its scale depend on the channel by about 1e-5, which the length of
    # the whole scale notices.
    batch_norm = name == "residual_batch_norm" and metric == "layerwise"
    assert after == pytest.approx(before, rel=1e-6 if batch_norm else 1e-8)
    euclidean = [measured(net, data, **options).value for net in (model, equal)]
    assert abs(euclidean[1] / euclidean[0] - 1) > 0.01


def test_the_ascent_stays_in_its_ball_and_climbs():
    """Every displacement tried lies in the ball, in either norm, and the best risk is one of those seen."""
    case = CASES["mlp"]
    problem = Problem(case.build(), (case.x, case.y), progress=False)
    for norm, order in (("l2", 2), ("linf", float("inf"))):
        with problem.guarded():
            space = ParameterSpace(problem)
            root = space.theta.abs()
            tried, risks = [], []
            inner = space.gradient

            def watched(vector, inner=inner, tried=tried, risks=risks):
                tried.append(vector)
                found = inner(vector)
                risks.append(found[0])
                return found

            space.gradient = watched
            start = {"here": root * inner()[1]}
            best = ascend(space, Diagonal(root), 0.2, start, norm=norm, steps=9)
        assert len(tried) == best.passes <= 9
        assert max(float(torch.linalg.vector_norm(v / root, order)) for v in tried) <= 0.2 * (1 + 1e-12)
        assert best.risk == max(risks) > float(case.risk(case.build()).detach())


def test_zero_parameters_have_no_manifold():
    model, data = regression()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(UndefinedMeasureError) as error:
        measured(model, data, "squared_error", metric="nodewise")
    assert str(error.value) == (
        "Expected parameters that have a nodewise metric but all of them are zero. "
        "Pass options={'epsilon_sharpness': {'metric': 'euclidean'}}."
    )


def test_where_the_gradient_is_zero_the_ascent_begins_elsewhere():
    model, data = regression()
    flat = copy.deepcopy(model)
    row = measured(flat, (torch.zeros_like(data[0]), flat.bias.detach().expand(20, 3)), "squared_error")
    # Only the bias matters, with Hessian 2I: the rise is ε².
    assert row.value == pytest.approx(1e-6, rel=1e-9)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"epsilon": -1e-3}, "Expected epsilon to be a positive number but got -0.001. For example 0.001."),
        ({"epsilon": True}, "Expected epsilon to be a positive number but got True. For example 0.001."),
        (
            {"form": "quadratics"},
            "Expected form to be one of ascent, quadratic but got 'quadratics'. Did you mean 'quadratic'? "
            "The default is 'ascent'.",
        ),
        (
            {"metric": "layer"},
            "Expected metric to be one of euclidean, layerwise, nodewise, fisher but got 'layer'. Did you "
            "mean 'layerwise'? The default is 'euclidean'.",
        ),
        ({"steps": 0}, "Expected steps to be an integer of at least 1 but got 0. For example 20."),
        ({"restarts": 2.0}, "Expected restarts to be an integer of at least 1 but got 2.0. For example 3."),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, message):
    model, data = regression()
    assert refusal(OptionError, model, data, measures=NAME, options={NAME: options}) == message


def test_the_model_is_left_as_it_was():
    case = CASES["residual_batch_norm"]
    model = case.build()
    with untouched(model, case.x, case.y):
        measured(model, (case.x, case.y), steps=3)


def test_a_ball_in_which_the_risk_overflows_is_refused():
    model, data = regression()
    with pytest.raises(UndefinedMeasureError) as error:
        measured(model.float(), tuple(part.float() for part in data), "squared_error", epsilon=1e30)
    assert str(error.value) == (
        "Expected a finite risk within a distance of 1e+30 from the parameters but got inf. Pass a smaller "
        "radius (epsilon, rho) in options=, or dtype=torch.float64."
    )
