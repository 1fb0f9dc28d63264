"""The metrics D of the catalogue: most of its measures are a functional of the spectrum of D^½ H D^½.

A rewriting θ → Tθ of the network that leaves its function turns H into T⁻ᵀ H T⁻¹. A metric that moves along,
D → T D Tᵀ, leaves that spectrum as it is, so a measure is unchanged by what its metric moves along with.
`flatness.curvature.metrics` has D^½ as an operator, and `functionals` what measures take of the spectrum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flatness.catalogue.measure import LayerView


@dataclass(frozen=True)
class Metric:
    """D on the weight W (d×m) of a layer.

    Attributes:
        name: What `flatness.network_spectrum` and `flatness.landscape.density` call it, where they have it.
        symbol: D.
        unchanged: The rewritings that it moves along with.
        statistic: The statistic that sums up to Tr DH, or to Tr H where D is `factor` times 1.
        spectrum: Likewise the spectrum with λ_max(D^½ H D^½).
        factor: The number that D is; None for metrics that are none.
        notes: What to say of it for one layer.
    """

    name: str
    symbol: str
    unchanged: frozenset[str]
    statistic: str = ""
    spectrum: str = ""
    factor: Callable[[LayerView], Tensor] | None = None
    notes: Callable[[LayerView], Iterable[str]] = lambda view: ()


def _of_whitening(view: LayerView) -> Iterator[str]:
    """The rank of C, and what is doubtful about it."""
    found = view.whitening
    if found is None:
        return
    ranks = sorted({*found.ranks})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    per_group = " in every group" if len(found.ranks) > 1 else ""
    yield f"C has rank {rank} of {found.units}{per_group}, from {found.rows} features"
    if found.rows < found.units:
        yield (
            f"fewer features ({found.rows}) than input units ({found.units}): C is what these few happen to "
            "span, and more data will change the value. Measure more samples"
        )


EUCLIDEAN = Metric("euclidean", "1", frozenset(), "row_traces", "layer_eigenvalue")
LAYERWISE = Metric(
    "layerwise",
    "‖W‖²",
    frozenset({"layerwise"}),
    "row_traces",
    "layer_eigenvalue",
    factor=lambda view: view.squared_norm,
)
NODEWISE = Metric("nodewise", "diag W_ij²", frozenset({"layerwise", "neuronwise"}))
FISHER = Metric("fisher", "diag 1/E(∂_i ℓ)²", frozenset({"layerwise", "neuronwise"}))
RELATIVE = Metric(
    "relative",
    "W Wᵀ ⊗ 1",
    frozenset({"layerwise", "neuronwise except own features", "attention q, k, v"}),
    "relative",
    "relative_eigenvalue",
)
UNIT_SPREAD = Metric(
    "unit spread",
    "W V² Wᵀ ⊗ V⁻²",
    frozenset({"layerwise", "neuronwise", "attention q, k, v"}),
    "relative_normalized",
)
WHITENED = Metric(
    "whitened",
    "W C Wᵀ ⊗ C⁺",
    frozenset({"layerwise", "neuronwise", "attention"}),
    "relative_whitened",
    "whitened_eigenvalue",
    notes=_of_whitening,
)
METRICS = {one.name: one for one in (EUCLIDEAN, LAYERWISE, NODEWISE, FISHER, RELATIVE, UNIT_SPREAD, WHITENED)}
# Metrics are invariant to these for single layers only, not for all layers together.
_OF_LAYERS = {"neuronwise except own features", "attention q, k, v"}


def in_metric(options: Mapping[str, Any]) -> dict[str, Any]:
    """What leaves the spectrum of all layers together in the metric of the options; see `Measure.adapted`."""
    return {"invariances": METRICS[options["metric"]].unchanged - _OF_LAYERS}
