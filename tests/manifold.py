"""The spectral norm of the Riemannian Hessian of Rangamani et al. 2019, from its definition.

On the quotient manifold the inverse metric is D: ‖W_l‖² on the entries of W_l and ‖b_l‖² on those of b_l. The
Riemannian Hessian D·H has the spectrum of the symmetric D^½ H D^½. Nothing of the library is imported.
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

Risk = Callable[[nn.Module], Tensor]


class RiemannianHessian:
    """v ↦ D^½ H D^½ v over all parameters, in the model's own precision; the graph is built once."""

    def __init__(self, model: nn.Module, risk: Risk) -> None:
        self.parameters = list(model.parameters())
        self.gradients = torch.autograd.grad(risk(model), self.parameters, create_graph=True)
        norms = [parameter.detach().norm() for parameter in self.parameters]
        self.root = torch.cat(
            [norm.expand(p.numel()) for norm, p in zip(norms, self.parameters, strict=True)]
        )
        self.products = 0

    def __matmul__(self, v: Tensor) -> Tensor:
        parts = (self.root * v).split([parameter.numel() for parameter in self.parameters])
        inner = sum(
            (g.flatten() @ part for g, part in zip(self.gradients, parts, strict=True)), torch.zeros(())
        )
        found = torch.autograd.grad(inner, self.parameters, retain_graph=True)
        self.products += 1
        return self.root * torch.cat([part.flatten() for part in found])


def power_method(hessian: RiemannianHessian, tolerance: float = 1e-4, limit: int = 2000) -> float:
    """Algorithm 1 of the paper: |λ|_max, stopped when the eigenvector changes by less than the tolerance."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(len(hessian.root), generator=generator, dtype=hessian.root.dtype)
    v /= v.norm()
    for _ in range(limit):
        w = hessian @ v
        value = float(v @ w)
        w /= w.norm() * (1 if value > 0 else -1)
        change, v = float((w - v).norm()), w
        if change < tolerance:
            break
    return float(v @ (hessian @ v))


def lanczos(hessian: RiemannianHessian) -> float:
    """λ_max by scipy's Lanczos."""

    def product(v: np.ndarray) -> np.ndarray:
        return (hessian @ torch.from_numpy(v.astype(np.float64).ravel())).numpy()

    size = len(hessian.root)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)
    return float(eigsh(operator, k=1, which="LA", v0=start, ncv=10, tol=1e-12, return_eigenvectors=False)[0])
