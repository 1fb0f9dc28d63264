"""Permutations: channels that change places, with everything that belongs to them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Self

import torch
from torch import Tensor, nn

from flatness.errors import ModelError, OptionError, listed
from flatness.symmetry.flow.groups import Symmetries
from flatness.symmetry.flow.uses import Use
from flatness.symmetry.rewriting.base import Draw, Rescaling, named_layers, numbers_in

# Odd, so that products modulo 2^64 lose nothing.
_MIX, _NAME = 6364136223846793005, 3935559000370003845


class Permutation(Rescaling):
    """Channels that are alike change places; no measure may notice."""

    kind = "permutation"
    reorders = True

    @classmethod
    def acts_on(cls, found: Symmetries) -> Symmetries:
        """Channels that may change places, whatever their scale does."""
        moved = found.permutations
        if not exchangeable(moved):
            raise ModelError(
                f"Expected channels that may change places but {found.model} has none: "
                f"{listed(moved.reasons, 6)}."
            )
        return moved

    @classmethod
    def drawn(cls, found: Symmetries, draw: Draw) -> Self:
        """A random permutation of every list of exchangeable classes."""
        generator = torch.Generator().manual_seed(draw.seed)
        goes = torch.arange(found.classes)
        for members in exchangeable(found):
            places = torch.tensor(members)
            goes[places] = places[torch.randperm(len(members), generator=generator)]
        return cls(found, goes)

    @classmethod
    def given(cls, found: Symmetries, factors: Mapping[str, Any]) -> Self:
        """Row i of a layer is to become its former row ``factors[layer][i]``."""
        goes = torch.arange(found.classes)
        family = {number: place for place, members in enumerate(exchangeable(found)) for number in members}
        for name, action in named_layers(found, factors, "permutations").items():
            assert action.rows is not None
            rows = action.rows.tolist()
            for row, former in enumerate(_order(name, factors[name], len(rows))):
                if row != former and family.get(rows[row], -1) != family.get(rows[former], -2):
                    raise OptionError(
                        f"Expected rows of {name!r} that may change places but {row} and {former} may not: "
                        "they lead to different layers or groups."
                    )
                if rows[former] >= 0:
                    goes[rows[former]] = rows[row]
        return cls(found, goes)

    def changed(self) -> Tensor:
        """Whether each class goes elsewhere."""
        return self.scales != torch.arange(len(self.scales))

    def apply(self, model: nn.Module) -> None:
        """Move the entries of all parameters and running statistics, in place."""
        goes = torch.cat([self.scales, torch.tensor([-1])])
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        for action in self.symmetries.actions:
            if action.up is not None or action.down is not None:
                with torch.no_grad():
                    _permute(tensors[action.name], action, goes)

    def leaves(self, declared: Set[str], layer: str | None) -> bool:
        """No measure knows its units by their places."""
        return True


def exchangeable(symmetries: Symmetries) -> list[list[int]]:
    """Classes that may change places with each other, in lists.

    Two channels are exchangeable when they meet the same parameters in the same way and next to the same
    channels: rows of one group of a convolution and value channels of one head of attention are, rows of
    different groups and channels of different heads are not, nor are channels of which one is cut off.
    """
    signature = torch.zeros(symmetries.classes, dtype=torch.int64)
    whole = torch.ones(symmetries.classes, dtype=torch.bool)
    for action in symmetries.actions:
        output_units, input_units = action.units or (None, None)
        for own, met in ((action.up, input_units), (action.down, output_units)):
            if own is not None:
                signature = _with_neighbours(signature, own, met)
        if action.rows is not None:
            # Rows tied to each other by what follows: which of them is which is not known here.
            whole &= action.rows[action.rows >= 0].bincount(minlength=symmetries.classes) <= 1
    for own, places in symmetries.companies:
        signature = _with_neighbours(signature, own, places)
    families: dict[int, list[int]] = {}
    for number in whole.nonzero().flatten().tolist():
        families.setdefault(int(signature[number]), []).append(number)
    return [members for members in families.values() if len(members) > 1]


def _with_neighbours(signature: Tensor, own: Tensor, units: Tensor | None) -> Tensor:
    """Signatures of classes that also tell which units a class meets, by a sum of their names."""
    pair = torch.broadcast_tensors(own, torch.tensor(0) if units is None else units)
    mine, theirs = (part.flatten() for part in pair)
    free = mine >= 0
    mine, theirs = mine[free], theirs[free]
    names = (theirs + 1) * _MIX
    names = (names ^ (names >> 29)) * _NAME
    return (signature * _MIX).index_add_(0, mine, names ^ (names >> 32))


def _order(name: str, value: Any, rows: int) -> list[int]:
    """A permutation as a user gave it."""
    wanted = f"a permutation of 0 … {rows - 1} for {name!r}"
    order = numbers_in(value, wanted).flatten().tolist()
    if sorted(order) != list(range(rows)):
        raise OptionError(f"Expected {wanted} but got {listed(order, 8)}.")
    return order


def _permute(values: Tensor, action: Use, goes: Tensor) -> None:
    """The k-th entry that goes to a pair of classes takes the place of the k-th that is there."""
    index = action.index
    shape = values.shape if index is None else index.shape
    up, down = (_aligned(part, len(shape)) for part in (action.up, action.down))
    # Dimensions along which nothing is told apart, such as kernel positions, move as a whole.
    told = [index is not None or max(sizes) > 1 for sizes in zip(up.shape, down.shape, strict=True)]
    narrowed = [size if varies else 1 for size, varies in zip(shape, told, strict=True)]
    up, down = up.expand(narrowed), down.expand(narrowed)
    size = len(goes) + 1
    here = ((up + 1) * size + down + 1).flatten()
    there = ((goes[up] + 1) * size + goes[down] + 1).flatten()
    targets, sources = torch.argsort(here, stable=True), torch.argsort(there, stable=True)
    if index is None:
        laid = values.permute(sorted(range(len(shape)), key=lambda axis: not told[axis]))
        entries = laid.reshape(len(here), -1)
    else:
        flat = index.flatten().long()
        targets, sources = flat[targets], flat[sources]
        laid, entries = values, values.reshape(-1, 1)
    moved = entries.clone()
    moved[targets.to(values.device)] = entries[sources.to(values.device)]
    laid.copy_(moved.reshape(laid.shape))


def _aligned(classes: Tensor | None, dims: int) -> Tensor:
    classes = torch.tensor(-1) if classes is None else classes
    return classes.reshape([1] * (dims - classes.dim()) + list(classes.shape))
