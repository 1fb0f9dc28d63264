"""Neuron-wise rescaling: every channel has a factor of its own (petzka2021, §4; tsuzuku2020, §5.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any, Self

import torch
from torch import Tensor

from flatness.symmetry.flow.groups import Symmetries
from flatness.symmetry.rewriting.base import (
    FIXED,
    ChannelScaling,
    Invariance,
    contradiction,
    named_layers,
    positive,
)

OWN_FEATURES = "neuronwise except own features"


class Neuronwise(ChannelScaling):
    """Rows and biases are multiplied by a channel's factor, columns that take it in are divided by it."""

    kind = "neuronwise"
    invariances = (
        Invariance("neuronwise", "N", "single neurons are rescaled"),
        Invariance(
            OWN_FEATURES, "(N)", "single neurons are rescaled, except those that feed the layer itself"
        ),
    )
    partial = OWN_FEATURES

    @classmethod
    def choices(cls, found: Symmetries) -> Tensor:
        """Every class has its own factor."""
        return torch.arange(found.classes)

    @classmethod
    def given(cls, found: Symmetries, factors: Mapping[str, Any]) -> Self:
        """From factors of the output units of some layers."""
        scales = torch.full((found.classes,), math.nan, dtype=torch.float64)
        for name, action in named_layers(found, factors).items():
            assert action.rows is not None
            classes = action.rows.flatten().tolist()
            values = positive(name, factors[name], len(classes)).expand(len(classes)).tolist()
            for unit, (number, value) in enumerate(zip(classes, values, strict=True)):
                known = 1.0 if number == FIXED else float(scales[number])
                if math.isnan(known):
                    scales[number] = value
                    if found.inverse[number] != FIXED:
                        scales[found.inverse[number]] = 1 / value
                elif abs(value - known) > 1e-9 * known:
                    raise contradiction(found, name, value, known, unit)
        return cls.scaled(found, scales.nan_to_num(1.0))

    def leaves(self, declared: Set[str], layer: str | None) -> bool:
        """With the exception of own features, layers whose own features have no free scale keep their value.

        The first layer is such a one. A sum over layers is not: each factor belongs to the features of some
        layer.
        """
        if self.kind in declared:
            return True
        found = self.symmetries
        return OWN_FEATURES in declared and layer in found.layers and not found.features_of(layer)
