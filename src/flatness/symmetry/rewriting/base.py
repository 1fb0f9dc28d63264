"""What a kind of rewriting says: what it acts on, how factors are chosen and applied, what stays equal."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from flatness.errors import LayerError, ModelError, OptionError, listed, nearest
from flatness.symmetry.flow.groups import Symmetries
from flatness.symmetry.flow.uses import Use

FIXED = -1
# How far the logarithm of a product of factors may be from 0 by rounding alone.
_ROUNDED = 1e-9


class Invariance(NamedTuple):
    """What a measure may declare about a kind of rewriting.

    Attributes:
        name: What the measure declares.
        mark: What stands for it in tables.
        when: When the measure is unchanged, in words.
    """

    name: str
    mark: str
    when: str


@dataclass(frozen=True)
class Draw:
    """How factors are drawn.

    Attributes:
        seed: Of the random numbers.
        low: Smallest factor.
        high: Largest factor.
        frozen: Classes of channels that keep their scale.
        condition: Largest condition number of matrices; None: what `low` and `high` allow.
    """

    seed: int = 0
    low: float = 0.2
    high: float = 5.0
    frozen: Set[int] = frozenset()
    condition: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        bounds = (self.low, self.high)
        numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in bounds)
        if not numbers or not 0 < self.low <= self.high:
            raise OptionError(f"Expected 0 < low ≤ high but got low={self.low!r} and high={self.high!r}.")
        if not hasattr(self.seed, "__index__"):
            raise OptionError(f"Expected seed to be an integer but got {self.seed!r}. For example seed=0.")
        given = self.condition
        if given is not None and not (isinstance(given, (int, float)) and 1 <= given < math.inf):
            raise OptionError(
                f"Expected condition to be a number of at least 1, the condition number of matrices, but got "
                f"{given!r}. For example condition=10."
            )

    def uniform(self, count: int) -> Tensor:
        """Numbers between 0 and 1, in float64."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(count, generator=generator, dtype=torch.float64)

    def log_uniform(self, count: int) -> Tensor:
        """Numbers between low and high whose logarithm is uniform."""
        low, high = math.log(self.low), math.log(self.high)
        return (low + (high - low) * self.uniform(count)).exp()


@dataclass(frozen=True, eq=False)
class Rescaling(ABC):
    """A change of parameters that leaves a network's function as it is, or what `expected` says.

    Attributes:
        symmetries: What it acts on.
        scales: The factor of every class of channels; for a permutation the class whose place each one takes.
        kind: Its name, which its file has too.
        invariances: What measures may declare about it.
        partial: The one among them that leaves the features of a layer itself as they are, if there is one.
        reorders: Whether units change places, so that values of units are compared in order of size.
    """

    symmetries: Symmetries
    scales: Tensor

    kind: ClassVar[str]
    invariances: ClassVar[tuple[Invariance, ...]] = ()
    partial: ClassVar[str | None] = None
    reorders: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def acts_on(cls, found: Symmetries) -> Symmetries:
        """The symmetries that it takes.

        Raises:
            ModelError: When there are none in this network.
        """

    @classmethod
    @abstractmethod
    def drawn(cls, found: Symmetries, draw: Draw) -> Self:
        """One at random, out of what it acts on."""

    @classmethod
    @abstractmethod
    def given(cls, found: Symmetries, factors: Mapping[str, Any]) -> Self:
        """The one with a user's factors.

        Raises:
            OptionError: When the factors are not of its form, or would change the function.
        """

    @abstractmethod
    def apply(self, model: nn.Module) -> None:
        """Change the parameters and running statistics of a model in place."""

    @abstractmethod
    def changed(self) -> Tensor:
        """Whether it changes anything in each class of channels."""

    def expected(self, output: Tensor) -> Tensor:
        """What the changed network puts out where the original put out `output`."""
        return output

    def leaves(self, declared: Set[str], layer: str | None) -> bool:
        """Whether a measure that declares this keeps its value for a layer (None: for the network)."""
        return self.kind in declared

    def reaches(self, layer: str | None) -> bool:
        """Whether it changes a layer's weight (None: anything at all)."""
        found = self.symmetries
        if layer is None:
            return bool(self.changed().any())
        if layer not in found.layers:
            return True
        own = found.units_of(layer) | found.features_of(layer)
        return bool(self.changed()[sorted(own)].any())


class Scaling(Rescaling):
    """A rewriting that multiplies and divides parameters by positive factors, one per class of channels."""

    def changed(self) -> Tensor:
        """Whether each class has another factor than 1."""
        return self.scales != 1

    def apply(self, model: nn.Module) -> None:
        """Multiply every parameter and running statistic by the factors of its channels, in place."""
        scales = with_fixed(self.scales)
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        for correction in self.symmetries.corrections:
            s, variance = scales[correction.labels], tensors[correction.variance].double().cpu()
            factor = (s.square() * variance + correction.eps).sqrt()
            factor = factor / (s * (variance + correction.eps).sqrt())
            _multiply(tensors[correction.scale], factor, None)
        for action in self.symmetries.actions:
            factor = scales.new_ones(())
            if action.up is not None:
                factor = factor * scales[action.up] ** action.power
            if action.down is not None:
                factor = factor / scales[action.down]
            _multiply(tensors[action.name], factor, action.index)


class ChannelScaling(Scaling):
    """A scaling whose factors, of all channels that may have any, are chosen freely or layer by layer."""

    @classmethod
    def acts_on(cls, found: Symmetries) -> Symmetries:
        """All channels that may be rescaled."""
        if not found.groups:
            raise ModelError(
                f"Expected a network in which something may be rescaled but in {found.model} everything is "
                f"fixed: {listed(found.reasons, 6)}. Print flatness.symmetries(model, example) for the whole "
                "list; kind='permutation' may still work."
            )
        return found

    @classmethod
    @abstractmethod
    def choices(cls, found: Symmetries) -> Tensor:
        """The class whose factor each class of channels takes; −1 for those that are fixed."""

    @classmethod
    @abstractmethod
    def ties(cls, name: str, action: Use, factors: Any) -> list[tuple[int, int, float]]:
        """What a user's factors for a layer say: the factor of a class over that of another, for each."""

    @classmethod
    def scaled(cls, found: Symmetries, scales: Tensor) -> Self:
        """The one with these factors of classes."""
        return cls(found, scales)

    @classmethod
    def given(cls, found: Symmetries, factors: Mapping[str, Any]) -> Self:
        """From factors of some layers: what is given holds, and layers not given make up for it.

        Where that leaves a choice, the scale that comes first in the network stays 1, so that later layers
        make up for earlier ones.
        """
        of = [*cls.choices(found).tolist(), FIXED]
        scales = TiedScales()
        for number, other in enumerate(found.inverse):
            if other != FIXED and FIXED != of[number] < of[other]:
                scales.invert(of[number], of[other])
        for name, action in named_layers(found, factors).items():
            ties = cls.ties(name, action, factors[name])
            for unit, (out, into, value) in enumerate(ties):
                forced = scales.tie(of[out], of[into], math.log2(value))
                if forced is not None:
                    where = f"unit {unit} of {name}" if len(ties) > 1 else name
                    raise _contradiction(found, name, where, value, 2**forced)
        logs = [scales.log(number) for number in of[:-1]]
        return cls.scaled(found, torch.tensor(logs, dtype=torch.float64).exp2())

    @classmethod
    def drawn(cls, found: Symmetries, draw: Draw) -> Self:
        """Log-uniform factors, those of keys the inverse of those of queries."""
        of = cls.choices(found)
        factors = draw.log_uniform(found.classes)
        scales = torch.where(of == FIXED, 1.0, factors[of.clamp(min=0)])
        frozen = draw.frozen | {found.inverse[number] for number in draw.frozen} - {FIXED}
        scales[torch.tensor(sorted(frozen), dtype=torch.int64)] = 1.0
        for number, other in enumerate(found.inverse):
            if other > number:
                scales[other] = 1 / scales[number]
        return cls.scaled(found, scales)


class TiedScales:
    """Scales of classes that are tied to each other, log s_a = ± log s_b + step; that of class −1 is 1.

    Logarithms are to the base 2, so that powers of two stay exact.
    """

    def __init__(self) -> None:
        self._ties: dict[int, tuple[int, int, float]] = {}

    def invert(self, one: int, other: int) -> None:
        """Let a class have the inverse scale of one that comes before it."""
        self._ties[other] = (one, -1, 0.0)

    def tie(self, out: int, into: int, step: float) -> float | None:
        """Let log s_out be log s_into + step; where it is tied to another step already, returns that one."""
        (a, turn_a, from_a), (b, turn_b, from_b) = self._anchored(out), self._anchored(into)
        turn, missing = turn_a * turn_b, step + from_b - from_a
        if a == b and (turn > 0 or a == FIXED):
            return None if abs(missing) <= _ROUNDED else from_a - from_b
        if a == b:
            self._ties[a] = (FIXED, 1, turn_a * missing / 2)
        elif a != FIXED and (b == FIXED or a > b):
            self._ties[a] = (b, turn, turn_a * missing)
        else:
            self._ties[b] = (a, turn, -turn_b * missing)
        return None

    def log(self, number: int) -> float:
        """The logarithm of a scale, that of untied classes 0."""
        return self._anchored(number)[2]

    def _anchored(self, number: int) -> tuple[int, int, float]:
        """The class that a class is tied to in the end, with sign and step."""
        sign, offset = 1, 0.0
        while number in self._ties:
            number, turn, step = self._ties[number]
            offset += sign * step
            sign *= turn
        return number, sign, offset


def with_fixed(scales: Tensor) -> Tensor:
    """Factors of classes, with that of class −1 as the last: 1."""
    return torch.cat([scales, scales.new_ones(1)])


def _multiply(values: Tensor, factor: Tensor, index: Tensor | None) -> None:
    if bool((factor == 1).all()):
        return
    if index is not None:
        whole = torch.ones(values.numel(), dtype=torch.float64)
        whole[index.long()] = factor.expand(index.shape)
        factor = whole.reshape(values.shape)
    with torch.no_grad():
        values.copy_((values.double() * factor.to(values.device)).to(values.dtype))


def named_layers(found: Symmetries, given: Mapping[str, Any], what: str = "factors") -> dict[str, Use]:
    """The layers that a user gave something for, in network order."""
    check_names(f"{what} for layers of the model", given, found.layers)
    return {name: action for name, action in found.layers.items() if name in given}


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a layer that is none of those that something may be given for."""
    for name in given:
        if name not in known:
            raise LayerError(
                f"Expected {what} but got {name!r}.{nearest(name, known)} Layers: {listed(known, 20)}."
            )


def numbers_in(value: Any, wanted: str, dtype: torch.dtype | None = None) -> Tensor:
    """What a user gave as numbers, whatever their shape.

    Raises:
        OptionError: Where it is none.
    """
    try:
        return torch.as_tensor(value, dtype=dtype).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"Expected {wanted} but got {value!r}.") from error


def positive(name: str, value: Any, units: int) -> Tensor:
    """Factors of a layer as a float64 tensor of one or `units` numbers, all positive."""
    wanted = f"{'one number' if units == 1 else f'one number or {units}'} as the factor of {name!r}"
    values = numbers_in(value, wanted, torch.float64).flatten()
    if values.numel() not in (1, units):
        got = f"{values.numel()} numbers" if values.numel() else repr(value)
        raise OptionError(f"Expected {wanted} but got {got}.")
    wrong = values[~(values.isfinite() & (values > 0))]
    if wrong.numel():
        raise OptionError(
            f"Expected positive factors but got {float(wrong[0]):g} for {name!r}: a ReLU lets only positive "
            "factors pass."
        )
    return values


def _contradiction(found: Symmetries, name: str, where: str, value: float, forced: float) -> OptionError:
    """What to raise where a layer's factor, or that of one of its units, can only be another one."""
    parameter = found.layers[name].name
    fixed = [g for g in found.fixed if any(slot.parameter == parameter for slot in g.producers)]
    why = f" ({fixed[0].reasons[0]})" if fixed else ""
    return OptionError(
        f"Expected factors that leave the function as it is but got {value:g} for {where}, where the other "
        f"factors allow only {forced:g}{why}. Leave {name!r} out to have it computed."
    )
