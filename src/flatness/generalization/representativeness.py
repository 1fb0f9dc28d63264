"""`flatness.representativeness`: how well local distributions around samples stand in for the true one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import DataError, OptionError
from flatness.generalization.chosen_layer import choose_layer, collect_samples
from flatness.generalization.fitting import Fitter, fitter_of, sample_losses
from flatness.generalization.kernels import Kernel, bandwidth, check_delta, kernel_of
from flatness.generalization.local_losses import local_losses
from flatness.generalization.perturbed_layer import ChosenLayer
from flatness.losses import Loss
from flatness.measuring.examine.examination import examine
from flatness.problem import setting_of
from flatness.problem.model import Forward
from flatness.problem.problem import Problem
from flatness.problem.ranks import separately
from flatness.report.report import Result
from flatness.report.tables import format_value

INPUT = "input"
_IN_INPUT_SPACE = "in input space: φ is the identity and ψ a linear predictor on the inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Representativeness(Result):
    """E_Rep, cross-validated (petzka2021, eq. 3, §6 and App. C).

    `stderr` is the error of an estimate of the average E_Rep over samples of this size. The E_Rep of the
    given sample scatters more around that average, which only fresh data can show.

    Attributes:
        delta: δ, the bandwidth relative to the features' length.
        kernel: The kernel.
        features: m.
        samples: n.
        folds: Number of folds.
        draws: Draws per point.
        per_fold: The estimate of each fold.
        gap_per_fold: Held-out minus fitting risk of each fold: the cross-validated generalisation gap.
        robustness_per_fold: E_F of each fold; with it the estimate adds up to the gap.
        draws_stderr: The part of `stderr` that more draws would remove.
    """

    delta: float
    kernel: str
    features: int
    samples: int
    folds: int
    draws: int
    per_fold: tuple[float, ...]
    gap_per_fold: tuple[float, ...]
    robustness_per_fold: tuple[float, ...]
    draws_stderr: float

    @property
    def gap(self) -> float:
        """The cross-validated generalisation gap."""
        return sum(self.gap_per_fold) / self.folds

    @property
    def robustness(self) -> float:
        """E_F of the refitted ψ: gap − representativeness."""
        return sum(self.robustness_per_fold) / self.folds

    def __str__(self) -> str:
        """The number in a sentence."""
        lines = [
            f"representativeness of {self.subject()} at δ = {self.delta:.4g}: "
            f"{format_value(self.value, self.stderr)} ({self.kernel}, {self.folds} folds, {self.draws} draws "
            "per point)",
            f"cross-validated gap {format_value(self.gap)} = representativeness + E_F "
            f"{format_value(self.robustness)}",
            *self.notes,
        ]
        return "\n  ".join(lines)

    __repr__ = __str__


@separately()
def representativeness(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    *,
    layer: str = "last",
    delta: float | None = None,
    kernel: str | Kernel = "uniform",
    sigma: float | None = None,
    fitter: Any = "auto",
    penalty: float = 1.0,
    folds: int = 3,
    draws: int = 100,
    forward: Forward | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Representativeness:
    """How badly perturbed training samples represent the true distribution, by cross-validation.

    For each fold ψ is refitted on the rest S_f of the data; then E_Rep = mean loss on the fold − mean loss of
    ψ around the points of S_f, labels held (petzka2021, eq. 3).

    Args:
        model: The trained network; its features φ are those that enter `layer`.
        data: A DataLoader, a pair of tensors, or any re-iterable of batches.
        loss: As for `flatness.measure`.
        layer: Name of a Linear layer, "last", or "input" for the inputs themselves (φ = id).
        delta: Bandwidth relative to the features' length; the rule n^(−1/(4+m)) when None.
        kernel: "uniform", "truncated_normal", "epanechnikov", "orthogonal" (on the sphere), or "point"
            (nothing moves: the estimate is the generalisation gap).
        sigma: Of the truncated normal, in units of the bandwidth; 1/(2√m) when None.
        fitter: What refits ψ: "ridge" (as the paper), "head" (a linear layer that minimises the loss), "auto"
            (ridge for squared losses, head for others), or a function ``(z, y) -> ψ``.
        penalty: Of both linear fits.
        folds: Number of folds.
        draws: Draws per point, in pairs ±ξ.
        forward: ``forward(model, batch) -> (output, target)`` for batches with another structure.
        batch_size: Samples per micro-batch; chosen by memory when None.
        device: Compute features on a copy of the model there.
        dtype: Compute features on a copy of the model in that precision.
        seed: Seed of folds and draws.
        progress: Whether to show a bar on work of more than two seconds.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> data = torch.randn(60, 4), torch.randint(3, (60,))
        >>> found = flatness.representativeness(model, data)
        >>> abs(found.value + found.robustness - found.gap) < 1e-12
        True
    """
    problem = Problem(model, data, loss, **setting_of(locals()))
    fitter_of(fitter, problem.loss, 1, penalty)
    with problem.guarded():
        if layer == INPUT and layer not in dict(problem.model.named_modules()):
            examine(problem)
            chosen, notes = None, [_IN_INPUT_SPACE]
        else:
            chosen = choose_layer(problem, layer)
            notes = layer_notes(chosen)
        seen = collect_samples(problem, chosen)
    return cross_validated(
        seen.z,
        seen.y,
        fitter_of(fitter, problem.loss, seen.outputs, penalty),
        problem.loss,
        kernel=kernel_of(kernel, sigma),
        delta=delta,
        folds=folds,
        draws=draws,
        seed=seed,
        layer=INPUT if chosen is None else chosen.name,
        notes=(*notes, *problem.notes),
    )


def cross_validated(
    z: Tensor,
    y: Tensor,
    fit: Fitter,
    loss: Loss,
    *,
    kernel: Kernel,
    delta: float | None = None,
    folds: int = 3,
    draws: int = 100,
    seed: int = 0,
    layer: str | None = None,
    notes: tuple[str, ...] = (),
) -> Representativeness:
    """The same on features z (n, m) and targets y.

    The standard error is over samples: each is held out once and perturbed in the other folds; the dependence
    between folds through refitting is left out.
    """
    delta = bandwidth(*z.shape) if delta is None else check_delta(delta)
    check_folds(folds, len(z))
    check_features(z)
    if not isinstance(draws, int) or draws < 2:
        raise OptionError(f"Expected at least 2 draws per point but got {draws!r}. For example draws=100.")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(z), generator=generator)
    held, moved = torch.zeros(len(z), dtype=torch.float64), torch.zeros(len(z), dtype=torch.float64)
    rows: list[tuple[float, float, float]] = []
    noise = 0.0
    for part in torch.tensor_split(order, folds):
        rest = order[~torch.isin(order, part)]
        predict = fit(z[rest], y[rest])
        with torch.no_grad():
            held[part] = sample_losses(loss, predict(z[part]), y[part])
            train = sample_losses(loss, predict(z[rest]), y[rest])
            local, variance = local_losses(predict, z[rest], y[rest], loss, kernel, delta, draws, generator)
        moved[rest] += local / (folds - 1)
        noise += float(variance.sum()) / len(rest) ** 2 / folds**2
        rows.append((float(held[part].mean()), float(train.mean()), float(local.mean())))
    per_fold = tuple(test - local for test, _, local in rows)
    return Representativeness(
        measure="representativeness",
        level="layer",
        value=sum(per_fold) / folds,
        layer=layer,
        stderr=float((held - moved).std()) / math.sqrt(len(z)),
        method="sampled",
        loss=loss.name,
        notes=notes,
        delta=delta,
        kernel=repr(kernel),
        features=z.shape[1],
        samples=len(z),
        folds=folds,
        draws=draws,
        per_fold=per_fold,
        gap_per_fold=tuple(test - train for test, train, _ in rows),
        robustness_per_fold=tuple(local - train for _, train, local in rows),
        draws_stderr=math.sqrt(noise),
    )


def check_folds(folds: object, samples: int) -> None:
    """Refuse fewer than two folds, or fewer samples than folds."""
    if not isinstance(folds, int) or folds < 2:
        raise OptionError(f"Expected at least 2 folds but got {folds!r}. For example folds=3.")
    if samples < 2 * folds:
        raise DataError(
            f"Expected at least two samples for each of the {folds} folds but got {samples} samples in all. "
            "Use more data or fewer folds."
        )


def check_features(z: Tensor) -> None:
    """Refuse features that are not finite, or that are the same for all samples."""
    if not bool(z.isfinite().all()):
        raise DataError(
            "Expected finite features but got NaN or infinity. Look for inputs that overflow inside the "
            "network."
        )
    if bool((z == z[:1]).all()):
        raise DataError(
            f"Expected features that vary but all {len(z)} feature vectors are equal. Nothing can be learned "
            "from them: choose another layer, or check the data."
        )


def layer_notes(chosen: ChosenLayer) -> list[str]:
    """What the reader should know about a refit on the features of a layer."""
    notes = ["φ was trained on all samples; only ψ is refitted in each fold"]
    if not chosen.last:
        notes.append(
            f"ψ is refitted as a linear predictor on the features of {chosen.name}, not as the layers that "
            "follow; pass a fitter to refit those"
        )
    return notes
