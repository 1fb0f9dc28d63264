"""The geometry of attention's heads behind geodesic sharpness (da Silva et al. 2025), and its ascent.

A head is a pair (G, H) of matrices with one column per channel: (W_q, W_k) or (W_v, W_oᵀ) laid out as
(inputs × channels), biases as further rows. (G A⁻¹, H Aᵀ) is the same function for every invertible A. With
M = GᵀG and N = HᵀH there are two metrics in which these moves are isometries:

    mixed   ⟨η, ζ⟩ = Tr(N η_Gᵀζ_G + M η_Hᵀζ_H)
    own     ⟨η, ζ⟩ = Tr(M⁻¹ η_Gᵀζ_G + N⁻¹ η_Hᵀζ_H)

A direction is horizontal where it is orthogonal to all (GΛ, −HΛᵀ), along which the function stays. The
ascent goes along θ + ξ − ½Γ(ξ, ξ), a geodesic to second order. All steps and lengths are those of the metric,
so that an equivalent network takes equal steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatness.catalogue.engines.ball_ascent import ARRIVED
from flatness.catalogue.measure import Surroundings, Valued
from flatness.curvature.operators.ascent import Chart, ascend
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import FlatnessError, ProcessError, UndefinedMeasureError, listed
from flatness.problem import batches
from flatness.problem.problem import Problem
from flatness.symmetry.flow.groups import find_groups
from flatness.symmetry.flow.heads import Head
from flatness.symmetry.trace.forward_pass import trace

Pair = tuple[Tensor, Tensor]
_EXAMPLE = 8
# An eigenvalue of M or N so far below the mean one counts as 0; then so much of the mean one is added to all.
_SINGULAR, _ADDED = 1e-12, 1e-6


class Geometry(ABC):
    """A metric at one head (G, H), both (inputs, channels) in float64.

    Args:
        G: The first matrix.
        H: The second.

    Attributes:
        regular: Whether M and N have inverses as they are.
    """

    def __init__(self, G: Tensor, H: Tensor) -> None:
        self.G, self.H = G, H
        (self.M, one), (self.N, other) = _gram(G), _gram(H)
        self.regular = one and other
        self._inverse_M, self._inverse_N = torch.linalg.inv(self.M), torch.linalg.inv(self.N)

    @abstractmethod
    def vector(self, u: Pair) -> Pair:
        """The direction with these coordinates, whose plain length is its length in the metric."""

    @abstractmethod
    def horizontal(self, xi: Pair) -> Pair:
        """The part of a direction that is orthogonal to all that leaves the function as it is."""

    @abstractmethod
    def connection(self, xi: Pair) -> Pair:
        """Γ(ξ, ξ): geodesics have ξ̈ = −Γ(ξ̇, ξ̇)."""

    def _moved(self, xi: Pair, L: Tensor) -> Pair:
        return xi[0] + self.G @ L, xi[1] - self.H @ L.T


class Mixed(Geometry):
    """Each matrix measured by the other: a step has the size of the change of G Hᵀ."""

    def vector(self, u: Pair) -> Pair:
        """ξ_G = u_G N^{-½} and ξ_H = u_H M^{-½}."""
        return u[0] @ _power(self.N, -0.5), u[1] @ _power(self.M, -0.5)

    def horizontal(self, xi: Pair) -> Pair:
        """Gᵀξ_G N = M ξ_HᵀH afterwards."""
        G_part = self._inverse_M @ self.G.T @ xi[0]
        return self._moved(xi, (xi[1].T @ self.H @ self._inverse_N - G_part) / 2)

    def connection(self, xi: Pair) -> Pair:
        """From the Euler-Lagrange equations of the energy."""
        a, b = xi
        G, H = self.G, self.H
        G_part = a @ (b.T @ H + H.T @ b) - G @ (b.T @ b)
        H_part = b @ (a.T @ G + G.T @ a) - H @ (a.T @ a)
        return G_part @ self._inverse_N, H_part @ self._inverse_M


class Own(Geometry):
    """Each matrix measured by itself: a step has the size of the relative change of G and of H."""

    def vector(self, u: Pair) -> Pair:
        """ξ_G = u_G M^½ and ξ_H = u_H N^½."""
        return u[0] @ _power(self.M, 0.5), u[1] @ _power(self.N, 0.5)

    def horizontal(self, xi: Pair) -> Pair:
        """ξ_GᵀG N = M Hᵀξ_H afterwards, by AΛᵀ + ΛᵀA = M Hᵀξ_H − ξ_GᵀG N with A = MN.

        (The paper's equation has Λ in one place where Λᵀ belongs, and leaves a vertical part.)
        """
        B = self.M @ self.H.T @ xi[1] - xi[0].T @ self.G @ self.N
        # A = M^½ S M^{-½} with S = M^½ N M^½, which is symmetric.
        root, inverse = _power(self.M, 0.5), _power(self.M, -0.5)
        values, Q = torch.linalg.eigh(root @ self.N @ root)
        C = Q.T @ inverse @ B @ root @ Q
        transposed = root @ Q @ (C / (values[:, None] + values)) @ Q.T @ inverse
        return self._moved(xi, transposed.T)

    def connection(self, xi: Pair) -> Pair:
        """From the Euler-Lagrange equations of the energy, for G and H apart."""
        return self._one(self.G, self._inverse_M, xi[0]), self._one(self.H, self._inverse_N, xi[1])

    def _one(self, G: Tensor, inverse: Tensor, a: Tensor) -> Tensor:
        return G @ inverse @ a.T @ a - a @ inverse @ (a.T @ G + G.T @ a)


GEOMETRIES: dict[str, type[Geometry]] = {"mixed": Mixed, "own": Own}


def _gram(G: Tensor) -> tuple[Tensor, bool]:
    """GᵀG, and whether it has an inverse as it is; where not, with a little of its mean eigenvalue added."""
    M = G.T @ G
    mean = M.diagonal().mean()
    if float(torch.linalg.eigvalsh(M)[0]) > _SINGULAR * float(mean):
        return M, True
    return M + _ADDED * mean * torch.eye(len(M), dtype=M.dtype, device=M.device), False


def _power(M: Tensor, exponent: float) -> Tensor:
    """A power of a symmetric positive matrix."""
    values, Q = torch.linalg.eigh(M)
    return (Q * values**exponent) @ Q.T


@dataclass(frozen=True)
class _Block:
    """A head in parameter space.

    Attributes:
        G: Places of its first matrix in θ, (inputs, channels).
        H: Places of the second.
        geometry: Its metric; None where one of them is zero, so that nothing has a length.
    """

    G: Tensor
    H: Tensor
    geometry: Geometry | None


class Curved(Chart):
    """Horizontal directions of heads, and every other parameter in units of its size.

    Args:
        theta: The parameters.
        blocks: The heads.
    """

    def __init__(self, theta: Tensor, blocks: Sequence[_Block]) -> None:
        self._blocks = blocks
        root = theta.abs()
        for block in blocks:
            root[block.G], root[block.H] = 0.0, 0.0
        self._root = root

    def displacement(self, u: Tensor) -> Tensor:
        """ξ − ½Γ(ξ, ξ) of the horizontal direction ξ with coordinates u."""
        step = self._root * u
        for block in self._blocks:
            at = block.geometry
            if at is None:
                continue
            xi = at.horizontal(at.vector((u[block.G], u[block.H])))
            for places, along, bent in zip((block.G, block.H), xi, at.connection(xi), strict=True):
                step = step.index_add(0, places.flatten(), (along - bent / 2).flatten())
        return step

    def slope(self, u: Tensor, gradient: Tensor) -> Tensor:
        """The derivative of E in the coordinates u."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.displacement(u), u, gradient)
        return found


def _parts(space: ParameterSpace, count: int) -> Iterator[ParameterSpace]:
    """The same parameters over consecutive batches of the data, as large as each other up to one sample.

    Of several processes each divides its own part of the data, and gives one piece to every batch.
    """
    if count == 1:
        yield space
        return
    problem = space.problem
    with problem.ranks.stage():
        pieces = list(problem.source.batches(problem.micro_batch))
        samples = sum(map(batches.size_of, pieces))
        if samples < count:
            raise UndefinedMeasureError(
                f"Expected at least one sample for each of {count} batches but got {samples}. Pass "
                f"options={{'geodesic_sharpness': {{'batches': {samples}}}}} or less."
            )
    for number in range(count):
        first, last = number * samples // count, (number + 1) * samples // count
        yield ParameterSpace(problem.beside(_rows(pieces, first, last)))


def _rows(pieces: Sequence[Any], first: int, last: int) -> list[Any]:
    """Samples first to last of batches one after another."""
    found, begin = [], 0
    for piece in pieces:
        size = batches.size_of(piece)
        start, stop = max(first - begin, 0), min(last - begin, size)
        if start < stop:
            found.append(batches.rows(piece, start, stop))
        begin += size
    return found


def _heads(problem: Problem) -> tuple[list[Head], list[str]]:
    """The heads of a network that any matrix may mix, and what to say of others."""

    def forward(model: nn.Module, batch: Any) -> Any:
        return problem.forward(model, batch)[0]

    try:
        with problem.ranks.stage():
            found = find_groups(trace(problem.model, problem.example(_EXAMPLE), forward)).attention
    except ProcessError:
        raise
    except FlatnessError as error:
        raise UndefinedMeasureError(
            f"Expected a network in which heads of attention can be looked for but got: {error} Use "
            "adaptive_sharpness, which looks for none."
        ) from error
    rotary = list(dict.fromkeys(head.name for head in found.heads if head.pairs))
    if rotary:
        raise UndefinedMeasureError(
            f"Expected heads whose queries and keys any matrix may mix but rotary embeddings turn channels "
            f"of {listed(rotary, 4)} in pairs, for which geodesic_sharpness is not defined. Use "
            "relative_flatness, or adaptive_sharpness."
        )
    notes = [f"in the adaptive norm: {reason}" for reason in found.reasons]
    return list(found.heads), notes


def _block(space: ParameterSpace, head: Head, geometry: type[Geometry]) -> _Block:
    """A head in parameter space."""
    begins, total = {}, 0
    for name, parameter in space.parameters.items():
        begins[name] = total
        total += parameter.numel()
    sides = [
        torch.cat([begins[part.parameter] + part.entries.T for part in head.parts if part.along == along])
        for along in (True, False)
    ]
    G, H = (side.to(space.theta.device) for side in sides)
    at = space.theta[G], space.theta[H]
    return _Block(G, H, geometry(*at) if all(bool(side.any()) for side in at) else None)


def _blocks(space: ParameterSpace, geometry: type[Geometry]) -> tuple[list[_Block], list[str]]:
    """The heads of a network in parameter space, and what to say of them."""
    heads, notes = _heads(space.problem)
    blocks = [_block(space, head, geometry) for head in heads]
    kept = [block.geometry for block in blocks if block.geometry is not None]
    if len(kept) < len(blocks):
        notes.append(f"heads with a zero matrix, which do not move: {len(blocks) - len(kept)}")
    singular = sum(not one.regular for one in kept)
    if singular:
        notes.append(
            f"heads with fewer inputs than channels, or dependent channels: {singular}; {_ADDED:g} of the "
            "mean eigenvalue is added to their metric, and mixing their channels may change the value"
        )
    return blocks, notes


def geodesic_sharpness(around: Surroundings) -> dict[str | None, Valued]:
    """The largest rises of the risk along horizontal geodesics that ascents find, one for every batch."""
    options, space = around.options, around.space
    rho, metric = float(options["rho"]), options["metric"]
    blocks, notes = _blocks(space, GEOMETRIES[metric])
    chart = Curved(space.theta, blocks)
    if not bool(chart.displacement(torch.ones_like(space.theta)).any()):
        raise UndefinedMeasureError(
            "Expected parameters to move in proportion to their size but all of them are zero: "
            "geodesic_sharpness is not defined here. Check that the weights are loaded."
        )
    zero = torch.zeros_like(space.theta)
    rises, ascents = [], []
    for part in _parts(space, options["batches"]):
        risk, gradient = part.gradient()
        start = {"the gradient": chart.slope(zero, gradient)}
        ascents.append(ascend(part, chart, rho, start, norm="l2", steps=options["steps"]))
        rises.append(max(ascents[-1].risk - risk, 0.0))
    passes, pairs = sum(ascent.passes for ascent in ascents), sum(bool(block.geometry) for block in blocks)
    aligned = min(ascent.alignment for ascent in ascents)
    over = "all the data at once" if len(rises) == 1 else f"the mean over {len(rises)} batches"
    notes.insert(
        0,
        f"a lower bound: {over}, {passes} gradients; ρ = {rho:g}, {metric} metric for {pairs} pairs of "
        "matrices in heads of attention, adaptive for the rest",
    )
    if aligned < ARRIVED:
        notes.append(
            f"still climbing: displacement and gradient are aligned to {aligned:.3f} only; raise steps"
        )
    value = sum(rises) / len(rises)
    return {None: Valued(value, tuple(notes), aligned >= ARRIVED, method="ascent")}
