"""Labels on tensor entries: which entries of a network are scaled by the same factor.

Every value of a forward pass carries a tensor of labels of its own shape, one label per entry. Entries whose
labels lie in one class scale together. Operators that only move entries act on labels as they act on values;
operators that mix entries put their labels into one class; operators that need values as they are make a
class fixed, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# The label of an entry that is zero (or infinite) whatever happens: it fits into every class.
ANY = -1.0


def blank(shape: Sequence[int]) -> Tensor:
    """Labels of entries that fit into every class."""
    return torch.full((), ANY, dtype=torch.float64).expand(tuple(shape))


class Classes:
    """Classes of labels (union-find), some of them fixed.

    Labels are whole numbers held in float64 tensors, because more operators of torch take those than
    integers.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._reasons: dict[int, tuple[str, ...]] = {}
        # Roots of classes whose factors multiply to 1, both ways.
        self._inverse: dict[int, int] = {}

    def fresh(self, count: int) -> Tensor:
        """(count,) new labels, each a class of its own."""
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        return torch.arange(start, start + count, dtype=torch.float64)

    def fixed(self, shape: Iterable[int], reason: str) -> Tensor:
        """One new fixed label for all entries of a tensor."""
        label = self.fresh(1)
        self._reasons[int(label)] = (reason,)
        return label.reshape(()).expand(tuple(shape))

    def unite(self, a: Tensor, b: Tensor) -> Tensor:
        """Put labels at the same position into one class; returns labels of the broadcast shape."""
        shape = torch.broadcast_shapes(a.shape, b.shape)
        a, b = compact(a.expand(shape), b.expand(shape))
        for one, other in _pairs(a, b):
            self._join(one, other)
        joined = torch.where(a == ANY, b, a) if bool((a == ANY).any()) else a
        return joined.expand(shape)

    def unite_along(self, labels: Tensor, dims: Iterable[int]) -> Tensor:
        """Put all labels along some dimensions into one class; those dimensions have size 1 afterwards."""
        dims = tuple(dims)
        if not dims or labels.numel() == 0:
            return labels
        (small,) = compact(labels)
        one = small.amax(dims, keepdim=True)
        self.unite(small, one)
        shape = list(labels.shape)
        for dim in dims:
            shape[dim] = 1
        return one.expand(shape)

    def invert(self, a: Tensor, b: Tensor) -> None:
        """Let labels at the same position have inverse factors: what multiplies the one divides the other."""
        a, b = compact(*torch.broadcast_tensors(a, b))
        for one, other in _pairs(a, b):
            self._pair(one, other)

    def inverse(self, label: int) -> int:
        """The root of the class with inverse factors; -1 where there is none."""
        return self._inverse.get(self.root(label), -1)

    def pin(self, labels: Tensor | None, reason: str | None) -> None:
        """Fix the classes of labels, where there is a reason to; one that is fixed already keeps its own."""
        if labels is None or reason is None:
            return
        for label in distinct(labels):
            root = self.root(label)
            self._reasons.setdefault(root, (reason,))
            if root in self._inverse:
                self._reasons.setdefault(self._inverse[root], (reason,))

    def are_fixed(self, labels: Tensor) -> bool:
        """Whether no entry can scale."""
        return all(self.root(label) in self._reasons for label in distinct(labels))

    def reasons(self, label: int) -> tuple[str, ...]:
        """Why the class of a label is fixed; empty when it is free."""
        return self._reasons.get(self.root(label), ())

    def root(self, label: int) -> int:
        """The label that stands for its class."""
        parent = self._parent
        while parent[label] != label:
            parent[label] = parent[parent[label]]
            label = parent[label]
        return label

    def roots(self, labels: Tensor, free_only: bool = True) -> Tensor:
        """The roots of labels as int64, of the same shape.

        -1 stands for entries that fit into every class, and for fixed classes if `free_only`.
        """
        values, inverse = torch.unique(labels, return_inverse=True)
        roots = [-1 if value == ANY else self.root(int(value)) for value in values.tolist()]
        if free_only:
            roots = [-1 if root in self._reasons else root for root in roots]
        return torch.tensor(roots, dtype=torch.int64)[inverse]

    def free_roots(self) -> Tensor:
        """The roots of all labels and, as the last entry, of `ANY`; -1 for fixed classes."""
        return self.roots(torch.tensor([*range(len(self._parent)), ANY], dtype=torch.float64))

    def _join(self, one: int, other: int) -> None:
        one, other = self.root(one), self.root(other)
        if one == other:
            return
        partners = [self._inverse[root] for root in (one, other) if root in self._inverse]
        for root in (one, other, *partners):
            self._inverse.pop(root, None)
        keep, drop = min(one, other), max(one, other)
        self._parent[drop] = keep
        reasons = self._reasons.get(keep, ()) + self._reasons.pop(drop, ())
        if reasons:
            self._reasons[keep] = tuple(dict.fromkeys(reasons))
        for partner in partners[1:]:
            self._join(partners[0], partner)
        if partners:
            self._pair(keep, partners[0])

    def _pair(self, one: int, other: int) -> None:
        """Make two classes inverse to each other; what was inverse to one of them joins the other."""
        one, other = self.root(one), self.root(other)
        if one == other:
            self._reasons.setdefault(one, ("it meets itself in a product",))
            return
        for root, counterpart in ((one, other), (other, one)):
            known = self._inverse.get(root)
            if known is not None and known != counterpart:
                self._join(known, counterpart)
                return
        self._inverse[one], self._inverse[other] = other, one
        reasons = self._reasons.get(one) or self._reasons.get(other)
        if reasons:
            self._reasons.setdefault(one, reasons)
            self._reasons.setdefault(other, reasons)


def _pairs(a: Tensor, b: Tensor) -> list[tuple[int, int]]:
    """The different pairs of labels at the same position, without `ANY`, in order."""
    met = (a != ANY) & (b != ANY)
    return sorted(set(zip(a[met].long().tolist(), b[met].long().tolist(), strict=True)))


def compact(*tensors: Tensor) -> list[Tensor]:
    """The same tensors with every dimension along which all of them repeat (stride 0) cut to size 1."""
    found = list(tensors)
    for axis in range(found[0].dim()):
        if found[0].shape[axis] > 1 and all(tensor.stride(axis) == 0 for tensor in found):
            found = [tensor.narrow(axis, 0, 1) for tensor in found]
    return found


def distinct(labels: Tensor) -> list[int]:
    """The different labels of a tensor, without `ANY`."""
    (small,) = compact(labels)
    return [int(label) for label in torch.unique(small).tolist() if label != ANY]


def places_in_class(labels: Tensor) -> Tensor:
    """How many entries with the same label come before each entry, as float64 like labels.

    >>> places_in_class(torch.tensor([5.0, 7, 5, 5, 7])).tolist()
    [0.0, 0.0, 1.0, 2.0, 1.0]
    """
    flat = labels.flatten()
    order = torch.argsort(flat, stable=True)
    number = torch.arange(len(flat))
    starts = torch.ones_like(number, dtype=torch.bool)
    starts[1:] = flat[order][1:] != flat[order][:-1]
    places = torch.empty_like(flat)
    places[order] = (number - torch.where(starts, number, 0).cummax(0).values).to(flat.dtype)
    return places.reshape(labels.shape)
