"""The least trace of the Hessian that rescaling the layers of a chain can give a network."""

from __future__ import annotations

import math

from flatness.catalogue.measure import Measure, NetworkView, Valued
from flatness.catalogue.registry import register_measure


def _minimum(view: NetworkView) -> Valued:
    """The minimum of Σ_l α_l⁻² Tr H_l over Π α_l = 1, where all terms are the traces' geometric mean."""
    traces = {name or "the model itself": float(trace) for name, trace in view.layer_traces.items()}
    L = len(traces)
    over = f"the weights of {', '.join(traces)}; biases and norm layers are no part of it"
    low = [name for name, trace in traces.items() if trace <= 0]
    if not traces:  # no signal arrives anywhere: the loss has no curvature on these outputs
        return Valued(0.0, ("no layer has any curvature",), converged=False)
    if low:
        # A trace of 0 makes the infimum 0; below 0 there is none, and the value says no more than that.
        note = f"traces that are not positive count as 0: {', '.join(low)}; no minimum is attained"
        return Valued(0.0, (note,), converged=False, over=over)
    return Valued(L * math.exp(sum(math.log(trace) for trace in traces.values()) / L), over=over)


minimum_sharpness = register_measure(
    Measure(
        name="minimum_sharpness",
        symbol="MS",
        formula="min of Σ_l Tr H_l over layer-wise factors with product 1 = L (Π_l Tr H_l)^{1/L}",
        source="Ibayashi et al. 2021",
        summary=(
            "The trace of the network's Hessian after the best rescaling of its layers. Where branches meet, "
            "factors need not multiply to 1, and rescaling changes it."
        ),
        when="For the trace of a plain chain of layers, freed of the scale of its layers.",
        misleads=(
            "Where branches or norm layers take up factors its minimum is over the wrong rescalings; "
            "neurons scaled one by one change it anywhere."
        ),
        levels=("network",),
        invariances=frozenset({"layerwise in chains"}),
        network=_minimum,
        network_needs=frozenset({"traces"}),
        clips="sums",
    )
)
