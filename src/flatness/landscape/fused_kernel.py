"""The kernel of `fused`, in Triton's language; import it only where it is to run."""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from importlib import import_module
from typing import Any

BLOCK = 512
"""Entries of a block: four for each thread of four warps, the sixteen bytes that one instruction moves."""

try:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
except ImportError:
    triton = tl = None


def _largest_of_mixed(out, weights, maps, points, size, blocks, MAPS: tl.constexpr, BLOCK: tl.constexpr):
    """out[s, p, m] = max(0, max_q Σ_k weights[p, k] maps[s, k, q, m]), all of them contiguous.

    A program reads a block of m at all places q of all maps k once, and keeps it for all points p.
    """
    sample = (tl.program_id(0) // blocks).to(tl.int64)  # offsets need not fit into 32 bits
    m = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = m < size
    read = maps + sample * MAPS * 4 * size + m
    Z = ()
    for _ in tl.static_range(MAPS * 4):
        Z += (tl.load(read, mask=inside, other=0.0),)
        read += size
    write = out + sample * points * size + m
    for _ in range(points):
        best = tl.load(weights) * Z[0]
        for k in tl.static_range(1, MAPS):
            best += tl.load(weights + k) * Z[4 * k]
        for q in tl.static_range(1, 4):
            mixed = tl.load(weights) * Z[q]
            for k in tl.static_range(1, MAPS):
                mixed += tl.load(weights + k) * Z[4 * k + q]
            best = tl.maximum(best, mixed, propagate_nan=tl.PropagateNan.ALL)
        best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(write, best, mask=inside)
        weights += MAPS
        write += size


# Compiled anew for sizes that sixteen does or does not divide, not for every kind of other numbers.
_OTHERS = ["points", "blocks"]
kernel: Any = None if triton is None else triton.jit(_largest_of_mixed, do_not_specialize=_OTHERS)
"""None where there is no Triton."""
