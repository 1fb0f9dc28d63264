"""The batched Lanczos solver against dense eigenvalues."""

import pytest
import torch

from flatness.curvature.operators import lanczos
from flatness.curvature.operators.lanczos import TopEigenvalues


def symmetric(eigenvalues, seed):
    """A symmetric matrix with given eigenvalues in a random basis."""
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(
        torch.randn(len(eigenvalues), len(eigenvalues), generator=generator, dtype=torch.float64)
    )
    return Q @ torch.diag(torch.as_tensor(eigenvalues, dtype=torch.float64)) @ Q.T


def solve(matrices, **arguments):
    A = torch.stack(matrices)
    solver = TopEigenvalues((len(A), A.shape[1]), A.device, **arguments)
    while not solver.done:
        solver.tell(torch.einsum("bij,bj->bi", A, solver.query()))
    solver.verify(torch.einsum("bij,bj->bi", A, solver.vectors))
    return A, solver


def test_finds_the_largest_signed_eigenvalue_of_each_operator():
    spectra = [
        torch.linspace(-9.0, 2.0, 40),
        torch.linspace(0.0, 5.0, 40).square(),
        -torch.linspace(1.0, 3.0, 40),
    ]
    A, solver = solve([symmetric(spectrum, seed) for seed, spectrum in enumerate(spectra)])
    assert solver.converged.all()
    # The tolerance on the residual, 1e-7 of the operator's norm, bounds the error of the eigenvalue.
    assert solver.values.tolist() == pytest.approx([2.0, 25.0, -1.0], rel=1e-6)
    assert (solver.residuals <= 1e-6 * torch.linalg.matrix_norm(A, 2)).all()


def test_restarts_reach_the_same_value_with_a_small_basis():
    A = symmetric(torch.linspace(0.0, 1.0, 200).pow(2), 3)
    _, solver = solve([A], basis_limit=12, max_products=2000)
    assert solver.converged.all()
    assert sum(part.shape[1] for part in solver._parts) <= 13
    assert solver.values.item() == pytest.approx(1.0, rel=1e-6)


def test_long_vectors_come_in_parts_of_their_own_precision(monkeypatch):
    monkeypatch.setattr(lanczos, "_PART_BYTES", 3 * 200 * 4)
    monkeypatch.setattr(lanczos, "_BASIS_BYTES", 0)
    assert lanczos.basis_dtype(200, torch.float64) == torch.float64
    assert (
        lanczos.basis_dtype(200, torch.bfloat16) == lanczos.basis_dtype(200, torch.float32) == torch.float32
    )
    A = symmetric(torch.linspace(-2.0, 1.0, 200).pow(3), 3).float()
    start = torch.ones(1, 200)
    _, solver = solve([A], basis_limit=12, max_products=2000, tolerance=1e-6, start=start)
    assert solver.converged.all()
    assert solver.vectors.dtype == torch.float32
    assert len(solver._parts) > 2
    assert all(part.nbytes <= 3 * 200 * 4 for part in solver._parts)
    assert solver.values.item() == pytest.approx(1.0, rel=2e-6)
    V = torch.cat(solver._parts, 1)[0].double()
    torch.testing.assert_close(V @ V.T, torch.eye(len(V), dtype=torch.float64), rtol=0, atol=2e-6)


def test_zero_rank_one_and_tiny_operators_end_early():
    v = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, solver = solve(
        [torch.zeros(10, 10, dtype=torch.float64), torch.outer(v, v), 1e-200 * torch.outer(v, v)]
    )
    assert solver.converged.all()
    assert solver.products < 10
    assert solver.values.tolist() == pytest.approx([0.0, float(v @ v), 1e-200 * float(v @ v)], rel=1e-10)


def test_one_dimension_is_the_entry_itself():
    _, solver = solve([torch.tensor([[-3.0]], dtype=torch.float64)])
    assert solver.values.item() == -3.0
    assert solver.smallest.item() == -3.0


def test_giving_up_is_reported_with_the_residual():
    A = symmetric(torch.linspace(0.999, 1.0, 300), 5)
    A, solver = solve([A], max_products=6, tolerance=1e-12)
    assert not solver.converged.any()
    assert solver.products == 6
    v = solver.vectors[0]
    assert solver.residuals.item() == pytest.approx(
        float((A[0] @ v - solver.values[0] * v).norm()), rel=1e-12
    )
    assert solver.residuals.item() > 1e-6
