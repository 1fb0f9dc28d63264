"""What the sampled engine probes, and how first derivatives are differentiated again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatness.curvature.parameters.parameter_space import explained
from flatness.curvature.sums.folds import Collector
from flatness.curvature.sums.pair_statistics import LayerPairs, Own, WeightSigns, laid_out_like
from flatness.losses.signs import Signs
from flatness.network.affine import AffineModule
from flatness.network.recording import Record

Found = list[Tensor | None]


class Direction(NamedTuple):
    """Signals for the edges of one target, and what takes them together with what comes back.

    Attributes:
        signals: η at every edge.
        at_inputs: What is sent back from every input of the target, on top.
        take: Takes h at every edge, and how the target's inputs move, None where nothing came; and what
            stands for the target's own curvature, if that has been taken off h.
        fitted: Further directions at its only edge, each for one statistic.
    """

    signals: list[Tensor]
    at_inputs: list[Tensor]
    take: Callable[[Collector, Found, Found, Own | None], None]
    fitted: Callable[[], Iterable[tuple[str, Tensor]]] = tuple


class Target(ABC):
    """What the sampled engine probes: a module, with the edges where signals come back.

    Attributes:
        name: The module's name.
        edges: Where signals come back.
        inputs: What the module is given where that moves with its own weight, with its edges.
        entries: Numbers that say all directions of one sample.
    """

    name: str
    edges: list[Any]
    inputs: list[tuple[Tensor, Any]]
    entries: int

    @abstractmethod
    def add_squares(self, collector: Collector, arrived: Found, weight: Tensor | float) -> None:
        """Add what one direction of the output sends back, squared, with a signed weight (n,) or ±1."""

    @abstractmethod
    def random_direction(self, signs: Signs, slopes: Found, kind: Tensor) -> Direction:
        """A random direction with E ηηᵀ = 1, given the first derivatives at the edges.

        Args:
            signs: Where its signs come from.
            slopes: The first derivatives.
            kind: Which kind of direction each sample gets (n,), at a target that has several.
        """

    @abstractmethod
    def every_direction(self, slopes: Found) -> Iterator[Direction]:
        """The direction of every entry of one sample, in all samples at once."""


class _CallTarget(Target):
    """A module that is called once; what is probed is what it returns.

    Args:
        name: The module's name.
        record: Its call.
        n: Number of samples.
    """

    def __init__(self, name: str, record: Record, n: int) -> None:
        self.name, self.edges, self.inputs = name, [record.z_edge], []
        self.shape, self.n, self.entries = record.z_shape, n, record.z_shape.numel() // n

    @abstractmethod
    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Add a pair of signals to the sums."""

    def add_squares(self, collector: Collector, arrived: Found, weight: Tensor | float) -> None:
        """Add a pair that is one signal twice."""
        (delta,) = arrived
        if delta is not None:
            self.add(collector, delta, _weighted(delta, weight, self.n))

    def random_direction(self, signs: Signs, slopes: Found, kind: Tensor) -> Direction:
        """Signs shaped like what the module returns."""
        return self._given(signs.like(_zeros(slopes, self.shape)))

    def every_direction(self, slopes: Found) -> Iterator[Direction]:
        """The unit vectors e_k."""
        for k in range(self.entries):
            one = _zeros(slopes, self.shape).reshape(self.n, -1)
            one[:, k] = 1.0
            yield self._given(one.reshape(self.shape))

    def _given(self, eta: Tensor) -> Direction:
        def take(collector: Collector, products: Found, moved: Found, own: Own | None) -> None:
            if products[0] is not None:
                self.add(collector, eta, products[0])

        return Direction([eta], [], take)


class LayerTarget(_CallTarget):
    """A layer; what is probed is its preactivations."""

    def __init__(self, pairs: LayerPairs, record: Record) -> None:
        super().__init__(pairs.name, record, pairs.n)
        self.pairs = pairs

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Add a pair of signals to the layer's statistics."""
        self.pairs.add(collector, eta, h)

    def random_direction(self, signs: Signs, slopes: Found, kind: Tensor) -> Direction:
        """Signs shaped like z where a sample meets W once, η = VΦ with signs V at many positions."""
        if self.pairs.plain:
            return super().random_direction(signs, slopes, kind)
        drawn = WeightSigns(self.pairs, signs)

        def take(collector: Collector, products: Found, moved: Found, own: Own | None) -> None:
            if products[0] is not None:
                drawn.add(collector, products[0], own)

        return Direction([drawn.signal(self.shape)], [], take, partial(drawn.fitted, self.shape))

    def only(self, eta: Tensor, rows: slice) -> Tensor:
        """Signals of some rows of the weight alone, shaped like the layer's output."""
        kept = self.pairs.layer.signals(eta, self.n)
        alone = torch.zeros_like(kept)
        alone[:, :, rows] = kept[:, :, rows]
        return laid_out_like(self.pairs.layer, alone, eta.shape)


class AffineTarget(_CallTarget):
    """A norm layer or PReLU.

    A sample meets its scale and shift at every position, so that random signs stand in their places: signs of
    z's shape would be noise for all that is probed along with it.
    """

    def __init__(self, module: AffineModule, record: Record, n: int) -> None:
        super().__init__(module.name, record, n)
        self.module, self.x = module, record.x

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Add a pair of signals to the diagonals of scale and shift."""
        first = self.module.gradients(self.x, eta)
        self._put(collector, first, first if h is eta else self.module.gradients(self.x, h))

    def random_direction(self, signs: Signs, slopes: Found, kind: Tensor) -> Direction:
        """Signs in the places of scale and shift."""
        with torch.enable_grad():
            eta = _zeros(slopes, self.shape).requires_grad_()
            own = self.module.gradients(self.x, eta)
            V = {name: signs.at(k).like(g.detach()) for k, (name, g) in enumerate(own.items())}
            (along,) = torch.autograd.grad(list(own.values()), eta, list(V.values()))

        def take(collector: Collector, products: Found, moved: Found, own: Own | None) -> None:
            if products[0] is not None:
                self._put(collector, V, self.module.gradients(self.x, products[0]))

        return Direction([along], [], take)

    @staticmethod
    def _put(collector: Collector, a: Mapping[str, Tensor], q: Mapping[str, Tensor]) -> None:
        for name, own in a.items():
            collector.put(name, {"diagonal": own * q[name]})


class RepeatedTarget(_CallTarget):
    """A parameter with a copy for every sample, (n, …), of which the trace is wanted."""

    def __init__(self, name: str, copies: Tensor) -> None:
        self.name, self.edges, self.inputs = name, [copies], []
        self.shape, self.n, self.entries = copies.shape, len(copies), copies[0].numel()

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Add a pair of signals to the trace."""
        collector.put(self.name, {"trace": (eta * h).flatten(1).sum(1, keepdim=True)})


def _zeros(slopes: Found, shape: torch.Size) -> Tensor:
    slope = next(slope for slope in slopes if slope is not None)
    return torch.zeros(shape, dtype=slope.dtype, device=slope.device)


def _weighted(delta: Tensor, weight: Tensor | float, n: int) -> Tensor:
    """Signals times the weights of their samples."""
    if not isinstance(weight, Tensor):
        return delta if weight == 1.0 else -delta
    rows = weight.repeat_interleave(delta.shape[0] // n)
    return delta * rows.reshape(-1, *[1] * (delta.dim() - 1))


class Twice:
    """The first derivatives ⟨s, f⟩ of a micro-batch at all targets, and what differentiates them again.

    Where a target's inputs move with its weight, zeros are sent back from these inputs beside s: what arrives
    at the zeros in the second pass is how the inputs move.

    Args:
        output: The outputs f, with their graph.
        slope: s.
        targets: The targets.
        ends: Other places where first derivatives are wanted.

    Attributes:
        targets: Those whose first derivatives change with the weights.
        slopes: The first derivatives at the edges of each, by name.
        ends: Those at the other places.
    """

    def __init__(
        self, output: Tensor, slope: Tensor, targets: Sequence[Target], ends: Mapping[Any, Any]
    ) -> None:
        self._zeros = {
            one.name: [torch.zeros_like(x).requires_grad_() for x, _ in one.inputs] for one in targets
        }
        inputs = [edge for target in targets for _, edge in target.inputs]
        zeros = chain.from_iterable(self._zeros.values())
        edges = list(chain.from_iterable(target.edges for target in targets))
        with explained(second=True):
            pulled = torch.autograd.grad(
                [output, *inputs],
                [*edges, *ends.values()],
                [slope, *zeros],
                create_graph=True,
                allow_unused=True,
            )
        self.ends = dict(zip(ends, pulled[len(edges) :], strict=True))
        self.slopes = {target.name: own for target, own in zip(targets, shares(pulled, targets), strict=True)}
        self.targets = [target for target in targets if any(map(_moves, self.slopes[target.name]))]

    def products(
        self, asked: Sequence[tuple[Target, Direction]], scales: Sequence[float]
    ) -> list[tuple[Found, Found]]:
        """What comes back at the edges and inputs of these targets: directions times scales, over scales."""
        targets = [target for target, _ in asked]
        sent = (self._sent(target, way, c) for c, (target, way) in zip(scales, asked, strict=True))
        starts, signals = zip(*chain.from_iterable(sent), strict=True)
        edges = list(chain.from_iterable(target.edges for target in targets))
        zeros = chain.from_iterable(self._zeros[target.name] for target in targets)
        with explained(second=True):
            found = torch.autograd.grad(
                starts, [*edges, *zeros], signals, retain_graph=True, allow_unused=True
            )
        with torch.no_grad():
            own, moved = shares(found[: len(edges)], targets), iter(found[len(edges) :])
            return [
                (_over(products, c), _over(islice(moved, len(target.inputs)), c))
                for c, target, products in zip(scales, targets, own, strict=True)
            ]

    def _sent(self, target: Target, direction: Direction, scale: float) -> Iterator[tuple[Any, Tensor]]:
        """Where signals along a direction start, and what they are."""
        for slope, signal in zip(self.slopes[target.name], direction.signals, strict=True):
            if _moves(slope):
                yield slope, scale * signal
        for (_, edge), signal in zip(target.inputs, direction.at_inputs, strict=True):
            yield edge, scale * signal


def shares(values: Iterable[Tensor | None], targets: Sequence[Target]) -> list[Found]:
    """Values at the edges of all targets, target by target."""
    left = iter(values)
    return [list(islice(left, len(target.edges))) for target in targets]


def _moves(slope: Tensor | None) -> bool:
    return slope is not None and slope.requires_grad


def _over(values: Iterable[Tensor | None], c: float) -> Found:
    return [None if value is None else value / c for value in values]
