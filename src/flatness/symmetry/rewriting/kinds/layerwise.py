"""Layer-wise rescaling: W_i → λ_i W_i and b_i → (Π_{j≤i} λ_j) b_i (rangamani2019, §2.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any, Self

import torch
from torch import Tensor

from flatness.symmetry.flow.groups import Symmetries
from flatness.symmetry.flow.labels import Classes
from flatness.symmetry.rewriting.base import (
    FIXED,
    ChannelScaling,
    Invariance,
    contradiction,
    named_layers,
    positive,
    with_fixed,
)

IN_CHAINS = "layerwise in chains"
# How far from 1 a factor, or a product of factors, may be by rounding alone.
_UNCHANGED, _ONE = 1e-12, 1e-9


class Layerwise(ChannelScaling):
    """Every weight tensor is multiplied by one number; layers that meet in a sum share it."""

    kind = "layerwise"
    invariances = (
        Invariance("layerwise", "L", "whole layers are rescaled"),
        Invariance(IN_CHAINS, "(L)", "whole layers are rescaled, in networks that are a chain of layers"),
    )

    @classmethod
    def choices(cls, found: Symmetries) -> Tensor:
        """The classes of a layer's rows take one factor, and those of its columns."""
        return _layer_classes(found)

    @classmethod
    def given(cls, found: Symmetries, factors: Mapping[str, Any]) -> Self:
        """From λ of some layers: what is given holds, and layers not given make up for it.

        Each λ ties the scale of a layer's output to that of its input, s_out = λ·s_in. Where that leaves a
        choice, the scale that comes first in the network stays 1, so that later layers make up for earlier
        ones.
        """
        of = torch.cat([_layer_classes(found), torch.tensor([FIXED])])
        scales = _TiedScales()
        for number, other in enumerate(found.inverse):
            if other != FIXED and FIXED != of[number] < of[other]:
                scales.invert(int(of[number]), int(of[other]))
        for name, action in named_layers(found, factors).items():
            value = float(positive(name, factors[name], 1))
            out, into = (int(of[_first(units)]) for units in (action.rows, action.columns))
            forced = scales.tie(out, into, math.log(value))
            if forced is not None:
                raise contradiction(found, name, value, math.exp(forced))
        logs = [scales.log(number) for number in of[:-1].tolist()]
        return cls.scaled(found, torch.tensor(logs, dtype=torch.float64).exp())

    def leaves(self, declared: Set[str], layer: str | None) -> bool:
        """Invariance in chains holds where the factors of all layers multiply to 1.

        They do in a chain of layers, not where branches meet or a norm layer takes up a factor.
        """
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


def _layer_classes(found: Symmetries) -> Tensor:
    """Classes joined so that every weight has one factor: its rows share one, its columns share one.

    Returns:
        The layer-wise class of every class; −1 where it is fixed.
    """
    classes = Classes()
    labels = torch.cat([classes.fresh(found.classes), classes.fixed((1,), "fixed")])  # class −1 is the last
    for number, other in enumerate(found.inverse):
        if other != FIXED:
            classes.invert(labels[number], labels[other])
    for action in found.actions:
        for units in (action.rows, action.columns):
            if units is not None:
                classes.unite_along(labels[units.flatten()], [0])
    return classes.roots(labels[:-1])


class _TiedScales:
    """Scales of classes that are tied to each other, log s_a = ± log s_b + step; that of class −1 is 1."""

    def __init__(self) -> None:
        self._ties: dict[int, tuple[int, int, float]] = {}

    def invert(self, one: int, other: int) -> None:
        """Let a class have the inverse scale of one that comes before it."""
        self._ties[other] = (one, -1, 0.0)

    def tie(self, out: int, into: int, step: float) -> float | None:
        """Let log s_out be log s_into + step; where it is tied to another step already, returns that one."""
        (a, turn_a, from_a), (b, turn_b, from_b) = self._anchored(out), self._anchored(into)
        turn, missing = turn_a * turn_b, step + from_b - from_a
        if a == b and (turn > 0 or a == FIXED):
            return None if abs(missing) <= _ONE else from_a - from_b
        if a == b:
            self._ties[a] = (FIXED, 1, turn_a * missing / 2)
        elif a != FIXED and (b == FIXED or a > b):
            self._ties[a] = (b, turn, turn_a * missing)
        else:
            self._ties[b] = (a, turn, -turn_b * missing)
        return None

    def log(self, number: int) -> float:
        """The logarithm of a scale, that of untied classes 0."""
        return self._anchored(number)[2]

    def _anchored(self, number: int) -> tuple[int, int, float]:
        """The class that a class is tied to in the end, with sign and step."""
        sign, offset = 1, 0.0
        while number in self._ties:
            number, turn, step = self._ties[number]
            offset += sign * step
            sign *= turn
        return number, sign, offset


def _first(units: Tensor | None) -> int:
    return int(units.flatten()[0]) if units is not None and units.numel() else FIXED
