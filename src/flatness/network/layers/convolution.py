"""Convolutions and transposed convolutions as matrices over patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatness.network.layers.view import Layer


class _PatchLayer(Layer):
    """What convolutions have in common: every output position sees one patch of the input."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        conv = cast(Any, module)
        self.groups = int(conv.groups)
        self.taps = math.prod(conv.kernel_size)
        self._kernel, self._stride, self._dilation = conv.kernel_size, conv.stride, conv.dilation

    def _patches(self, x: Tensor, strides: Sequence[int]) -> Tensor:
        """The patches of an input that is padded already, (n, C, k_1, …, k_r, P)."""
        spatial = len(self._kernel)
        for axis, (size, step, stride) in enumerate(zip(self._kernel, self._dilation, strides, strict=True)):
            x = x.unfold(2 + axis, (size - 1) * step + 1, stride)[..., ::step]
        # now (n, C, P_1 … P_r, k_1 … k_r): taps come right after the channel, positions last
        order = [0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial)]
        return x.permute(order).flatten(2 + spatial)

    def _columns(self, patches: Tensor) -> Tensor:
        """Patches as Φ (n, G, C_in/G · taps, P)."""
        return patches.reshape(len(patches), self.groups, -1, patches.shape[-1])

    def signals(self, dz: Tensor, n: int) -> Tensor:
        """δ (n, G, d, P)."""
        return dz.reshape(n, self.groups, dz.shape[1] // self.groups, -1)

    def per_input_unit(self, values: Tensor, n: int) -> Tensor:
        """Values (n, C, …) as (n, C, pixels)."""
        return values.reshape(n, values.shape[1], -1)


class ConvolutionLayer(_PatchLayer):
    """`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d` with any stride, padding, dilation and number of groups."""

    def arranged(self, weight: Tensor) -> Tensor:
        """W (G, d, C_in/G · taps)."""
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def features(self, x: Tensor, n: int) -> Tensor:
        """Φ (n, G, C_in/G · taps, P): the patches, padded as the module pads."""
        return self._columns(self._patches(self._padded(x), self._stride))

    def gradients(self, x: Tensor, dz: Tensor, n: int) -> Tensor:
        """The derivatives g (n, G, d, m): those of one convolution with a group per sample; no patches."""
        (x, padding), spatial = self._given(x), len(self._kernel)
        kernels = dz.new_empty(1).expand(n * dz.shape[1], x.shape[1] // self.groups, *self._kernel)
        (_, g, _) = torch.ops.aten.convolution_backward(
            dz.flatten(0, 1)[None],
            x.flatten(0, 1)[None],
            kernels,
            bias_sizes=None,
            stride=self._stride,
            padding=padding,
            dilation=self._dilation,
            transposed=False,
            output_padding=[0] * spatial,
            groups=n * self.groups,
            output_mask=[False, True, False],
        )
        return g.reshape(n, self.groups, dz.shape[1] // self.groups, -1)

    def along(self, x: Tensor, V: Tensor, n: int) -> Tensor:
        """VΦ (n, G, d, P) of weights V (n, G, d, m), without patches."""
        # GPUs are slow with hundreds of groups.
        few = x.is_cuda and V.shape[2] * self.groups < x.shape[1]
        return self._along_taps(x, V, n) if few else self._along_samples(x, V, n)

    def _along_samples(self, x: Tensor, V: Tensor, n: int) -> Tensor:
        """VΦ as one convolution with a group per sample."""
        x, padding = self._given(x)
        kernels = V.reshape(-1, x.shape[1] // self.groups, *self._kernel)
        z = self._convolved(x.flatten(0, 1)[None], kernels, padding, n * self.groups)
        return z.reshape(n, self.groups, V.shape[2], -1)

    def _along_taps(self, x: Tensor, V: Tensor, n: int) -> Tensor:
        """VΦ tap by tap: every tap is a matrix, and what it makes of x is moved to its place."""
        x, padding = self._given(x)
        d, c = V.shape[2], x.shape[1] // self.groups
        taps = V.reshape(n, self.groups, d, c, -1).mT.flatten(2, 3)
        parts = (taps @ x.reshape(n, self.groups, c, -1)).reshape(n, -1, *x.shape[2:])
        moves = torch.eye(self.taps, dtype=x.dtype, device=x.device).reshape(1, -1, *self._kernel)
        kernels = moves.expand(self.groups * d, *moves.shape[1:])
        z = self._convolved(parts, kernels, padding, self.groups * d)
        return z.reshape(n, self.groups, d, -1)

    def _convolved(self, x: Tensor, kernels: Tensor, padding: list[int], groups: int) -> Tensor:
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self._kernel) - 1]
        return convolve(x, kernels, None, self._stride, padding, self._dilation, groups)

    def _given(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """The input and the zeros that a convolution puts around it itself; other padding is in it."""
        conv = cast(Any, self.module)
        ends = conv._reversed_padding_repeated_twice[::-1]
        if conv.padding_mode == "zeros" and ends[::2] == ends[1::2]:
            return x, ends[::2]
        return self._padded(x), [0] * len(self._kernel)

    def _padded(self, x: Tensor) -> Tensor:
        conv = cast(Any, self.module)
        # torch keeps the padding of every mode in the form F.pad wants: last dimension first, (before, after)
        # pairs.
        padding = conv._reversed_padding_repeated_twice
        if any(padding):
            x = F.pad(x, padding, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
        return x


class TransposedConvolutionLayer(_PatchLayer):
    """`nn.ConvTranspose1d`, `2d` and `3d` with any stride, padding, output padding, dilation and groups.

    Output position o of channel s gets Σ_{c,κ} W_csκ x_ci over those taps κ with o = i·stride − padding +
    κ·dilation. So it is a convolution with the kernel turned round over the input with stride − 1 zeros put
    between its pixels, and the weight, stored as (C_in, C_out/G, taps), has its rows in the second place.
    """

    def arranged(self, weight: Tensor) -> Tensor:
        """W (G, d, C_in/G · taps)."""
        return weight.unflatten(0, (self.groups, -1)).flatten(3).transpose(1, 2).flatten(2)

    def features(self, x: Tensor, n: int) -> Tensor:
        """Φ (n, G, C_in/G · taps, P): which input pixels each output pixel sees through which tap."""
        patches = self._patches(self._spread(x), [1] * len(self._kernel))
        # Turned round: the first tap meets the last pixel of a window.
        return self._columns(patches.flip(*range(2, patches.dim() - 1)))

    def _spread(self, x: Tensor) -> Tensor:
        """The input with zeros between its pixels, padded (or cut): every window is an output pixel."""
        conv = cast(Any, self.module)
        places = [((size - 1) * step + 1) for size, step in zip(x.shape[2:], self._stride, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *places)
        spread[(..., *(slice(None, None, step) for step in self._stride))] = x
        margins: list[int] = []
        for axis in reversed(range(len(places))):
            before = (self._kernel[axis] - 1) * self._dilation[axis] - conv.padding[axis]
            margins += [before, before + conv.output_padding[axis]]
        return F.pad(spread, margins)
