"""The rise of the risk along one step of sharpness-aware minimisation."""

from __future__ import annotations

from flatness.catalogue.measure import Measure, Surroundings, Valued
from flatness.catalogue.options import declared, positive
from flatness.catalogue.registry import register_measure
from flatness.errors import UndefinedMeasureError


def _sam(around: Surroundings) -> dict[str | None, Valued]:
    risk, slope = around.gradient()
    length = float(slope.norm())
    if length == 0:
        raise UndefinedMeasureError(
            "Expected a gradient to step along but it is zero everywhere: sam_sharpness is not defined here. "
            "Use epsilon_sharpness, or check that the outputs depend on the parameters."
        )
    rho = float(around.options["rho"])
    higher = around.space.risk(slope * (rho / length))
    note = f"one step of length {rho:g} along the gradient of all the data, whose length is {length:.3g}"
    return {None: Valued(higher - risk, (note,))}


sam_sharpness = register_measure(
    Measure(
        name="sam_sharpness",
        symbol="SAM",
        formula="E(θ + ρ ∇E/‖∇E‖) − E(θ), ρ = 0.05",
        source="Foret et al. 2021",
        summary="How much the risk rises in the ascent step that sharpness-aware minimisation takes.",
        when="To see what sharpness-aware training minimises, on all the data instead of a batch.",
        misleads=(
            "One step along the gradient finds the steepest direction, not the sharpest; near a "
            "minimum it says little, and rescaling changes it."
        ),
        levels=("network",),
        explore=_sam,
        cost="one gradient and one forward pass",
        **declared({"rho": positive(0.05)}),
    )
)
