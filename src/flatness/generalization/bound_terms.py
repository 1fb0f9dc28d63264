"""The numbers that the bound adds up, with their kinds and sources."""

from __future__ import annotations

import math

from flatness.generalization.bound_result import BoundTerm
from flatness.generalization.chosen_layer import ChosenLayer
from flatness.generalization.kernels import Kernel
from flatness.generalization.representativeness import Representativeness
from flatness.report.report import Report

_CROSS = "cross-validated, eq. 3: the paper says it is then technically not a bound"


def bound_terms(
    found: Representativeness, flat: Report | None, chosen: ChosenLayer, kernel: Kernel
) -> list[BoundTerm]:
    """All terms at the δ of a cross-validated representativeness; without flatness, the others are None."""
    delta, m, d = found.delta, chosen.features, chosen.outputs
    terms = [BoundTerm("representativeness", found.value, found.stderr, "approximation", _CROSS)]
    kappa = flat.result("relative_flatness", layer=chosen.name) if flat else None
    maximal = flat.value("maximal_relative_flatness", layer=chosen.name) if flat else None
    factor = delta**2 / (2 * m)

    def add(name: str, value: float | None, stderr: float, source: str) -> None:
        terms.append(BoundTerm(name, value, stderr, "approximation", source))

    def total(value: float | None) -> float | None:
        return None if value is None else found.value + value

    term = factor * kappa.value if kappa else None
    error = factor * kappa.stderr if kappa else 0.0
    add("flatness term", term, error, "δ²/(2m) κ_Tr, Theorem 5: up to O(δ³), at a minimum, labels held")
    whole = math.hypot(found.stderr, error)
    add("bound", total(term), whole, "representativeness + flatness term, §5")
    tau2 = kernel.second_moment(m)
    sharper = tau2 * term if term is not None else None
    add("with the kernel's radius", total(sharper), whole, f"the same with E[r²] = {tau2:.3g} δ² for δ²")
    uniform = delta**2 * d / 2 * maximal if maximal is not None else None
    add("uniform flatness term", uniform, 0.0, "(δ²d/2) κ^φ, Theorem 14: over all ‖A‖ ≤ 1, up to O(δ³)")
    add("uniform bound", total(uniform), found.stderr, "Theorem 15 (without its second Σ_s, a slip)")
    return terms


def rule_terms(
    found: Representativeness, flat: Report | None, chosen: ChosenLayer, kernel: Kernel
) -> list[BoundTerm]:
    """The first three at the rule's δ, for comparison with a smaller one."""
    where = f"δ = |S|^(−1/(4+m)) = {found.delta:.3g}"
    return [
        BoundTerm(f"{term.name} at the rule's δ", term.value, term.stderr, term.kind, where)
        for term in bound_terms(found, flat, chosen, kernel)[:3]
    ]
