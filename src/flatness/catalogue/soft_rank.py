"""How many directions of parameter space are curved: Tr[H (H + λ)⁻¹], by stochastic Lanczos quadrature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flatness.catalogue.measure import Measure, Surroundings, Valued, averaged
from flatness.catalogue.metrics import in_metric
from flatness.catalogue.options import choice, count, declared, positive
from flatness.curvature.spectra import METRICS, SpectrumRequest

if TYPE_CHECKING:
    from flatness.curvature.metrics import Root
    from flatness.curvature.operators.lanczos import LanczosRuns

# λ in units of the largest eigenvalue, where none is given.
_SHARE = 0.01
# A value has settled where the last quarter of the steps changes it by no more than this, or by its error.
_SETTLED = 0.01


def soft_ranks(nodes: Any, weights: Any, dimension: int, ridge: float) -> Any:
    """N Σ τ θ/(θ + λ) of every run, eigenvalues below 0 counted as 0.

    Args:
        nodes: Places θ of quadratures, (runs, steps).
        weights: Their weights τ.
        dimension: N.
        ridge: λ.
    """
    curved = nodes.clip(min=0)
    return dimension * (weights * (curved / (curved + ridge))).sum(1)


def _soft_rank(around: Surroundings) -> dict[str | None, Valued]:
    from flatness.curvature.operators.lanczos import lanczos_runs, side_by_side

    options = around.options
    root = around.root(SpectrumRequest(metric=options["metric"], parameters=options["parameters"]))
    N, runs, steps = int(root.mask.sum()), options["runs"], options["steps"]
    after_some, after_all = [], []
    for lanczos in lanczos_runs(runs, root.mask, steps, around.seed):
        _run(lanczos, around, root)
        after_some.append(lanczos.quadrature(-(-3 * lanczos.made // 4)))
        after_all.append(lanczos.quadrature())
    early, (nodes, weights) = side_by_side(after_some), side_by_side(after_all)
    counted = nodes[weights > 1e-14]
    largest, smallest = float(counted.max()), float(counted.min())
    if largest <= 0:
        return {None: Valued(0.0, (f"no direction curves upwards: the largest eigenvalue is {largest:.3g}",))}
    ridge = _SHARE * largest if options["ridge"] is None else float(options["ridge"])
    value, stderr = averaged(soft_ranks(nodes, weights, N, ridge).tolist())
    change = abs(value - averaged(soft_ranks(*early, N, ridge).tolist())[0])
    exhausted = nodes.shape[1] < steps or nodes.shape[1] == N
    converged = exhausted or change <= max(stderr, _SETTLED * value)
    notes = [
        f"λ = {ridge:.4g}, the largest eigenvalue {largest:.4g}; {runs} runs of {nodes.shape[1]} steps over "
        f"{N:,} parameters"
    ]
    if smallest < 0:
        share = float((weights * (nodes < 0)).sum(1).mean())
        notes.append(f"eigenvalues below 0 count as 0: {100 * share:.2g} % of all, the lowest {smallest:.3g}")
    if not converged:
        notes.append(f"not converged: the last quarter of the steps changed it by {change:.2g}. Raise steps")
    terms = {"ridge": ridge, "largest": largest, "smallest": smallest, "parameters": N}
    return {None: Valued(value, tuple(notes), converged, stderr, "sampled", terms=terms)}


def _run(lanczos: LanczosRuns, around: Surroundings, root: Root) -> None:
    while not lanczos.done:
        products = around.hessian([root(vector) for vector in lanczos.query()])
        lanczos.tell(torch.stack([root(product) for product in products]))


soft_rank = Measure(
    name="soft_rank",
    symbol="rank_λ H",
    formula="Tr[H (H + λ)⁻¹]",
    source="MacKay 1992, the number of well-determined parameters",
    summary="How many directions the loss curves in: eigenvalues count by how far they exceed λ.",
    when=(
        "Beside the largest eigenvalue and the trace: whether few directions are curved or many. With ridge= "
        "the ratio of a Gaussian prior's precision to the number of samples it is the effective number of "
        "parameters."
    ),
    misleads=(
        "λ decides it: compare networks with the same λ (ridge=), or by the default, which is relative to "
        "each network's largest eigenvalue. Rescaling changes it unless a metric is chosen that moves along."
    ),
    levels=("network",),
    explore=_soft_rank,
    flatness=False,
    adapted=in_metric,
    cost="runs × steps Hessian products of the whole network",
    **declared(
        ridge=positive(None, none="for 1 % of the largest eigenvalue", example="0.01"),
        runs=count(10, least=2),
        steps=count(40),
        metric=choice(*METRICS),
        parameters=choice("all", "weights"),
    ),
)
