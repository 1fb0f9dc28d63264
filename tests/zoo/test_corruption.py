"""Corruptions are what their definitions say, and the same wherever they are made."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from flatness import data
from flatness.errors import DataError
from flatness.zoo.data.corruption import CORRUPTIONS, corrupted

IMAGES = np.random.default_rng(1).uniform(0.3, 0.7, (50, 3, 16, 12)).astype(np.float32)


@pytest.mark.parametrize(("strength", "deviation"), list(enumerate((0.04, 0.06, 0.08, 0.09, 0.10), 1)))
def test_noise_has_its_deviation_and_is_the_same_again(strength, deviation):
    found = corrupted(IMAGES, "noise", strength)
    noise = (found - IMAGES).astype(np.float64)
    # Standard error of a deviation: σ/√(2n); 4 of them, and hardly a pixel is cut off at 0 or 1.
    assert noise.std() == pytest.approx(deviation, abs=4 * deviation / np.sqrt(2 * noise.size) + 2e-4)
    assert abs(noise.mean()) < 4 * deviation / np.sqrt(noise.size)
    assert np.array_equal(found, corrupted(IMAGES, "noise", strength))


@pytest.mark.parametrize(("strength", "width"), list(enumerate((0.4, 0.6, 0.7, 0.8, 1.0), 1)))
def test_blur_is_a_convolution_with_a_gaussian(strength, width):
    radius = int(4 * width + 0.5)
    window = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / width) ** 2)
    window = window / window.sum()
    kernel = (window[:, None] * window).expand(3, 1, -1, -1)
    expected = F.conv2d(F.pad(torch.from_numpy(IMAGES), (radius,) * 4, "replicate"), kernel, groups=3)
    np.testing.assert_allclose(corrupted(IMAGES, "blur", strength), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize(("strength", "factor"), list(enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1)))
def test_contrast_keeps_the_mean_and_shrinks_the_spread(strength, factor):
    found = corrupted(IMAGES, "contrast", strength)
    np.testing.assert_allclose(found.mean((2, 3)), IMAGES.mean((2, 3)), atol=1e-6)
    np.testing.assert_allclose(found.std((2, 3)), factor * IMAGES.std((2, 3)), rtol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("strength", "quality"), list(enumerate((80, 65, 58, 50, 40), 1)))
def test_jpeg_is_what_pillow_writes_and_reads(strength, quality, channels):
    found = corrupted(IMAGES[:2, :channels], "jpeg", strength)
    pixels = np.rint(IMAGES[1, :channels] * 255).astype(np.uint8)
    file = io.BytesIO()
    shown = pixels[0] if channels == 1 else np.moveaxis(pixels, 0, 2)
    Image.fromarray(shown).save(file, "JPEG", quality=quality)
    read = np.asarray(Image.open(file), np.float32) / 255
    expected = read[None] if channels == 1 else np.moveaxis(read, 2, 0)
    np.testing.assert_allclose(found[1], expected, atol=1e-7)
    assert np.abs(found - IMAGES[:2, :channels]).mean() > 0.005


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_every_corruption_grows_with_its_strength_and_stays_in_range(kind):
    distances = [np.abs(corrupted(IMAGES, kind, strength) - IMAGES).mean() for strength in range(1, 6)]
    assert distances == sorted(distances)
    extreme = corrupted((IMAGES > 0.5).astype(np.float32), kind, 5)
    assert extreme.min() >= 0
    assert extreme.max() <= 1


def test_a_data_set_is_corrupted_before_it_is_standardised():
    plain = data.load("digits", split="test", limit=20)
    found = data.load("digits", split="test", limit=20, corruption=("contrast", 2))
    assert "corrupted: contrast of strength 2" in found.notes
    np.testing.assert_array_equal(found.inputs.numpy(), corrupted(plain.inputs.numpy(), "contrast", 2))
    scaled = data.load("digits", split="test", limit=20, standardize=True)
    both = data.load("digits", split="test", limit=20, standardize=True, corruption=("contrast", 2))
    slope = (scaled.inputs - scaled.inputs.mean()).norm() / (plain.inputs - plain.inputs.mean()).norm()
    torch.testing.assert_close(both.inputs - scaled.inputs, slope * (found.inputs - plain.inputs))


def test_what_cannot_be_corrupted_is_refused():
    def message(*given):
        with pytest.raises(DataError) as caught:
            corrupted(*given)
        return str(caught.value)

    assert message(IMAGES, "blurr", 1) == (
        "Expected a corruption to be one of noise, blur, contrast, jpeg but got 'blurr'. Did you mean 'blur'?"
    )
    assert message(IMAGES, "blur", 6) == (
        "Expected the strength of a corruption to be 1, 2, 3, 4 or 5, but got 6."
    )
    assert message(IMAGES[:, 0], "blur", 1) == (
        "Expected images of one channel or three to corrupt, (samples, channels, height, width), but got "
        "inputs of shape (50, 16, 12)."
    )
    assert message(2 * IMAGES - 1, "blur", 1).startswith(
        "Expected images with pixels from 0 to 1 to corrupt, but got pixels from -"
    )


@pytest.mark.parametrize("given", ["noise", ("noise",), ("noise", 1, 2), 3])
def test_a_corruption_is_a_kind_with_a_strength(given):
    with pytest.raises(DataError, match="a kind with a strength, such as"):
        data.load("digits", split="test", corruption=given)
