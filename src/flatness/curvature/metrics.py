"""Metrics D that move along when a network is rewritten: the spectrum of D^½ H D^½ stays where H's does not.

A symmetry E(Tθ) = E(θ) that is linear in θ turns H into T⁻ᵀ H T⁻¹, and D = BBᵀ into T D Tᵀ. Eigenvalues other
than 0 are those of Bᵀ H B, for any factor B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatness.curvature.sums.spread import Whitening


class LayerRoot:
    """A factor B of D = W Wᵀ ⊗ 1 on a weight W, or of D = W C Wᵀ ⊗ C⁺.

    With W = P S Qᵀ it is V = P S U, for coordinates U (G, k, m), k the smaller of d and m. Features that are
    whitened by Z take W Y for W, and V Zᵀ for V.

    Args:
        W: The weight (G, d, m), float64.
        whitening: Coordinates in which its features are white, for C.

    Attributes:
        shape: (G, k, m).
        singular: Whether D has directions of length 0 that U leaves out.
    """

    def __init__(self, W: Tensor, whitening: Whitening | None = None) -> None:
        self._whitening = whitening
        P, S, _ = torch.linalg.svd(W if whitening is None else whitening.of_weight(W), full_matrices=False)
        self._left = P * S[:, None]
        G, d, m = W.shape
        self.shape = torch.Size((G, min(d, m), m))
        self.singular = m < d

    def direction(self, U: Tensor) -> Tensor:
        """B U: the direction (G, d, m) of W that coordinates stand for."""
        V = self._left @ U
        return V if self._whitening is None else self._whitening.of_dual_features(V.mT).mT

    def coordinates(self, V: Tensor) -> Tensor:
        """Bᵀ V (G, k, m) of a derivative V (G, d, m)."""
        V = V if self._whitening is None else self._whitening.of_features(V.mT).mT
        return self._left.mT @ V
