"""The part of the residual that arises right behind a layer, taken apart from what arises later on.

With x' what the next module is given and δ' the derivative there, held fixed, D = ∂²⟨δ', x'⟩/∂z² is the
curvature of the operators of one segment alone, see `flatness.network.segments`. A transformer's errors come
from there: signs of queries that meet those of keys say nothing about a trace, and weigh several times as
much as it. D costs little by itself, so it is taken off what a probe of the network brings, h − Dη, and known
better:

* Behind entrywise functions D is diagonal: one product with ones gives it, and nothing about it is random.
* In attention D η_b is computed for queries, keys and values b one after another. The pairs (η_b, D η_b)
  stand for the pair (η, Dη): signs of different b never meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from flatness.curvature.parameters.parameter_space import explained
from flatness.curvature.sums.pair_statistics import Own, Piece
from flatness.curvature.sums.targets import Direction, Found, LayerTarget, Target, Twice
from flatness.network.segments import Place, Segment, find_segments

# Queries, keys and values, where one layer returns them all.
_PACKED = 3
# From how many tokens on attention is taken apart. In a GPT with sequences of 1,024 its own noise is most of
# the noise; in small ones of 17 to 64 it is not, and this would take a fifth of the time.
LONG = 128


class OwnCurvature:
    """D of one segment on one micro-batch.

    Args:
        segment: The segment.
        targets: Its layers that are probed.
        end: The edge of what the module at the end is given.
        slope: The derivative there.

    Attributes:
        diagonals: D of layers behind which it is diagonal, shaped like what they return.
    """

    def __init__(
        self, segment: Segment, targets: Sequence[LayerTarget], end: GradientEdge, slope: Tensor
    ) -> None:
        self._targets = targets
        edges = [target.edges[0] for target in targets]
        with torch.enable_grad(), explained(second=True):
            found = torch.autograd.grad([end], edges, [slope.detach()], create_graph=True, allow_unused=True)
        pairs = zip(targets, found, strict=True)
        # The first derivatives of ⟨δ', x'⟩ that change with some layer.
        self._slopes = {target.name: one for target, one in pairs if one is not None and one.requires_grad}
        exact = [target for target in targets if target.name in segment.entrywise]
        self.diagonals = dict(self._diagonals(exact))
        parts = _PACKED if len(targets) == 1 else 1
        self._blocks = [
            (target, rows)
            for target in targets
            if segment.attends and target not in exact and target.name in self._slopes
            for rows in _parts(target.pairs.W.shape[1], parts)
        ]

    def _diagonals(self, exact: Iterable[LayerTarget]) -> Iterator[tuple[str, Tensor]]:
        for target in exact:
            slope = self._slopes.get(target.name)
            if slope is not None:
                (D,) = _derivatives(slope, [target], torch.ones_like(slope))
                if D is not None:
                    yield target.name, D

    def products(self, eta: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, slice | None]]:
        """Shares of Dη by layer, with the rows of η that they come from where these are the layer's own.

        Args:
            eta: Directions of some layers; others are 0.
        """
        for name, D in self.diagonals.items():
            if name in eta:
                yield name, D * eta[name], None
        blocks = [(target, rows) for target, rows in self._blocks if target.name in eta]
        if len(blocks) < 2:
            return
        for target, rows in blocks:
            sent = target.only(eta[target.name], rows)
            found = _derivatives(self._slopes[target.name], self._targets, sent)
            for other, product in zip(self._targets, found, strict=True):
                if product is not None and other.name in eta:
                    yield other.name, product, rows if other is target else None

    def holds(self, target: Target) -> bool:
        """Whether it is about a target."""
        return any(target is one for one in self._targets)

    def values(self, target: LayerTarget, direction: Direction) -> dict[str, Tensor]:
        """Curvature D of each sample along directions of single statistics."""
        found: dict[str, list[Tensor]] = {}
        for name, eta in direction.fitted():
            (product,) = _derivatives(self._slopes[target.name], [target], eta)
            if product is not None:
                found.setdefault(name, []).append((eta * product).reshape(target.n, -1).sum(1))
        return {name: torch.stack(own).mean(0) for name, own in found.items()}


def own_segments(
    output: Tensor, targets: Iterable[Target], inputs: Mapping[Place, GradientEdge]
) -> list[Segment]:
    """The segments of a network whose D is worth being taken apart.

    Args:
        output: Its output, with the graph.
        targets: What is probed.
        inputs: What layers are given, by call.
    """
    layers = {target.name: target for target in targets if isinstance(target, LayerTarget)}
    edges = {name: one.edges[0] for name, one in layers.items() if one.pairs.takes_diagonals}
    found = find_segments(output, edges, inputs)
    long = {name for name, one in layers.items() if one.pairs.route.positions >= LONG}
    split = [replace(one, attends=one.attends and not long.isdisjoint(one.layers)) for one in found]
    return [one for one in split if one.entrywise or one.attends]


def own_curvatures(
    segments: Iterable[Segment], twice: Twice, ends: Mapping[Place, GradientEdge]
) -> list[OwnCurvature]:
    """D of all segments.

    Args:
        segments: The segments.
        twice: First derivatives of the network, also at the ends of the segments.
        ends: The edges of these ends.
    """
    layers = {target.name: target for target in twice.targets if isinstance(target, LayerTarget)}
    found = []
    for segment in segments:
        targets = [layers[name] for name in segment.layers if name in layers]
        slope = twice.ends.get(segment.end)
        if targets and slope is not None:
            found.append(OwnCurvature(segment, targets, ends[segment.end], slope))
    return found


def take_apart(
    own: Iterable[OwnCurvature],
    asked: Sequence[tuple[Target, Direction]],
    scales: Sequence[float],
    found: Sequence[tuple[Found, Found]],
) -> list[Own]:
    """Take Dη off what a probe of the network has brought, in place.

    Args:
        own: D of the segments.
        asked: The targets that were probed together, each with its direction.
        scales: By how much the directions were scaled, and the products are to be divided.
        found: The products.

    Returns:
        What stands for it, by target.
    """
    places = {target.name: k for k, (target, _) in enumerate(asked)}
    eta = {
        target.name: c * way.signals[0]
        for c, (target, way) in zip(scales, asked, strict=True)
        if isinstance(target, LayerTarget)
    }
    stand_ins = [Own([], {}) for _ in asked]
    for part in own:
        for name, product, rows in part.products(eta):
            k = places[name]
            product, (products, _) = product / scales[k], found[k]
            products[0] = -product if products[0] is None else products[0] - product
            if rows is not None:
                stand_ins[k].pieces.append(Piece(rows, product))
        for (target, direction), stand_in in zip(asked, stand_ins, strict=True):
            if stand_in.pieces and isinstance(target, LayerTarget) and part.holds(target):
                stand_in.values.update(part.values(target, direction))
    return stand_ins


def _parts(d: int, count: int) -> list[slice]:
    """Rows in parts of equal size; none where there are no such."""
    return [] if d % count else [slice(k * d // count, (k + 1) * d // count) for k in range(count)]


def _derivatives(start: Tensor, at: Iterable[Target], sent: Tensor) -> Found:
    edges = [target.edges[0] for target in at]
    with explained(second=True):
        return list(torch.autograd.grad([start], edges, [sent], retain_graph=True, allow_unused=True))
