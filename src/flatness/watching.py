"""Watching later batches: a plan holds for the path through the network that the first samples took."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flatness.errors import LayerError, NotExactError, listed
from flatness.examined import Examined
from flatness.graph import curved_operators
from flatness.problem import Problem


def watch_path(problem: Problem, examined: Examined, *, unused: bool) -> None:
    """Have later batches checked for taking another path through the network than the samples looked at.

    Hooks set here are removed with everything else that the guard sets back.
    """

    def check(output: Tensor) -> None:
        new = curved_operators(output) - examined.graph.operators
        if new:
            raise NotExactError(
                "Expected every batch to take the same path through the network but a later one meets "
                f"{listed(sorted(new))}, which the first samples did not. Exact curvature needs a path that "
                "does not depend on the data."
            )

    def refuse(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            raise LayerError(
                "Expected every batch to take the same path through the network but a later one calls "
                f"{name!r}, which the first samples did not. Name the layers to measure with layers=, "
                "without those used now and then."
            )

        return hook

    problem.watch = check
    for name in examined.silent if unused else ():
        problem.model.get_submodule(name).register_forward_pre_hook(refuse(name))
