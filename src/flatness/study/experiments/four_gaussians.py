"""Binary classification in feature space with a given class separation (petzka2021, App. C.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CLUSTERS, _INFORMATIVE, _REDUNDANT = 4, 6, 2


@dataclass(frozen=True)
class FourGaussians:
    """Four Gaussian clusters in R⁶, two for each class, and two redundant features.

    The paper says "sample 4 cluster centroids from a hypercube and scale them so that their distance is c";
    its code does what scikit-learn's `make_classification` does, and so does this: centroids are distinct
    vertices of the cube [−c, c]⁶, covariances AᵀA with entries of A uniform in [−1, 1], redundant features
    random linear combinations of the six. No label is flipped.

    Attributes:
        means: (4, 6).
        factors: A (4, 6, 6): a cluster is mean + normal · A.
        mixing: (6, 2): the redundant features are z₁…z₆ · mixing.
        separation: c.
    """

    means: Tensor
    factors: Tensor
    mixing: Tensor
    separation: float

    @classmethod
    def draw(cls, separation: float, seed: int = 0) -> FourGaussians:
        """A random distribution with this class separation.

        >>> FourGaussians.draw(2.0, seed=1).means.abs().unique()
        tensor([2.], dtype=torch.float64)
        """
        rng = np.random.default_rng([seed, 1])
        vertices = rng.choice(2**_INFORMATIVE, _CLUSTERS, replace=False)
        corners = (vertices[:, None] >> np.arange(_INFORMATIVE)) & 1
        means = separation * (2.0 * corners - 1)
        factors = rng.uniform(-1, 1, (_CLUSTERS, _INFORMATIVE, _INFORMATIVE))
        mixing = rng.uniform(-1, 1, (_INFORMATIVE, _REDUNDANT))
        return cls(torch.tensor(means), torch.tensor(factors), torch.tensor(mixing), float(separation))

    def sample(self, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Features (n, 8) and the class of their cluster, ±1: (n, 1); float64, in random order."""
        generator = torch.Generator().manual_seed(seed)
        cluster = torch.randperm(n, generator=generator) % _CLUSTERS
        normal = torch.randn(n, 1, _INFORMATIVE, generator=generator, dtype=torch.float64)
        z = (normal @ self.factors[cluster])[:, 0] + self.means[cluster]
        y = 2.0 * (cluster % 2).double() - 1
        return torch.cat([z, z @ self.mixing], dim=1), y[:, None]

    def label(self, z: Tensor) -> Tensor:
        """y(z), the more probable class at the six informative features: ±1, (n, 1).

        Labels without noise, as the theory assumes them.
        """
        x = z[:, :_INFORMATIVE]
        scores = []
        for mean, factor in zip(self.means, self.factors, strict=True):
            whitened = torch.linalg.solve(factor.T, (x - mean).T)
            scores.append(-0.5 * whitened.square().sum(0) - torch.linalg.slogdet(factor).logabsdet)
        log_density = torch.stack(scores, dim=1)
        positive = torch.logsumexp(log_density[:, 1::2], 1) > torch.logsumexp(log_density[:, ::2], 1)
        return 2.0 * positive.double()[:, None] - 1
