"""What a forward pass does with parameters: which entries it takes, and which labels scale them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from flatness.symmetry.flow.labels import compact

# What transformers name the packed projections of attention, and the last part of other parameters' names.
_PROJECTIONS = {"q_proj_weight": "q", "k_proj_weight": "k", "v_proj_weight": "v"}
_PACKED = ("in_proj_weight", "in_proj_bias")
_OF_LAYERS = ("weight", "bias", "running_mean", "running_var", "weight_orig")


@dataclass(frozen=True)
class ParameterView:
    """A parameter, or entries of it in another layout.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the view.
        index: Which entry of the parameter (counted flat) stands where; None when nothing has moved.
    """

    name: str
    shape: tuple[int, ...]
    index: Tensor | None = None

    def entries(self) -> Tensor:
        """The index as a tensor, float64 like labels."""
        if self.index is not None:
            return self.index
        return torch.arange(math.prod(self.shape), dtype=torch.float64).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter: by which labels its entries are multiplied and divided.

    Attributes:
        name: Name of the parameter or buffer.
        index: As in `ParameterView`.
        up: Labels whose factors multiply the entries; broadcasts against the view; None for none.
        down: Labels whose factors divide them.
        up_part: What the labels of `up` are called: "rows", "bias", "scale", …
        down_part: "columns".
        rows: The labels of `up`, one per output unit.
        columns: The labels of `down`, one per input unit.
        units: Output and input unit of every entry of a weight, laid out like `up` and `down`.
        power: 2 for a variance.
        held: Why the entries may not change at all.
    """

    name: str
    index: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None
    up_part: str = "entries"
    down_part: str = "columns"
    rows: Tensor | None = None
    columns: Tensor | None = None
    units: tuple[Tensor, Tensor] | None = None
    power: int = 1
    held: str | None = None

    def numbered(self, numbers: Tensor) -> Self:
        """The same with the numbers of classes, −1 for fixed ones, in the place of labels."""
        labels = {"up": self.up, "down": self.down, "rows": self.rows, "columns": self.columns}
        found = {key: numbers[each.long()] for key, each in labels.items() if each is not None}
        return replace(self, **found)

    @property
    def layer(self) -> str:
        """What users call its layer; of packed projections of attention the one it is: ``attn.q``.

        >>> Use("block.fc1.weight").layer, Use("mix").layer, Use("attn.q_proj_weight").layer
        ('block.fc1', 'mix', 'attn.q')
        """
        owner, _, last = self.name.rpartition(".")
        part = _PROJECTIONS.get(last, "")
        if last in _PACKED and self.index is not None and self.index.numel():
            third = int(self.index.flatten()[0]) // self.index.numel()
            part = "qkv"[third : third + 1]
        if part:
            return f"{owner}.{part}" if owner else part
        return owner if owner and last in _OF_LAYERS else self.name


@dataclass(frozen=True)
class NormCorrection:
    """A batch norm whose input is scaled by s: its scale takes the factor √(s²v + ε) / (s·√(v + ε)).

    Mean and variance become s·μ and s²·v, as they would be if they were collected anew. The ε inside the root
    does not scale, and what that leaves goes into the scale γ. (Putting it into the variance could make that
    negative.)

    Attributes:
        scale: Name of γ.
        variance: Name of the running variance.
        eps: ε.
        labels: Labels of the input, one per channel.
    """

    scale: str
    variance: str
    eps: float
    labels: Tensor


def entries_used(uses: list[Use], total: int) -> tuple[int, int]:
    """How many different entries of a parameter are used, and how many over all uses of it."""
    if any(use.index is None for use in uses):
        return total, total * len(uses)
    each = [torch.unique(compact(use.index)[0]) for use in uses if use.index is not None]
    return len(torch.unique(torch.cat(each))), sum(len(index) for index in each)
