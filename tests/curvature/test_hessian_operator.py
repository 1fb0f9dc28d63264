"""Products with the network's Hessian, moves in parameter space, squared gradients: against dense truth."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from flatness.curvature.parameters.hessian_operator import HessianOperator
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.sums.squared_gradients import squared_gradients
from flatness.errors import DifferentiabilityError, LossError
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from flatness.problem.problem import Problem
from networks import CASES, ragged_batches
from untouched import untouched

NAMES = [
    "mlp",
    "mlp_no_bias",
    "cnn_max_pool",
    "cnn_grouped",
    "residual_batch_norm",
    "two_heads",
    "dense_concat",
]


def smooth():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)).double()


def given(n=21):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def names_of(model):
    return [name for name, _ in model.named_parameters()]


def matrix(operator):
    return torch.stack(operator(list(torch.eye(operator.space.dimension, dtype=torch.float64))), 1)


@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("name", ["cross_entropy", "bce"])
def test_a_float32_network_that_is_sure_and_right_keeps_its_curvature(name, curvature):
    model, x = nn.Sequential(nn.Linear(5, 3)), given()[0]
    model[0].bias.data = torch.tensor([18.0, 0, 0] if name == "cross_entropy" else [18.0, 17, 19])
    y = torch.zeros(21).long() if name == "cross_entropy" else torch.ones(21, 3)
    double = copy.deepcopy(model).double()
    loss = F.cross_entropy if name == "cross_entropy" else F.binary_cross_entropy_with_logits
    H = oracle.hessian(
        double, oracle.mean_risk(x, y if y.dtype == torch.long else y.double(), loss), names_of(model)
    )
    options = {"loss": name, "curvature": curvature, "progress": False}
    report = flatness.measure(model, (x.float(), y), measures="hessian_top_eigenvalue", **options)
    assert float(torch.linalg.eigvalsh(H)[-1]) < 1e-6
    found = report.value("hessian_top_eigenvalue", layer=None, reduction=None)
    assert found == pytest.approx(oracle.top_eigenvalue(H), rel=1e-4)


@pytest.mark.parametrize("kept", [0, 1000, 2**40])
@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
def test_products_are_those_of_the_dense_hessian(kept, curvature):
    model, (x, y) = smooth(), given()
    data = ragged_batches(x, y, (8, 8, 5))
    problem = Problem(model, data, weight_decay=0.1, progress=False)
    with problem.guarded(), untouched(model):
        space = ParameterSpace(problem)
        space.risk()
        operator = HessianOperator(space, curvature=curvature, graph_bytes=kept)
        first, second = matrix(operator), matrix(operator)
    if curvature == "hessian":
        H = oracle.hessian(model, oracle.mean_risk(x, y, F.cross_entropy), names_of(model))
    else:
        H = oracle.gauss_newton(model, x, names_of(model), oracle.output_hessian(y, F.cross_entropy))
    H = H + 0.1 * torch.eye(len(H), dtype=torch.float64)
    torch.testing.assert_close(first, H, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(second, H, rtol=1e-10, atol=1e-12)
    assert problem.micro_batch == (256 if kept < 2**40 else 1)  # enormous graphs come one at a time


def test_a_subset_of_the_parameters_has_its_block():
    model, (x, y) = smooth(), given()
    chosen = ["2.weight", "0.bias"]
    problem = Problem(model, (x, y), progress=False)
    with problem.guarded():
        H = matrix(HessianOperator(ParameterSpace(problem, chosen)))
    expected = oracle.hessian(model, oracle.mean_risk(x, y, F.cross_entropy), chosen)
    torch.testing.assert_close(H, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kept", [0, 1000])
def test_frozen_parameters_count_and_stay_frozen(kept):
    model, (x, y) = smooth(), given()
    expected = oracle.hessian(model, oracle.mean_risk(x, y, F.cross_entropy), names_of(model))
    model[0].weight.requires_grad_(False)
    problem = Problem(model, (x, y), progress=False)
    with problem.guarded(), untouched(model):
        space = ParameterSpace(problem)
        space.risk()
        H = matrix(HessianOperator(space, graph_bytes=kept))
    torch.testing.assert_close(H, expected, rtol=1e-10, atol=1e-12)
    assert not model[0].weight.requires_grad


def test_risk_gradient_and_error_rate_after_a_move():
    model, (x, y) = smooth(), given()
    problem = Problem(model, ragged_batches(x, y, (8, 8, 5)), weight_decay=0.3, progress=False)
    with problem.guarded(), untouched(model):
        space = ParameterSpace(problem)
        move = torch.linspace(-1, 1, space.dimension, dtype=torch.float64)
        risk, (again, gradient), errors = space.risk(move), space.gradient(move), space.error_rate(move)
        at_rest = space.error_rate()
    assert at_rest == pytest.approx(float((model(x).argmax(1) != y).double().mean()))
    with torch.no_grad():
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()) + move, model.parameters()
        )
    theta = nn.utils.parameters_to_vector(model.parameters())
    truth = F.cross_entropy(model(x), y) + 0.15 * theta.square().sum()
    slope = torch.autograd.grad(truth, list(model.parameters()))
    assert risk == pytest.approx(truth.item(), rel=1e-12)
    assert again == pytest.approx(truth.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in slope]), rtol=1e-10, atol=1e-12)
    assert errors == pytest.approx(float((model(x).argmax(1) != y).double().mean()))


def test_a_move_is_undone_after_an_error():
    model, (x, y) = smooth(), given()
    problem = Problem(model, (x, y), progress=False)
    space = ParameterSpace(problem)

    def interrupted():
        with problem.guarded(), space.moved(torch.ones(space.dimension)):
            raise KeyboardInterrupt

    with untouched(model), pytest.raises(KeyboardInterrupt):
        interrupted()


def test_an_error_rate_needs_classes():
    model, (x, _) = smooth(), given()
    problem = Problem(model, (x, torch.zeros(21, 3, dtype=torch.float64)), "mse", progress=False)
    with problem.guarded(), pytest.raises(LossError) as caught:
        ParameterSpace(problem).error_rate()
    assert str(caught.value) == (
        "Expected a classification loss, as an accuracy is needed, but got 'mse'. Use 'cross_entropy' or "
        "'bce' with class targets."
    )


def per_sample_squares(model, case):
    """E(∂_i ℓ)² by one backward pass per sample."""
    total = 0.0
    for x, y in zip(case.x, case.y, strict=True):
        loss = F.cross_entropy(model(x[None]), y[None])
        found = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        total = total + torch.cat([g.flatten() for g in found]).square()
    return total / len(case.x)


@pytest.mark.parametrize("name", NAMES)
def test_squared_gradients_are_those_of_a_loop_over_samples(name):
    case = CASES[name]
    model = case.build()
    problem = Problem(model, ragged_batches(case.x, case.y, (7, len(case.x) - 7)), progress=False)
    with untouched(model), problem.guarded():
        plan = make_plan(problem, measure_request("weight_norm"))
        assert plan.gradient_routes.layers
        found = squared_gradients(ParameterSpace(problem), plan.gradient_routes).means
        plan.gradient_routes.layers.pop()
        plan.gradient_routes.affine.clear()
        slow = squared_gradients(ParameterSpace(problem), plan.gradient_routes).means
    expected = per_sample_squares(model.eval(), case)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(slow, expected, rtol=1e-10, atol=1e-14)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def test_operators_without_a_second_derivative_are_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()

        def forward(self, x):
            return self.head(Once.apply(self.fc(x)))

    problem = Problem(Net(), given(), progress=False)
    # The Gauss-Newton part as well: torch would leave the share of what lies before the operator out.
    for curvature in ("hessian", "gauss_newton"):
        with problem.guarded(), pytest.raises(DifferentiabilityError) as caught:
            matrix(HessianOperator(ParameterSpace(problem), curvature=curvature))
        assert str(caught.value) == (
            "Expected operators with second derivatives but Once is marked as once_differentiable. Write its "
            "backward out of torch operators and take the mark away, or pass "
            "curvature='finite_differences', which takes first derivatives at two points."
        )
