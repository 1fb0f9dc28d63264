"""Neuron-wise rescaling: every channel has a factor of its own (petzka2021, §4; tsuzuku2020, §5.1)."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from flatness.symmetry.flow.groups import Symmetries
from flatness.symmetry.flow.uses import Use
from flatness.symmetry.rewriting.base import FIXED, ChannelScaling, Invariance, positive

OWN_FEATURES = "neuronwise except own features"
WITHOUT_ATTENTION = "neuronwise without attention"


class Neuronwise(ChannelScaling):
    """Rows and biases are multiplied by a channel's factor, columns that take it in are divided by it."""

    kind = "neuronwise"
    invariances = (
        Invariance("neuronwise", "N", "single neurons are rescaled"),
        Invariance(
            OWN_FEATURES, "(N)", "single neurons are rescaled, except those that feed the layer itself"
        ),
        Invariance(WITHOUT_ATTENTION, "[N]", "single neurons are rescaled, in networks without attention"),
    )
    partial = OWN_FEATURES

    @classmethod
    def choices(cls, found: Symmetries) -> Tensor:
        """Every class has its own factor."""
        return torch.arange(found.classes)

    @classmethod
    def ties(cls, name: str, action: Use, factors: Any) -> list[tuple[int, int, float]]:
        """Each output unit has the factor that is given for it."""
        assert action.rows is not None
        units = action.rows.flatten().tolist()
        values = positive(name, factors, len(units)).expand(len(units)).tolist()
        return [(unit, FIXED, value) for unit, value in zip(units, values, strict=True)]

    def leaves(self, declared: Set[str], layer: str | None) -> bool:
        """With the exception of own features, layers whose own features have no free scale keep their value.

        The first layer is such a one. A sum over layers is not: each factor belongs to the features of some
        layer.
        """
        if self.kind in declared:
            return True
        found = self.symmetries
        if WITHOUT_ATTENTION in declared and not found.attention.heads:
            return True
        return OWN_FEATURES in declared and layer in found.layers and not found.features_of(layer)
