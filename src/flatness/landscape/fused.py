"""max(0, max_q Σ_k w_k Z_k[q]) for many w in one kernel: the maps Z are read once for all of them.

What it replaces writes Σ_k w_k Z_k[q] of all four places q of a window to memory, to read it again. The kernel
is written in Triton, which comes with builds of torch for CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Fused:
    """The kernel, as long as it works.

    Attributes:
        failure: Why it does not, if it was tried: no Triton, no compiler, a device that it does not know.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def __call__(self, weights: Tensor, maps: Tensor) -> Tensor | None:
        """What `launched` returns; None for what the kernel does not do here."""
        if self.failure is not None or not maps.is_cuda or maps.dtype != torch.float32 or not maps.numel():
            return None
        out = _room(weights, maps)  # running out of memory is no failure of the kernel
        try:
            return launched(weights, maps, out)
        except Exception as failure:
            self.failure = failure
            return None


fused = Fused()
"""One for the process: what cannot be compiled once is not tried again."""


def launched(weights: Tensor, maps: Tensor, out: Tensor | None = None) -> Tensor:
    """max(0, max_q Σ_k w_k Z_k[q]).

    Args:
        weights: (points, K + 1) in float32.
        maps: (samples, K + 1, 4, …), contiguous.
        out: Where to write it; None makes room.

    Returns:
        (samples, points, …).
    """
    from flatness.landscape.fused_kernel import BLOCK, kernel  # loading Triton takes its time

    if kernel is None:
        raise ImportError("Triton is not installed.")
    out = _room(weights, maps) if out is None else out
    samples, count = maps.shape[:2]
    size = maps[0, 0, 0].numel()
    blocks = -(-size // BLOCK)
    with torch.cuda.device_of(maps):
        kernel[(samples * blocks,)](
            out, weights.contiguous(), maps, len(weights), size, blocks, MAPS=count, BLOCK=BLOCK, num_warps=4
        )
    return out


def _room(weights: Tensor, maps: Tensor) -> Tensor:
    return maps.new_empty(len(maps), len(weights), *maps.shape[3:])
