"""Fast pooling gives torch's values, and leaves other pooling to torch."""

import pytest
import torch
from torch.nn import functional as F

from flatness.problem.pooling import FastPooling


@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (2, 3, 9, 7), (3, 5, 5)])
@pytest.mark.parametrize("size", [2, (2, 3), (1, 2), [3], 5])
def test_windows_side_by_side_have_torchs_maxima(shape, size):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0] = float("nan")
    expected = F.max_pool2d(x, size)
    with torch.no_grad(), FastPooling():
        found = F.max_pool2d(x, size)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "options", [{"stride": 1}, {"padding": 1}, {"dilation": 2}, {"ceil_mode": True}, {"stride": (2, 3)}]
)
def test_other_windows_are_left_to_torch(options):
    x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    expected = F.max_pool2d(x, 2, **options)
    with torch.no_grad(), FastPooling():
        torch.testing.assert_close(F.max_pool2d(x, 2, **options), expected, rtol=0, atol=0)
        assert F.max_pool2d(x, 2, return_indices=True, **options)[1].dtype == torch.int64


def test_it_is_not_torchs_kernel_that_runs():
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    with torch.no_grad(), FastPooling():
        assert "MaxPool" not in type(F.max_pool2d(x, 2).grad_fn).__name__


def test_a_window_larger_than_the_image_is_refused_by_torch():
    with torch.no_grad(), FastPooling(), pytest.raises(RuntimeError):
        F.max_pool2d(torch.randn(1, 1, 3, 3), 4)


@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (2, 3, 9, 7), (3, 5, 5)])
@pytest.mark.parametrize("size", [2, (2, 3), (1, 2), 4])
def test_derivatives_go_where_torch_sends_them(shape, size):
    """Also among equal entries (a ReLU makes many zeros), and for images that lie otherwise in memory."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).relu()
    x = x.transpose(-2, -3).contiguous().transpose(-2, -3).requires_grad_()
    expected = F.max_pool2d(x, size)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (reference,) = torch.autograd.grad(expected, x, weights)
    with FastPooling(derivatives=True):
        found = F.max_pool2d(x, size)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert type(found.grad_fn).__name__ == "_TracedBackward"
    (derivative,) = torch.autograd.grad(found, x, weights)
    torch.testing.assert_close(derivative, reference, rtol=0, atol=0)
    assert derivative.stride() == x.stride()


def test_derivatives_of_many_networks_at_once():
    x = torch.randn(4, 2, 3, 6, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with FastPooling(derivatives=True):
        found = torch.vmap(lambda one: F.max_pool2d(one, 2))(x)
    expected = F.max_pool2d(x.flatten(0, 1), 2).unflatten(0, (4, 2))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (derivative,) = torch.autograd.grad(found.square().sum(), x)
    (reference,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(derivative, reference, rtol=0, atol=0)


def test_large_windows_with_derivatives_are_left_to_torch():
    x = torch.randn(1, 1, 10, 10, requires_grad=True)
    with FastPooling(derivatives=True):
        assert "MaxPool" in type(F.max_pool2d(x, 5).grad_fn).__name__


def test_pooling_of_single_entries_is_not_the_image_itself():
    x = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    with torch.no_grad(), FastPooling():
        F.relu_(F.max_pool2d(x, 1))
    assert torch.equal(x, before)


def test_where_gradients_are_on_equal_entries_share_none():
    x = torch.ones(1, 1, 4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(F.max_pool2d(x, 2).sum(), x)
    with FastPooling():
        (found,) = torch.autograd.grad(F.max_pool2d(x, 2).sum(), x)
    assert torch.equal(found, expected)
