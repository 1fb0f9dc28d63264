"""Whether the samples that were looked at first give the same outputs when a pass meets them again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatness.errors import NondeterministicError
from flatness.problem.batches import size_of, tensors_in

# Entries of a sample's output that are compared, evenly spaced: outputs can be long.
_ENTRIES = 4096
# Largest accepted change relative to the largest output; kernels differ between batch sizes.
_CHANGE = 1e-2


class FirstOutputs:
    """Outputs of the first samples, to be held against those of a pass over the data.

    Random numbers from a generator that is not known, and counts of calls, show only when the same samples
    run again. A pass does that anyway; it is compared once.

    Args:
        example: The first samples, placed.
        logits: Their outputs.
    """

    def __init__(self, example: Any, logits: Tensor) -> None:
        self._inputs = list(tensors_in(example))
        self._logits = _some(logits)
        self._change: Tensor | None = None
        self._seen = False

    def compare(self, batch: Any, logits: Tensor) -> None:
        """Note how far outputs are from what they were; the device is not waited for.

        Args:
            batch: Any samples. Those are compared that are the first ones, in the same place.
            logits: Their outputs.
        """
        inputs, others = self._inputs, list(tensors_in(batch))
        if self._seen or len(inputs) != len(others):
            return
        self._seen = True
        n = min(size_of(batch), len(self._logits))
        pairs = [(x[:n], y[:n]) for x, y in zip(inputs, others, strict=True) if x.dim() and y.dim()]
        now = _some(logits[:n])
        if any(x.shape != y.shape for x, y in pairs) or now.shape != self._logits[:n].shape:
            return
        same = torch.ones(n, dtype=torch.bool, device=now.device)
        for x, y in pairs:
            if len(x) == n:
                same &= (x == y).reshape(n, -1).all(1).to(same.device)
        change = (now - self._logits[:n]).abs().amax(1).masked_fill(~same, 0)
        self._change = torch.stack([change.max(), self._logits.abs().max()])

    def check(self) -> None:
        """Refuse outputs that changed; the device is waited for.

        Raises:
            NondeterministicError: If they did.
        """
        if self._change is None:
            return
        (change, scale), self._change = self._change.tolist(), None
        # A few units in the last place of half precision are more.
        if change > max(_CHANGE, 8 * torch.finfo(self._logits.dtype).eps) * max(scale, 1e-30):
            raise NondeterministicError(
                "Expected the same output for the same samples but two runs in evaluation mode differ by "
                f"{change:.3g}. Look for noise, random sampling or a count of calls inside forward, and for "
                "layers that treat a sample by the rest of its batch."
            )


def _some(logits: Tensor) -> Tensor:
    """Evenly spaced entries of every sample's output."""
    flat = logits.detach().reshape(logits.shape[0], -1)
    return flat[:, :: -(-flat.shape[1] // _ENTRIES) or 1].clone()
