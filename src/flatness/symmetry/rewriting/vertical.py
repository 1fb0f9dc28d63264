"""Vertical directions: where a network's parameters may move without changing what it computes.

They are the derivatives of rescalings at the identity. On the quotient manifold of rangamani2019 they span
the vertical space: (β_1 W_1, …, β_L W_L) with Σβ = 0 (Lemma 2.4), with biases (…, γ_1 b_1, …, γ_L b_L) and
β_i = γ_i − γ_{i−1} (Lemma 2.6). The risk does not change along them, so its gradient is orthogonal to them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatness.errors import OptionError, listed, nearest
from flatness.symmetry.flow.groups import Symmetries
from flatness.symmetry.rewriting.factors import FIXED, LayerClasses

KINDS = ("layerwise", "neuronwise")


def vertical_directions(
    model: nn.Module, found: Symmetries, kind: str = "layerwise"
) -> list[dict[str, Tensor]]:
    """One direction for every factor that may be chosen, as tensors by parameter name; others are zero.

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
            f"Expected what flatness.symmetries returned but got {type(found).__name__}. Write "
            "flatness.vertical_directions(model, flatness.symmetries(model, example))."
        )
    if kind not in KINDS:
        raise OptionError(
            f"Expected kind to be one of {listed(KINDS)} but got {kind!r}.{nearest(kind, KINDS)}"
        )
    exponents = _exponents(found, kind)
    rates: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())
    for action in found.actions:
        name = action.use.name
        if name in parameters:
            rates.setdefault(name, torch.zeros(len(exponents), *parameters[name].shape))
            for classes, power in ((action.up, action.use.power), (action.down, -1)):
                if classes is not None:
                    _add_rates(rates[name], power * exponents[:, classes], action.use.index)
    return [
        {
            name: rates[name][one].to(value) * value.detach()
            if name in rates
            else torch.zeros_like(value, requires_grad=False)
            for name, value in parameters.items()
        }
        for one in range(len(exponents))
    ]


def _exponents(found: Symmetries, kind: str) -> Tensor:
    """The power of every factor that may be chosen in that of every class: (factors, classes + 1).

    Classes with inverse factors (keys to queries) go with one choice, 1 and −1. The last column is that of
    class −1, which is fixed.
    """
    of = LayerClasses(found).of if kind == "layerwise" else torch.arange(found.classes)
    inverse = torch.tensor(found.inverse or [FIXED] * found.classes, dtype=torch.int64)
    # Rescaling what runs into a batch norm moves its running statistics too, which are no parameters.
    elsewhere = {int(number) for _, numbers in found.corrections for number in numbers.unique()} - {FIXED}
    rows: list[Tensor] = []
    for number in sorted(set(of.tolist()) - {FIXED}):
        row = torch.zeros(found.classes + 1)
        row[:-1][of == number] = 1
        partners = inverse[of == number]
        row[partners[partners != FIXED]] = -1
        moved = set(row.nonzero().flatten().tolist())
        if not moved & elsewhere and not any(torch.equal(row, -other) for other in rows):
            rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, found.classes + 1)


def _add_rates(rates: Tensor, touched: Tensor, index: Tensor | None) -> None:
    """Add to d log θ / d log factor, for every chosen factor, what one action does."""
    for one, change in enumerate(touched):
        if index is None:
            rates[one] += change
        else:
            flat = rates[one].view(-1)
            flat[index.long()] += change.expand(index.shape)
