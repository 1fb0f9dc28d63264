"""Layer-wise rescaling: W_i → λ_i W_i and b_i → (Π_{j≤i} λ_j) b_i (rangamani2019, §2.1)."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from flatness.symmetry.flow.groups import Symmetries
from flatness.symmetry.flow.labels import Classes
from flatness.symmetry.flow.uses import Use
from flatness.symmetry.rewriting.base import FIXED, ChannelScaling, Invariance, positive, with_fixed

IN_CHAINS = "layerwise in chains"
WITHOUT_ATTENTION = "layerwise without attention"
# How far from 1 a factor, or a product of factors, may be by rounding alone.
_UNCHANGED, _ONE = 1e-12, 1e-9


class Layerwise(ChannelScaling):
    """Every weight tensor is multiplied by one number; layers that meet in a sum share it."""

    kind = "layerwise"
    invariances = (
        Invariance("layerwise", "L", "whole layers are rescaled"),
        Invariance(IN_CHAINS, "(L)", "whole layers are rescaled, in networks that are a chain of layers"),
        Invariance(WITHOUT_ATTENTION, "[L]", "whole layers are rescaled, in networks without attention"),
    )

    @classmethod
    def choices(cls, found: Symmetries) -> Tensor:
        """Classes joined so that every weight has one factor: its rows share one, its columns share one."""
        classes = Classes()
        labels = torch.cat([classes.fresh(found.classes), classes.fixed((1,), "fixed")])  # class −1 is last
        for number, other in enumerate(found.inverse):
            if other != FIXED:
                classes.invert(labels[number], labels[other])
        for action in found.actions:
            for units in (action.rows, action.columns):
                if units is not None:
                    classes.unite_along(labels[units.flatten()], [0])
        return classes.roots(labels[:-1])

    @classmethod
    def ties(cls, name: str, action: Use, factors: Any) -> list[tuple[int, int, float]]:
        """λ is the scale of a layer's output over that of its input."""
        return [(_first(action.rows), _first(action.columns), float(positive(name, factors, 1)))]

    def leaves(self, declared: Set[str], layer: str | None) -> bool:
        """Invariance in chains holds where the factors of all layers multiply to 1.

        They do in a chain of layers, not where branches meet or a norm layer takes up a factor.
        """
        if WITHOUT_ATTENTION in declared and not self.symmetries.attention.heads:
            return True
        if self.kind in declared or IN_CHAINS not in declared:
            return self.kind in declared
        # A scale of a norm layer takes no columns in: it is no layer of the chain.
        chain = [name for name, action in self.symmetries.layers.items() if action.columns is not None]
        return abs(math.prod(map(self._factor, chain)) - 1.0) < _ONE

    def reaches(self, layer: str | None) -> bool:
        """Whether a layer's own factor is another one than 1: those of its rows and columns may cancel."""
        if layer is None or layer not in self.symmetries.layers:
            return super().reaches(layer)
        return abs(self._factor(layer) - 1.0) > _UNCHANGED

    def _factor(self, layer: str) -> float:
        """λ of a layer, W → λW: the factor of its rows over that of its columns."""
        action, scales = self.symmetries.layers[layer], with_fixed(self.scales)
        return float(scales[_first(action.rows)] / scales[_first(action.columns)])


def _first(units: Tensor | None) -> int:
    return int(units.flatten()[0]) if units is not None and units.numel() else FIXED
