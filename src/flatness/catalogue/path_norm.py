"""The path norm: what a network with squared weights makes of an input of ones."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from flatness.catalogue.measure import Measure, Surroundings, Valued
from flatness.catalogue.path_sums import PathSums
from flatness.catalogue.registry import register_measure
from flatness.errors import UndefinedMeasureError, listed
from flatness.problem import batches
from flatness.problem.problem import Problem

_NOTE = "one forward pass of ones through the squared weights; pooling layers stay as they are"
_SIGNED = "differences count as sums over paths, and constant factors by their size"


def squared_network(model: nn.Module) -> nn.Module:
    """A float64 copy whose weights, biases and norm layers (evaluation mode) are the squares of the model's.

    A norm layer in evaluation mode is x ↦ a x + c with a = γ/√(var + eps) and c = β − a·mean; in the copy it
    is x ↦ a² x + c².
    """
    try:
        squared = copy.deepcopy(model).to(torch.float64)
    except Exception as error:
        raise UndefinedMeasureError(
            "Expected a model that copy.deepcopy can copy, as path_norm squares the weights of a copy, but "
            f"got: {error}. Leave path_norm out."
        ) from error
    done: set[int] = set()
    with torch.no_grad():
        for module in squared.modules():
            if isinstance(module, _BatchNorm):
                _square_batch_norm(module)
                continue
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in done:
                    parameter.square_()
                    done.add(id(parameter))
    return squared


def _square_batch_norm(module: _BatchNorm) -> None:
    assert module.running_mean is not None
    assert module.running_var is not None
    scale = (module.running_var + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * module.weight
    shift = -scale * module.running_mean
    if module.bias is not None:
        shift = shift + module.bias
    module.eps = sys.float_info.min  # some versions of torch refuse 0, and 1 + this is 1
    module.running_mean = torch.zeros_like(module.running_mean)
    module.running_var = torch.ones_like(module.running_var)
    module.weight = nn.Parameter(scale.square())
    module.bias = nn.Parameter(shift.square())


def _path_norm(around: Surroundings) -> dict[str | None, Valued]:
    problem = around.space.problem
    _refuse_parametrized(problem.model)
    batch = _ones(problem)
    model = squared_network(problem.model)
    inputs = [tensor for tensor in batches.tensors_in(batch) if tensor.is_floating_point()]
    with torch.no_grad(), PathSums(model, inputs) as paths:
        output, _ = problem.forward(model, batch)
        paths.check_reached(output)
    _refuse_others(paths.refused)
    value = float(output.detach().sum()) / len(output)
    if not math.isfinite(value):
        raise UndefinedMeasureError(
            f"Expected a finite path norm but got {value}: products of squared weights overflow even in "
            "float64. Leave path_norm out."
        )
    return {None: Valued(value, (_NOTE, _SIGNED) if paths.signed else (_NOTE,))}


def _ones(problem: Problem) -> Any:
    """One sample whose floating-point tensors are ones in float64; the target does not matter."""
    batch = problem.example(1)
    if not any(tensor.is_floating_point() for tensor in batches.tensors_in(batch)):
        raise UndefinedMeasureError(
            f"Expected inputs that are real numbers but got {batches.describe(batch)}: a path starts at an "
            "input that can be 1. Leave path_norm out."
        )

    def one(tensor: Tensor) -> Tensor:
        return torch.ones_like(tensor, dtype=torch.float64) if tensor.is_floating_point() else tensor

    return batches.map_tensors(batch, one)


def _refuse_parametrized(model: nn.Module) -> None:
    found = [name for name, module in model.named_modules() if parametrize.is_parametrized(module)]
    if found:
        raise UndefinedMeasureError(
            f"Expected weights that are parameters but those of {listed(found)} are computed from others "
            "(torch.nn.utils.parametrize). Remove the parametrizations first."
        )


def _refuse_others(operators: set[str]) -> None:
    if operators:
        raise UndefinedMeasureError(
            "Expected a network of layers, rectifiers, pooling and batch norm, in which paths multiply, but "
            f"it computes {listed(sorted(operators))}. Leave path_norm out."
        )


path_norm = register_measure(
    Measure(
        name="path_norm",
        symbol="Σ_paths Π w²",
        formula="Σ_k f_{θ²}(1)_k: the outputs of the network with squared parameters on an input of ones",
        source="Neyshabur et al. 2015; Jiang et al. 2020",
        summary="The sum over all paths from inputs to outputs of the product of squared weights on them.",
        when="As a norm of the function rather than of its parameters: no rescaling changes it.",
        misleads=(
            "It knows nothing about the data, overflows in deep networks, and pooling layers stay as "
            "they are in it."
        ),
        levels=("network",),
        invariances=frozenset({"layerwise", "neuronwise"}),
        explore=_path_norm,
        cost="one forward pass of one sample",
        flatness=False,
    )
)
