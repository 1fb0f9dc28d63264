"""The steps that random networks are made of: what each applies to, its options, and the module it becomes.

A value is a tensor (n, *shape); a step maps it to another one, treats samples independently and is
deterministic in evaluation mode. A value of rank 2 may be read as channels × positions or as tokens ×
channels, whichever the step likes. A new step is one function with one decorator.
"""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
Draw = random.Random

LARGEST = 40
"""Entries of a value per sample, at most: dense Hessians stay small."""


@dataclass(frozen=True)
class Step:
    """One step of a recipe.

    Attributes:
        kind: Key of `KINDS`.
        options: What its module is made with.
        parts: Chains of steps inside it: branches, what is repeated.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    parts: tuple[tuple["Step", ...], ...] = ()


@dataclass(frozen=True)
class Kind:
    """What is known about a kind of step.

    Attributes:
        make: (shape, options, parts) → module; parts are chains of steps.
        options: (draw, shape) → options.
        fits: Whether it applies to a shape.
        parts: How many chains it contains.
    """

    make: Callable[..., nn.Module]
    options: Callable[[Draw, Shape], dict[str, Any]]
    fits: Callable[[Shape], bool]
    parts: int = 0


KINDS: dict[str, Kind] = {}


def chance(draw: Draw) -> bool:
    return draw.random() < 0.5


def among(draw: Draw, *choices: Any) -> Any:
    return draw.choice(choices)


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def step(fits: Callable[[Shape], bool], options=None, parts: int = 0, name: str | None = None):
    """Enter a kind of step; the decorated function makes its module from shape, options and parts."""

    def enter(make):
        key = name or make.__name__.strip("_")
        KINDS[key] = Kind(make, options or (lambda draw, shape: {}), fits, parts)
        return make

    return enter


def of_rank(*ranks: int) -> Callable[[Shape], bool]:
    return lambda shape: len(shape) in ranks


def anything(shape: Shape) -> bool:
    return len(shape) <= 4


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = [function]  # in a list: a module's attribute would be bound

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](x)


class Chain(nn.Sequential):
    """Steps one after another."""

    def __init__(self, steps: tuple[Step, ...], shape: Shape) -> None:
        modules = []
        for one in steps:
            modules.append(KINDS[one.kind].make(shape, dict(one.options), one.parts))
            shape = shape_after(modules[-1], shape)
        super().__init__(*modules)
        self.shape = shape


def shape_after(module: nn.Module, shape: Shape) -> Shape:
    """The shape of one sample after a module."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(module.double().eval()(torch.rand(2, *shape, dtype=torch.float64)).shape[1:])


class Composed(nn.Module):
    """A function of (self, x) with named submodules, parameters and buffers."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **owned: Any) -> None:
        super().__init__()
        for name, value in owned.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.compute = [compute]

    def forward(self, x: Tensor) -> Tensor:
        return self.compute[0](self, x)


def width(draw: Draw) -> int:
    return draw.randint(1, 4)
