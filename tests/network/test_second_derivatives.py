"""Stand-ins for torch's operators against torch's own derivatives, and against differences."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flatness
from flatness.errors import DifferentiabilityError
from flatness.network.graph import nodes_behind
from flatness.network.operators import STANDS_FOR
from flatness.network.second_derivatives import SecondDerivatives

IMAGE, KERNEL, HEADS = (2, 4, 5, 4), (6, 4, 3, 2), [(2, 2, 3, 4)] * 3


def stand_ins(output):
    return [node for node in nodes_behind(output) if hasattr(node, STANDS_FOR)]


def convolution(convolve=F.conv2d, **options):
    return lambda x, W, b=None: convolve(x, W, b, **options)


def batch_norm(training, **options):
    def run(x, *weight_and_bias):
        mean, var = (torch.linspace(*ends, 4).to(x) for ends in ((-1, 1), (0.5, 2)))
        return F.batch_norm(x, mean, var, *weight_and_bias, training=training, **options)

    return run


def attention(mask=None, **options):
    def run(Q, K, V):
        hidden = None if mask is None else mask.to(Q.device)
        return F.scaled_dot_product_attention(Q, K, V, hidden, **options)

    return run


def layer_norm(*shape, **options):
    return lambda x, *weight_and_bias: F.layer_norm(x, shape, *weight_and_bias, **options)


def some_hidden(*shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 1, :] = False  # a row that sees nothing
    return mask


CONVOLUTIONS = {
    "plain": (convolution(), [IMAGE, KERNEL, (6,)]),
    "without bias": (convolution(), [IMAGE, KERNEL]),
    "strides": (convolution(stride=(2, 1)), [IMAGE, KERNEL, (6,)]),
    "rows left over": (convolution(stride=2, padding=1), [(2, 4, 6, 5), KERNEL, (6,)]),
    "padding": (convolution(padding=(1, 2)), [IMAGE, KERNEL, (6,)]),
    "holes": (convolution(dilation=(1, 2), padding=1), [IMAGE, KERNEL, (6,)]),
    "groups": (convolution(groups=2), [IMAGE, (6, 2, 3, 2), (6,)]),
    "channel by channel": (convolution(groups=4), [IMAGE, (4, 1, 3, 2), (4,)]),
    "signals": (convolution(F.conv1d, padding=1, stride=2), [(2, 3, 7), (4, 3, 3), (4,)]),
    "volumes": (convolution(F.conv3d, padding=1), [(2, 2, 3, 2, 3), (3, 2, 2, 3, 2), (3,)]),
}
NORMS = {
    "batch norm": (batch_norm(True), [(5, 4, 3, 2), (4,), (4,)]),
    "batch norm of vectors": (batch_norm(True, eps=0.1), [(5, 4), (4,), (4,)]),
    "batch norm of turned images": (
        lambda x, *given: batch_norm(True)(x.permute(3, 2, 1, 0), *given),
        [(2, 3, 4, 5), (4,), (4,)],
    ),
    "batch norm without weight": (batch_norm(True), [(5, 4, 3)]),
    "running statistics": (batch_norm(False), [(5, 4, 3), (4,), (4,)]),
    "running statistics without weight": (batch_norm(False, eps=0.1), [(5, 4)]),
    "layer norm": (layer_norm(4), [(5, 3, 4), (4,), (4,)]),
    "layer norm of two axes": (layer_norm(3, 4, eps=0.1), [(5, 3, 4), (3, 4), (3, 4)]),
    "layer norm without bias": (layer_norm(4), [(5, 4), (4,)]),
    "layer norm without weight": (layer_norm(4), [(5, 3, 4)]),
}
ATTENTION = {
    "attention": (attention(), HEADS),
    "one head": (attention(), [(2, 3, 4)] * 3),
    "other lengths": (attention(scale=0.3), [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)]),
    "causal": (attention(is_causal=True), HEADS),
    "causal and shorter": (attention(is_causal=True), [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)]),
    "hidden keys": (attention(some_hidden(2, 1, 3, 3)), HEADS),
    "a mask that is added": (attention(torch.randn(3, 3, dtype=torch.float64)), HEADS),
}
CASES = CONVOLUTIONS | NORMS | ATTENTION | {"GELU": (F.gelu, [(5, 4)])}
SUMMED_OTHERWISE = {*ATTENTION, "batch norm of turned images"}


def numbers(shapes, trained=None, device="cpu"):
    """Random tensors, all or some of which require gradients."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]
    for one in given if trained is None else trained:
        (one if trained is None else given[one]).requires_grad_()
    return given


def stood_in(function):
    @functools.wraps(function)
    def run(*given):
        with SecondDerivatives():
            return function(*given)

    return run


def derivatives(function, shapes, trained, followed, device):
    """The output, first derivatives, and derivatives of a function of those that are followed on."""
    given = numbers(shapes, trained, device)
    z = function(*given)
    inputs = [given[one] for one in trained]
    first = torch.autograd.grad(z.sin().sum(), inputs, create_graph=True)
    total = torch.stack([first[trained.index(one)].pow(3).sum() for one in followed]).sum()
    return [z, *first, *torch.autograd.grad(total, inputs, materialize_grads=True)]


def subsets(sequence):
    sizes = range(1, len(sequence) + 1)
    return [part for size in sizes for part in itertools.combinations(sequence, size)]


ON_A_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
@pytest.mark.parametrize("case", CASES)
def test_all_derivatives_are_torchs(case, device):
    function, shapes = CASES[case]
    for trained in subsets(range(len(shapes))):
        for followed in subsets(trained):
            own = derivatives(stood_in(function), shapes, trained, followed, device)
            with sdpa_kernel(SDPBackend.MATH):
                expected = derivatives(function, shapes, trained, followed, device)
            assert stand_ins(own[0])
            assert torch.equal(own[0], expected[0]) or case in SUMMED_OTHERWISE
            torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_all_derivatives_are_limits_of_differences(case):
    function, shapes = CASES[case]
    assert torch.autograd.gradcheck(stood_in(function), numbers(shapes))
    assert torch.autograd.gradgradcheck(stood_in(function), numbers(shapes))


@pytest.mark.parametrize("case", ["plain", "batch norm", "layer norm", "attention", "GELU"])
def test_third_derivatives_are_refused(case):
    function, shapes = CASES[case]
    given = numbers(shapes)
    (first, *_) = torch.autograd.grad(stood_in(function)(*given).sin().sum(), given, create_graph=True)
    (second, *_) = torch.autograd.grad(first.pow(3).sum(), given, create_graph=True)
    with pytest.raises(DifferentiabilityError, match="a gradient that is not differentiated itself"):
        second.sum().backward()


class GradientsOfKernels(TorchDispatchMode):
    """Counts those that convolutions compute."""

    def __init__(self):
        super().__init__()
        self.computed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.computed += args[-1][1]
        return func(*args, **(kwargs or {}))


def test_gradients_of_kernels_are_computed_where_they_are_asked_for():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 3, 6, 6)
    with SecondDerivatives():
        hidden = model[:2](x)
        z = model[2](hidden)
    with GradientsOfKernels() as kernels:
        (signal,) = torch.autograd.grad(z.sin().sum(), hidden, create_graph=True)
    assert kernels.computed == 0
    with kernels:
        torch.autograd.grad(z.sin().sum(), model[2].weight, retain_graph=True)
    assert kernels.computed == 1
    with kernels:
        torch.autograd.grad(signal.square().sum(), hidden, retain_graph=True)
    assert kernels.computed == 1
    with kernels:
        signal.square().sum().backward()
    # Twice for the second kernel, which is used in the signal and before it; once for the first.
    assert kernels.computed == 4


def test_types_under_autocast_are_torchs():
    torch.manual_seed(0)
    modules = {
        nn.Conv2d(3, 3, 3): (2, 3, 5, 5),
        nn.BatchNorm2d(3, track_running_stats=False): (2, 3, 5, 5),
        nn.LayerNorm(4): (3, 4),
        nn.GELU(): (3, 4),
    }
    functions = {**modules, lambda q: F.scaled_dot_product_attention(q, q, q): (2, 3, 4)}
    for function, shape in functions.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            if dtype == torch.float64 and function in modules:
                continue
            x, gradients = torch.randn(shape).to(dtype), []
            for context in (SecondDerivatives(), sdpa_kernel(SDPBackend.MATH)):
                given = x.clone().requires_grad_()
                with torch.autocast("cpu", dtype=torch.bfloat16), context:
                    z = function(given)
                (first,) = torch.autograd.grad(z.float().square().sum(), given, create_graph=True)
                gradients.append([z, first, *torch.autograd.grad(first.float().square().sum(), given)])
            assert [one.dtype for one in gradients[0]] == [one.dtype for one in gradients[1]]
            torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05)


LEFT_TO_TORCH = {
    "paddings by name": lambda x, W: F.conv2d(x, W, padding="same"),
    "a single image": lambda x, W: F.conv2d(x[0], W),
    "dropout": lambda x, W: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "shared heads": lambda x, W: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True),
    "learnt masks": lambda x, W: F.scaled_dot_product_attention(x, x, x, W[0, 0, 0, 0].expand(5, 5)),
    "a vector": lambda x, W: F.scaled_dot_product_attention(*3 * [x[0, 0]]),
    "a bias alone": lambda x, W: F.layer_norm(x, (4,), None, W[0, :, 0, 0]),
    "a bias alone in batch norm": lambda x, W: F.batch_norm(x, None, None, None, W[0, :, 0, 0], True),
    "GELU by tanh": lambda x, W: F.gelu(x, approximate="tanh"),
    "complex numbers": lambda x, W: F.conv2d(x * 1j, W * 1j),
    "gradients of functions": lambda x, W: torch.func.grad(lambda x: F.conv2d(x, W).sum())(x),
    "maps": lambda x, W: torch.vmap(lambda x: F.conv2d(x[None], W))(x),
    "checkpoints": lambda x, W: checkpoint(F.conv2d, x, W, use_reentrant=False),
}


@pytest.mark.parametrize("case", LEFT_TO_TORCH)
def test_what_is_left_to_torch(case):
    results = []
    for context in (SecondDerivatives(), torch.enable_grad()):
        torch.manual_seed(0)
        x, W = numbers([(2, 4, 5, 4), (4, 4, 3, 3)])
        with context, sdpa_kernel(SDPBackend.MATH):
            z = LEFT_TO_TORCH[case](x, W)
        assert not stand_ins(z)
        results.append([z, *torch.autograd.grad(z.abs().sum(), (x, W), allow_unused=True)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_tensors_without_gradients_are_left_to_torch():
    x, W = numbers([IMAGE, KERNEL])
    with SecondDerivatives():
        assert F.conv2d(x.detach(), W.detach()).grad_fn is None
        with torch.no_grad():
            assert F.conv2d(x, W).grad_fn is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: F.batch_norm(torch.randn(1, 3, requires_grad=True), None, None, training=True),
        lambda: F.conv2d(torch.randn(2, 3, 4, 4), torch.randn(2, 2, 3, 3, requires_grad=True)),
        lambda: F.layer_norm(torch.randn(2, 3, requires_grad=True), (4,)),
        lambda: F.scaled_dot_product_attention(
            *torch.randn(2, 2, 3, 4, requires_grad=True), torch.randn(2, 4, 5)
        ),
    ],
)
def test_errors_are_torchs(wrong):
    said = []
    for context in (SecondDerivatives(), torch.enable_grad()):
        with context, pytest.raises((ValueError, RuntimeError)) as caught:
            wrong()
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_checkpoints_are_penalised_like_the_network_they_save_memory_for():
    class Saved(nn.Module):
        def __init__(self, saves):
            super().__init__()
            self.saves, self.head = saves, nn.Linear(6, 3)
            self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 6))

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False) if self.saves else self.body(x))

    batch, gradients = (torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))), []
    for saves in (False, True):
        torch.manual_seed(0)
        model = Saved(saves).double()
        flatness.penalty(model, batch, layers=None, seed=0).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
