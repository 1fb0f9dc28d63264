"""Sharpness along an optimizer's step and in its metric, against the dense Hessian."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flatness
from flatness.errors import OptionError, UndefinedMeasureError
from oracle import all_parameters, hessian, mean_risk
from small import data, network

CRITICAL, DIRECTIONAL, PRECONDITIONED = (
    "critical_sharpness",
    "directional_sharpness",
    "preconditioned_sharpness",
)


def dense(model, x, y, loss=F.cross_entropy):
    """g and H of all parameters."""
    risk = mean_risk(x, y, loss)
    names = [name for name, _ in model.named_parameters()]
    slopes = torch.autograd.grad(risk(model), list(model.parameters()))
    return torch.cat([slope.flatten() for slope in slopes]), hessian(model, risk, names)


def measured(model, given, measure=CRITICAL, loss="cross_entropy", settings=None, **options):
    report = flatness.measure(
        model, given, loss, measures=measure, options={measure: options}, progress=False, **(settings or {})
    )
    return report.result(measure)


def smooth():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), network().parameters(), strict=True):
            parameter.copy_(value)
    return model


def trained(kind=torch.optim.Adam, steps=6, **options):
    model, (x, y) = smooth(), data()
    optimizer = kind(model.parameters(), **{"lr": 0.02, **options})
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def quadratic():
    """A linear network under the squared error: E is a quadratic in all parameters."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    targets = torch.randn(23, 3, generator=generator, dtype=torch.float64)
    return model, (data()[0], targets)


@pytest.mark.parametrize("width", [0.1, 0.01, 1e-6])
@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_a_quadratic_has_the_curvature_along_the_gradient_over_the_slope(width, penalty):
    model, given = quadratic()
    g, H = dense(model, *given, F.mse_loss)
    g, H = g + penalty * all_parameters(model), H + penalty * torch.eye(len(g), dtype=g.dtype)
    row = measured(model, given, loss="mse", width=width, settings={"weight_decay": penalty})
    expected = float(g @ H @ g / (g @ g))
    assert row.value == pytest.approx(expected, rel=width)
    # The residual is the distance to the end of the bracket in which the crossing lies.
    assert abs(row.value - expected) <= row.residual <= width * row.value
    assert (row.method, row.converged) == ("bisection", True)
    along = measured(model, given, DIRECTIONAL, loss="mse", settings={"weight_decay": penalty})
    assert along.value == pytest.approx(expected, rel=1e-9)


def test_about_ten_forward_passes():
    model, optimizer = trained()
    # On a quadratic the parabola through the first is right, and two say so.
    assert measured(*quadratic(), loss="mse").terms["passes"] == 4
    assert measured(model, data(), optimizer=optimizer).terms["passes"] <= 12


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"weight_decay": 0.5}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
    ],
)
def test_at_the_critical_rate_the_optimizers_own_step_leaves_the_risk(kind, options):
    model, optimizer = trained(kind, **options)
    x, y = data()
    row = measured(model, (x, y), optimizer=optimizer, width=1e-6)
    assert row.terms["rate"] == 0.02
    assert row.terms["threshold"] == pytest.approx(100)
    before = F.cross_entropy(model(x), y).item()
    for share, rises in ((0.999, False), (1.001, True)):
        other = copy.deepcopy((model, optimizer))  # together, so that the copies belong to each other
        for group in other[1].param_groups:
            group["lr"] = share * 2 / row.value
        other[1].zero_grad()
        F.cross_entropy(other[0](x), y).backward()
        other[1].step()
        assert (F.cross_entropy(other[0](x), y).item() > before) is rises


def test_directional_sharpness_is_the_curvature_along_the_step():
    model, optimizer = trained()
    g, H = dense(model, *data())
    before = all_parameters(model)
    other = copy.deepcopy((model, optimizer))
    other[1].zero_grad()
    F.cross_entropy(other[0](data()[0]), data()[1]).backward()
    other[1].step()
    step = before - all_parameters(other[0])
    row = measured(model, data(), DIRECTIONAL, optimizer=optimizer)
    assert row.value == pytest.approx(float(step @ H @ step / (step @ step)), rel=1e-9)
    plain = measured(model, data(), DIRECTIONAL)
    assert plain.value == pytest.approx(float(g @ H @ g / (g @ g)), rel=1e-9)


def test_the_step_of_an_optimizer_has_its_own_weight_decay_and_not_that_of_the_risk():
    model, given = smooth(), data()
    g, H = dense(model, *given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.2)
    step = g + 0.2 * all_parameters(model)
    row = measured(model, given, DIRECTIONAL, optimizer=optimizer, settings={"weight_decay": 0.7})
    assert row.value == pytest.approx(float(step @ H @ step / (step @ step)) + 0.7, rel=1e-9)


def test_directions_as_a_tensor_by_name_and_by_a_function_are_one():
    model, (x, y) = smooth(), data()
    g, H = dense(model, x, y)
    signs = g.sign()
    by_name = dict(
        zip(
            dict(model.named_parameters()),
            (
                part.view_as(p)
                for part, p in zip(signs.split([24, 6, 18, 3]), model.parameters(), strict=True)
            ),
            strict=True,
        )
    )
    expected = float(signs @ H @ signs / (signs @ signs))
    for direction in (signs, by_name, lambda slopes: {name: s.sign() for name, s in slopes.items()}):
        row = measured(model, (x, y), DIRECTIONAL, direction=direction)
        assert row.value == pytest.approx(expected, rel=1e-9)


def test_the_step_may_come_from_other_data_and_another_loss():
    model, (x, y) = smooth(), data()
    other = -x.flip(0), y
    _, H = dense(model, x, y)
    for options, step in (
        ({"update_data": other}, dense(model, *other)[0]),
        ({"update_loss": "mse"}, dense(model, x, F.one_hot(y, 3).double(), F.mse_loss)[0]),
    ):
        if "update_loss" in options:
            options["update_data"] = (x, F.one_hot(y, 3).double())
        row = measured(model, (x, y), DIRECTIONAL, **options)
        assert row.value == pytest.approx(float(step @ H @ step / (step @ step)), rel=1e-9)
        assert row.terms["update_fingerprint"] != "0"
    assert "of 23 other samples of mse" in row.notes[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.2)
    step = dense(model, *other)[0] + 0.2 * all_parameters(model)
    row = measured(
        model,
        (x, y),
        DIRECTIONAL,
        optimizer=optimizer,
        update_data=other,
        settings={"weight_decay": 0.7},
    )
    curvature = float(step @ H @ step / (step @ step)) + 0.7
    assert row.value == pytest.approx(curvature, rel=1e-9)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_preconditioned_sharpness_is_that_of_the_dense_hessian(kind):
    model, optimizer = trained(kind, betas=(0.8, 0.95), eps=1e-4)
    _, H = dense(model, *data())
    nu = torch.cat([optimizer.state[value]["exp_avg_sq"].flatten() for value in model.parameters()])
    P = (1 - 0.8**6) * ((nu / (1 - 0.95**6)).sqrt() + 1e-4)
    expected = float(torch.linalg.eigvalsh(P.rsqrt()[:, None] * H * P.rsqrt())[-1])
    row = measured(model, data(), PRECONDITIONED, optimizer=optimizer)
    threshold = (2 + 2 * 0.8) / ((1 - 0.8) * 0.02)
    assert row.value == pytest.approx(expected, rel=1e-6)
    assert row.terms == pytest.approx({"rate": 0.02, "threshold": threshold, "share": expected / threshold})
    assert row.notes[0] == (
        f"stability threshold (2 + 2β₁)/((1 − β₁)η) = 900 at β₁ = 0.8, η = 0.02; the value is "
        f"{expected / threshold:.3g} of it"
    )


def test_the_metric_of_sgd_is_the_identity_and_groups_share_the_rate():
    model, _ = trained()
    _, H = dense(model, *data())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    row = measured(model, data(), PRECONDITIONED, optimizer=optimizer)
    assert row.value == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-6)
    assert row.terms["threshold"] == pytest.approx(38.0)
    first, second = list(model[0].parameters()), list(model[2].parameters())
    optimizer = torch.optim.SGD([{"params": first, "lr": 0.05}, {"params": second}], lr=0.2)
    shares = torch.cat([torch.full((30,), 0.25), torch.ones(21)]).double()
    row = measured(model, data(), PRECONDITIONED, optimizer=optimizer)
    expected = torch.linalg.eigvalsh(shares.sqrt()[:, None] * H * shares.sqrt())[-1]
    assert row.value == pytest.approx(float(expected), rel=1e-6)
    assert row.terms["threshold"] == pytest.approx(10.0)


def test_the_penalty_of_an_optimizer_is_asked_for():
    note = (
        "without the optimizer's weight decay: pass weight_decay=0.3 for the curvature of the loss and its "
        "penalty together"
    )
    for kind, penalty, told in (
        (torch.optim.Adam, 0.0, True),
        (torch.optim.Adam, 0.3, False),
        (torch.optim.AdamW, 0.0, False),
    ):
        model, optimizer = trained(kind, weight_decay=0.3)
        settings = {"weight_decay": penalty}
        row = measured(model, data(), PRECONDITIONED, optimizer=optimizer, settings=settings)
        assert (note in row.notes) is told


def test_a_copy_in_another_precision_has_the_step_of_the_original():
    model, optimizer = trained(steps=4)
    single = copy.deepcopy((model, optimizer))
    single[0].float()
    expected = measured(model, data(), DIRECTIONAL, optimizer=optimizer)
    row = measured(single[0], data(), DIRECTIONAL, optimizer=single[1], settings={"dtype": torch.float64})
    assert row.value == pytest.approx(expected.value, rel=1e-4)


def falling(output, target):
    """A loss that falls for ever along its gradient."""
    return -(output * F.one_hot(target, 3)).sum(1)


def test_a_loss_that_never_rises_has_critical_sharpness_0():
    model = nn.Linear(4, 3).double()
    row = measured(model, data(), loss=falling)
    assert (row.value, row.terms["critical_rate"]) == (0.0, None)
    assert row.notes[-1].startswith("the risk did not rise up to a rate of ")
    assert row.notes[-1].endswith(", so the value counts as 0")


def test_an_update_uphill_is_refused():
    model, (x, y) = smooth(), data()
    g, _ = dense(model, x, y)
    with pytest.raises(UndefinedMeasureError) as caught:
        measured(model, (x, y), direction=-g)
    assert str(caught.value) == (
        "Expected a step along which the risk falls at first but along a direction that was given Δᵀ∇E = "
        f"{-float(g @ g):.3g} is not positive, so that no rate is critical. Momentum may point uphill for a "
        "moment; measure at another step, or use directional_sharpness. A direction is subtracted from the "
        "parameters, like a gradient."
    )
    assert measured(model, (x, y), DIRECTIONAL, direction=-g).value == pytest.approx(
        measured(model, (x, y), DIRECTIONAL).value, rel=1e-9
    )


def test_a_dip_below_rounding_is_not_reliable():
    model, (x, y) = smooth(), data()
    g, H = dense(model, x, y)
    _, vectors = torch.linalg.eigh(H)
    # A step almost across the slope: steep curvature, next to no descent.
    flat = vectors[:, -1] - (vectors[:, -1] @ g) / (g @ g) * g
    row = measured(model, (x, y), direction=flat + 1e-9 * g)
    assert not row.converged
    assert row.notes[-1].startswith("not reliable: along this step the risk falls by about ")


def test_a_step_that_is_zero_is_refused():
    model, (x, y) = smooth(), data()
    for measure in (CRITICAL, DIRECTIONAL):
        with pytest.raises(UndefinedMeasureError) as caught:
            measured(model, (x, y), measure, direction=torch.zeros(51))
        assert str(caught.value) == (
            "Expected a step to measure along but a direction that was given is zero everywhere. At a point "
            "where nothing moves measure hessian_top_eigenvalue; check that the optimizer's parameters "
            "require gradients."
        )


def test_options_that_mean_nothing_are_refused():
    model, optimizer = trained()
    g, _ = dense(model, *data())
    for options, message in (
        (
            {"optimizer": optimizer, "direction": g},
            "Expected one of optimizer and direction but got both. Leave direction out for the optimizer's "
            "next step.",
        ),
        (
            {"direction": g, "update_loss": "mse"},
            "Expected update_data and update_loss beside an optimizer, the gradient or a function of it, but "
            "direction holds the step itself. Leave one of them out.",
        ),
        (
            {"direction": g[:-1]},
            "Expected direction to be one tensor of 51 numbers, tensors by the names of parameters, or a "
            "function that makes them of gradients by name, but got float64[50]. For example "
            "{name: p.grad for name, p in model.named_parameters()}.",
        ),
        (
            {"direction": {"0.weight": g[:24], "1.weight": g}},
            "Expected direction to hold a tensor for every parameter, by name, but got missing: 0.bias, "
            "2.weight, 2.bias, unknown: 1.weight, of other shapes: 0.weight. For example "
            "{name: p.grad for name, p in model.named_parameters()}.",
        ),
        (
            {"direction": g * torch.nan},
            "Expected a direction of finite numbers but got NaN or infinity. Check the gradients it is of.",
        ),
        (
            {"optimizer": "adam"},
            "Expected optimizer to be an optimizer of torch.optim, as an object, or None but got 'adam'. For "
            "example options={'critical_sharpness': {'optimizer': optimizer}}, from Python; the command line "
            "and study files have no way to pass one.",
        ),
    ):
        with pytest.raises(OptionError) as caught:
            measured(model, data(), **options)
        assert str(caught.value) == message


def test_preconditioned_sharpness_needs_an_optimizer():
    message = (
        "Expected an optimizer, whose state holds the metric of preconditioned_sharpness, but got none. From "
        "Python, pass options={'preconditioned_sharpness': {'optimizer': optimizer}}; the command line "
        "cannot. hessian_top_eigenvalue does without."
    )
    with pytest.raises(UndefinedMeasureError) as caught:
        measured(smooth(), data(), PRECONDITIONED)
    assert str(caught.value) == message
    notes = flatness.measure(smooth(), data(), measures="all", progress=False).notes
    assert f"not computed for the whole network: preconditioned_sharpness. {message}" in notes


def test_a_state_without_second_moments_is_refused():
    model, optimizer = trained()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(OptionError, match="to remember max_exp_avg_sq of '0"):
        measured(model, data(), PRECONDITIONED, optimizer=optimizer)
    for state in optimizer.state.values():
        del state["exp_avg_sq"]
    optimizer.param_groups[0]["amsgrad"] = False
    for measure in (CRITICAL, PRECONDITIONED):
        with pytest.raises(OptionError) as caught:
            measured(model, data(), measure, optimizer=optimizer)
        assert str(caught.value) == (
            "Expected Adam to remember exp_avg_sq of '0.weight' but its state has only step, exp_avg. Load "
            "a state saved by the same kind of optimizer with the same options."
        )


def test_a_saved_report_tells_the_optimizers_settings(tmp_path):
    model, optimizer = trained(torch.optim.SGD, momentum=0.9)
    report = flatness.measure(
        model,
        data(),
        measures=CRITICAL,
        options={CRITICAL: {"optimizer": optimizer, "update_data": data(9)}},
        progress=False,
    )
    report.save(tmp_path / "report.json")
    loaded = flatness.Report.load(tmp_path / "report.json")
    options = loaded.meta["options"][CRITICAL]
    assert options["optimizer"] == (
        "SGD(lr=0.02, momentum=0.9, dampening=0, weight_decay=0, nesterov=False, maximize=False)"
    )
    assert [text.split()[0] for text in options["update_data"]] == ["float64[9,", "int64[9]"]
    assert loaded.result(CRITICAL).terms == report.result(CRITICAL).terms


def test_a_risk_that_overflows_has_risen():
    """Steep enough that the first rate tried overflows float32; the crossing is that of float64."""

    def steep(output, target):
        return (30 * output.square().sum(1)).exp() - 1

    model, found = nn.Linear(4, 1), {}
    with torch.no_grad():
        model.weight.fill_(0.3)
        model.bias.fill_(-0.4)
    given = data()[0].float().clamp(-1, 1), torch.zeros(23)
    for dtype in (torch.float32, torch.float64):
        row = measured(model, given, loss=steep, direction=torch.ones(5), settings={"dtype": dtype})
        found[dtype] = row.value
    assert found[torch.float32] == pytest.approx(found[torch.float64], rel=0.01)
