"""Largest eigenvalues of layer Hessians and of their row blocks, all layers in step over the same passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.operators.lanczos import TopEigenvalues, basis_limit, default_tolerance, in_step
from flatness.curvature.parameters.batch_sums import BatchSums
from flatness.curvature.spectra import Spectrum
from flatness.network.layers import Layer
from flatness.problem.problem import Problem

HessianSlice = Callable[[Tensor, bool], Tensor]
"""A micro-batch's share of Σ_i H_i: its product with V (G, d, m), or of the row blocks with their rows."""

_ANEW = "eigenvalues: signals or graphs did not fit into memory and were recomputed for every product"


def top_eigenvalues(
    problem: Problem,
    layers: Mapping[str, Layer],
    wanted: Mapping[str, Sequence[str]],
    opened: Callable[[], AbstractContextManager[Callable[[Any], dict[str, HessianSlice]]]],
    *,
    normaliser: float,
    keep: bool | None,
    tolerance: float | None = None,
    max_products: int = 300,
) -> dict[tuple[str, str], Spectrum]:
    """Largest eigenvalues by (layer, part).

    Args:
        problem: The model, data and loss, already guarded.
        layers: The layers.
        wanted: For every layer, the parts: "whole" for λ_max(H_l), "rows" for λ_max(H_ss) of all rows s.
        opened: A context for one pass over the data, which gives the slices of a micro-batch by layer.
        normaliser: C of the whole data set.
        keep: Whether slices are kept in memory; otherwise every product streams the data anew. None where
            they hold nothing that is worth it.
        tolerance: Relative residual to stop at; depends on the dtype by default.
        max_products: Upper limit of passes.
    """
    slices = BatchSums(problem, opened, "eigenvalues", keep=bool(keep), note="" if keep is None else _ANEW)
    shapes = {name: layer.matrix().shape for name, layer in layers.items()}
    solvers = {
        (name, part): TopEigenvalues(
            _sizes(shapes[name], part),
            problem.device,
            tolerance=default_tolerance(problem.dtype) if tolerance is None else tolerance,
            max_products=max_products,
            basis_limit=basis_limit(shapes[name].numel()),
            seed=problem.seed,
        )
        for name, parts in wanted.items()
        for part in parts
    }

    def products(vectors: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
        laid_out = {key: V.reshape(shapes[key[0]]).to(problem.dtype) for key, V in vectors.items()}
        found = slices.sums(
            lambda own: {(name, part): own[name](V, part == "rows") for (name, part), V in laid_out.items()}
        )
        return {key: total.reshape(vectors[key].shape) / normaliser for key, total in found.items()}

    # Several processes go on as the first one decides: rounding may differ between their devices.
    in_step(solvers, products, problem.ranks.first)
    answers = products({key: solver.vectors for key, solver in solvers.items()})
    for key, solver in solvers.items():
        solver.verify(answers[key])
    return {key: _finished(solver) for key, solver in solvers.items()}


def _sizes(shape: torch.Size, part: str) -> tuple[int, int]:
    """How many operators there are, and on how many numbers each: on a whole weight, or on its rows."""
    return (1, shape.numel()) if part == "whole" else (shape[:2].numel(), shape[2])


def _finished(solver: TopEigenvalues) -> Spectrum:
    found = (each.cpu() for each in (solver.values, solver.smallest, solver.residuals))
    return Spectrum(*found, converged=bool(solver.converged.all()), products=solver.products)
