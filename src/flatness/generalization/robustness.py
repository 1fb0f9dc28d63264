"""`flatness.feature_robustness`: how much the loss grows when features are perturbed (petzka2021, §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatness.catalogue.options import choice
from flatness.errors import NotExactError, OptionError
from flatness.generalization.chosen_layer import choose_layer, measured_flatness
from flatness.generalization.kernels import Kernel, check_delta, kernel_of
from flatness.generalization.matrices import given_matrices, operator_norms
from flatness.generalization.perturbations import (
    LossChanges,
    first_order_bound,
    given_perturbations,
    loss_changes,
    random_perturbations,
    worst_matrices,
)
from flatness.generalization.perturbed_layer import ChosenLayer
from flatness.generalization.robustness_result import Robustness
from flatness.problem import setting_of
from flatness.problem.model import Forward
from flatness.problem.problem import Problem
from flatness.problem.ranks import separately
from flatness.report.report import Result

_THROUGH = choice("weights", "features", "noise")
_PAIRS = 32


@separately()
def feature_robustness(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    *,
    layer: str = "last",
    delta: float | Sequence[float] = 0.01,
    matrices: int | Tensor = _PAIRS,
    distribution: str | Kernel = "orthogonal",
    sigma: float | None = None,
    through: str = "weights",
    steps: int = 4,
    iterations: int = 50,
    compare: bool = True,
    forward: Forward | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Robustness:
    """How much the risk grows when the features of a layer are perturbed, labels held (petzka2021, eq. 4, 7).

    E_F(A) = E(W + W A) − E(W): perturbing features φ by Aφ and weights W by WA is the same (eq. 1).

    Args:
        model: The trained network.
        data: A DataLoader, a pair of tensors, or any re-iterable of batches.
        loss: As for `flatness.measure`.
        layer: Name of the layer whose features are perturbed, or "last".
        delta: δ, the size of the perturbation relative to the features; or several, for a curve.
        matrices: How many random matrices to draw, each with its negative; or the matrices themselves, one or
            several of m×m (for a convolution m is channels × kernel positions; matrices of channels ×
            channels mix whole channels).
        distribution: "orthogonal" (Haar, Theorem 5); a kernel of Proposition 2: "uniform",
            "truncated_normal", "epanechnikov"; or "worst", the worst A with ‖A‖ ≤ 1, found by ascent from
            `matrices` random starts (a lower bound).
        sigma: Of the truncated normal, in units of the bandwidth; 1/(2√m) when None.
        through: What to perturb: "weights", "features", or "noise" (every sample its own draw from the
            induced distribution, petzka2019 App. D.1).
        steps: Number of steps α ≤ δ at which Definition 1's maximum is taken, when `delta` is one number.
        iterations: Most ascent steps for "worst".
        compare: Whether to measure the flatness that the theory compares the value with.
        forward: ``forward(model, batch) -> (output, target)`` for batches with another structure.
        batch_size: Samples per micro-batch; chosen by memory when None.
        device: Work on a copy of the model there.
        dtype: Work on a copy of the model in that precision.
        seed: Seed of the matrices.
        progress: Whether to show a bar on work of more than two seconds.

    Returns:
        A `Robustness`: print it, or use `.value`, `.stderr`, `.curve`, `.epsilon`, `.quantiles`, `.ratio`.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        ... ).double()
        >>> data = torch.randn(50, 4).double(), torch.randint(3, (50,))
        >>> robustness = flatness.feature_robustness(model, data, delta=0.01, matrices=200)
        >>> abs(robustness.ratio - 1) < 0.1  # Theorem 5
        True
    """
    setting = setting_of(locals())
    _THROUGH.check("through", through)
    alphas = _steps(delta, steps)
    problem = Problem(model, data, loss, **setting)
    with problem.guarded():
        chosen = choose_layer(problem, layer)
        if distribution == "worst":
            run = _worst_run(chosen, alphas, matrices, iterations, seed)
        elif isinstance(matrices, int) and not isinstance(matrices, bool):
            run = _random_run(chosen, alphas, matrices, kernel_of(distribution, sigma), through, seed)
        else:
            run = _given_run(chosen, alphas, matrices, through)
    flat = _flatness(run, alphas, chosen, (model, data, loss), setting) if compare else None
    return _finished(run, alphas, problem, chosen, flat)


@dataclass
class _Run:
    """What was evaluated, before it is compared with anything."""

    name: str
    through: str
    changes: LossChanges
    second_moment: float | None = None  # of random matrices
    converged: bool = True
    notes: list[str] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)


def _random_run(
    chosen: ChosenLayer, alphas: list[float], count: int, kernel: Kernel, through: str, seed: int
) -> _Run:
    """Random matrices with their negatives, or the noise they induce."""
    if count < 2:
        raise OptionError(
            f"Expected at least 2 random matrices, for a standard error, but got {count}. For "
            f"example matrices={_PAIRS}."
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = random_perturbations(chosen, kernel, count, alphas, through, generator)
    changes = loss_changes(chosen, drawn)
    return _Run(repr(kernel), through, changes, kernel.second_moment(chosen.features))


def _given_run(chosen: ChosenLayer, alphas: list[float], matrices: Any, through: str) -> _Run:
    A = given_matrices(matrices, chosen.layer)
    changes = loss_changes(chosen, given_perturbations(chosen, A, alphas, through))
    run, largest = _Run("given", through, changes), float(operator_norms(A).max())
    if largest > 1 + 1e-6:
        run.notes.append(f"the largest ‖A‖ is {largest:.4g}: the paper's δ is for ‖A‖ ≤ 1")
    return run


def _worst_run(chosen: ChosenLayer, alphas: list[float], matrices: Any, iterations: int, seed: int) -> _Run:
    """The best of several ascents at every step; each also goes on from the worst of the step before."""
    if not isinstance(matrices, int):
        raise OptionError(
            "Expected matrices to be the number of random starts with distribution='worst' but got a tensor. "
            "For example matrices=4."
        )
    restarts = min(max(1, matrices), 4) if matrices == _PAIRS else max(1, matrices)
    found: list[LossChanges] = []
    A, before, ended = None, alphas[0], True
    for alpha in alphas:
        start = None if A is None else A[:1] * (before / alpha)  # the same perturbation, of norm ≤ 1
        A, own_ended = worst_matrices(chosen, alpha, restarts, iterations, seed, start)
        found.append(loss_changes(chosen, given_perturbations(chosen, A[:1], [alpha], "weights")))
        before, ended = alpha, ended and own_ended
    changes = replace(found[-1], values=torch.cat([one.values for one in found]))
    run = _Run("worst", "weights", changes, converged=ended)
    run.notes.append(
        f"the best of {restarts} ascents over ‖A‖ ≤ 1 at every step: a lower bound on the worst case"
    )
    if not ended:
        run.notes.append("an ascent was still gaining when it was stopped: raise iterations")
    run.bounds["first order, δ‖Wᵀ∇E‖_* (0 at a minimum)"] = first_order_bound(chosen, alphas[-1])
    return run


def _finished(
    run: _Run, alphas: list[float], problem: Problem, chosen: ChosenLayer, flat: Result | None
) -> Robustness:
    values = run.changes.values
    count, curve = values.shape[1], values.mean(1)
    sampled = run.second_moment is not None
    stderr = values.std(1) / count**0.5 if sampled else torch.zeros_like(curve)
    found = Robustness(
        measure="feature_robustness",
        level="layer",
        value=float(curve[-1]),
        layer=chosen.name,
        stderr=float(stderr[-1]),
        method="sampled" if sampled else "exact",
        loss=problem.loss.name,
        converged=run.converged,
        notes=tuple(dict.fromkeys([*run.notes, *problem.notes])),
        delta=alphas[-1],
        distribution=run.name,
        through=run.through,
        features=chosen.features,
        matrices=count,
        deltas=tuple(alphas),
        curve=tuple(curve.tolist()),
        curve_stderr=tuple(stderr.tolist()),
        epsilon=tuple(curve.abs().cummax(0).values.tolist()),
        per_matrix=tuple(values[-1].tolist()),
        epsilon_per_matrix=tuple(values.abs().amax(0).tolist()),
        quantiles=run.changes.quantiles(),
        largest_sample=run.changes.largest_sample(),
        bounds=run.bounds,
    )
    if flat is None:
        return found
    found = replace(found, relative_flatness=flat.value, relative_flatness_stderr=flat.stderr)
    if run.second_moment is None:
        return found
    predicted = [alpha**2 * run.second_moment * flat.value / (2 * chosen.features) for alpha in alphas]
    share = 1 - predicted[-1] / found.value if chosen.kinks and found.value else None
    return replace(found, predicted=predicted[-1], predicted_curve=tuple(predicted), kink_share=share)


def _flatness(
    run: _Run, alphas: list[float], chosen: ChosenLayer, given: tuple[Any, Any, Any], setting: dict[str, Any]
) -> Result | None:
    """κ_Tr of the layer, and for the worst case the bounds of Theorem 14 and of petzka2019, App. C.1."""
    worst = run.name == "worst"
    names = ["relative_flatness"]
    names += ["maximal_relative_flatness", "layer_flatness"] if worst else []
    report = measured_flatness(names, chosen, given, setting)
    if isinstance(report, NotExactError):
        run.notes.append(f"not compared with flatness: {report}")
        return None
    if worst:
        delta, d = alphas[-1], chosen.outputs
        maximal = report.value("maximal_relative_flatness", layer=chosen.name)
        whole = report.value("layer_flatness", layer=chosen.name)
        run.bounds["Theorem 14, (δ²d/2) κ^φ"] = delta**2 * d / 2 * maximal
        run.bounds["petzka2019 App. C.1, (δ²/2) ‖W‖² λ_max"] = delta**2 / 2 * whole
    return report.result("relative_flatness", layer=chosen.name)


def _steps(delta: float | Sequence[float], steps: int) -> list[float]:
    if hasattr(delta, "__len__") and not isinstance(delta, str):
        listed = sorted(check_delta(float(entry)) for entry in delta)  # type: ignore[union-attr]
        if not listed:
            raise OptionError("Expected at least one delta but got an empty list. For example delta=0.01.")
        return listed
    largest = check_delta(delta)
    if not isinstance(steps, int) or steps < 1:
        raise OptionError(
            f"Expected steps to be a whole number of at least 1 but got {steps!r}. For example steps=4."
        )
    return [largest * step / steps for step in range(1, steps + 1)]
