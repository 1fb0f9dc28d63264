"""Feature matrices: Haar, the family A_δ, and the example of petzka2019, App. D.2."""

import math

import torch

from flatness.generalization.kernels import kernel_of
from flatness.generalization.matrices import (
    operator_norms,
    orthonormal_frames,
    random_directions,
    random_matrices,
)


def test_frames_are_orthonormal_and_uniform():
    """E[O] = 0 and E[O_ij²] = 1/m, also on the diagonal, where QR without fixed signs is biased."""
    count, m = 20_000, 3
    O = orthonormal_frames(count, m, m, torch.Generator().manual_seed(0))
    assert torch.allclose(O.transpose(1, 2) @ O, torch.eye(m, dtype=O.dtype).expand(count, m, m), atol=1e-12)
    bound = 4.5 / math.sqrt(count)
    assert float(O.mean(0).abs().max()) < bound / math.sqrt(m)
    assert float((O.square().mean(0) - 1 / m).abs().max()) < bound * 0.35
    # Moments of the trace tell Haar from other rotation-like laws: E[tr O] = 0, E[(tr O)²] = 1.
    trace = O.diagonal(dim1=1, dim2=2).sum(1)
    assert abs(float(trace.mean())) < bound
    assert abs(float(trace.square().mean()) - 1) < bound * math.sqrt(2)


def test_directions_of_a_wide_weight_have_the_moments_of_w_times_haar():
    """E[(WA)ᵀ(WA)] = ‖W‖²/m · I and W A (W A)ᵀ = W Wᵀ, with and without forming A."""
    W = torch.randn(1, 2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    V = random_directions(W, kernel_of("orthogonal"), 20_000, torch.Generator().manual_seed(2))[:, 0]
    assert torch.allclose(V @ V.transpose(1, 2), (W[0] @ W[0].T).expand(20_000, 2, 2), atol=1e-10)
    second = torch.einsum("rst,ruv->stuv", V, V) / len(V)
    expected = torch.einsum("su,tv->stuv", W[0] @ W[0].T, torch.eye(7, dtype=torch.float64) / 7)
    assert float((second - expected).abs().max()) < 5 * float(W.norm() ** 2) / 7 / math.sqrt(20_000) * 2


def test_matrices_of_a_kernel_are_scaled_rotations_independent_between_groups():
    A = random_matrices(kernel_of("uniform"), 500, 2, 4, torch.Generator().manual_seed(0))
    norms = torch.linalg.matrix_norm(A, ord=2)
    assert torch.allclose(norms[:, 0], norms[:, 1])
    assert float(norms.max()) <= 1
    assert torch.allclose(
        A @ A.transpose(2, 3), norms.square()[..., None, None] * torch.eye(4, dtype=torch.float64)
    )
    overlap = torch.einsum("rij,rij->r", A[:, 0], A[:, 1])
    assert abs(float(overlap.mean())) < 4 * float(overlap.std()) / math.sqrt(500)


def test_close_samples_moved_apart_need_a_matrix_of_norm_root_2_over_epsilon():
    """petzka2019, App. D.2: (1, 0, 0) moves along (1, 0, 0), (1, ε, 0) along (0, 1, 0)."""
    epsilon = 0.01
    x = torch.tensor([[1.0, 0, 0], [1.0, epsilon, 0]], dtype=torch.float64)
    moves = torch.tensor([[1.0, 0, 0], [0, 1.0, 0]], dtype=torch.float64)
    A = (torch.linalg.pinv(x) @ moves).T  # the smallest matrix that does it
    assert torch.allclose(x @ A.T, moves)
    assert float(operator_norms(A[None, None])) >= math.sqrt(2) / epsilon
