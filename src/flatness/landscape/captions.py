"""Words about landscapes: what axes are called, and what was done about batch norm."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

AXES = {
    "layer": "random layer-normalised directions",
    "filter": "random filter-normalised directions",
    "eigenvectors": "eigenvectors of the largest Hessian eigenvalues",
    "relative_flatness": "directions W·A, A random orthogonal",
    "given": "given directions",
    "between": "the line from one network (0) to another (1)",
    "trajectory": "the principal plane of training trajectories",
}
"""What a line or plane goes along, by kind of direction."""

_BATCH_NORM = {
    "as_is": " Batch norm keeps the statistics of the unmoved network.",
    "recomputed": " Batch norm statistics are recomputed at every point, in batches of {batch}.",
    "interpolated": " Batch norm statistics are interpolated along the line; beyond its ends they are "
    "those of the nearer network.",
}


def batch_norm_words(meta: Mapping[str, Any]) -> str:
    """A sentence for the caption; nothing for networks without batch norm."""
    return _BATCH_NORM.get(str(meta.get("batch_norm")), "").format(batch=meta.get("micro_batch", "?"))


def data_words(meta: Mapping[str, Any]) -> str:
    """On how much data, to go after the name of a loss; nothing where that is not known.

    >>> data_words({"samples": 1}), data_words({"samples": 2000})
    (' on 1 sample', ' on 2,000 samples')
    """
    samples = meta.get("samples")
    return f" on {samples:,} sample{'' if samples == 1 else 's'}" if samples else ""


def number_of(counts: Collection[int], word: str) -> str:
    """How many, where groups may differ.

    >>> number_of({5}, "line"), number_of({1, 3}, "line")
    ('5 lines', '1 to 3 lines')
    """
    low, high = min(counts), max(counts)
    amount = f"{high}" if low == high else f"{low} to {high}"
    return f"{amount} {word}{'' if high == 1 else 's'}"
