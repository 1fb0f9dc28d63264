"""Adaptive sharpness: the rise of the risk when every parameter moves in proportion to its own size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flatness.catalogue.epsilon_sharpness import largest_rise
from flatness.catalogue.measure import Measure, Surroundings, Valued
from flatness.catalogue.options import choice, count, declared, positive
from flatness.catalogue.registry import register_measure
from flatness.curvature.operators.ascent import NORMS
from flatness.curvature.operators.network_spectrum import SpectrumRequest, inverse_metric_root
from flatness.errors import UndefinedMeasureError

# Radii in units of the parameters. A ball in ℓ2 shares one length among all parameters; the others give each
# parameter that much, so that their numbers are smaller.
DEFAULT_RHO = {
    ("worst", "l2"): 0.5,
    ("worst", "linf"): 0.01,
    ("average", "l2"): 0.05,
    ("average", "linf"): 0.1,
}
_METRIC = SpectrumRequest(metric="nodewise")


def _adaptive(around: Surroundings) -> dict[str | None, Valued]:
    options = around.options
    case, norm = options["case"], options["norm"]
    rho = float(DEFAULT_RHO[case, norm] if options["rho"] is None else options["rho"])
    root = inverse_metric_root(around.space, _METRIC)
    if not bool(root.any()):
        raise UndefinedMeasureError(
            "Expected parameters to move in proportion to their size but all of them are zero: "
            "adaptive_sharpness is not defined here. Check that the weights are loaded."
        )
    form = _worst if case == "worst" else _average
    return {None: form(around, root, rho, norm)}


def _worst(around: Surroundings, root: Tensor, rho: float, norm: str) -> Valued:
    return largest_rise(around, _METRIC, root, rho, norm, f"ρ = {rho:g}, {norm}")


def _average(around: Surroundings, root: Tensor, rho: float, norm: str) -> Valued:
    """The mean over pairs ±u, in which the gradient's noise cancels; u normal (l2) or uniform (linf)."""
    risk, _ = around.gradient()
    generator = torch.Generator().manual_seed(around.seed)
    rises = []
    for _ in range(around.options["draws"]):
        u = _drawn(len(root), norm, generator).to(root.device)
        pair = [around.space.risk(sign * rho * root * u) for sign in (1.0, -1.0)]
        rises.append(sum(pair) / 2 - risk)
    values = torch.tensor(rises, dtype=torch.float64)
    stderr = float(values.std()) / math.sqrt(len(values))
    kind = "normal, standard deviation" if norm == "l2" else "uniform, up to"
    note = f"{len(values)} pairs ±u of {kind} ρ = {rho:g} of each parameter's size"
    return Valued(float(values.mean()), (note,), stderr=stderr, method="sampled")


def _drawn(size: int, norm: str, generator: torch.Generator) -> Tensor:
    if norm == "l2":
        return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    return 2 * torch.rand(size, generator=generator, dtype=torch.float64, device="cpu") - 1


def _loss_of(options: Mapping[str, Any]) -> str | None:
    """Logits divided by their standard deviation over the classes: the loss of tsuzuku2020."""
    return "normalized_cross_entropy" if options["logit_normalization"] else None


adaptive_sharpness = register_measure(
    Measure(
        name="adaptive_sharpness",
        symbol="S^ρ(θ, |θ|)",
        formula=(
            "max of E(θ+δ) − E over ‖δ/|θ|‖_p ≤ ρ, p = 2 or ∞; average case: the mean of E(θ+δ) − E, "
            "δ_i/|θ_i| normal with deviation ρ (p = 2) or uniform up to ρ (p = ∞)"
        ),
        source="Kwon et al. 2021; Andriushchenko et al. 2023",
        summary="The rise of the risk when every parameter moves in proportion to its size.",
        when="To compare with recent studies of sharpness that no rescaling of neurons can change.",
        misleads=(
            "Values depend on ρ, the norm and the case, and the worst case is a lower bound: compare "
            "only numbers with the same options."
        ),
        levels=("network",),
        invariances=frozenset({"layerwise", "neuronwise"}),
        explore=_adaptive,
        cost="gradients of all the data: restarts × steps at most; average case: 2 × draws forward passes",
        **declared(
            {
                "case": choice("worst", "average"),
                "norm": choice(*NORMS),
                "rho": positive(None, none="for a radius that suits case and norm", example="0.5"),
                "steps": count(20),
                "restarts": count(1),
                "draws": count(20, 2),
                "logit_normalization": choice(False, True),
            }
        ),
        loss_of=_loss_of,
    )
)
