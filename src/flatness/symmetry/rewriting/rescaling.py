"""Equal networks: the same function with other parameters."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import ModelError, OptionError, listed, nearest
from flatness.problem.guard import Kept
from flatness.problem.process_state import PROCESS
from flatness.symmetry.flow.groups import Symmetries, checked, symmetries
from flatness.symmetry.rewriting import logits, permuting
from flatness.symmetry.rewriting.equality import Comparison
from flatness.symmetry.rewriting.factors import (
    drawn,
    from_layers,
    from_units,
    layerwise_factors,
    neuronwise_factors,
)
from flatness.symmetry.trace.tracing import Forward, default_forward

KINDS = ("layerwise", "neuronwise", "permutation", "output")


@dataclass(frozen=True)
class Rescaling:
    """A change of parameters that leaves a network's function as it is (of the kind "output": its decisions).

    Attributes:
        kind: "layerwise", "neuronwise", "permutation" or "output".
        factors: What `flatness.rescale` takes as ``factors`` to do the same again.
        symmetries: What it acts on.
        scales: The factor of every class of channels; for a permutation the class whose place each one takes.
    """

    kind: str
    factors: dict[str, Any]
    symmetries: Symmetries
    scales: Tensor

    def inverse(self) -> dict[str, Any]:
        """The factors that undo it."""
        if self.kind == "permutation":
            return {name: torch.argsort(order) for name, order in self.factors.items()}
        if self.kind == "output":
            scale, shift = self.factors["scale"], self.factors["shift"]
            return {"scale": 1 / scale, "shift": -shift / scale}
        return {name: 1 / value for name, value in self.factors.items()}

    def apply(self, model: nn.Module) -> None:
        """Change the parameters and running statistics of a model in place."""
        if self.kind == "permutation":
            permuting.permute(model, self.symmetries, self.scales)
            return
        scale_parameters(model, self.symmetries, self.scales)
        if self.kind == "output":
            logits.shift_biases(model, self.symmetries, self.factors["shift"])

    def expected(self, output: Tensor) -> Tensor:
        """What the changed network puts out where the original put out `output`."""
        return output if self.kind != "output" else self.factors["scale"] * output + self.factors["shift"]


def rescale(
    model: nn.Module,
    example: Any,
    kind: str = "layerwise",
    seed: int = 0,
    low: float = 0.2,
    high: float = 5.0,
    factors: Mapping[str, Any] | None = None,
    *,
    forward: Forward | None = None,
) -> nn.Module:
    """An equal network: a copy with other parameters that computes the same function.

    Args:
        model: The network; it is not changed.
        example: Inputs for it, as for `flatness.symmetries`; model and copy are compared on it and on new
            random inputs of its kind and scale. A warning says where the model does not run on those.
        kind: What is changed; see below.
        seed: Seed of the random factors.
        low: Smallest factor a channel (or a layer's output) can get; factors are drawn log-uniformly.
        high: Largest factor.
        factors: Factors instead of random ones, by layer. Layer-wise, ``{"fc1": 5.0}`` multiplies the weight
            of ``fc1`` by 5; layers not given make up for it, later ones for earlier ones. Neuron-wise, a
            number or one per output unit multiplies the channels that the layer puts out. For a permutation,
            new row i is old row ``factors["fc1"][i]``. For "output", ``{"scale": 2.0, "shift": 1.0}``.
        forward: ``forward(model, example) -> output`` for models that put out more than one tensor.

    Kinds:
        * "layerwise": every weight tensor is multiplied by one number, W_i → λ_i W_i, and biases by the
          product of the numbers so far, b_i → (Π_{j≤i} λ_j) b_i (rangamani2019, §2.1). Layers that meet in a
          sum or a concatenation share it.
        * "neuronwise": every channel has a factor of its own (petzka2021, §4; tsuzuku2020, §5.1). Rows and
          biases are multiplied by it, the columns that take the channel in are divided by it.
        * "permutation": channels change places.
        * "output": the logits are scaled by one number and shifted by another. Not an equal function, but an
          equal classifier.

    Returns:
        The changed copy, in the mode the model is in.

    Raises:
        ModelError: When nothing may be rescaled, or the copy puts out something else by more than rounding.
        OptionError: When factors are not positive, or would change the function.

    Example:
        >>> import torch, flatness
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> x = torch.randn(5, 4)
        >>> equal = flatness.rescale(model, x, factors={"0": 5.0})
        >>> (
        ...     torch.allclose(equal[2].weight, model[2].weight / 5),
        ...     torch.allclose(equal(x), model(x), atol=1e-5),
        ... )
        (True, True)
    """
    model = checked(model)
    found = symmetries(model, example, forward=forward)
    rescaling = make_rescaling(found, kind, seed=seed, low=low, high=high, factors=factors)
    with Kept(model):
        comparison = Comparison(model, example, forward or default_forward)
        changed = rescaled_copy(model, example, rescaling, forward or default_forward, comparison)
    for note in comparison.notes:
        warnings.warn(f"flatness.rescale {note}", stacklevel=2)
    return changed


def make_rescaling(
    found: Symmetries,
    kind: str,
    *,
    seed: int = 0,
    low: float = 0.2,
    high: float = 5.0,
    factors: Mapping[str, Any] | None = None,
    frozen: Set[int] = frozenset(),
) -> Rescaling:
    """Choose the factors of a rescaling; `frozen` classes of channels keep their scale (neuron-wise only)."""
    check_choices(kind, low, high, factors)
    if not hasattr(seed, "__index__"):
        raise OptionError(f"Expected seed to be an integer but got {seed!r}. For example seed=0.")
    if kind == "permutation":
        moved = found.permutations
        if not permuting.exchangeable(moved):
            raise ModelError(
                f"Expected channels that may change places but {found.model} has none: "
                f"{listed(_reasons(moved), 6)}."
            )
        goes = (
            permuting.drawn_permutation(moved, seed)
            if factors is None
            else permuting.given_permutation(moved, factors)
        )
        return Rescaling(kind, dict(permuting.permuted_factors(moved, goes)), moved, goes)
    if kind == "output":
        return _output_rescaling(found, seed, low, high, factors)
    if not found.groups:
        raise ModelError(_nothing(found))
    if factors is None:
        scales = drawn(found, kind, seed, low, high, frozen)
    else:
        scales = from_layers(found, factors) if kind == "layerwise" else from_units(found, factors)
    used: dict[str, Any] = dict(
        layerwise_factors(found, scales) if kind == "layerwise" else neuronwise_factors(found, scales)
    )
    return Rescaling(kind, used, found, scales)


def rescaled_copy(
    model: nn.Module,
    example: Any,
    rescaling: Rescaling,
    forward: Forward,
    comparison: Comparison | None = None,
) -> nn.Module:
    """A changed copy of the model, after checking that it puts out what it should.

    Args:
        model: The network.
        example: Inputs for it; the outputs of both are compared there and on new inputs like it.
        rescaling: What to change.
        forward: ``forward(model, example) -> output``.
        comparison: Outputs of the model that were collected before, instead.
    """
    try:
        with PROCESS.lock:
            changed = copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"Expected a model that copy.deepcopy can copy but got: {error}. Rescaling works on a copy: "
            "remove what cannot be copied."
        ) from error
    changed.zero_grad(set_to_none=True)
    rescaling.apply(changed)
    (comparison or Comparison(model, example, forward)).check(changed, rescaling)
    return changed


def scale_parameters(model: nn.Module, found: Symmetries, scales: Tensor) -> None:
    """Multiply every parameter and running statistic by the factors of its channels, in place."""
    extended = torch.cat([scales, scales.new_ones(1)])  # class −1 is the last: fixed
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for correction, numbers in found.corrections:
            s, variance = extended[numbers], tensors[correction.variance].double().cpu()
            factor = (s.square() * variance + correction.eps).sqrt() / (
                s * (variance + correction.eps).sqrt()
            )
            _multiply(tensors[correction.scale], factor, None)
        for action in found.actions:
            factor = torch.ones((), dtype=torch.float64)
            if action.up is not None:
                factor = factor * extended[action.up] ** action.use.power
            if action.down is not None:
                factor = factor / extended[action.down]
            if not bool((factor == 1).all()):
                _multiply(tensors[action.use.name], factor, action.use.index)


def _multiply(values: Tensor, factor: Tensor, index: Tensor | None) -> None:
    if index is not None:
        whole = torch.ones(values.numel(), dtype=torch.float64)
        whole[index.long()] = factor.expand(index.shape)
        factor = whole.reshape(values.shape)
    values.copy_((values.double() * factor.to(values.device)).to(values.dtype))


def _output_rescaling(
    found: Symmetries, seed: int, low: float, high: float, factors: Mapping[str, Any] | None
) -> Rescaling:
    freed, biases = logits.output_symmetry(found)
    if factors is None:
        generator = torch.Generator().manual_seed(seed)
        draw = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        scale = math.exp(math.log(low) + (math.log(high) - math.log(low)) * draw[0])
        shift = low + (high - low) * draw[1] if biases else 0.0
    else:
        scale, shift = logits.given_output(factors, biases)
    scales = torch.ones(freed.classes, dtype=torch.float64)
    scales[freed.output] = scale
    if freed.inverse[freed.output] >= 0:
        scales[freed.inverse[freed.output]] = 1 / scale
    return Rescaling("output", {"scale": scale, "shift": shift}, freed, scales)


def check_choices(kind: str, low: float, high: float, factors: Any = None) -> None:
    """Refuse kinds, bounds and factors that cannot be meant."""
    if kind not in KINDS:
        raise OptionError(
            f"Expected kind to be one of {listed(KINDS)} but got {kind!r}.{nearest(kind, KINDS)}"
        )
    numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in (low, high))
    if not numbers or not 0 < low <= high:
        raise OptionError(f"Expected 0 < low ≤ high but got low={low!r} and high={high!r}.")
    if factors is not None and not isinstance(factors, Mapping):
        raise OptionError(
            f"Expected factors by layer, such as {{'fc1': 5.0}}, but got {type(factors).__name__}."
        )


def _reasons(found: Symmetries) -> list[str]:
    """Why anything is fixed, each reason once."""
    return list(dict.fromkeys(reason for group in found.fixed if group.producers for reason in group.reasons))


def _nothing(found: Symmetries) -> str:
    return (
        f"Expected a network in which something may be rescaled but in {found.model} everything is fixed: "
        f"{listed(_reasons(found), 6)}. "
        "Print flatness.symmetries(model, example) for the whole list; kind='permutation' may still work."
    )
