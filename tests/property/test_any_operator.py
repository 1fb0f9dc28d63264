"""All operators of torch between two layers: what no table knows counts as curved and as not free.

Every function of torch, torch.special and torch.nn.functional, and every method of a tensor, that maps a
batch of vectors to real numbers, sample by sample, stands between two Linear layers. Exact values are held
against the dense Hessian, rewritten networks against outputs on fresh data. Operators that torch adds later
come in by themselves.
"""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flatness
import oracle
from property.budget import LONG, count

PLACES = {"torch": torch, "special": torch.special, "functional": F, "Tensor": torch.Tensor}
# Kinds of rewriting that leave the outputs alone.
EQUAL = ("layerwise", "neuronwise", "permutation")
# They change their operand's storage or the process.
LEFT_OUT = {"set_", "resize_as_", "backward", "retain_grad", "compile", "manual_seed", "share_memory_"}


def operands(x):
    """Ways to call an operator of one or two values."""
    away = x.abs() + 0.5
    yield "x", (x,)
    yield "|x| + 0.5", (away,)
    yield "0.9 tanh x", (0.9 * x.tanh(),)
    yield "x, other", (x, x.flip(-1) * 0.7)
    yield "|x|, other", (away, away.flip(-1))
    yield "x, number", (x, 0.6)
    yield "x, dim", (x, -1)


class Between(nn.Module):
    """Linear, operator, Linear."""

    def __init__(self, function, way, width):
        super().__init__()
        self.function = [function]
        self.way = way
        self.first, self.last = nn.Linear(3, 4), nn.Linear(width, 2)

    def forward(self, x):
        return self.last(middle(self.function[0], self.way, self.first(x)))


def middle(function, way, h):
    """The operator's value, one vector a sample."""
    return function(*dict(operands(h))[way]).flatten(1)


def width_of(function, way):
    """Number of values a sample gets; None where this is no deterministic real function of single samples."""
    h = torch.linspace(-1.3, 1.7, 20, dtype=torch.float64).reshape(5, 4)
    h = h[:, [2, 0, 3, 1]].clone().requires_grad_()
    try:
        value = function(*dict(operands(h))[way])
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64 or not value.requires_grad:
            return None
        if (
            value.dim() < 2
            or len(value) != 5
            or not 0 < value[0].numel() <= 16
            or not bool(value.isfinite().all())
        ):
            return None
        again, alone = function(*dict(operands(h))[way]), function(*dict(operands(h[:2]))[way])
        slopes = torch.autograd.grad(value.sum(), h)[0]
    except Exception:
        return None
    same = torch.equal(value, again) and alone.shape[1:] == value.shape[1:] and torch.equal(alone, value[:2])
    return value[0].numel() if same and bool(slopes.isfinite().all()) else None


def operators(every=1):
    """(place, name, way) of every operator that fits, of each `every`-th name."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, module in PLACES.items():
            for key in dir(module)[::every]:
                function = getattr(module, key, None)
                if (
                    key.startswith("_")
                    or key in LEFT_OUT
                    or not callable(function)
                    or isinstance(function, type)
                ):
                    continue
                ways = [way for way, _ in operands(torch.zeros(1, 1)) if width_of(function, way) is not None]
                found += [(place, key, way) for way in ways]
    return found


def hold(place, key, way):
    """Measure and rewrite one network; what went wrong, in words, or None."""
    function = getattr(PLACES[place], key)
    torch.manual_seed(1)
    model = Between(function, way, width_of(function, way)).double().eval()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2

    def risk(network):
        return F.cross_entropy(network(x), y)

    if not bool(risk(model).isfinite()):
        return None
    with contextlib.suppress(flatness.FlatnessError):
        report = flatness.measure(
            model,
            (x, y),
            measures="hessian_trace",
            layers="first",
            max_passes=2,
            precision=0.5,
            progress=False,
        )
        row = report.result("hessian_trace", layer="first")
        if row.method == "exact":
            try:
                H = oracle.hessian(model, risk, ["first.weight"])
            except RuntimeError as error:
                if "is not implemented" in str(error):  # torch has no second derivative to hold it against
                    return None
                raise
            if not abs(row.value - float(H.trace())) <= 1e-9 * (1e-6 + float(H.abs().sum())):
                return f"trace {row.value} called exact, dense {float(H.trace())}"
    for kind in EQUAL:
        with contextlib.suppress(flatness.FlatnessError):
            equal = flatness.rescale(model, x, kind, low=0.3, high=3.0)
            fresh = 2 * torch.randn(40, 3, dtype=torch.float64)
            difference = float((equal(fresh) - model(fresh)).abs().nan_to_num(0).max())
            if difference > 1e-9:
                return f"{kind} rescaling changes outputs by {difference}"
    return None


def test_no_operator_is_taken_for_what_it_is_not():
    found = operators(1 if LONG else 16)
    assert len(found) > (900 if LONG else 50)
    wrong = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, key, way in found:
            count("operators")
            try:
                said = hold(place, key, way)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            if said:
                wrong[place, key, way] = said
    assert not wrong, wrong


@pytest.mark.parametrize("kind", EQUAL)
def test_a_custom_operator_of_a_library_is_curved_and_not_free(kind):
    @torch.library.custom_op("flatness_tests::relu", mutates_args=())
    def relu(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    relu.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Module(), nn.Linear(4, 2)).double()
    model[1].forward = relu
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2
    with contextlib.suppress(flatness.FlatnessError):
        report = flatness.measure(model, (x, y), measures="hessian_trace", layers="0", progress=False)
        row = report.result("hessian_trace", layer="0")
        H = oracle.hessian(model, lambda network: F.cross_entropy(network(x), y), ["0.weight"])
        assert abs(row.value - float(H.trace())) <= 6 * row.stderr + 1e-12
    with contextlib.suppress(flatness.FlatnessError):
        equal = flatness.rescale(model, x, kind)
        torch.testing.assert_close(equal(3 * x), model(3 * x))
