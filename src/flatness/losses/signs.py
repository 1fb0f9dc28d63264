"""Random signs that are a function of (seed, sample, draw), whatever else is worked on at the same time.

A generator hands out its numbers in the order in which they are asked for, so that what a sample gets depends
on the micro-batches before it. Here a number that belongs to the sample and one that belongs to the draw are
mixed by the finaliser of SplitMix64 (Steele, Lea and Flood 2014): the same signs in any micro-batch, on any
device, before and after work was resumed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 64
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Signs:
    """Signs of some samples; every `like` is a new draw.

    Args:
        seed: Tells one set of signs from another.
        samples: The samples' numbers in the data, (n,), on the device of the signs.
        draw: What the draw is for, such as the number of the probe.

    Example:
        >>> signs = Signs(0, torch.arange(4))
        >>> whole, part = signs.at(1).like(torch.empty(4, 3)), Signs(0, torch.arange(2, 4)).at(1)
        >>> torch.equal(part.like(torch.empty(2, 3)), whole[2:])
        True
    """

    def __init__(self, seed: int, samples: Tensor, draw: Sequence[int] = ()) -> None:
        self._bases = _mixed(samples * _signed(_GOLDEN) + _signed(_hashed((seed,))))
        self._draw, self._drawn = tuple(draw), 0

    def at(self, *draw: int) -> Signs:
        """The same samples in another draw, counted from its beginning."""
        other = copy.copy(self)
        other._draw, other._drawn = (*self._draw, *draw), 0
        return other

    def of_probes(self, numbers: Tensor) -> Signs:
        """The same samples, each in the draws of a probe of its own, given by its number (n,)."""
        other = self.at()
        other._bases = _mixed(self._bases + (numbers + 1) * _signed(_GOLDEN))
        return other

    def next(self) -> Signs:
        """The same samples in a draw of its own, which counts as one of these."""
        self._drawn += 1
        return self.at(-self._drawn)

    def of(self, part: slice | Tensor) -> Signs:
        """Some of the samples, at the beginning of the same draw."""
        other = self.at()
        other._bases = self._bases[part]
        return other

    def like(self, tensor: Tensor) -> Tensor:
        """Signs ±1 in the shape and type of a tensor, whose rows belong to the samples in equal shares."""
        n = len(self._bases)
        each = tensor.numel() // max(n, 1)
        words = torch.arange(-(-each // _BITS), device=self._bases.device) * _signed(_GOLDEN)
        key = _signed(_hashed((*self._draw, self._drawn)))
        self._drawn += 1
        octets = _mixed((self._bases ^ key)[:, None] + words).view(torch.uint8)
        places = torch.arange(8, dtype=torch.uint8, device=octets.device)
        bits = octets[..., None].bitwise_right_shift(places).bitwise_and_(1).flatten(1)
        return bits[:, :each].to(tensor.dtype).mul_(2).sub_(1).reshape(tensor.shape)


def lots(samples: Tensor, groups: int) -> Tensor:
    """A group for every sample by lot, (n,): a function of the sample's number."""
    return (_mixed(samples * _signed(_GOLDEN)) >> 1).remainder(groups)


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64: products wrap around, shifts are those of unsigned numbers."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(_FIRST)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(_SECOND)
    return x ^ ((x >> 31) & (2**33 - 1))


def _hashed(numbers: Sequence[int]) -> int:
    """One unsigned 64-bit number from several of any size: the same mixing, in Python's own integers."""
    state = 0
    for number in numbers:
        state = (state ^ (number % 2**_BITS)) + _GOLDEN & 2**_BITS - 1
        state = (state ^ state >> 30) * _FIRST & 2**_BITS - 1
        state = (state ^ state >> 27) * _SECOND & 2**_BITS - 1
        state ^= state >> 31
    return state


def _signed(number: int) -> int:
    """An unsigned 64-bit number as the signed one with the same bits."""
    return number - 2**_BITS if number >= 2 ** (_BITS - 1) else number
