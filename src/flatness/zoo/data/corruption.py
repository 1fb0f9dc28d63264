"""Corrupted images: with noise, blurred, with less contrast, or compressed as JPEG.

Four of the corruptions of Hendrycks and Dietterich (2019, arXiv:1903.12261), at the five strengths that they
chose for CIFAR-10. The same images give the same result in every process; pixels are not rounded to eight
bits, except by JPEG itself.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np

from flatness.errors import DataError, check_known

Images = np.ndarray
"""Float32 in [0, 1], (samples, channels, height, width)."""


def _noise(images: Images, deviation: float) -> Images:
    """Gaussian noise, independent in every pixel and channel."""
    return images + deviation * np.random.default_rng(0).standard_normal(images.shape, np.float32)


def _blur(images: Images, width: float) -> Images:
    """A Gaussian window of this standard deviation in pixels, cut off at four; edge pixels are repeated."""
    from scipy.ndimage import gaussian_filter

    return gaussian_filter(images, width, mode="nearest", axes=(2, 3))


def _contrast(images: Images, factor: float) -> Images:
    """Each channel's distance from its own mean over the image, times a factor."""
    mean = images.mean(axis=(2, 3), keepdims=True)
    return mean + factor * (images - mean)


def _jpeg(images: Images, quality: float) -> Images:
    """Through JPEG, with half the resolution in colour, as Pillow and most programs write it."""
    from PIL import Image

    def through(image: np.ndarray) -> np.ndarray:
        file = io.BytesIO()
        Image.fromarray(image.squeeze()).save(file, "JPEG", quality=int(quality))
        return np.asarray(Image.open(file)).reshape(image.shape)

    pixels = np.rint(images * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return np.stack([through(image) for image in pixels]).transpose(0, 3, 1, 2) / np.float32(255)


CORRUPTIONS: dict[str, tuple[Callable[[Images, float], Images], tuple[float, ...]]] = {
    "noise": (_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "blur": (_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "jpeg": (_jpeg, (80, 65, 58, 50, 40)),
}
"""By name: the function, and its argument at strengths 1 to 5."""
STRENGTHS = range(1, 6)


def corrupted(images: Images, kind: str, strength: int) -> Images:
    """Images with a corruption, in [0, 1] again.

    Args:
        images: Float32 in [0, 1], (samples, channels, height, width), of one channel or three.
        kind: A key of `CORRUPTIONS`.
        strength: 1 to 5.

    Example:
        >>> image = np.array([0.2, 0.6], np.float32).reshape(1, 1, 1, 2)
        >>> [round(float(pixel), 2) for pixel in corrupted(image, "contrast", 2).flatten()]
        [0.3, 0.5]
    """
    check_known(kind, CORRUPTIONS, "a corruption", DataError)
    if type(strength) is not int or strength not in STRENGTHS:
        raise DataError(f"Expected the strength of a corruption to be 1, 2, 3, 4 or 5, but got {strength!r}.")
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise DataError(
            "Expected images of one channel or three to corrupt, (samples, channels, height, width), but got "
            f"inputs of shape {images.shape}."
        )
    low, high = (images.min(), images.max()) if images.size else (0, 1)
    if not 0 <= low <= high <= 1:
        raise DataError(
            f"Expected images with pixels from 0 to 1 to corrupt, but got pixels from {low:g} to {high:g}. "
            "Store them as uint8, which is divided by 255, or divide them by their largest possible value."
        )
    function, strengths = CORRUPTIONS[kind]
    return function(images, strengths[strength - 1]).clip(0, 1).astype(np.float32)
