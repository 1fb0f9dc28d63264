"""The constants of Theorem 6 (petzka2021, Prop. 12), estimated where they can be, infinite where they are.

C₁ = ½ τ₂ L ∫|∇²(p‖z‖²)| dz and C₂ = L √(α β Vol), with τ₂ and β of the kernel, α = ∫ p(z)/‖z‖ᵐ dz, L the
largest loss and Vol the volume of feature space. (The paper loses the ½ between its last two displays.)

Two answers are given. For a Gaussian, α diverges since its density at 0 is positive (1/‖z‖ᵐ is not
integrable there), and the volume and the largest loss are infinite: the bound says nothing. Plug-in values
from the sample are finite for any sample: a heuristic, called so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flatness.generalization.kernels import Kernel
from flatness.report.tables import format_value

_DRAWS = 20_000


@dataclass(frozen=True)
class RateConstants:
    """The constants and the rate they belong to.

    Attributes:
        source: What density they are for.
        kind: "bound" where they are exact for that density, "heuristic" for plug-in values.
        rate: |S|^(−2/(4+m)).
        tau2: τ₂ of the kernel.
        beta: β of the kernel.
        alpha: α.
        laplacian: ∫|∇²(p‖z‖²)| dz, of a Gaussian with the sample's mean and covariance.
        volume: Volume of feature space.
        largest_loss: L.
        flatness: κ_Tr/(2m).
        failure: Δ, the probability with which the bound may fail.
    """

    source: str
    kind: str
    rate: float
    tau2: float
    beta: float
    alpha: float
    laplacian: float
    volume: float
    largest_loss: float
    flatness: float
    failure: float

    @property
    def c1(self) -> float:
        """C₁ = ½ τ₂ L ∫|∇²(p‖z‖²)| dz."""
        return 0.5 * self.tau2 * self.largest_loss * self.laplacian

    @property
    def c2(self) -> float:
        """C₂ = L √(α β Vol); infinite where α is, also for a sample without volume."""
        if math.isinf(self.alpha):
            return math.inf
        return self.largest_loss * math.sqrt(self.alpha * self.beta * self.volume)

    @property
    def value(self) -> float:
        """|S|^(−2/(4+m)) (κ_Tr/(2m) + C₁ + C₂/√Δ)."""
        return self.rate * (self.flatness + self.c1 + self.c2 / math.sqrt(self.failure))

    def __str__(self) -> str:
        """All of it on two lines."""
        names = {
            "τ₂": self.tau2,
            "β": self.beta,
            "α": self.alpha,
            "∫|∇²(p‖z‖²)|": self.laplacian,
            "Vol": self.volume,
            "L": self.largest_loss,
            "C₁": self.c1,
            "C₂": self.c2,
        }
        parts = ", ".join(f"{name} {_words(value)}" for name, value in names.items())
        return f"{_words(self.value)} [{self.kind}; {self.source}]\n      rate {self.rate:.4g}; {parts}"


def _words(value: float) -> str:
    return "infinite" if math.isinf(value) else format_value(value)


def rate_constants(
    z: Tensor, kernel: Kernel, flatness_term: float, largest_loss: float, failure: float
) -> tuple[RateConstants, RateConstants]:
    """The constants for a Gaussian like the sample, and plug-in values from the sample.

    Args:
        z: Features (n, m).
        kernel: Of the local distributions.
        flatness_term: κ_Tr/(2m).
        largest_loss: The largest loss of a sample.
        failure: Δ.
    """
    n, m = z.shape
    plugin = RateConstants(
        source="sample averages, bounding box and largest loss in place of the truth",
        kind="heuristic",
        rate=n ** (-2 / (4 + m)),
        tau2=kernel.second_moment(m),
        beta=kernel.squared_integral(m),
        alpha=inverse_moment(z),
        laplacian=gaussian_laplacian(z.mean(0), torch.cov(z.T).reshape(m, m)),
        volume=float((z.amax(0) - z.amin(0)).prod()),
        largest_loss=largest_loss,
        flatness=flatness_term,
        failure=failure,
    )
    source = "features distributed like a Gaussian"
    endless = dict.fromkeys(("alpha", "volume", "largest_loss"), math.inf)
    return replace(plugin, source=source, kind="bound", **endless), plugin


def inverse_moment(z: Tensor) -> float:
    """The sample mean of ‖z‖⁻ᵐ; infinite if a feature vector is 0."""
    lengths = z.norm(dim=1)
    return float((lengths ** -z.shape[1]).mean()) if bool((lengths > 0).all()) else math.inf


def gaussian_laplacian(mean: Tensor, sigma: Tensor, draws: int = _DRAWS, seed: int = 0) -> float:
    """∫|∇²(p‖z‖²)| dz for p = N(mean, sigma), by Monte Carlo over p; infinite for a singular sigma.

    With S = sigma⁻¹ and u = S(z − mean): ∇²(p‖z‖²)/p = ‖z‖²(‖u‖² − tr S) − 4 z·u + 2m.
    """
    m = len(mean)
    values, vectors = torch.linalg.eigh(sigma)
    if float(values[0]) <= 1e-12 * float(values[-1]):
        return math.inf
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(draws, m, generator=generator, dtype=torch.float64)
    z = mean + (normal * values.sqrt()) @ vectors.T
    u = (normal / values.sqrt()) @ vectors.T
    trace = float((1 / values).sum())
    inside = z.square().sum(1) * (u.square().sum(1) - trace) - 4 * (z * u).sum(1) + 2 * m
    return float(inside.abs().mean())
