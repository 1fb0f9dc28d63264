"""Σ_k w_k Z_k for many w at once: a product whose inner axis is short.

In memory it is (points, …, samples) where the maps Z have their samples last, else (samples, points, …), so
that a grouped convolution finds the channels of all points side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatness.landscape.fused import fused


class Mixed(torch.autograd.Function):
    """Σ_k w_k Z_k for weights (K + 1) and maps (samples, K + 1, …): (samples, …). No derivatives.

    With `largest`, maps are (samples, K + 1, q, …), and it is max(0, max_q Σ_k w_k Z_k[q]).
    """

    @staticmethod
    def forward(weights: Tensor, maps: Tensor, largest: bool) -> Tensor:
        """One point."""
        mixed = torch.tensordot(weights, maps.movedim(1, 0), 1)
        return mixed.amax(1).relu_() if largest else mixed

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """All points in one product: of all samples where they lie side by side, else of each.

        The largest in one kernel, where there is one, or one after the other for the product, them and ReLU.
        """
        assert in_dims[:2] == (0, None)
        weights, maps, largest = args
        side_by_side, laid = _laid_out(maps)
        found = fused(weights, laid) if largest else None
        if found is None:
            found = _product(weights, laid)
            found = found.amax(2).relu_() if largest else found
        return _as_given(side_by_side, found)


def _laid_out(maps: Tensor) -> tuple[bool, Tensor]:
    """Whether samples lie side by side in memory, and maps in its order: then (1, K + 1, …, samples)."""
    by_sample = maps.movedim(0, -1)
    side_by_side = by_sample.is_contiguous()
    return side_by_side, by_sample[None] if side_by_side else maps.contiguous()


def _product(weights: Tensor, laid: Tensor) -> Tensor:
    """(points, K + 1) times (samples, K + 1, …): (samples, points, …)."""
    flat = laid.flatten(2)
    product = (weights @ flat[0])[None] if len(flat) == 1 else weights.expand(len(flat), -1, -1).bmm(flat)
    return product.unflatten(2, laid.shape[2:])


def _as_given(side_by_side: bool, found: Tensor) -> tuple[Tensor, int]:
    """What is laid out in memory as (points, samples, …), or (samples, points, …), and the axis of points."""
    return (found[0].movedim(-1, 1), 0) if side_by_side else (found, 1)
