"""Equal networks: the same function with other parameters, and the directions that lead there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import ModelError, OptionError, listed, nearest
from flatness.problem.guard import Kept
from flatness.problem.process_state import PROCESS
from flatness.symmetry.flow.groups import Symmetries, checked, symmetries
from flatness.symmetry.rewriting.base import FIXED, ChannelScaling, Draw, Rescaling
from flatness.symmetry.rewriting.equality import Comparison
from flatness.symmetry.rewriting.kinds import KINDS, kind_named
from flatness.symmetry.trace.forward_pass import Forward, default_forward


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
    condition: float | None = None,
) -> nn.Module:
    """An equivalent network: a copy with other parameters that computes the same function.

    Args:
        model: The network; it is not changed.
        example: Inputs for it, as for `flatness.symmetries`; model and copy are compared on it and on new
            random inputs of its kind and scale. A warning says if the model does not run on those.
        kind: What is changed; see below.
        seed: Seed of the random factors.
        low: Smallest factor a channel (or a layer's output) can get; factors are drawn log-uniformly.
        high: Largest factor.
        factors: Factors instead of random ones, by layer. Layer-wise, ``{"fc1": 5.0}`` multiplies the weight
            of ``fc1`` by 5; layers not given compensate for it, later ones for earlier ones. Neuron-wise, a
            number or one per output unit multiplies the channels that the layer puts out. For a permutation,
            new row i is old row ``factors["fc1"][i]``. For "output", ``{"scale": 2.0, "shift": 1.0}``. For
            "attention", a matrix or one per head, by the layer of the queries (A) or of the values (B);
            `flatness.symmetries` prints their names.
        forward: ``forward(model, example) -> output`` for models that put out more than one tensor.
        condition: For "attention", the largest condition number of the random matrices; high/low by default.

    Kinds:
        * "attention": the channels of every head of attention are mixed by invertible matrices, q → Aᵀq and
          k → A⁻¹k, v → Bv and W_o → W_o B⁻¹, whose singular values are drawn log-uniformly from [low, high].
          Heads that share keys share A; rotary embeddings leave a scaled rotation of each pair of channels.
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
    draw = Draw(seed, low, high, condition=condition)
    if condition is not None and kind != "attention":
        raise OptionError(
            f"Expected condition only with kind='attention', whose factors are matrices, but got it with "
            f"kind={kind!r}. Pass low and high."
        )
    found = symmetries(model, example, forward=forward)
    rescaling = make_rescaling(found, kind, draw, factors)
    with Kept(model):
        comparison = Comparison(model, example, forward or default_forward)
        changed = rescaled_copy(model, rescaling, comparison)
    for note in comparison.notes:
        warnings.warn(f"flatness.rescale {note}", stacklevel=2)
    return changed


def make_rescaling(
    found: Symmetries, kind: str, draw: Draw, factors: Mapping[str, Any] | None = None
) -> Rescaling:
    """A rewriting of a kind, with a user's factors or else with random ones."""
    chosen = kind_named(kind)
    if factors is None:
        return chosen.drawn(chosen.acts_on(found), draw)
    if not isinstance(factors, Mapping):
        raise OptionError(
            f"Expected factors by layer, such as {{'fc1': 5.0}}, but got {type(factors).__name__}."
        )
    return chosen.given(chosen.acts_on(found), factors)


def rescaled_copy(model: nn.Module, rescaling: Rescaling, comparison: Comparison) -> nn.Module:
    """A changed copy of the model, after checking that it puts out what it should."""
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
    comparison.check(changed, rescaling)
    return changed


def vertical_directions(
    model: nn.Module, found: Symmetries, kind: str = "layerwise"
) -> list[dict[str, Tensor]]:
    """One direction for every factor that may be chosen, as tensors by parameter name; others are zero.

    They are the derivatives of rescalings at the identity, along which a network's parameters move without
    changing what it computes. On the quotient manifold of rangamani2019 they span the vertical space:
    (β_1 W_1, …, β_L W_L) with Σβ = 0 (Lemma 2.4), with biases (…, γ_1 b_1, …, γ_L b_L) and
    β_i = γ_i − γ_{i−1} (Lemma 2.6). The risk does not change along them, so its gradient is orthogonal to
    them.

    Args:
        model: The network that the symmetries were found in.
        found: What `flatness.symmetries` returned.
        kind: "layerwise" (one direction per group of layers) or "neuronwise" (one per channel).

    Example:
        >>> import torch, flatness
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> found = flatness.symmetries(model, torch.randn(5, 4))
        >>> (direction,) = flatness.vertical_directions(model, found)
        >>> (
        ...     torch.equal(direction["0.weight"], model[0].weight),
        ...     torch.equal(direction["2.weight"], -model[2].weight),
        ... )
        (True, True)
    """
    if not isinstance(found, Symmetries):
        raise OptionError(
            f"Expected the result of flatness.symmetries but got {type(found).__name__}. Write "
            "flatness.vertical_directions(model, flatness.symmetries(model, example))."
        )
    scalings = {name: one for name in KINDS if issubclass(one := kind_named(name), ChannelScaling)}
    if kind not in scalings:
        raise OptionError(
            f"Expected kind to be one of {listed(scalings)} but got {kind!r}.{nearest(kind, scalings)}"
        )
    chosen = _exponents(found, scalings[kind].choices(found))
    return [_direction(model, found, exponents) for exponents in chosen]


def _direction(model: nn.Module, found: Symmetries, exponents: Tensor) -> dict[str, Tensor]:
    """The derivative of every parameter where the logarithms of all factors move by these numbers."""
    parameters = dict(model.named_parameters())
    rates = {name: torch.zeros(value.shape) for name, value in parameters.items()}
    for action in found.actions:
        for classes, power in ((action.up, action.power), (action.down, -1)):
            if classes is None or action.name not in rates:
                continue
            rate, moved = rates[action.name], power * exponents[classes]
            if action.index is None:
                rate += moved
            else:
                rate.view(-1)[action.index.long()] += moved.expand(action.index.shape)
    return {name: rates[name].to(value) * value.detach() for name, value in parameters.items()}


def _exponents(found: Symmetries, of: Tensor) -> list[Tensor]:
    """The power of every factor that may be chosen in that of every class.

    Classes with inverse factors (keys to queries) go with one choice, 1 and −1. The last entry is that of
    class −1, which is fixed.
    """
    inverse = torch.tensor(found.inverse, dtype=torch.int64)
    # Rescaling what runs into a batch norm moves its running statistics too, which are no parameters.
    elsewhere = {int(number) for correction in found.corrections for number in correction.labels.unique()}
    rows: list[Tensor] = []
    for number in sorted(set(of.tolist()) - {FIXED}):
        row = torch.zeros(found.classes + 1)
        row[:-1][of == number] = 1
        partners = inverse[of == number]
        row[partners[partners != FIXED]] = -1
        moved = set(row.nonzero().flatten().tolist())
        if not moved & elsewhere and not any(torch.equal(row, -other) for other in rows):
            rows.append(row)
    return rows
