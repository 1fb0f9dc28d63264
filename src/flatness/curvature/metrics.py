"""Metrics D that move along when a network is rewritten: the spectrum of D^½ H D^½ stays where H's does not.

A symmetry E(Tθ) = E(θ) that is linear in θ turns H into T⁻ᵀ H T⁻¹, and D = BBᵀ into T D Tᵀ. Eigenvalues other
than 0 are those of Bᵀ H B, for any factor B.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

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
        self._P, self._S = P, S
        G, d, m = W.shape
        self.shape = torch.Size((G, min(d, m), m))
        self.singular = m < d

    @property
    def positive(self) -> bool:
        """Whether any direction has a length."""
        return bool(self._S.any())

    def direction(self, U: Tensor) -> Tensor:
        """B U: the direction (G, d, m) of W that coordinates stand for."""
        V = (self._P * self._S[:, None]) @ U
        return V if self._whitening is None else self._whitening.of_dual_features(V.mT).mT

    def coordinates(self, V: Tensor) -> Tensor:
        """Bᵀ V (G, k, m) of a derivative V (G, d, m)."""
        V = V if self._whitening is None else self._whitening.of_features(V.mT).mT
        return (self._P * self._S[:, None]).mT @ V

    def apply(self, V: Tensor) -> Tensor:
        """D^½ V, the symmetric root, for a direction V (G, d, m)."""
        V = V if self._whitening is None else self._whitening.root_times(V.mT).mT
        return self._P @ (self._S[:, :, None] * (self._P.mT @ V))


class Root(ABC):
    """D^½ on a vector of parameters.

    Attributes:
        mask: Where parameters have a metric; the others stay where they are.
    """

    mask: Tensor

    @abstractmethod
    def __call__(self, vector: Tensor) -> Tensor:
        """D^½ v."""

    @abstractmethod
    def on(self, chosen: Tensor) -> Root:
        """The same on the entries where `chosen` is 1, which are whole parameters, and 0 elsewhere."""


class DiagonalRoot(Root):
    """D is diagonal.

    Args:
        values: The diagonal of D^½; 0 where a parameter is left out.
    """

    def __init__(self, values: Tensor) -> None:
        self.values, self.mask = values, values > 0

    def __call__(self, vector: Tensor) -> Tensor:
        """One product for each entry."""
        return (self.values * vector).to(vector.dtype)

    def on(self, chosen: Tensor) -> DiagonalRoot:
        """Products of both."""
        return DiagonalRoot(self.values * chosen)


@dataclass(frozen=True)
class Block:
    """The metric of one layer's weight, and where in the vector of parameters its entries stand (G, d, m)."""

    places: Tensor
    root: LayerRoot


class BlockRoot(Root):
    """D has a block for the weight of every layer; other parameters have no metric.

    Args:
        blocks: The layers.
        like: Any vector of parameters.
    """

    def __init__(self, blocks: Iterable[Block], like: Tensor) -> None:
        self._blocks, self._like = list(blocks), like
        self.mask = torch.zeros_like(like, dtype=torch.bool)
        for block in self._blocks:
            self.mask[block.places] = block.root.positive

    def __call__(self, vector: Tensor) -> Tensor:
        """Layer by layer."""
        product = torch.zeros_like(vector)
        for block in self._blocks:
            product[block.places] = block.root.apply(vector[block.places])
        return product

    def on(self, chosen: Tensor) -> BlockRoot:
        """The layers whose weight is chosen."""
        kept = [block for block in self._blocks if bool(chosen[block.places.flatten()[0]])]
        return BlockRoot(kept, self._like)
