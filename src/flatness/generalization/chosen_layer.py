"""Which layer is meant, and whether the theory speaks about it: f = ψ∘φ with ψ(φ) = g(Wφ)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatness.errors import LayerError, NotExactError, listed
from flatness.generalization.perturbed_layer import ChosenLayer
from flatness.measuring.examine.examination import examine
from flatness.measuring.examine.examined import Examined
from flatness.measuring.measure import measure
from flatness.network.graph import only_layout_between
from flatness.network.layers import select_layers
from flatness.problem import batches
from flatness.problem.problem import Problem
from flatness.report.report import Report


def choose_layer(problem: Problem, layer: str) -> ChosenLayer:
    """Look at a few samples and find the layer. The problem must be guarded.

    Raises:
        LayerError: If it does not exist, did not run, is used twice, or nothing follows from it.
    """
    if not isinstance(layer, str):
        raise LayerError(
            f"Expected layer to be the name of one layer, or 'last', but got {type(layer).__name__}. For "
            "example layer='fc2'."
        )
    examined = examine(problem)
    name = _selected(problem, examined, layer)
    record, call = examined.records[name], examined.calls[name]
    n = examined.items.logits.shape[0]
    view = examined.layers[name]
    sizes = [(entry.x.numel() + entry.z_shape.numel()) // n for entry in examined.calls.values()]
    each = problem.dtype.itemsize * 2 * (sum(sizes) + examined.items.logits.numel() // n)
    problem.fit_memory(each, backward=False)
    last = call.z_edge is not None and only_layout_between(examined.items.logits, call.z_edge)
    return ChosenLayer(
        problem,
        view,
        each,
        positions=max(1, call.z_shape.numel() // (n * view.output_units)),
        last=last,
        kinks=not last and not record.operators,
    )


def _selected(problem: Problem, examined: Examined, layer: str) -> str:
    kinds = {name: type(module).__name__ for name, module in problem.model.named_modules()}
    if not examined.called:
        raise LayerError(
            "Expected at least one Linear or convolution layer that the forward pass calls but there is "
            "none. Call layers as modules, not through their weights."
        )
    names = select_layers(examined.layers, examined.called, layer, last=examined.last, modules=kinds)
    if len(names) > 1:
        raise LayerError(
            f"Expected layer to be the name of one layer, or 'last', but {layer!r} stands for {len(names)}: "
            f"{listed(names)}. Choose one of them."
        )
    (name,) = names
    record = examined.records[name]
    following = [other for other in examined.called if not examined.records[other].idle]
    if record.idle:
        raise LayerError(
            f"Expected a layer that the output follows from but nothing follows {name!r}: the output does "
            f"not depend on it. Layers that it depends on: {listed(following) or 'none'}."
        )
    reason = record.refused if record.shared is None else record.used_again
    if reason is not None:
        raise LayerError(
            f"Expected a layer that a sample meets in one place but {name!r} cannot be changed alone: "
            f"{reason}. Choose another of: {listed(following)}."
        )
    return name


def require_vectors(chosen: ChosenLayer) -> None:
    """Refuse layers that do not have one feature vector per sample."""
    if chosen.positions > 1 or chosen.layer.groups > 1 or not chosen.layer.plain:
        raise LayerError(
            f"Expected a layer with one feature vector per sample but {chosen.name!r} is a "
            f"{type(chosen.layer.module).__name__} that meets {chosen.positions} positions. Choose a Linear "
            "layer after pooling or flattening."
        )


def require_all_through(chosen: ChosenLayer) -> None:
    """Refuse layers that something goes around: ψ would not be a function of their features alone."""
    if not chosen.everything_passes():
        raise LayerError(
            "Expected a layer that everything passes through, so that ψ is a function of its features, but "
            f"something goes around {chosen.name!r}. Choose another layer, such as 'last'."
        )


@dataclass(frozen=True)
class Samples:
    """What a layer, or a predictor in its place, sees of the data.

    Attributes:
        z: φ(x_i) of all samples, (n, m) in float64 on the CPU.
        y: Their targets, on the CPU.
        outputs: Number of outputs of the network.
        largest_loss: The largest loss of a sample.
    """

    z: Tensor
    y: Tensor
    outputs: int
    largest_loss: float


def collect_samples(problem: Problem, chosen: ChosenLayer | None) -> Samples:
    """One pass over the data: the features of a layer, or the inputs themselves without one."""
    if chosen is not None:
        require_vectors(chosen)
    features: list[Tensor] = []
    targets: list[Tensor] = []
    losses: list[float] = []
    outputs: list[int] = []

    def step(batch: object) -> None:
        inputs = nullcontext([next(batches.tensors_in(batch))])
        with inputs if chosen is None else chosen.inputs() as seen:
            output, target = problem.outputs(batch)
        items = problem.laid_out(output, target)
        largest = float(problem.loss.values(items).max())
        features.append(seen[0].detach().double().cpu().reshape(batches.size_of(batch), -1))
        targets.append(_as_tensor(target))
        losses.append(largest)
        outputs.append(items.logits.shape[-1])

    with torch.no_grad():
        problem.stream(step, "features")
    return Samples(torch.cat(features), torch.cat(targets), outputs[0], max(losses))


def _as_tensor(target: object) -> Tensor:
    if not isinstance(target, Tensor):
        raise LayerError(
            f"Expected targets as tensors but got {type(target).__name__}. Pass forward= that returns "
            "(output, target) with a tensor of targets."
        )
    return target.detach().cpu()


def measured_flatness(
    names: list[str], chosen: ChosenLayer, given: tuple[Any, Any, Any], setting: dict[str, Any]
) -> Report | NotExactError:
    """Measures of the layer, of the model, data and loss as they were given; or why there are none."""
    try:
        return measure(*given, measures=names, layers=[chosen.name], **setting)
    except NotExactError as error:
        return error
