"""Feature matrices A: Haar orthogonal ones, the family A_δ of Proposition 2, and what a user gives.

All shapes put the copies first and the groups of the layer second: A is (R, G, m, m), W A is (R, G, d, m).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from flatness.errors import OptionError
from flatness.generalization.kernels import Kernel
from flatness.network.layers import Layer


def orthonormal_frames(count: int, m: int, columns: int, generator: Generator) -> Tensor:
    """`columns` orthonormal vectors of R^m, uniform (Haar): (count, m, columns), float64 on the CPU.

    With columns = m these are Haar orthogonal matrices. QR alone is not uniform: its signs must be fixed so
    that the diagonal of R is positive.
    """
    normal = torch.randn(count, m, columns, generator=generator, dtype=torch.float64)
    Q, R = torch.linalg.qr(normal)
    signs = torch.diagonal(R, dim1=-2, dim2=-1).sign()
    return Q * torch.where(signs == 0, 1.0, signs)[:, None, :]


def random_matrices(kernel: Kernel, count: int, groups: int, m: int, generator: Generator) -> Tensor:
    """A = r·O of norm ≤ 1, independent in every group: (count, groups, m, m)."""
    radii = kernel.radii((count, 1, 1, 1), m, generator)
    O = orthonormal_frames(count * groups, m, m, generator)
    return radii * O.reshape(count, groups, m, m)


def random_directions(W: Tensor, kernel: Kernel, count: int, generator: Generator) -> Tensor:
    """W A for A = r·O: (count, G, d, m).

    Only d rows of O enter: with Wᵀ = Q R, W A = Rᵀ (Qᵀ O) and Qᵀ O is uniform among d orthonormal rows. No
    m×m matrix is formed.
    """
    G, d, m = W.shape
    radii = kernel.radii((count, 1, 1, 1), m, generator)
    W = W.detach().cpu().double()
    if d >= m:
        frames = orthonormal_frames(count * G, m, m, generator).reshape(count, G, m, m)
        return radii * (W @ frames)
    R = torch.linalg.qr(W.transpose(1, 2)).R
    frames = orthonormal_frames(count * G, m, d, generator).reshape(count, G, m, d)
    return radii * (R.transpose(1, 2) @ frames.transpose(2, 3))


def given_matrices(matrices: Any, layer: Layer) -> Tensor:
    """A user's matrices as (R, G, size, size), size the layer's features m or its input channels.

    Args:
        matrices: (size, size), (R, size, size) or (R, G, size, size); of the first two, all groups get the
            same.
        layer: The layer they act on.
    """
    G, _, m = layer.matrix().shape
    sizes = sorted({m, m // layer.taps}, reverse=True)
    wanted = " or ".join(f"{size} × {size}" for size in sizes)
    if not isinstance(matrices, Tensor):
        raise OptionError(
            f"Expected matrices to be a number of random ones or a tensor of {wanted} matrices but got "
            f"{type(matrices).__name__}. For example matrices=32, or matrices=torch.eye({m})."
        )
    shape = tuple(matrices.shape)
    if not 2 <= len(shape) <= 4 or shape[-1] != shape[-2] or shape[-1] not in sizes or 0 in shape:
        raise OptionError(
            f"Expected matrices of {wanted}, as {layer.name!r} has {m} features, but got shape "
            f"{list(shape)}. Pass one matrix, or several with their number first."
        )
    if not bool(matrices.isfinite().all()):
        raise OptionError("Expected finite matrices but got NaN or infinity. Check how they were made.")
    A = matrices.detach().cpu().double()
    if A.dim() < 4:
        A = A.reshape(-1, 1, *shape[-2:]).expand(-1, G, -1, -1)
    if A.shape[1] != G:
        raise OptionError(
            f"Expected one matrix for each of the {G} groups of {layer.name!r} but got {A.shape[1]}. Pass "
            f"shape (R, {G}, {m}, {m}), or one matrix for all groups."
        )
    return A


def on_patches(A: Tensor, layer: Layer) -> Tensor:
    """Channel mixing B as the patch-space matrix B ⊗ I_taps; patch-space matrices as they are."""
    m = layer.matrix().shape[2]
    if A.shape[-1] == m:
        return A
    taps = torch.eye(layer.taps, dtype=A.dtype)
    return torch.einsum("rgij,kl->rgikjl", A, taps).reshape(*A.shape[:2], m, m)


def operator_norms(A: Tensor) -> Tensor:
    """‖A‖, the largest singular value, over all groups: (R,)."""
    return torch.linalg.matrix_norm(A, ord=2).amax(1)
