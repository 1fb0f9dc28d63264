"""The kernel for all points: the values of the plain formula, and a run that goes on without it.

Without a GPU the kernel runs in Triton's interpreter: pip install triton, and TRITON_INTERPRET=1.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatness.landscape import fused as module
from flatness.landscape import mixing
from flatness.landscape.fused import Fused, launched
from flatness.landscape.mixing import Mixed
from flatness.landscape.points import Points
from flatness.problem.problem import Problem

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
compiled_or_interpreted = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device, or Triton and TRITON_INTERPRET=1"
)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def plain(weights, maps):
    """(points, K + 1) and (samples, K + 1, 4, …) in float64, rounded once."""
    mixed = torch.einsum("pk,skq...->spq...", weights.double(), maps.double())
    return mixed.amax(2).relu().to(maps.dtype)


def spoiled(maps):
    """NaN at each of the four places and in each map, and infinities of both signs."""
    count = maps.shape[1]
    for place in range(4):
        maps[:, place % count, place, ..., place] = float("nan")
    maps[:, 0, 1, ..., 5] = float("inf")
    maps[:, 0, :, ..., 6] = float("-inf")
    return maps


@compiled_or_interpreted
@pytest.mark.parametrize("directions", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("samples", "shape"), [(1, (3, 5, 7, 11)), (3, (2, 3, 9)), (2, (8, 128)), (1, (7,)), (5, (1, 513))]
)
def test_the_kernel_has_the_values_of_the_plain_formula(directions, samples, shape):
    """Blocks of 512: whole ones, ragged ones, a few entries."""
    weights, maps = drawn(5, directions + 1), drawn(samples, directions + 1, 4, *shape)
    found = launched(weights, maps)
    # Sums of four terms of order one, each rounded to 2⁻²⁴ relative
    torch.testing.assert_close(found, plain(weights, maps), rtol=1e-6, atol=2e-6)
    assert found.is_contiguous()
    assert (found == 0).any() or found.numel() < 100


@compiled_or_interpreted
@pytest.mark.parametrize("directions", [1, 2, 3])
def test_what_is_not_finite_goes_through_the_kernel_as_through_torch(directions):
    weights, maps = drawn(6, directions + 1), spoiled(drawn(2, directions + 1, 4, 600))
    weights[:, 0] = 1
    found, expected = launched(weights, maps), plain(weights, maps)
    assert expected[..., :4].isnan().all()
    assert (expected[..., 5] == float("inf")).all()
    assert (expected[..., 6] == 0).all()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_points_at_once_are_points_one_by_one(side_by_side, dtype):
    """Whatever does it on this device; also what is not finite."""
    weights, maps = drawn(6, 3, dtype=dtype), spoiled(drawn(9, 3, 4, 2, 5, 8, dtype=dtype))
    if side_by_side:
        maps = maps.movedim(0, -1).contiguous().movedim(-1, 0)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-14
    with torch.no_grad():
        found = torch.vmap(Mixed.apply, in_dims=(0, None, None))(weights, maps, True)
        alone = torch.stack([Mixed.apply(row, maps, True) for row in weights])
        mixed = torch.vmap(Mixed.apply, in_dims=(0, None, None))(weights, maps, False)
    expected = plain(weights, maps).movedim(1, 0)
    for each in (found, alone):
        torch.testing.assert_close(each, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(
        mixed, torch.einsum("pk,sk...->ps...", weights, maps), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    memory = found.movedim(1, -1) if side_by_side else found.movedim(1, 0)
    assert memory.is_contiguous()


COEFFICIENTS = torch.tensor([[0.3, -0.2], [0.0, 0.5], [-1.5, 2.0]], dtype=torch.float64)


def surface(engine, bias, still=False):
    """Losses at some points of a network whose first layer is pooled, and those of networks set to them."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=bias), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    ).to(DEVICE)
    data = drawn(8, 2, 6, 6), torch.arange(8, device=DEVICE) % 3
    moving = {name: value for name, value in model.named_parameters() if not (still and name == "0.bias")}
    directions = [{name: 0.5 * torch.randn_like(value) for name, value in moving.items()} for _ in "ab"]
    expected = []
    for row in COEFFICIENTS.tolist():
        values = dict(model.named_parameters())
        for c, direction in zip(row, directions, strict=True):
            values = {name: value + c * direction.get(name, 0) for name, value in values.items()}
        with torch.no_grad():
            output = torch.func.functional_call(model, values, (data[0],))
            expected.append(float(F.cross_entropy(output, data[1])))
    problem = Problem(model, data, batch_size=4, progress=False)
    with problem.guarded():
        found = Points(problem, engine=engine, fixed_batch=True).along(directions)(COEFFICIENTS)
    return found[:, 0], torch.tensor(expected, dtype=torch.float64)


@compiled_or_interpreted
@pytest.mark.parametrize("engine", ["unfolded", "windowed", "grouped"])
@pytest.mark.parametrize(("bias", "still"), [(True, False), (True, True), (False, False)])
def test_engines_run_the_kernel(engine, bias, still, monkeypatch):
    monkeypatch.setattr(Fused, "takes", staticmethod(lambda maps: maps.dtype == torch.float32))
    kernel, calls = Fused(), []
    monkeypatch.setattr(mixing, "fused", kernel)
    monkeypatch.setattr(module, "launched", lambda *args: calls.append(args) or launched(*args))
    found, expected = surface(engine, bias, still)
    assert (len(calls), kernel.failure) == (2, None)  # batches of 4 out of 8
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("engine", ["unfolded", "windowed"])
def test_a_kernel_that_cannot_be_compiled_is_tried_once_and_the_run_goes_on(engine, monkeypatch):
    calls, broken = [], RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    def failing(*args):
        calls.append(args)
        raise broken

    kernel = Fused()
    monkeypatch.setattr(Fused, "takes", staticmethod(lambda maps: True))
    monkeypatch.setattr(mixing, "fused", kernel)
    monkeypatch.setattr(module, "launched", failing)
    found, expected = surface(engine, bias=True)
    assert (len(calls), kernel.failure) == (1, repr(broken))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_running_out_of_memory_is_no_failure_of_the_kernel(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    kernel = Fused()
    monkeypatch.setattr(Fused, "takes", staticmethod(lambda maps: True))
    monkeypatch.setattr(module, "launched", full)
    with pytest.raises(torch.OutOfMemoryError):
        kernel(drawn(2, 2), drawn(1, 2, 4, 3))
    assert kernel.failure is None


def test_the_kernel_is_for_single_precision_on_a_gpu():
    assert Fused.takes(drawn(1, 2, 4, 3)) == (DEVICE == "cuda")
    assert not Fused.takes(drawn(1, 2, 4, 3, dtype=torch.float64))
    assert not Fused.takes(drawn(1, 2, 4, 0))
