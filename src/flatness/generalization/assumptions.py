"""What the theorems assume, measured: a minimum in W, features with a density, and a small enough δ.

The paper's rule δ = |S|^(−1/(4+m)) tends to 1 as m grows: features are then moved by as much as they are
long, and δ²κ_Tr/(2m) no longer says what happens. Feature robustness itself, at δ halved again and again,
tells where it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatness.curvature.operators.lanczos import TopEigenvalues
from flatness.errors import OptionError
from flatness.generalization.fitting import Predictor, sample_losses
from flatness.generalization.kernels import Kernel, bandwidth, check_delta
from flatness.generalization.local_losses import local_losses
from flatness.generalization.perturbations import weight_gradient
from flatness.generalization.perturbed_layer import ChosenLayer
from flatness.losses import Loss

_GRADIENT = 0.01
_NEGATIVE = 1e-3
RULE = "rule"
"""As δ: the paper's rule, whether the expansion holds there or not."""

TOLERANCE = 0.25
"""How far the ratio of what happens and its second-order term may be from 1."""

_HALVINGS = 10
_ROWS, _DRAWS = 500_000, 256


@dataclass(frozen=True)
class Assumption:
    """Something that is assumed, what was measured, and whether that fits.

    Attributes:
        name: What is assumed.
        value: What was measured.
        holds: Whether it fits; None where that cannot be said.
        detail: In words.
    """

    name: str
    value: float
    holds: bool | None
    detail: str

    def __str__(self) -> str:
        """One line."""
        verdict = {True: "holds", False: "does not hold", None: "unknown"}[self.holds]
        return f"{self.name}: {verdict}; {self.detail}"


def at_minimum(chosen: ChosenLayer, relative_flatness: float | None, delta: float) -> list[Assumption]:
    """A minimum in W: the gradient against the curvature's effect, and the smallest eigenvalue."""
    W = chosen.W.double()
    gradient = weight_gradient(chosen)
    norm = float(gradient.norm())
    # Over random A the first order averages out; what a typical A sees is δ‖Wᵀ∇E‖_F/√m.
    first = delta * float((W.transpose(1, 2) @ gradient).norm()) / chosen.features**0.5
    detail = f"‖∇_W E‖ = {norm:.3g}; a random A changes E by {first:.2g} to first order"
    holds = None
    if relative_flatness is not None:
        second = delta**2 / (2 * chosen.features) * abs(relative_flatness)
        detail += f", by {second:.2g} to second"
        holds = first <= max(_GRADIENT * second, 1e-12)
    found = [Assumption("zero gradient", norm, holds, detail)]
    smallest, largest, residual, ended = extreme_eigenvalues(chosen)
    detail = f"λ_min = {smallest:.3g} ± {residual:.1g}, λ_max = {largest:.3g}" + (
        "" if ended else " (iteration stopped early)"
    )
    found.append(
        Assumption("positive semidefinite Hessian", smallest, smallest >= -_NEGATIVE * abs(largest), detail)
    )
    return found


def extreme_eigenvalues(chosen: ChosenLayer, products: int = 60) -> tuple[float, float, float, bool]:
    """Smallest and largest eigenvalue of the Hessian in W, the smallest's residual, and whether it converged.

    By Lanczos on products of two backward passes. What it finds is never below the true smallest eigenvalue.
    """
    still = torch.zeros_like(chosen.W)[None]
    solver = TopEigenvalues(
        (1, still.numel()),
        still.device,
        tolerance=1e-3,
        max_products=min(products, still.numel()),
    )
    while not solver.done:
        product = chosen.gradient(still, solver.query().reshape(still.shape))[1]
        solver.tell(-product.reshape(1, -1))
    residual = float(solver.residuals[0])
    return -float(solver.values[0]), -float(solver.smallest[0]), residual, bool(solver.converged.all())


def smooth_density(z: Tensor) -> Assumption:
    """Features with a density: none that are exactly 0 again and again, and a covariance of full rank."""
    atoms = float((z == 0).double().mean())
    centred = z - z.mean(0)
    rank = int(torch.linalg.matrix_rank(centred))
    reasons = []
    if atoms > 0.01:
        reasons.append(f"{100 * atoms:.0f} % of the features are exactly 0, as after a ReLU")
    if rank < z.shape[1]:
        reasons.append(f"the features span {rank} of {z.shape[1]} dimensions")
    detail = "; ".join(reasons) or f"features span all {z.shape[1]} dimensions, {100 * atoms:.1f} % are 0"
    return Assumption("features with a density", atoms, not reasons, detail)


@dataclass(frozen=True)
class Expansion:
    """What perturbed features do to the risk, and what its second-order term says, at one δ.

    Attributes:
        delta: δ.
        measured: E_F of the network over the kernel of bandwidth δ, labels held.
        stderr: Its standard error.
        predicted: δ²τ₂κ_Tr/(2m).
    """

    delta: float
    measured: float
    stderr: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Measured over predicted; 1 in the limit of small δ where the loss is smooth in W."""
        return self.measured / self.predicted if self.predicted else math.nan

    @property
    def holds(self) -> bool:
        """Whether the ratio is 1 up to `TOLERANCE` and two standard errors."""
        return abs(self.measured - self.predicted) <= TOLERANCE * abs(self.predicted) + 2 * self.stderr


def expansions(
    predict: Predictor,
    z: Tensor,
    y: Tensor,
    loss: Loss,
    kernel: Kernel,
    relative_flatness: float | None,
    delta: float | str | None,
    seed: int = 0,
) -> list[Expansion]:
    """The expansion of E_F of ψ around the features z (n, m) with targets y, at several δ; the last counts.

    All samples take part, as they do in κ_Tr: few of them can carry most of it.

    Without a δ that was asked for, from the rule's downwards by halves to the first at which, and at half of
    which, it holds. Where it holds at none, as it can be after kinks, the δ at which the ratio is nearest to
    1 comes last. Where there is nothing to compare, the δ that was asked for or the rule's, with NaN.
    """
    n, m = z.shape
    rule = bandwidth(n, m)
    asked = rule if delta in (None, RULE) else float(delta)
    if relative_flatness is None or not kernel.second_moment(m):
        return [Expansion(asked, math.nan, 0.0, math.nan)]
    coefficient = kernel.second_moment(m) * relative_flatness / (2 * m)
    draws = max(4, min(_DRAWS, _ROWS // n))

    def at(step: float) -> Expansion:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            base = sample_losses(loss, predict(z), y)
            local, variance = local_losses(predict, z, y, loss, kernel, step, draws, generator)
        error = math.sqrt(float(variance.sum())) / n
        return Expansion(step, float((local - base).mean()), error, step**2 * coefficient)

    return [at(asked)] if delta is not None else _halved(at, rule)


def _halved(at: Callable[[float], Expansion], rule: float) -> list[Expansion]:
    """From the rule's δ downwards by halves; the last one counts."""
    tried: list[Expansion] = []
    for halving in range(_HALVINGS + 1):
        tried.append(at(rule / 2**halving))
        # At two in a row: the ratio may pass through 1 on its way.
        if halving and tried[-1].holds and tried[-2].holds:
            return [*tried, tried[-2]]
    known = [one for one in tried if not math.isnan(one.ratio)]
    return [*tried, min(known, key=lambda one: abs(one.ratio - 1)) if known else tried[0]]


def given_delta(delta: object) -> float | str | None:
    """δ as it was asked for: a number, the paper's rule, or None for whatever the expansion allows."""
    if isinstance(delta, str) and delta != RULE:
        raise OptionError(f"Expected delta to be a positive number or 'rule' but got {delta!r}.")
    return delta if delta is None or isinstance(delta, str) else check_delta(delta)


def assumed(one: Expansion) -> list[Assumption]:
    """As one of the things that the bound assumes; nothing where nothing was compared."""
    if math.isnan(one.ratio):
        return []
    detail = (
        f"at δ = {one.delta:.3g} the risk rises by {one.measured:.3g} ± {one.stderr:.1g}, and "
        f"δ²τ₂κ_Tr/(2m) is {one.predicted:.3g}: ratio {one.ratio:.2f}"
    )
    return [Assumption("second-order expansion", one.ratio, one.holds, detail)]


def why_smaller(tried: list[Expansion]) -> str:
    """Why δ is not the rule's."""
    first, last = tried[0], tried[-1]
    return (
        f"δ is the largest of |S|^(−1/(4+m)) = {first.delta:.3g} and its halves at which the flatness term "
        f"predicts the measured rise (ratio {last.ratio:.2f} at {last.delta:.3g}, {first.ratio:.2f} at the "
        "rule's); delta='rule' uses the rule's"
    )
