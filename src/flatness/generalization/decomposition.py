"""E_gen = E_Rep + E_F (petzka2021, eq. 5), where the true distribution can be sampled.

All three terms are estimated apart, from independent seeds: the gap from fresh samples, representativeness
directly by Monte Carlo (eq. 3) from other fresh samples and noise, feature robustness from random matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatness.generalization.fitting import Predictor, sample_losses
from flatness.generalization.kernels import Kernel, check_delta
from flatness.generalization.local_losses import Labels, local_losses
from flatness.generalization.matrices import random_matrices
from flatness.losses import Loss
from flatness.report.tables import format_value

Population = Callable[[int, int], tuple[Tensor, Tensor]]
"""(number, seed) → features and targets, fresh from the true distribution."""


@dataclass(frozen=True)
class Term:
    """A value and its standard error."""

    value: float
    stderr: float

    def __str__(self) -> str:
        """Both."""
        return format_value(self.value, self.stderr)


@dataclass(frozen=True)
class Decomposition:
    """The three terms of equation 5, and what holding labels constant does to them.

    Attributes:
        gap: E(f) − E_emp(f, S).
        representativeness: E_Rep, with the true labels around the samples.
        robustness: E_F, with the true labels around the samples.
        representativeness_held: E_Rep with the labels of the samples.
        robustness_held: E_F with the labels of the samples, which is what flatness describes.
    """

    gap: Term
    representativeness: Term
    robustness: Term
    representativeness_held: Term
    robustness_held: Term

    @property
    def residual(self) -> Term:
        """Gap − E_Rep − E_F: 0 up to its standard error."""
        return _sum(self.gap, _minus(self.representativeness), _minus(self.robustness))

    @property
    def label_share(self) -> Term:
        """How much of E_F is due to labels that change: E_F with true labels − with labels held."""
        return _sum(self.robustness, _minus(self.robustness_held))

    def __str__(self) -> str:
        """All terms."""
        return "\n".join(
            [
                f"generalisation gap                 {self.gap}",
                f"= representativeness               {self.representativeness}",
                f"+ feature robustness               {self.robustness}",
                f"  residual                         {self.residual}",
                f"labels held: representativeness    {self.representativeness_held}",
                f"             feature robustness    {self.robustness_held}",
                f"             labels' share of E_F  {self.label_share}",
            ]
        )

    __repr__ = __str__


def decompose_gap(
    predict: Predictor,
    z: Tensor,
    y: Tensor,
    population: Population,
    labels: Labels,
    loss: Loss,
    *,
    kernel: Kernel,
    delta: float,
    fresh: int = 200_000,
    draws: int = 400,
    matrices: int = 400,
    seed: int = 0,
) -> Decomposition:
    """Estimate the terms of equation 5 for a fixed predictor.

    Args:
        predict: ψ.
        z: Features of the sample S, (n, m).
        y: Their targets, y_i = y(z_i).
        population: Draws from the true distribution.
        labels: The true label function.
        loss: The loss.
        kernel: Of the local distributions.
        delta: δ.
        fresh: Fresh samples for each estimate of the risk.
        draws: Draws per point.
        matrices: Random matrices, each with its negative.
        seed: Seed; every estimate derives its own.
    """
    delta = check_delta(delta)
    own = sample_losses(loss, predict(z), y)
    empirical = float(own.mean())
    risk = _risk(predict, population, loss, fresh, seed + 1)
    terms: dict[str, Term] = {}
    for name, label in (("true", labels), ("held", None)):
        terms[f"representativeness {name}"] = direct_representativeness(
            predict,
            z,
            y,
            population,
            loss,
            kernel=kernel,
            delta=delta,
            labels=label,
            fresh=fresh,
            draws=draws,
            seed=seed + 2,
        )
        terms[f"robustness {name}"] = _matrix_robustness(
            predict, z, y, loss, kernel, delta, matrices, seed + 4, label
        )
    return Decomposition(
        Term(risk.value - empirical, risk.stderr),
        terms["representativeness true"],
        terms["robustness true"],
        terms["representativeness held"],
        terms["robustness held"],
    )


def direct_representativeness(
    predict: Predictor,
    z: Tensor,
    y: Tensor,
    population: Population,
    loss: Loss,
    *,
    kernel: Kernel,
    delta: float,
    labels: Labels | None = None,
    fresh: int = 200_000,
    draws: int = 400,
    seed: int = 0,
) -> Term:
    """E_Rep (eq. 3) by Monte Carlo where the true distribution can be sampled.

    The risk on fresh samples minus the loss around the points of S; labels there are held unless the true
    label function is given. The other arguments are those of `decompose_gap`.
    """
    risk = _risk(predict, population, loss, fresh, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    around, variance = local_losses(predict, z, y, loss, kernel, delta, draws, generator, labels)
    return _sum(risk, Term(-float(around.mean()), math.sqrt(float(variance.sum())) / len(z)))


def _risk(predict: Predictor, population: Population, loss: Loss, count: int, seed: int) -> Term:
    fresh_z, fresh_y = population(count, seed)
    values = sample_losses(loss, predict(fresh_z), fresh_y)
    return Term(float(values.mean()), float(values.std()) / math.sqrt(count))


def _matrix_robustness(
    predict: Predictor,
    z: Tensor,
    y: Tensor,
    loss: Loss,
    kernel: Kernel,
    delta: float,
    matrices: int,
    seed: int,
    labels: Labels | None,
) -> Term:
    """E_F over A_δ: all samples moved by the same matrix, matrices in pairs ±A."""
    m = z.shape[1]
    base = sample_losses(loss, predict(z), y).mean()
    A = delta * random_matrices(kernel, matrices, 1, m, torch.Generator().manual_seed(seed))[:, 0]
    changes = torch.zeros(matrices, dtype=torch.float64)
    for number, matrix in enumerate(A):
        shift = z @ matrix.T
        for moved in (z + shift, z - shift):
            target = y if labels is None else labels(moved)
            changes[number] += (sample_losses(loss, predict(moved), target).mean() - base) / 2
    return Term(float(changes.mean()), float(changes.std()) / math.sqrt(matrices))


def _minus(term: Term) -> Term:
    return Term(-term.value, term.stderr)


def _sum(*terms: Term) -> Term:
    """Sum of independent terms."""
    return Term(sum(term.value for term in terms), math.hypot(*(term.stderr for term in terms)))
