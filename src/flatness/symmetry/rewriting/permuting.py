"""Permutations: channels that change places, with everything that belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import LayerError, OptionError, listed, nearest
from flatness.symmetry.flow.channels import Action
from flatness.symmetry.flow.groups import Symmetries

# Odd, so that products modulo 2^64 lose nothing.
_MIX, _NAME = 6364136223846793005, 3935559000370003845


def exchangeable(symmetries: Symmetries) -> list[list[int]]:
    """Classes that may change places with each other, in lists.

    Two channels are exchangeable when they meet the same parameters in the same way and next to the same
    channels: rows of one group of a convolution and value channels of one head of attention are, rows of
    different groups and channels of different heads are not, nor are channels of which one is cut off.
    """
    signature = torch.zeros(symmetries.classes, dtype=torch.int64)
    whole = torch.ones(symmetries.classes, dtype=torch.bool)
    for action in symmetries.actions:
        output_units, input_units = action.use.units or (None, None)
        for own, met in ((action.up, input_units), (action.down, output_units)):
            if own is not None:
                signature = _with_neighbours(signature, own, met)
        if action.rows is not None:
            # Rows tied to each other by what follows: which of them is which is not known here.
            whole &= action.rows[action.rows >= 0].bincount(minlength=symmetries.classes) <= 1
    for own, places in symmetries.companies:
        signature = _with_neighbours(signature, own, places)
    families: dict[int, list[int]] = {}
    for number, one in enumerate(signature.tolist()):
        if whole[number]:
            families.setdefault(one, []).append(number)
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


def drawn_permutation(symmetries: Symmetries, seed: int) -> Tensor:
    """Where each class goes: a random permutation of every list of exchangeable classes."""
    generator = torch.Generator().manual_seed(seed)
    goes = torch.arange(symmetries.classes)
    for members in exchangeable(symmetries):
        places = torch.tensor(members)
        goes[places] = places[torch.randperm(len(members), generator=generator)]
    return goes


def given_permutation(symmetries: Symmetries, given: Mapping[str, Any]) -> Tensor:
    """Where each class goes when row i of a layer is to become its former row perm[i]."""
    goes = torch.arange(symmetries.classes)
    family = {
        number: position for position, members in enumerate(exchangeable(symmetries)) for number in members
    }
    for name, value in given.items():
        action = symmetries.layers.get(name)
        if action is None or action.rows is None:
            raise LayerError(
                "Expected permutations for layers of the model but got "
                f"{name!r}.{nearest(name, symmetries.layers)} "
                f"Layers: {listed(symmetries.layers, 20)}."
            )
        rows = action.rows.tolist()
        order = _order(value)
        if order is None or sorted(order) != list(range(len(rows))):
            got = repr(value) if order is None else listed(order, 8)
            raise OptionError(f"Expected a permutation of 0 … {len(rows) - 1} for {name!r} but got {got}.")
        for row, former in enumerate(order):
            if row != former and (family.get(rows[row], -1) != family.get(rows[former], -2)):
                raise OptionError(
                    f"Expected rows of {name!r} that may change places but {row} and {former} may not: they "
                    "lead to different layers or groups."
                )
            if rows[former] >= 0:
                goes[rows[former]] = rows[row]
    return goes


def _order(value: Any) -> list[Any] | None:
    """The numbers of a given permutation; None where there are none."""
    try:
        return torch.as_tensor(value).flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        return None


def permuted_factors(symmetries: Symmetries, goes: Tensor) -> dict[str, Tensor]:
    """The permutation of every layer's rows: new row i is old row perm[i]."""
    comes = torch.argsort(goes)
    found = {}
    for name, action in symmetries.layers.items():
        if action.rows is None:
            continue
        classes = action.rows.tolist()
        place = {number: row for row, number in enumerate(classes)}
        moved = [number >= 0 and int(comes[number]) != number for number in classes]
        rows = [place[int(comes[classes[row]])] if moved[row] else row for row in range(len(classes))]
        found[name] = torch.tensor(rows)
    return found


def permute(model: nn.Module, symmetries: Symmetries, goes: Tensor) -> None:
    """Move the entries of all parameters and running statistics, in place."""
    extended = torch.cat([goes, torch.tensor([-1])])
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for action in symmetries.actions:
        if action.up is None and action.down is None:
            continue
        with torch.no_grad():
            _permute_one(tensors[action.use.name], action, extended)


def _permute_one(values: Tensor, action: Action, goes: Tensor) -> None:
    """The k-th entry that goes to a pair of classes takes the place of the k-th that is there."""
    shape = values.shape if action.use.index is None else action.use.index.shape
    up, down = (_aligned(part, len(shape)) for part in (action.up, action.down))
    # Dimensions along which nothing is told apart, such as kernel positions, move as a whole.
    varying = [
        axis
        for axis in range(len(shape))
        if max(up.shape[axis], down.shape[axis]) > 1 or action.use.index is not None
    ]
    narrowed = [size if axis in varying else 1 for axis, size in enumerate(shape)]
    up, down = up.expand(narrowed), down.expand(narrowed)
    size = len(goes) + 1
    here = ((up + 1) * size + down + 1).flatten()
    there = ((goes[up] + 1) * size + goes[down] + 1).flatten()
    targets, sources = torch.argsort(here, stable=True), torch.argsort(there, stable=True)
    if action.use.index is not None:
        flat = action.use.index.flatten().long()
        order, entries = [0], values.detach().reshape(-1, 1)
        targets, sources = flat[targets], flat[sources]
    else:
        order = [*varying, *(axis for axis in range(len(shape)) if axis not in varying)]
        entries = values.detach().permute(order).reshape(len(here), -1)
    moved = entries.clone()
    moved[targets.to(values.device)] = entries[sources.to(values.device)]
    if action.use.index is not None:
        values.copy_(moved.reshape(values.shape))
    else:
        moved = moved.reshape([shape[axis] for axis in order])
        values.copy_(moved.permute([order.index(axis) for axis in range(len(shape))]))


def _aligned(classes: Tensor | None, dims: int) -> Tensor:
    classes = torch.tensor(-1) if classes is None else classes
    return classes.reshape([1] * (dims - classes.dim()) + list(classes.shape))
