"""Random crops and mirror images for training.

One number determines how an image is moved. It is drawn for every sample and epoch beforehand, so that a step
can be recorded as a CUDA graph, and a killed run resumes with the same images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flatness.errors import DataError

NONE = "none"
AUGMENTATIONS = (NONE, "crop+flip")
"""``crop+flip``: a random window of the image padded with 4 zeros on each side, mirrored half of the time."""

_MARGIN = 4
_PLACES = 2 * _MARGIN + 1


def draw(samples: int, generator: torch.Generator) -> Tensor:
    """How each of so many images is moved: one of 9 · 9 · 2 numbers."""
    return torch.randint(_PLACES * _PLACES * 2, (samples,), generator=generator)


def moved(images: Tensor, moves: Tensor) -> Tensor:
    """Images (n, channels, height, width), each by its number (n,): (down · 9 + right) · 2 + mirrored."""
    height, width = images.shape[2:]
    place, mirrored = moves // 2, moves % 2 == 1
    rows = torch.arange(height, device=moves.device) + (place // _PLACES)[:, None]
    across = torch.arange(width, device=moves.device).expand(len(moves), -1)
    columns = torch.where(mirrored[:, None], across.flip(1), across) + (place % _PLACES)[:, None]
    frame = F.pad(images, (_MARGIN,) * 4).permute(0, 2, 3, 1)
    each = torch.arange(len(moves), device=moves.device)[:, None, None]
    return frame[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def check_images(shape: Sequence[int], augmentation: str) -> None:
    """Refuse inputs that are not images.

    Args:
        shape: The shape of a data set's inputs.
        augmentation: One of `AUGMENTATIONS`.
    """
    if augmentation != NONE and len(shape) != 4:
        raise DataError(
            f"Expected images for augmentation {augmentation!r}, (samples, channels, height, width), but got "
            f"inputs of shape {tuple(shape)}. Leave augmentation out of [grid]."
        )
