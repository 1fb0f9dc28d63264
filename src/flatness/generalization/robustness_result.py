"""What feature robustness found: a number, its curve over δ, and what single samples went through."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatness.generalization.storage import Saved
from flatness.report.report import Drawn, Result
from flatness.report.tables import format_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness(Saved, Result, Drawn):
    """E_F, the change of the risk when features are perturbed (petzka2021, eq. 4), at `delta`.

    Attributes:
        delta: The largest δ.
        distribution: What the matrices A are drawn from: a kernel, "given" or "worst".
        through: What was perturbed: "weights", "features", or "noise" injected into the features.
        features: m, the number of features.
        matrices: How many matrices, each with its negative where they are random.
        deltas: The steps α ≤ δ, ascending.
        curve: E_F at each step, averaged over the matrices.
        curve_stderr: Its standard errors.
        epsilon: max over α ≤ δ of |E_F(α)| at each step: the model is ((δ, S, A), ε)-feature robust
            (Definition 1).
        per_matrix: E_F at `delta` of each matrix (of each pair ±A).
        epsilon_per_matrix: Definition 1's ε of each matrix.
        quantiles: Quantiles of single samples' loss changes at `delta`, over samples and matrices.
        largest_sample: Number of the sample whose loss grew most.
        relative_flatness: κ_Tr of the layer, or None.
        relative_flatness_stderr: Its standard error; 0 when exact.
        predicted: δ² τ₂ κ_Tr / (2m), what Theorem 5 says about the average; None without κ_Tr.
        predicted_curve: The same at each step.
        kink_share: Share of `value` that the Hessian does not see, 1 − predicted / value, where what follows
            the layer is piecewise linear; None elsewhere.
        bounds: Bounds that hold up to O(δ³), and what they need, by name.
    """

    format = "flatness robustness"
    what = "feature robustness"

    delta: float
    distribution: str
    through: str
    features: int
    matrices: int
    deltas: tuple[float, ...]
    curve: tuple[float, ...]
    curve_stderr: tuple[float, ...]
    epsilon: tuple[float, ...]
    per_matrix: tuple[float, ...]
    epsilon_per_matrix: tuple[float, ...] = ()
    quantiles: dict[str, float]
    largest_sample: int
    relative_flatness: float | None = None
    relative_flatness_stderr: float = 0.0
    predicted: float | None = None
    predicted_curve: tuple[float, ...] = ()
    kink_share: float | None = None
    bounds: dict[str, float]

    @property
    def ratio(self) -> float | None:
        """The value over what Theorem 5 predicts; 1 up to O(δ²) for smooth losses."""
        return None if not self.predicted else self.value / self.predicted

    @property
    def ratio_stderr(self) -> float | None:
        """Standard error of the ratio, of both its parts."""
        if self.ratio is None or not self.predicted or not self.relative_flatness:
            return None
        return math.hypot(
            self.stderr / self.predicted,
            self.ratio * self.relative_flatness_stderr / self.relative_flatness,
        )

    @property
    def largest_change(self) -> float:
        """The largest change of a single sample's loss."""
        return self.quantiles["1"]

    def __str__(self) -> str:
        """The number in a sentence, what is predicted, and what single samples went through."""
        what = "the worst A" if self.distribution == "worst" else f"{self.matrices} matrices"
        lines = [
            f"feature robustness of {self.subject()} at δ = {self.delta:g}: "
            f"{format_value(self.value, self.stderr)} ({self.distribution}, {what}, through {self.through})",
            f"ε(δ) = max over α ≤ δ: {format_value(self.epsilon[-1])}",
        ]
        if self.predicted is not None and self.ratio is not None:
            ratio = format_value(self.ratio, self.ratio_stderr or 0.0)
            lines.append(f"Theorem 5, δ²τ₂κ_Tr/(2m): {format_value(self.predicted)}; ratio {ratio}")
        if self.kink_share is not None:
            lines.append(
                f"share of the kinks after the layer, which no Hessian sees: {100 * self.kink_share:.1f} %"
            )
        median, high, top = (self.quantiles[level] for level in ("0.5", "0.95", "1"))
        lines.append(
            f"single samples: median {median:.3g}, 95 % quantile {high:.3g}, largest {top:.3g} "
            f"(sample {self.largest_sample})"
        )
        lines += [f"{name}: {format_value(value)}" for name, value in self.bounds.items()]
        return "\n  ".join([*lines, *self.notes])

    __repr__ = __str__
