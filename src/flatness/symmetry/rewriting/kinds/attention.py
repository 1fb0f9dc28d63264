"""Attention: the channels of a head mixed by an invertible matrix, queries against keys, values against o.

q → Aᵀq and k → A⁻¹k leave every product ⟨q, k⟩; v → Bv and W_o → W_o B⁻¹ leave what comes out. Biases go
along.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from flatness.errors import ModelError, OptionError, listed
from flatness.symmetry.flow.groups import Symmetries
from flatness.symmetry.flow.heads import Head
from flatness.symmetry.rewriting.base import Draw, Invariance, Rescaling, check_names, numbers_in
from flatness.symmetry.trace.attention import LOOKED_FOR

INTO_HEADS, OUT_OF_HEADS = "attention q, k, v", "attention o"
# How far a given matrix may be, relative to its size, from one that rotary embeddings let through.
_ROUNDED = 1e-9


@dataclass(frozen=True, eq=False)
class Attention(Rescaling):
    """Every head has a matrix A for queries and keys, and a matrix B for values and output projection.

    Attributes:
        matrices: For each head of `symmetries.attention` what multiplies its queries, Aᵀ, or its values, B;
            its keys and the columns of o are multiplied by the inverse of the transpose.
    """

    matrices: tuple[Tensor, ...] = ()

    kind = "attention"
    invariances = (
        Invariance("attention", "A", "the heads of attention are mixed by matrices"),
        Invariance(INTO_HEADS, "(A)", "the heads of attention are mixed, for the layers of q, k and v"),
        Invariance(OUT_OF_HEADS, "(Ao)", "the heads of attention are mixed, for the layer of o"),
    )

    @classmethod
    def acts_on(cls, found: Symmetries) -> Symmetries:
        """All heads whose channels may be mixed."""
        if not found.attention.calls:
            raise ModelError(
                f"Expected a network with attention for kind='attention' but found none in {found.model}. "
                f"What is recognised: {LOOKED_FOR}. Print flatness.symmetries(model, example) for what may "
                "be rescaled."
            )
        if not found.attention.heads:
            raise ModelError(
                f"Expected attention whose heads may be mixed but in {found.model} none may: "
                f"{listed(found.attention.reasons, 6)}. kind='neuronwise' may still work."
            )
        return found

    @classmethod
    def drawn(cls, found: Symmetries, draw: Draw) -> Self:
        """Random rotations on both sides of log-uniform singular values."""
        generator = torch.Generator().manual_seed(draw.seed)
        return cls._of(found, [_random(head, draw, generator) for head in found.attention.heads])

    @classmethod
    def given(cls, found: Symmetries, factors: Mapping[str, Any]) -> Self:
        """A by the layer of the queries, B by that of the values; one matrix, or one for each head."""
        by_name: dict[str, list[Head]] = {}
        for head in found.attention.heads:
            by_name.setdefault(head.name, []).append(head)
        check_names("matrices for layers of queries or values", factors, by_name)
        chosen = {
            name: _given(name, heads, factors[name]) if name in factors else map(_unmoved, heads)
            for name, heads in by_name.items()
        }
        following = {name: iter(matrices) for name, matrices in chosen.items()}
        return cls._of(found, [next(following[head.name]) for head in found.attention.heads])

    @classmethod
    def _of(cls, found: Symmetries, matrices: Iterable[Tensor]) -> Self:
        made = cls(found, torch.ones(found.classes, dtype=torch.float64), tuple(matrices))
        made._check_precision()
        return made

    def _check_precision(self) -> None:
        """Refuse matrices that leave nothing of the parameters' precision."""
        heads = self.symmetries.attention.heads
        names = {part.parameter for head in heads for part in head.parts}
        values = (value for value in self.symmetries.trace.values if value.name in names)
        eps, dtype = max((torch.finfo(value.dtype).eps, value.dtype) for value in values)
        condition = max(float(torch.linalg.cond(matrix)) for matrix in self.matrices)
        if condition * eps > math.sqrt(eps):
            name, digits = str(dtype).removeprefix("torch."), -math.log10(eps)
            left = max(digits - math.log10(condition), 0)
            raise OptionError(
                f"Expected matrices that {name} can multiply by and undo but got a condition number of "
                f"{condition:.2g}, which leaves {left:.1f} of its {digits:.1f} digits. Convert the model "
                f"with model.double(), or keep the condition number below {1 / math.sqrt(eps):.2g}: pass "
                "condition=10."
            )

    def apply(self, model: nn.Module) -> None:
        """Multiply the channels of every head by its matrix, or by the inverse of the transpose, in place."""
        parameters = dict(model.named_parameters())
        for head, matrix in zip(self.symmetries.attention.heads, self.matrices, strict=True):
            inverse = torch.linalg.inv(matrix).T
            for part in head.parts:
                _multiply(parameters[part.parameter], part.entries, matrix if part.along else inverse)

    def changed(self) -> Tensor:
        """Whether each class of channels is mixed."""
        moved = torch.zeros(self.symmetries.classes, dtype=torch.bool)
        for head, matrix in zip(self.symmetries.attention.heads, self.matrices, strict=True):
            if not torch.equal(matrix, torch.eye(len(matrix), dtype=matrix.dtype)):
                own = [head.channels[place] for place in head.moved]
                moved[own] = True
                moved[[other for number in own if (other := self.symmetries.inverse[number]) >= 0]] = True
        return moved

    def leaves(self, declared: Set[str], layer: str | None) -> bool:
        """By the roles that a layer plays; for the network, by those of all layers."""
        if self.kind in declared:
            return True
        parts = [part for head in self.symmetries.attention.heads for part in head.parts]
        roles = {part.role for part in parts if layer in (None, part.layer)}
        kept = set("qkv" if INTO_HEADS in declared else "") | set("o" if OUT_OF_HEADS in declared else "")
        return bool(roles) and roles <= kept


def _random(head: Head, draw: Draw, generator: torch.Generator) -> Tensor:
    """A matrix that a head lets through; singular values between low and high, or within the condition."""
    low, high = math.log(draw.low), math.log(draw.high)
    if draw.condition is not None:
        middle, half = (low + high) / 2, min(high - low, math.log(draw.condition)) / 2
        low, high = middle - half, middle + half

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    def sizes(count: int) -> Tensor:
        return (low + (high - low) * uniform(count)).exp()

    matrix, order = _unmoved(head), {place: row for row, place in enumerate(head.moved)}
    free = torch.tensor([order[place] for place in head.free], dtype=torch.int64)
    left, right = (_rotation(len(free), generator) for _ in range(2))
    matrix[free[:, None], free] = left @ (sizes(len(free))[:, None] * right)
    angles = 2 * math.pi * uniform(len(head.pairs))
    for (one, other), size, angle in zip(head.pairs, sizes(len(head.pairs)), angles, strict=True):
        i, j = order[one], order[other]
        matrix[i, i] = matrix[j, j] = size * angle.cos()
        matrix[j, i] = size * angle.sin()
        matrix[i, j] = -matrix[j, i]
    return matrix


def _unmoved(head: Head) -> Tensor:
    return torch.eye(len(head.moved), dtype=torch.float64)


def _rotation(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix, all alike likely: the signs of diag(R) make QR unique."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def _given(name: str, heads: list[Head], value: Any) -> list[Tensor]:
    """A user's matrices for the heads of a layer, as they multiply its channels."""
    d = len(heads[0].channels)
    wanted = f"an invertible matrix {d}×{d} for {name!r}, or {len(heads)} of them, one for each head"
    matrices = numbers_in(value, f"{wanted},", torch.float64)
    if matrices.shape not in ((d, d), (len(heads), d, d)):
        got = "×".join(map(str, matrices.shape)) or "one number"
        raise OptionError(f"Expected {wanted}, but got {got}.")
    if not bool(matrices.isfinite().all()) or not bool((torch.linalg.det(matrices) != 0).all()):
        raise OptionError(
            f"Expected {wanted}, but got one that has no inverse. Leave {name!r} out to keep it."
        )
    each = [matrix.T if heads[0].compares else matrix for matrix in matrices.expand(len(heads), d, d)]
    return [_let_through(name, head, matrix) for head, matrix in zip(heads, each, strict=True)]


def _let_through(name: str, head: Head, matrix: Tensor) -> Tensor:
    """The part of a matrix that is about channels that are mixed, if the rest of it does nothing."""
    allowed = torch.eye(len(matrix), dtype=torch.float64)
    for one, other in head.pairs:
        size = (matrix[one, one] + matrix[other, other]) / 2
        turn = (matrix[other, one] - matrix[one, other]) / 2
        allowed[one, one] = allowed[other, other] = size
        allowed[other, one], allowed[one, other] = turn, -turn
    free = torch.tensor(head.free, dtype=torch.int64)
    allowed[free[:, None], free] = matrix[free[:, None], free]
    if float((matrix - allowed).abs().max()) > _ROUNDED * float(matrix.abs().max()):
        kept = len(head.channels) - len(head.moved)
        why = "rotary embeddings turn channels in pairs, and let a scaled rotation of each pair through"
        why = why if head.pairs else f"{kept} of {len(head.channels)} channels stay as they are"
        raise OptionError(
            f"Expected a matrix for {name!r} that leaves the function as it is but got another: {why}. Leave "
            f"{name!r} out, or draw one: flatness.rescale(model, example, kind='attention')."
        )
    return allowed[head.moved][:, head.moved]


def _multiply(values: nn.Parameter, entries: Tensor, matrix: Tensor) -> None:
    entries, matrix = entries.to(values.device), matrix.to(values.device)
    with torch.no_grad():
        flat = values.reshape(-1)  # the parameter itself where its memory is in order, else a copy
        flat[entries] = (matrix @ flat[entries].double()).to(flat.dtype)
        if flat.data_ptr() != values.data_ptr():
            values.copy_(flat.view_as(values))
