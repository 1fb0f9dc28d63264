"""What a forward pass does with parameters: which entries it takes, and which labels scale them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flatness.symmetry.flow.labels import compact


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


@dataclass(frozen=True)
class Use:
    """One use of a parameter: by which labels its entries are multiplied and divided.

    Attributes:
        name: Name of the parameter or buffer.
        index: As in `ParameterView`.
        up: Labels whose factors multiply the entries; broadcasts against the view; None for none.
        down: Labels whose factors divide them.
        up_part: What the labels of `up` are called: "rows", "bias", "scale", …
        down_part: Likewise, "columns".
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
