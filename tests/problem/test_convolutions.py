"""Convolutions as products: torch's values for many networks at once, however images lie in memory."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flatness.problem.convolutions import AsProducts


class Copies(TorchDispatchMode):
    """Types of elements that are copied."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            self.types.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def networks(samples, dtype, size, last=True):
    """Images of three networks, samples side by side in memory or not, kernels and biases."""
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(3, 2, 7, 8, samples, dtype=dtype, generator=generator).movedim(-1, 1)
    weight = torch.randn(3, 4, 2, *size, dtype=dtype, generator=generator)
    bias = torch.randn(3, 4, dtype=dtype, generator=generator)
    return x if last else x.contiguous(), weight, bias


def convolved(x, weight, bias, banded=False, **options):
    with AsProducts(banded):
        return torch.vmap(lambda *own: F.conv2d(*own, **options))(x, weight, bias)


@pytest.mark.parametrize("samples", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(3, 2), (1, 1)])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"stride": (1, 2), "padding": 1}], ids=str)
@pytest.mark.parametrize("last", [True, False])
def test_many_networks_convolve_as_each_alone(samples, dtype, size, options, last):
    given = networks(samples, dtype, size, last)
    expected = torch.stack([F.conv2d(*own, **options) for own in zip(*given, strict=True)])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    for banded in (False, True):
        with torch.no_grad():
            found = convolved(*given, banded=banded, **options)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    with_gradients = convolved(*given, **options)
    torch.testing.assert_close(with_gradients, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("samples", "dtype", "wide"),
    [
        (8, torch.float32, True),
        (6, torch.float32, False),
        (6, torch.float64, True),
        (7, torch.float64, False),
    ],
)
def test_unfolding_moves_sixteen_bytes_at_a_time_where_samples_divide(samples, dtype, wide):
    given = networks(samples, dtype, (3, 2))
    with torch.no_grad(), Copies() as copies:
        convolved(*given)
    assert copies.types == {torch.complex128 if wide else dtype}


@pytest.mark.parametrize("own_memory", [False, True])
def test_images_that_begin_between_sixteen_bytes_are_copied_as_they_are(own_memory):
    x, weight, bias = networks(8, torch.float32, (3, 2))
    room = torch.frombuffer(bytearray(4 * x.numel() + 4), dtype=torch.float32, offset=4)
    if not own_memory:
        room = torch.empty(x.numel() + 1)[1:]
    shifted = room.view(3, 2, 7, 8, 8).copy_(x.movedim(1, -1)).movedim(-1, 1)
    with torch.no_grad(), Copies() as copies:
        found = convolved(shifted, weight, bias)
    assert copies.types == {torch.float32}
    assert torch.equal(found, convolved(x, weight, bias))


def test_derivatives_of_images_with_samples_last():
    given = [part.requires_grad_() for part in networks(8, torch.float64, (3, 2))]
    expected = torch.stack([F.conv2d(*own) for own in zip(*given, strict=True)])
    reference = torch.autograd.grad(expected.sin().sum(), given)
    found = torch.autograd.grad(convolved(*given).sin().sum(), given)
    for ours, theirs in zip(found, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
