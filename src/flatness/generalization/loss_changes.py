"""The risk along many perturbations at once: one streamed pass, sums over samples, single samples kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatness.generalization.perturbing import PerturbedLayer
from flatness.losses import counted
from flatness.problem import batches

Evaluate = Callable[[Any, list[int]], Tensor]
"""(batch, which perturbations) → ℓ_i, (steps, perturbations, n)."""

LEVELS = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
# Perturbations whose single samples are kept for quantiles.
_KEPT = 16


@dataclass
class LossChanges:
    """Risks and loss changes of a pass.

    Attributes:
        risk: E of the unchanged network.
        risks: E of the changed ones, (steps, perturbations).
        single: Changes of single samples' losses at the kept steps, (kept, n), scaled to average to E_F.
    """

    risk: float
    risks: Tensor
    single: Tensor

    def quantiles(self) -> dict[str, float]:
        """Quantiles over samples and kept perturbations, by level."""
        values = self.single.flatten().sort().values
        places = [min(len(values) - 1, round(level * (len(values) - 1))) for level in LEVELS]
        return {f"{level:g}": float(values[place]) for level, place in zip(LEVELS, places, strict=True)}

    def largest_sample(self) -> int:
        """The sample whose loss grew most."""
        return int(self.single.argmax()) % self.single.shape[1]


def loss_changes(
    perturbed: PerturbedLayer, evaluate: Evaluate, steps: int, count: int, kept_steps: list[int], label: str
) -> LossChanges:
    """Stream the data once and evaluate every perturbation at every step.

    Args:
        perturbed: The layer.
        evaluate: What to evaluate.
        steps: Number of steps that `evaluate` returns.
        count: Number of perturbations.
        kept_steps: Steps at which single samples' changes are kept.
        label: What the progress bar says.
    """
    problem = perturbed.problem
    sums = torch.zeros(steps, count, dtype=torch.float64)
    totals = {"risk": 0.0, "normaliser": 0.0}
    single: list[Tensor] = []

    def step(batch: Any) -> None:
        n = batches.size_of(batch)
        base = perturbed.losses(batch)
        size = max(1, perturbed.copies_at_once(n) // steps)
        parts, kept = [], []
        for start in range(0, count, size):
            chosen = list(range(start, min(count, start + size)))
            losses = evaluate(batch, chosen)
            parts.append(losses.sum(2).cpu())
            wanted = [place for place, number in enumerate(chosen) if number < _KEPT]
            if wanted:
                kept.append((losses[kept_steps][:, wanted] - base).flatten(0, 1).cpu())
        # Everything is computed: only now are totals touched.
        sums.add_(torch.cat(parts, dim=1))
        totals["risk"] += float(base.sum())
        totals["normaliser"] += perturbed.normaliser(batch)
        single.append(torch.cat(kept))

    with torch.no_grad():
        problem.stream(step, label)
    C = counted(totals["normaliser"], problem.samples)
    changes = torch.cat(single, dim=1)
    return LossChanges(totals["risk"] / C, sums / C, changes * (changes.shape[1] / C))
