"""`flatness.feature_robustness`: how much the loss grows when features are perturbed (petzka2021, §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import NotExactError, OptionError
from flatness.generalization.chosen_layer import ChosenLayer, choose_layer
from flatness.generalization.kernels import Kernel, check_delta, kernel_of
from flatness.generalization.matrices import (
    given_matrices,
    given_perturbations,
    operator_norms,
    random_perturbations,
)
from flatness.generalization.perturbed_layer import LossChanges, loss_changes
from flatness.generalization.robustness_result import Robustness
from flatness.generalization.worst import first_order_bound, worst_matrices
from flatness.measuring.measure import measure
from flatness.problem.forward import Forward
from flatness.problem.problem import Problem
from flatness.problem.ranks import separately
from flatness.report.report import Result

_ROUTES = ("weights", "features", "noise")
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
        compare: Whether to measure the flatness that theory compares the value with.
        forward: ``forward(model, batch) -> (output, target)`` for batches of another structure.
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
    _check_route(through)
    asked = _Asked(_steps(delta, steps), matrices, distribution, sigma, through, seed, iterations)
    setting = {
        "forward": forward,
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "seed": seed,
        "progress": progress,
    }
    problem = Problem(model, data, loss, **setting)
    with problem.guarded():
        chosen = choose_layer(problem, layer)
        found = (_worst_run if distribution == "worst" else _family_run)(chosen, asked)
    return _finished(found, problem, chosen, compare, (model, data, loss), setting)


@dataclass(frozen=True)
class _Asked:
    """Which perturbations: the arguments of `feature_robustness` that say so, `alphas` the steps up to δ."""

    alphas: list[float]
    matrices: int | Tensor
    distribution: str | Kernel
    sigma: float | None
    through: str
    seed: int
    iterations: int


class _Run:
    """What was evaluated, before it is compared with anything."""

    def __init__(
        self, changes: LossChanges, alphas: list[float], paired: bool, name: str, through: str
    ) -> None:
        self.changes, self.alphas, self.name, self.through = changes, alphas, name, through
        self.paired = paired
        self.second_moment = 1.0
        self.converged = True
        self.notes: list[str] = []
        self.bounds: dict[str, float] = {}

    @property
    def values(self) -> Tensor:
        """E_F of each matrix, or pair ±A, at each step: (steps, matrices)."""
        changes = self.changes.risks - self.changes.risk
        K = len(self.alphas)
        return (changes[:K] + changes[K:]) / 2 if self.paired else changes


def _family_run(chosen: ChosenLayer, asked: _Asked) -> _Run:
    """Given matrices, or random ones with their negatives."""
    alphas, matrices, through = asked.alphas, asked.matrices, asked.through
    if isinstance(matrices, bool) or not isinstance(matrices, int):
        A = given_matrices(matrices, chosen.layer)
        evaluate = given_perturbations(chosen, A, alphas, through)
        changes = loss_changes(chosen.perturbed, evaluate, len(alphas), len(A), [len(alphas) - 1])
        run = _Run(changes, alphas, False, "given", through)
        largest = float(operator_norms(A).max())
        if largest > 1 + 1e-6:
            run.notes.append(f"the largest ‖A‖ is {largest:.4g}: the paper's δ is for ‖A‖ ≤ 1")
        return run
    if matrices < 2:
        raise OptionError(
            f"Expected at least 2 random matrices, for a standard error, but got {matrices}. For example "
            f"matrices={_PAIRS}."
        )
    kernel = kernel_of(asked.distribution, asked.sigma)
    signed = [*alphas, *(-alpha for alpha in alphas)]
    evaluate = random_perturbations(
        chosen, kernel, matrices, signed, through, torch.Generator().manual_seed(asked.seed)
    )
    K = len(alphas)
    changes = loss_changes(chosen.perturbed, evaluate, 2 * K, matrices, [K - 1, 2 * K - 1])
    run = _Run(changes, alphas, True, repr(kernel), through)
    run.second_moment = kernel.second_moment(chosen.features)
    return run


def _worst_run(chosen: ChosenLayer, asked: _Asked) -> _Run:
    """The best of several ascents at every step; each also goes on from the worst of the step before."""
    alphas, matrices = asked.alphas, asked.matrices
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
        A, own_ended = worst_matrices(chosen.perturbed, alpha, restarts, asked.iterations, asked.seed, start)
        evaluate = given_perturbations(chosen, A[:1], [alpha], "weights")
        found.append(loss_changes(chosen.perturbed, evaluate, 1, 1, [0]))
        before, ended = alpha, ended and own_ended
    changes = replace(found[-1], risks=torch.cat([one.risks for one in found]))
    run = _Run(changes, alphas, False, "worst", "weights")
    run.converged = ended
    run.notes.append(
        f"the best of {restarts} ascents over ‖A‖ ≤ 1 at every step: a lower bound on the worst case"
    )
    if not ended:
        run.notes.append("an ascent was still gaining when it was stopped: raise iterations")
    run.bounds["first order, δ‖Wᵀ∇E‖_* (0 at a minimum)"] = first_order_bound(chosen.perturbed, alphas[-1])
    return run


def _finished(
    run: _Run,
    problem: Problem,
    chosen: ChosenLayer,
    compare: bool,
    given: tuple[Any, Any, Any],
    setting: dict[str, Any],
) -> Robustness:
    values = run.values
    curve = values.mean(1)
    count = values.shape[1]
    random = run.paired
    stderr = values.std(1) / count**0.5 if random else torch.zeros_like(curve)
    notes = [*run.notes, *problem.notes]
    flat = None
    if compare:
        flat, extra = _flatness(run, chosen, given, setting)
        notes += extra
    predicted = [
        alpha**2 * run.second_moment * flat.value / (2 * chosen.features) if flat and random else None
        for alpha in run.alphas
    ]
    value, last = float(curve[-1]), predicted[-1]
    return Robustness(
        measure="feature_robustness",
        level="layer",
        value=value,
        layer=chosen.name,
        stderr=float(stderr[-1]),
        method="sampled" if random else "exact",
        loss=problem.loss.name,
        converged=run.converged,
        notes=tuple(dict.fromkeys(notes)),
        delta=run.alphas[-1],
        distribution=run.name,
        through=run.through,
        features=chosen.features,
        matrices=count,
        deltas=tuple(run.alphas),
        curve=tuple(curve.tolist()),
        curve_stderr=tuple(stderr.tolist()),
        epsilon=tuple(curve.abs().cummax(0).values.tolist()),
        per_matrix=tuple(values[-1].tolist()),
        epsilon_per_matrix=tuple(values.abs().amax(0).tolist()),
        quantiles=run.changes.quantiles(),
        largest_sample=run.changes.largest_sample(),
        relative_flatness=flat.value if flat else None,
        relative_flatness_stderr=flat.stderr if flat else 0.0,
        predicted=last,
        predicted_curve=tuple(entry for entry in predicted if entry is not None),
        kink_share=1 - last / value if chosen.kinks and last is not None and value else None,
        bounds=run.bounds,
    )


def _flatness(
    run: _Run, chosen: ChosenLayer, given: tuple[Any, Any, Any], setting: dict[str, Any]
) -> tuple[Result | None, list[str]]:
    """κ_Tr of the layer, and for the worst case the bounds of Theorem 14 and of petzka2019, App. C.1."""
    worst = run.name == "worst"
    names = ["relative_flatness"]
    names += ["maximal_relative_flatness", "layer_flatness"] if worst else []
    try:
        report = measure(*given, measures=names, layers=[chosen.name], **setting)
    except NotExactError as error:
        return None, [f"not compared with flatness: {error}"]
    if worst:
        delta, d = run.alphas[-1], chosen.outputs
        maximal = report.value("maximal_relative_flatness", layer=chosen.name)
        whole = report.value("layer_flatness", layer=chosen.name)
        run.bounds["Theorem 14, (δ²d/2) κ^φ"] = delta**2 * d / 2 * maximal
        run.bounds["petzka2019 App. C.1, (δ²/2) ‖W‖² λ_max"] = delta**2 / 2 * whole
    return report.result("relative_flatness", layer=chosen.name), []


def _steps(delta: float | Sequence[float], steps: int) -> list[float]:
    if isinstance(delta, (list, tuple, Tensor)) or (hasattr(delta, "__len__") and not isinstance(delta, str)):
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


def _check_route(through: str) -> None:
    if through not in _ROUTES:
        raise OptionError(
            f"Expected through to be one of {', '.join(_ROUTES)} but got {through!r}. Leave it out to "
            "perturb the weights."
        )
