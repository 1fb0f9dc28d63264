"""What the bound is made of: terms with their kind and source, the rate of Theorem 6, and assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from flatness.errors import OptionError
from flatness.generalization.assumptions import Assumption
from flatness.generalization.locally_constant import LabelConstancy
from flatness.generalization.rate_constants import RateConstants
from flatness.generalization.representativeness import Representativeness
from flatness.generalization.storage import Written
from flatness.report.report import Drawn
from flatness.report.tables import format_value


@dataclass(frozen=True)
class BoundTerm:
    """A number of the bound.

    Attributes:
        name: What it is.
        value: The number; None where it could not be computed.
        stderr: Its standard error.
        kind: "bound", "approximation" or "heuristic", in the sense of the paper.
        source: Where it is from.
    """

    name: str
    value: float | None
    stderr: float
    kind: str
    source: str

    def __str__(self) -> str:
        """One line."""
        value = "not available" if self.value is None else format_value(self.value, self.stderr)
        if self.value is not None and self.value < 0 and "bound" in self.name:
            value += " (negative, so no bound)"
        return f"{self.name}: {value} [{self.kind}; {self.source}]"


@dataclass(frozen=True)
class GeneralizationBound(Written, Drawn):
    """The bound of petzka2021 and its terms. Print it.

    Attributes:
        layer: Name of the layer.
        samples: |S|.
        features: m.
        delta: δ.
        terms: All numbers.
        rate: Theorem 6 for a Gaussian density, and with plug-in values.
        assumptions: The assumptions, each measured.
        representativeness: The cross-validated estimate.
        labels: Definition 9 over δ.
        notes: What else to know.
    """

    format = "flatness bound"

    layer: str
    samples: int
    features: int
    delta: float
    terms: tuple[BoundTerm, ...]
    rate: tuple[RateConstants, ...]
    assumptions: tuple[Assumption, ...]
    representativeness: Representativeness
    labels: LabelConstancy
    notes: tuple[str, ...] = ()

    def term(self, name: str) -> BoundTerm:
        """A term by name."""
        for term in self.terms:
            if term.name == name:
                return term
        names = ", ".join(repr(term.name) for term in self.terms)
        raise OptionError(f"Expected the name of a term but got {name!r}. There are: {names}.")

    @property
    def value(self) -> float | None:
        """The sum of representativeness and δ²/(2m) κ_Tr, an approximate upper bound on E_gen."""
        return self.term("bound").value

    def summary(self) -> str:
        """One sentence: what the sum says about the gap, and how many assumptions hold."""
        whole, gap = self.term("bound"), self.representativeness.gap
        held = [assumption.holds for assumption in self.assumptions]
        rests = f"{sum(holds is True for holds in held)} of {len(held)} assumptions hold"
        if whole.value is None:
            return f"No statement about the gap: there is no flatness term. {rests}."
        value, measured = format_value(whole.value, whole.stderr), format_value(gap)
        if whole.value < 0:
            return (
                f"No statement about the gap: the sum is negative ({value}), as the refitted ψ does worse "
                f"on perturbed features than on new samples. Cross-validated gap: {measured}; {rests}."
            )
        above = f"above the cross-validated {measured}: an approximation, not a guarantee"
        below = f"below the cross-validated {measured}: no bound here"
        return f"The gap should be at most about {value}, {above if whole.value >= gap else below}; {rests}."

    def __str__(self) -> str:
        """The summary; terms, rate and assumptions."""
        lines = [
            f"generalisation bound at {self.layer}: n = {self.samples:,}, m = {self.features}, δ = "
            f"{self.delta:.4g}",
            self.summary(),
        ]
        lines += [f"  {term}" for term in self.terms]
        if self.rate:
            lines.append("  Theorem 6, |S|^(−2/(4+m)) (κ_Tr/(2m) + C₁ + C₂/√Δ):")
        lines += [f"    {constants}" for constants in self.rate]
        lines.append("assumed")
        lines += [f"  {assumption}" for assumption in self.assumptions]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from flatness.report.notebook import bound_html

        return bound_html(self)
