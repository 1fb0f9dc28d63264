"""Largest eigenvalues of layer Hessians and of their row blocks, all layers in step over the same passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.metrics import LayerRoot
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
    roots: Mapping[tuple[str, str], LayerRoot] | None = None,
) -> dict[tuple[str, str], Spectrum]:
    """Largest eigenvalues by (layer, part), without weight decay; in a metric, where it is no shift, with it.

    Args:
        problem: The model, data and loss, already guarded.
        layers: The layers.
        wanted: For every layer, the parts: "whole" for λ_max(H_l), "rows" for λ_max(H_ss) of all rows s, or
            the name of a metric D for λ_max(D^½ H_l D^½).
        opened: A context for one pass over the data, which gives the slices of a micro-batch by layer.
        normaliser: C of the whole data set.
        keep: Whether slices are kept in memory; otherwise every product streams the data again. None where
            they hold nothing that is worth it.
        tolerance: Relative residual to stop at; depends on the dtype by default.
        max_products: Upper limit of passes.
        roots: Factors of D by layer and part, for parts that are metrics.
    """
    roots = roots or {}
    slices = BatchSums(problem, opened, "eigenvalues", keep=bool(keep), note="" if keep is None else _ANEW)
    shapes = {name: layer.matrix().shape for name, layer in layers.items()}
    solvers = {
        (name, part): TopEigenvalues(
            _sizes(roots[name, part].shape if (name, part) in roots else shapes[name], part),
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
        asked = {key: V for key, V in vectors.items() if key in roots}
        directions = {key: roots[key].direction(V.reshape(roots[key].shape)) for key, V in asked.items()}
        plain = {key: V.reshape(shapes[key[0]]) for key, V in vectors.items() if key not in roots}
        laid_out = {key: V.to(problem.dtype) for key, V in (plain | directions).items()}
        found = slices.sums(
            lambda own: {(name, part): own[name](V, part == "rows") for (name, part), V in laid_out.items()}
        )
        answers = {key: total / normaliser for key, total in found.items()}
        for key, V in directions.items():
            answers[key] = roots[key].coordinates(answers[key].double() + problem.weight_decay * V)
        return {key: answer.reshape(vectors[key].shape) for key, answer in answers.items()}

    # Several processes go on as the first one decides: rounding may differ between their devices.
    in_step(solvers, products, problem.ranks.first)
    answers = products({key: solver.vectors for key, solver in solvers.items()})
    for key, solver in solvers.items():
        solver.verify(answers[key])
    return {key: _finished(solver, roots.get(key)) for key, solver in solvers.items()}


def _sizes(shape: torch.Size, part: str) -> tuple[int, int]:
    """How many operators there are, and on how many numbers each: on a whole weight, or on its rows."""
    return (shape[:2].numel(), shape[2]) if part == "rows" else (1, shape.numel())


def _finished(solver: TopEigenvalues, root: LayerRoot | None) -> Spectrum:
    values, smallest, residuals = (each.cpu() for each in (solver.values, solver.smallest, solver.residuals))
    if root is not None and root.singular:
        values, smallest = values.clamp(min=0), smallest.clamp(max=0)
    return Spectrum(
        values, smallest, residuals, converged=bool(solver.converged.all()), products=solver.products
    )
