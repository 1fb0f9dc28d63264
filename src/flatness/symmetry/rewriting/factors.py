"""Factors for a rescaling: drawn at random, or worked out from the ones a user gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from flatness.errors import LayerError, OptionError, listed, nearest
from flatness.symmetry.flow.channels import Action
from flatness.symmetry.flow.groups import Symmetries

FIXED = -1


class LayerClasses:
    """Classes joined so that every weight tensor has one factor: its rows share one, its columns share one.

    Attributes:
        of: The layer-wise class of every class; −1 where it is fixed.
    """

    def __init__(self, symmetries: Symmetries) -> None:
        self._parent = list(range(symmetries.classes + 1))
        for action in symmetries.actions:
            for units in (action.rows, action.columns):
                if units is not None:
                    self._join(units.unique().tolist())
        self._keep_inverses(symmetries.inverse)
        anchor = self._root(FIXED)
        roots = [self._root(number) for number in range(symmetries.classes)]
        self.of = torch.tensor([FIXED if root == anchor else root for root in roots], dtype=torch.int64)

    def one(self, units: Tensor | None) -> int:
        """The layer-wise class of rows or columns; −1 for fixed ones and for none."""
        first = int(units.flatten()[0]) if units is not None and units.numel() else FIXED
        return FIXED if first == FIXED else int(self.of[first])

    def _keep_inverses(self, inverse: tuple[int, ...]) -> None:
        """Join the inverses of joined classes; a class that holds its own inverse is fixed, and so is its."""
        changed = True
        while changed:
            changed, first = False, {}
            for number, other in enumerate(inverse):
                if other != FIXED:
                    root = self._root(number)
                    fixed = root in (self._root(FIXED), self._root(other))
                    target = FIXED if fixed else first.setdefault(root, other)
                    if self._root(target) != self._root(other):
                        self._join([target, other])
                        changed = True

    def _root(self, number: int) -> int:
        number %= len(self._parent)
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def _join(self, numbers: list[int]) -> None:
        for number in numbers[1:]:
            one, other = self._root(number), self._root(numbers[0])
            self._parent[max(one, other)] = min(
                one, other
            )  # the class that comes first in the network stands for all


def drawn(
    symmetries: Symmetries, kind: str, seed: int, low: float, high: float, frozen: Set[int] = frozenset()
) -> Tensor:
    """One factor per class, log-uniform between low and high; 1 for frozen classes.

    Args:
        symmetries: What may be rescaled.
        kind: "layerwise" or "neuronwise".
        seed: Of the random numbers.
        low: Smallest factor.
        high: Largest factor.
        frozen: Classes that keep their scale.
    """
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(symmetries.classes, generator=generator, dtype=torch.float64)
    factors = (math.log(low) + (math.log(high) - math.log(low)) * spread).exp()
    if kind == "layerwise":
        of = LayerClasses(symmetries).of
        factors = torch.where(of == FIXED, 1.0, factors[of.clamp(min=0)])
    frozen = frozen | {symmetries.inverse[number] for number in frozen} - {FIXED}
    if frozen:
        factors[torch.tensor(sorted(frozen))] = 1.0
    return with_inverses(symmetries, factors)


def with_inverses(symmetries: Symmetries, factors: Tensor) -> Tensor:
    """The factors, those of keys the inverse of those of queries: the class that comes first has its way."""
    factors = factors.clone()
    for number, other in enumerate(symmetries.inverse):
        if other > number:
            factors[other] = 1 / factors[number]
    return factors


def layerwise_factors(symmetries: Symmetries, factors: Tensor) -> dict[str, float]:
    """λ of every layer, W → λW: the factor of its rows over that of its columns."""
    extended = torch.cat([factors, factors.new_ones(1)])
    found = {}
    for name, action in symmetries.layers.items():
        above = (
            extended[action.rows.flatten()[0]]
            if action.rows is not None and action.rows.numel()
            else extended[-1]
        )
        below = extended[action.columns.flatten()[0]] if action.columns is not None else extended[-1]
        found[name] = float(above / below)
    return found


def neuronwise_factors(symmetries: Symmetries, factors: Tensor) -> dict[str, Tensor]:
    """The factor of every output unit of every layer."""
    extended = torch.cat([factors, factors.new_ones(1)])
    return {
        name: extended[action.rows] for name, action in symmetries.layers.items() if action.rows is not None
    }


def from_layers(symmetries: Symmetries, given: Mapping[str, Any]) -> Tensor:
    """Factors of classes from λ of some layers: what is given holds, and layers not given make up for it.

    Each λ ties the scale of a layer's output to that of its input, s_out = λ·s_in. Where that leaves a
    choice, the scale that comes first in the network stays 1, so that later layers make up for earlier ones.
    """
    merged = LayerClasses(symmetries)
    # class → (anchor, sign, step): the log of its scale is sign · that of the anchor + step
    scale: dict[int, tuple[int, int, float]] = {}
    for number, other in enumerate(symmetries.inverse):
        if (
            other != FIXED
            and (one := int(merged.of[number])) < (two := int(merged.of[other]))
            and one != FIXED
        ):
            scale[two] = (one, -1, 0.0)

    def position(number: int) -> tuple[int, int, float]:
        sign, offset = 1, 0.0
        while number in scale:
            number, turn, step = scale[number]
            offset += sign * step
            sign *= turn
        return number, sign, offset

    for name, action in _known_layers(symmetries, given).items():
        value = _positive(name, given[name], 1)
        out, into = position(merged.one(action.rows)), position(merged.one(action.columns))
        change = math.log(float(value)) + into[2] - out[2]
        turn = out[1] * into[1]
        if out[0] == into[0] and (turn > 0 or out[0] == FIXED):
            if abs(change) > 1e-9:
                raise OptionError(
                    _contradiction(symmetries, name, action, float(value), math.exp(out[2] - into[2]))
                )
        elif out[0] == into[0]:
            scale[out[0]] = (FIXED, 1, out[1] * change / 2)
        elif out[0] != FIXED and (into[0] == FIXED or out[0] > into[0]):
            scale[out[0]] = (into[0], turn, out[1] * change)
        else:
            scale[into[0]] = (out[0], turn, -into[1] * change)
    logs = [position(number)[2] if number != FIXED else 0.0 for number in merged.of.tolist()]
    return torch.tensor(logs, dtype=torch.float64).exp()


def from_units(symmetries: Symmetries, given: Mapping[str, Any]) -> Tensor:
    """Factors of classes from those of the output units of some layers."""
    factors = torch.full((symmetries.classes,), math.nan, dtype=torch.float64)
    for name, action in _known_layers(symmetries, given).items():
        assert action.rows is not None
        values = _positive(name, given[name], action.rows.numel()).expand(action.rows.numel())
        for unit, (number, value) in enumerate(
            zip(action.rows.flatten().tolist(), values.tolist(), strict=True)
        ):
            known = 1.0 if number == FIXED else float(factors[number])
            if number != FIXED and math.isnan(known):
                factors[number] = value
                if symmetries.inverse[number] != FIXED:
                    factors[symmetries.inverse[number]] = 1 / value
            elif abs(value - known) > 1e-9 * known:
                raise OptionError(_contradiction(symmetries, name, action, value, known, unit))
    return factors.nan_to_num(1.0)


def _known_layers(symmetries: Symmetries, given: Mapping[str, Any]) -> dict[str, Action]:
    """The given layers in network order."""
    for name in given:
        if name not in symmetries.layers:
            raise LayerError(
                "Expected factors for layers of the model but got "
                f"{name!r}.{nearest(name, symmetries.layers)} "
                f"Layers: {listed(symmetries.layers, 20)}."
            )
    return {name: action for name, action in symmetries.layers.items() if name in given}


def _positive(name: str, value: Any, units: int) -> Tensor:
    """Factors as a float64 tensor of one or `units` numbers, all positive."""
    try:
        values = torch.as_tensor(value, dtype=torch.float64).flatten()
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0)
    wanted = "one number" if units == 1 else f"one number or {units}"
    if values.numel() not in (1, units):
        got = f"{values.numel()} numbers" if values.numel() else repr(value)
        raise OptionError(f"Expected {wanted} as the factor of {name!r} but got {got}.")
    if not bool((values.isfinite() & (values > 0)).all()):
        bad = float(values[~(values.isfinite() & (values > 0))][0])
        raise OptionError(
            f"Expected positive factors but got {bad:g} for {name!r}: a ReLU lets only positive factors pass."
        )
    return values


def _contradiction(
    symmetries: Symmetries, name: str, action: Action, value: float, forced: float, unit: int | None = None
) -> str:
    where = name if unit is None else f"unit {unit} of {name}"
    reasons = next(
        (
            g.reasons
            for g in symmetries.fixed
            if any(slot.parameter == action.use.name for slot in g.producers)
        ),
        (),
    )
    why = f" ({reasons[0]})" if reasons else ""
    return (
        f"Expected factors that leave the function as it is but got {value:g} for {where}, where the other "
        "factors allow only "
        f"{forced:g}{why}. Leave {name!r} out to have it worked out."
    )
