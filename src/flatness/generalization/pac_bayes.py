"""`flatness.pac_bayes_bound`: the bound of tsuzuku2020 as a table of its terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from flatness.files import NUMBER, TEXT
from flatness.generalization.storage import Saved
from flatness.measuring.measure import measure
from flatness.problem import setting_of
from flatness.problem.model import Forward
from flatness.report.notebook import terms_html
from flatness.report.tables import Column, format_table, format_value

if TYPE_CHECKING:
    import pandas

_NOT_COMPUTABLE = "not computable"


@dataclass(frozen=True)
class PacBayesBound(Saved):
    """An upper bound on a noisy network's test error, with all its terms. Print it.

    Attributes:
        value: The bound: the sum of the terms. Above 1 it says nothing.
        stderr: Standard error of the error rate under noise, the only term that is estimated.
        terms: Rows with "term", "value" and "stderr", in the order of eq. 4.
        unknown: The term that cannot be computed.
        grid: For every λ: "lambda", "error under noise" (None where the rest alone was too large) and
            "rest", the sum of the other terms.
        settings: λ, δ, how the noise was chosen, number of samples, loss and whatever else distinguishes
            bounds.
        notes: Caveats.
    """

    format = "flatness PAC-Bayes bound"
    what = "a PAC-Bayes bound"
    writer = "PacBayesBound.save"
    shapes: ClassVar = {"terms": [{"term": TEXT}], "grid": [{"lambda": NUMBER}], "notes": [TEXT]}

    value: float
    stderr: float
    terms: tuple[dict[str, Any], ...]
    unknown: str
    grid: tuple[dict[str, Any], ...]
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()

    def __float__(self) -> float:
        """The bound."""
        return self.value

    @property
    def vacuous(self) -> bool:
        """Whether it says nothing."""
        return self.value >= 1

    def rows(self) -> list[tuple[str, str]]:
        """The table as text: terms, their sum, and the term that is missing."""
        shown = [(row["term"], format_value(row["value"], row["stderr"])) for row in self.terms]
        total = ("bound of the error with noise", format_value(self.value, self.stderr))
        return [*shown, total, (self.unknown, _NOT_COMPUTABLE)]

    def title(self) -> str:
        """What was bounded."""
        told = self.settings
        return (
            f"PAC-Bayes bound (tsuzuku2020, eq. 4): λ = {told['lambda']:g}, δ = {told['delta']:g}, "
            f"{told['samples']} samples, noise by {told['sigma']} from {told['loss']}"
        )

    def __str__(self) -> str:
        """The table of terms, and the notes."""
        rows: list[tuple[str, ...]] = [*self.rows()]
        rows.insert(len(self.terms), ())
        table = format_table([Column(), Column(align="right")], rows)
        return "\n".join([self.title(), table, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return terms_html(self.title(), self.rows(), self.notes)

    def to_frame(self) -> pandas.DataFrame:
        """One row per term: term, value, stderr; the sum and the unknown term (NaN) at the end."""
        import pandas as pd

        total = {"term": "bound of the error with noise", "value": self.value, "stderr": self.stderr}
        missing = {"term": self.unknown, "value": float("nan"), "stderr": float("nan")}
        return pd.DataFrame([*self.terms, total, missing], columns=["term", "value", "stderr"])

    def grid_frame(self) -> pandas.DataFrame:
        """One row per λ of the grid: lambda, error under noise, rest."""
        import pandas as pd

        frame = pd.DataFrame(list(self.grid), columns=["lambda", "error under noise", "rest"])
        return frame.astype(float)


def pac_bayes_bound(
    model: nn.Module,
    data: Any,
    loss: Any = "normalized_cross_entropy",
    *,
    sigma: str = "rows_and_columns",
    delta: float = 0.05,
    draws: int = 20,
    hyperprior: str = "float32",
    psi: str = "paper",
    forward: Forward | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
) -> PacBayesBound:
    """Bound the test error of a network with Gaussian noise on its weights, from its training data.

    tsuzuku2020, eq. 1–4: L_D(Q) ≤ L_S(Q) + (1/λ)(KL[Q‖P] + ln(1/δ) + Ψ). The noise is chosen by the curvature
    of a surrogate loss; the bound includes the cost of choosing it and λ. It is valid, and above 1 for most
    networks.

    Args:
        model: The trained classifier.
        data: Its training data, all of it.
        loss: The surrogate whose curvature chooses the noise; any classification loss. The bound itself is
            about the 0–1 loss.
        sigma: "rows_and_columns" (eq. 17), or "matrices" (eq. 11): fewer scales to encode, coarser noise.
        delta: The bound holds with probability 1 − δ over the training data.
        draws: Networks drawn to estimate the error rate under noise.
        hyperprior: The floating-point numbers that scales are chosen from: "float32", "bfloat16" (coarser,
            cheaper), "float16" or "float64".
        psi: "paper" for Ψ = λ²/2m as in eq. 3; "hoeffding" for λ²/8m, which Hoeffding's lemma gives for
            losses between 0 and 1.
        forward: As for `flatness.measure`, like all that follow.
        batch_size: Samples per micro-batch.
        device: Where to compute.
        dtype: In which precision.
        seed: Seed of the noise.
        progress: Whether to show a bar on long work.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> bound = flatness.pac_bayes_bound(model, (torch.randn(50, 4), torch.randint(3, (50,))))
        >>> bound.unknown
        '(A) network without noise instead of with it'
        >>> bound.vacuous
        True
    """
    setting = setting_of(locals())
    options = {
        "sigma": sigma,
        "delta": delta,
        "draws": draws,
        "hyperprior": hyperprior,
        "psi": psi,
        "loss": "same",
    }
    report = measure(
        model,
        data,
        loss,
        measures="pac_bayes_bound",
        options={"pac_bayes_bound": options},
        **setting,
    )
    told = dict(report.result("pac_bayes_bound").terms or {})
    return PacBayesBound(
        value=told.pop("value"),
        stderr=told.pop("stderr"),
        terms=tuple(told.pop("terms")),
        unknown=told.pop("unknown"),
        grid=tuple(told.pop("grid")),
        notes=(*told.pop("notes"), *report.notes),
        settings=told,
    )
