"""The spectral norm of the Hessian on a quotient manifold, rangamani2019: scale-invariant sharpness."""

from __future__ import annotations

from typing import Any

from flatness.catalogue.functionals import largest_of_network
from flatness.catalogue.measure import Measure
from flatness.catalogue.metrics import LAYERWISE, NODEWISE, Metric, in_metric
from flatness.catalogue.options import EIGENVALUE_OPTIONS, choice, declared
from flatness.curvature.spectra import METRICS, PARAMETERS, SOLVERS

_OPTIONS = {**EIGENVALUE_OPTIONS, "parameters": choice(*PARAMETERS), "solver": choice(*SOLVERS)}
_COST = "Hessian products of the whole network: about 20 to 60, in step with other eigenvalues"


def _largest(metric: Metric) -> dict[str, Any]:
    """λ_max(D^½ H D^½) of the network, in this metric or the one that the options name."""
    return {
        "invariances": metric.unchanged,
        "network": largest_of_network,
        "network_needs": frozenset({"spectrum"}),
        "adapted": in_metric,
        **declared(**_OPTIONS, metric=choice(*METRICS, default=metric.name)),
    }


riemannian_spectral_norm = Measure(
    name="riemannian_spectral_norm",
    symbol="‖Hess f‖",
    formula="λ_max(D^½ H D^½), D = ‖W_l‖² on W_l and ‖b_l‖² on b_l",
    source="rangamani2019, Def. 3",
    summary="The sharpest direction of the network, with each layer in units of its own length.",
    when=(
        "For the sharpest direction of the network as a whole, comparable between networks whose "
        "layers have different scales."
    ),
    misleads=(
        "Rescaling single neurons changes it; use the nodewise version for that. It takes Hessian products, "
        "and has the paper's meaning only at a critical point: the notes give the gradient's length."
    ),
    levels=("network",),
    **_largest(LAYERWISE),
    cost=_COST,
)

riemannian_spectral_norm_nodewise = Measure(
    name="riemannian_spectral_norm_nodewise",
    symbol="‖Hess f‖ (nodes)",
    formula="λ_max(D^½ H D^½), D = θ_i²",
    source="rangamani2019, §6",
    summary="The sharpest direction of the network, with each parameter in units of its own size.",
    when=("As `riemannian_spectral_norm`, and also between networks whose neurons have different scales."),
    misleads="Parameters near 0 hardly count, whatever their curvature: pruned networks look flat.",
    levels=("network",),
    **_largest(NODEWISE),
    cost=_COST,
)
