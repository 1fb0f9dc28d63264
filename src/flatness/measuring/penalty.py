"""`flatness.penalty`: the flatness of the current batch as a tensor with a gradient, to be added to a loss.

What is differentiated is the Gauss-Newton part. Where a layer's output is the network's output, that is a
closed form in the weight W, the features φ and the probabilities p, with no derivative inside. At other
layers one random vector s with E ssᵀ = ∂²ℓ/∂f² is sent back, δ = ∂(sᵀf)/∂z with its graph, and every
statistic is what the sampled engine makes of the pair (δ, δ). The signs in s are fixed and s moves with the
logits: its derivative is part of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flatness.catalogue.measure import LayerView, Measure
from flatness.catalogue.registry import get_measure, measures
from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.kinds import statistics_of
from flatness.curvature.sums.live_sums import (
    DIRECTIONS,
    Received,
    closed_form_sums,
    drawn,
    live_frame,
    probed_sums,
)
from flatness.errors import (
    DifferentiabilityError,
    LossError,
    MeasureError,
    ModelError,
    NotFiniteError,
    OptionError,
    listed,
)
from flatness.losses import Loss, resolve_loss
from flatness.losses.base import nothing_counts, promote, refuse
from flatness.losses.signs import Signs
from flatness.measuring.training_pass import TrainingPass, training_pass
from flatness.network.layers import Layer
from flatness.network.layers.shared import SharedLayer
from flatness.network.memory import ran_out
from flatness.problem.model import Forward, refuse_missing_row

Seed = int | torch.Generator | None


def penalty(
    model: nn.Module,
    batch: Any,
    measure: str | Measure = "relative_flatness",
    layers: str | Iterable[str] | None = "last",
    *,
    loss: Any = "cross_entropy",
    forward: Forward | None = None,
    seed: Seed = None,
    return_output: bool = False,
) -> Any:
    """A flatness measure of this batch as a differentiable tensor, to be added to a training loss.

    The model runs once, in the mode it is in: in training mode dropout is active and batch norm updates its
    statistics. What is measured is the Gauss-Newton part of the Hessian, which is the whole of it for the
    last layer of every network and for all layers of a ReLU network. Gradients flow through weights, features
    and probabilities to every parameter that requires one.

    Args:
        model: The network in training; wrapped by DistributedDataParallel too.
        batch: Inputs and targets, as `flatness.measure` takes batches, on the model's device.
        measure: "relative_flatness", "hessian_trace", "layer_flatness_trace", "neuron_flatness" (the sum over
            units), or another measure whose layer values follow from one pass over the data.
        layers: "last", a name, a list of names, or None for every supported layer that runs. Values of
            several layers are added up.
        loss: "cross_entropy", "nll", "mse", "squared_error", "bce", or torch's module or function of these.
        forward: ``forward(model, batch) -> (output, target)`` for batches with another structure.
        seed: Where the random signs of hidden layers come from. None: torch's own random state, so that every
            call has new ones. A `torch.Generator`: the same. A number: the same signs at every call
            with these layers.
        return_output: Whether to return the model's output too, so that the loss needs no forward pass.

    Returns:
        The penalty, a tensor without dimensions; with `return_output` the pair (penalty, output). The
        gradient of the penalty cannot be differentiated once more.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(50, 4), torch.randint(3, (50,))
        >>> value, output = flatness.penalty(model, (x, y), return_output=True)
        >>> (torch.nn.functional.cross_entropy(output, y) + 0.1 * value).backward()
        >>> report = flatness.measure(model, (x, y), measures="relative_flatness", layers="last")
        >>> abs(report.value("relative_flatness", layer="2") / value.item() - 1) < 1e-5
        True
    """
    chosen, resolved = _differentiable(measure), resolve_loss(loss)
    _check_loss(resolved)
    _check_seed(seed)
    _check_gradients(model)
    # A parametrised weight is computed once, for the layer and for the penalty.
    with parametrize.cached():
        try:
            run = training_pass(model, batch, layers, resolved, forward)
        except IndexError as error:
            refuse_missing_row(model, error)
            raise
        with torch.autocast(run.output.device.type, enabled=False):
            C = run.loss.normaliser(run.items)
            value = _total(run, chosen, C, seed)
    _check_numbers(run, C, value)
    return (value, run.output) if return_output else value


class _LiveView(LayerView):
    """A layer as measures see it, its weight and statistics with their graphs and in the type of training."""

    @cached_property
    def W(self) -> Tensor:
        """The weight (G, d, m)."""
        return self.weight

    @cached_property
    def squared_norm(self) -> Tensor:
        """‖W‖²_F."""
        return self.weight.square().sum()


# What was asked for


def _differentiable(name: str | Measure) -> Measure:
    """The measure, if what it is made of has a gradient."""
    measure = get_measure(name)
    if _has_gradient(measure):
        return measure
    known = [each.name for each in measures() if _has_gradient(each)]
    raise MeasureError(
        "Expected a measure whose layer values follow from one pass, since only these have a cheap "
        f"gradient, but got {measure.name!r}. Use {listed(known)}."
    )


def _has_gradient(measure: Measure) -> bool:
    if not measure.one_pass or not measure.needs or measure.clips is not None:
        return False
    if measure.layer is None and "sum" not in measure.reductions:
        return False
    return not any(statistic.units for statistic in statistics_of(measure.needs))


def _check_loss(loss: Loss) -> None:
    if not loss.has_live_probe:
        raise LossError(
            "Expected a loss whose second derivatives have a closed form, 'cross_entropy', 'nll', 'mse', "
            f"'squared_error' or 'bce', but got {loss.name!r}. Pass one of these as loss= of the penalty; it "
            "need not be the loss you train with."
        )


def _check_seed(seed: Any) -> None:
    if not (seed is None or isinstance(seed, torch.Generator) or hasattr(seed, "__index__")):
        raise OptionError(
            f"Expected seed to be None, a whole number or a torch.Generator but got {seed!r}. None draws new "
            "signs at every call."
        )


def _check_gradients(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"Expected a torch.nn.Module but got {type(model).__name__}. Pass the model itself.")
    if not torch.is_grad_enabled():
        off = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        raise DifferentiabilityError(
            f"Expected gradients to be recorded but {off} is on, which leaves a penalty without a "
            "gradient. Call it outside, or use flatness.measure for the value alone."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise DifferentiabilityError(
            "Expected parameters that are trained but no parameter of the model requires a gradient. Call "
            "model.requires_grad_(), or use flatness.measure for the value alone."
        )


def _check_numbers(run: TrainingPass, C: Tensor, value: Tensor) -> None:
    """Wait for the device, once, when all its work is on the way."""
    checks = run.loss.checks(run.items)
    # NaN and infinity times 0 are not 0; C = 0 makes the value NaN.
    wrong = sum((mask.any() for mask, _ in checks), value.detach() * 0)
    if wrong.item() == 0:
        return
    refuse([*checks, (C == 0, lambda _: nothing_counts(len(run.items.logits)))])
    raise _not_finite(run)


# The value


def _total(run: TrainingPass, measure: Measure, C: Tensor, seed: Seed) -> Tensor:
    """The sum over layers, of means with the divisor C."""
    frames = {layer.name: live_frame(layer) for layer in run.layers}
    means: dict[str, dict[str, Tensor]] = {}
    probed: list[Layer] = []
    for layer in run.layers:
        closed = None
        if not isinstance(layer, SharedLayer):
            (call,) = run.calls[layer.name]
            frame = frames[layer.name]
            closed = closed_form_sums(measure.needs, run.loss, run.items, C, layer, frame, call)
        if closed is None:
            probed.append(layer)
        else:
            means[layer.name] = closed
    if probed:
        means |= _probed(run, probed, frames, measure.needs, C, seed)
    values = []
    for layer in run.layers:
        view = _LiveView(layer.name, frames[layer.name].W, means[layer.name], taps=layer.taps, layer=layer)
        values.append(_value(measure, view))
    return torch.stack(values).sum() if len(values) > 1 else values[0]


def _probed(
    run: TrainingPass,
    layers: list[Layer],
    frames: dict[str, Frame],
    needs: frozenset[str],
    C: Tensor,
    seed: Seed,
) -> dict[str, dict[str, Tensor]]:
    """The means of every layer from what one random vector sends back to it."""
    logits = run.items.logits
    n, signs = len(logits), _signs(seed, logits)
    s = run.loss.live_probe(run.items, signs)
    assert s is not None  # or the loss would have been refused
    received = _received(run, layers, (s * C.rsqrt()).to(logits.dtype))
    # Drawn for all layers at once: a draw takes twenty operators.
    entries = [drawn(needs, layer, frames[layer.name], received[layer.name], n) for layer in layers]
    U = signs.like(s.new_empty(n, sum(entries), dtype=promote(s).dtype)).mul_(DIRECTIONS**-0.5)
    return {
        layer.name: probed_sums(needs, layer, frames[layer.name], received[layer.name], own, n)
        for layer, own in zip(layers, U.split(entries, 1), strict=True)
    }


def _received(run: TrainingPass, layers: list[Layer], s: Tensor) -> dict[str, Received]:
    """What every call of every layer was given, and what s sends back to it."""
    calls = {layer.name: run.uses(layer) for layer in layers}
    edges = {id(call): call.edge for own in calls.values() for _, call in own if call.edge is not None}
    found: tuple[Tensor | None, ...] = ()
    if edges:
        ends = list(edges.values())
        with _explained():
            found = torch.autograd.grad(run.items.logits, ends, s, create_graph=True, allow_unused=True)
    signals = dict(zip(edges, found, strict=True))
    return {
        name: [(use, call.x, _or_zero(signals.get(id(call)), call.z)) for use, call in own]
        for name, own in calls.items()
    }


def _or_zero(signal: Tensor | None, z: Tensor) -> Tensor:
    """What arrived; where nothing did the output does not depend on the layer."""
    return torch.zeros_like(z) if signal is None else signal


def _signs(seed: Seed, logits: Tensor) -> Signs:
    """Signs of every sample: those of a number, or of the next one that a random state gives."""
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    elif isinstance(seed, torch.Generator):
        seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))
    return Signs(int(seed), torch.arange(len(logits), device=logits.device))


@contextmanager
def _explained() -> Iterator[None]:
    """Say what torch's complaint about a derivative means for the user."""
    try:
        yield
    except RuntimeError as error:
        if ran_out(error):
            raise
        raise DifferentiabilityError(
            f"Expected operators that torch can differentiate but it says: {str(error).splitlines()[0]}. "
            "Take the penalty of the last layer, layers='last', or of layers after that operator."
        ) from error


def _value(measure: Measure, view: LayerView) -> Tensor:
    if measure.layer is not None:
        value: Any = measure.layer(view)
    else:
        assert measure.units is not None
        value = measure.units(view).sum()
    if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
        raise MeasureError(
            f"Expected {measure.name!r} to return one number with a gradient but it has none. Compute it "
            "with torch's operations from view.statistics and view.W, without float()."
        )
    return value.reshape(()) if value.dim() else value


def _not_finite(run: TrainingPass) -> NotFiniteError:
    bad = (~run.items.logits.isfinite()).flatten(1).any(1).nonzero()
    if len(bad):
        return NotFiniteError(
            f"Expected finite outputs but the model returned NaN or infinity for sample {int(bad[0])} of the "
            "batch. Look for NaN in the inputs or the weights, or for a learning rate that is too large."
        )
    return NotFiniteError(
        "Expected a finite penalty but got NaN or infinity, though all outputs are finite. Look for weights "
        f"or features that overflow in {run.items.logits.dtype}."
    )
