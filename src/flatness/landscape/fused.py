"""max(0, max_q Σ_k w_k Z_k[q]) for many w in one kernel: the maps Z are read once for all of them.

What it replaces writes Σ_k w_k Z_k[q] at all four places q of a window to memory, and reads it again. The
kernel is written in Triton, which comes with builds of torch for CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatness.network.memory import ran_out


class Fused:
    """The kernel, as long as it works.

    Attributes:
        failure: Why it does not, if it was tried: no Triton, no compiler, a device that it does not know.
    """

    def __init__(self) -> None:
        self.failure: str | None = None

    def __call__(self, weights: Tensor, maps: Tensor) -> Tensor | None:
        """What `launched` returns; None for what the kernel does not do here."""
        if self.failure is not None or not self.takes(maps):
            return None
        try:
            return launched(weights, maps)
        except Exception as failure:
            if ran_out(failure):
                raise
            self.failure = repr(failure)  # the exception itself would hold on to the maps
            return None

    @staticmethod
    def takes(maps: Tensor) -> bool:
        """Whether the kernel is for such maps."""
        return maps.is_cuda and maps.dtype == torch.float32 and maps.numel() > 0


fused = Fused()
"""One for the process: what cannot be compiled once is not tried again."""


def launched(weights: Tensor, maps: Tensor) -> Tensor:
    """max(0, max_q Σ_k w_k Z_k[q]).

    Args:
        weights: (points, K + 1) in float32.
        maps: (samples, K + 1, 4, …), contiguous.

    Returns:
        (samples, points, …).
    """
    from flatness.landscape.fused_kernel import BLOCK, kernel  # loading Triton takes its time

    if kernel is None:
        raise ImportError("Triton is not installed.")
    out = maps.new_empty(len(maps), len(weights), *maps.shape[3:])
    samples, count = maps.shape[:2]
    size = maps[0, 0, 0].numel()
    blocks = -(-size // BLOCK)
    with torch.cuda.device_of(maps):
        kernel[(samples * blocks,)](
            out,
            weights.contiguous(),
            maps,
            len(weights),
            size,
            blocks,
            MAPS=count,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out
