"""Rotation-invariant kernels: how far features are moved (petzka2021, eq. 6 and Proposition 2).

A kernel k_h(0, z) = h⁻ᵐ k(‖z‖/h) on the ball of radius h moves a feature vector by ρ·u: u uniform on the
sphere, ρ/h in (0, 1] with density ∝ k(r) r^{m−1}. With h = δ‖φ(x)‖ that is A φ(x) for A = r·O, O a Haar
orthogonal matrix: the family A_δ of Proposition 2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from scipy.special import beta as beta_function
from scipy.special import gammainc, gammaincinv
from torch import Generator, Tensor

from flatness.catalogue.options import positive
from flatness.errors import OptionError, nearest

_SIGMA = positive(0.25, "a positive number, in units of the bandwidth,", example="sigma=0.25")
_DELTA = positive(0.01, "a positive number, relative to the features' length,", example="delta=0.01")


class Kernel(ABC):
    """A radial profile k on (0, 1]; everything else follows from it and from the dimension m.

    Attributes:
        name: As options spell it.
    """

    name: str

    @abstractmethod
    def radii(self, shape: tuple[int, ...], m: int, generator: Generator) -> Tensor:
        """Draws of ρ/h, in float64 on the CPU."""

    @abstractmethod
    def second_moment(self, m: int) -> float:
        """τ₂ = ∫ ‖z‖² k₁(0, z) dz = E[(ρ/h)²] (petzka2021, Proposition 12)."""

    def squared_integral(self, m: int) -> float:
        """β = ∫ k₁(0, z)² dz (petzka2021, Proposition 12); infinite where there is no density, as here."""
        return math.inf

    def __repr__(self) -> str:
        """The name."""
        return self.name


class UniformBall(Kernel):
    """k constant: the uniform distribution on the ball; E[ρ²] = h² m/(m+2)."""

    name = "uniform"

    def radii(self, shape: tuple[int, ...], m: int, generator: Generator) -> Tensor:
        """U^{1/m}: volumes are uniform."""
        return torch.rand(shape, generator=generator, dtype=torch.float64) ** (1 / m)

    def second_moment(self, m: int) -> float:
        """m/(m + 2)."""
        return m / (m + 2)

    def squared_integral(self, m: int) -> float:
        """1 over the volume of the unit ball."""
        return 1 / ball_volume(m)


class Epanechnikov(Kernel):
    """k ∝ 1 − r²; then r² has the distribution Beta(m/2, 2)."""

    name = "epanechnikov"

    def radii(self, shape: tuple[int, ...], m: int, generator: Generator) -> Tensor:
        """The root of Γ(m/2) / (Γ(m/2) + Γ(2)), a Beta(m/2, 2)."""
        first = torch._standard_gamma(torch.full(shape, m / 2, dtype=torch.float64), generator)
        second = torch._standard_gamma(torch.full(shape, 2.0, dtype=torch.float64), generator)
        return (first / (first + second)).sqrt()

    def second_moment(self, m: int) -> float:
        """m/(m + 4), the mean of that Beta distribution."""
        return m / (m + 4)

    def squared_integral(self, m: int) -> float:
        """c² ∫ (1 − r²)² dz with c = (m + 2)/(2 vol) from ∫ k = 1."""
        volume = ball_volume(m)
        constant = (m + 2) / (2 * volume)
        return constant**2 * m * volume * float(beta_function(m / 2, 3)) / 2


class TruncatedNormal(Kernel):
    """The normal distribution with variance h²σ² in every direction, cut off at radius h.

    Args:
        sigma: σ, in units of the bandwidth; 1/(2√m) when None, whose root mean square radius is about h/2.
    """

    name = "truncated_normal"

    def __init__(self, sigma: float | None = None) -> None:
        if sigma is not None:
            _SIGMA.check("sigma", sigma)
        self.given = sigma

    def sigma(self, m: int) -> float:
        """σ in dimension m."""
        return self.given if self.given is not None else 0.5 / math.sqrt(m)

    def radii(self, shape: tuple[int, ...], m: int, generator: Generator) -> Tensor:
        """Draws of r²/(2σ²), a Γ(m/2); those beyond the cut are drawn again from what is inside."""
        sigma = self.sigma(m)
        cut = 1 / (2 * sigma**2)
        halves = torch._standard_gamma(torch.full(shape, m / 2, dtype=torch.float64), generator)
        beyond = halves > cut
        drawn = torch.rand(int(beyond.sum()), generator=generator, dtype=torch.float64)
        again = float(gammainc(m / 2, cut)) * drawn.numpy()
        halves[beyond] = torch.as_tensor(gammaincinv(m / 2, again), dtype=torch.float64)
        return (sigma * (2 * halves).sqrt()).clamp(max=1.0)

    def second_moment(self, m: int) -> float:
        """σ² m P(m/2 + 1, 1/2σ²) / P(m/2, 1/2σ²), P the regularised incomplete gamma function."""
        sigma = self.sigma(m)
        cut = 1 / (2 * sigma**2)
        return sigma**2 * m * float(gammainc(m / 2 + 1, cut) / gammainc(m / 2, cut))

    def squared_integral(self, m: int) -> float:
        """(πσ²)^{m/2} P(m/2, 1/σ²) / Z² with Z = (2πσ²)^{m/2} P(m/2, 1/2σ²)."""
        sigma = self.sigma(m)
        inside = float(gammainc(m / 2, 1 / (2 * sigma**2)))
        squared = float(gammainc(m / 2, 1 / sigma**2))
        return squared / inside**2 * (4 * math.pi * sigma**2) ** (-m / 2)

    def __repr__(self) -> str:
        """The name, and σ where it was given."""
        return self.name if self.given is None else f"{self.name}(σ={self.given:g})"


class FixedRadius(Kernel):
    """ρ = r·h always, so that there is no density.

    Args:
        name: "orthogonal" for r = 1, A = δ·O with O orthogonal, as in Theorem 5; "point" for r = 0: nothing
            moves, and representativeness equals the generalisation gap (petzka2021, §2).
        radius: r.
    """

    def __init__(self, name: str, radius: float) -> None:
        self.name, self.radius = name, radius

    def radii(self, shape: tuple[int, ...], m: int, generator: Generator) -> Tensor:
        """The same for all."""
        return torch.full(shape, self.radius, dtype=torch.float64)

    def second_moment(self, m: int) -> float:
        """r²."""
        return self.radius**2


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        FixedRadius("orthogonal", 1.0),
        UniformBall(),
        TruncatedNormal(),
        Epanechnikov(),
        FixedRadius("point", 0.0),
    )
}
"""The kernels by name."""


def kernel_of(kernel: str | Kernel, sigma: float | None = None) -> Kernel:
    """The kernel that a name stands for.

    >>> kernel_of("uniform").second_moment(8)
    0.8
    """
    if isinstance(kernel, Kernel):
        return kernel
    name = str(kernel).replace("-", "_")
    if name not in KERNELS:
        raise OptionError(
            f"Expected a kernel, one of {', '.join(KERNELS)}, but got {kernel!r}.{nearest(name, KERNELS)}"
        )
    if name == TruncatedNormal.name:
        return TruncatedNormal(sigma)
    if sigma is not None:
        raise OptionError(
            f"Expected sigma with 'truncated_normal' only but got it with {kernel!r}. Leave sigma out."
        )
    return KERNELS[name]


def directions(shape: tuple[int, ...], m: int, generator: Generator) -> Tensor:
    """Points uniform on the unit sphere of R^m: (*shape, m), float64 on the CPU."""
    normal = torch.randn((*shape, m), generator=generator, dtype=torch.float64)
    return normal / normal.norm(dim=-1, keepdim=True)


def bandwidth(samples: int, m: int) -> float:
    """The paper's rule δ = |S|^(−1/(4+m)) (petzka2021, Theorem 6)."""
    return samples ** (-1 / (4 + m))


def check_delta(delta: Any) -> float:
    """Refuse anything but a positive number."""
    _DELTA.check("delta", delta)
    return float(delta)


def ball_volume(m: int) -> float:
    """Volume of the unit ball of R^m."""
    return math.pi ** (m / 2) / math.gamma(m / 2 + 1)
