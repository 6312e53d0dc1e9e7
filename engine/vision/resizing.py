"""Pixels of one size → of another, to the bit as Pillow does it, and several times as fast (csrc/ops/cpu/resize.h)."""

from __future__ import annotations

import numpy as np

from bequest.engine.kernels.pixels import resize
from bequest.engine.types.image import Rgb
from bequest.engine.vision.borrowing import borrowed

_NEAREST = 0  # takes pixels as they are, and is what no model's files ask for
_ANY = 1  # a filter, where nothing is resized
Size = tuple[int, int]  # height, width


def resized(image: Rgb, size: Size, resample: int) -> Rgb:
    """`resample`: the number of a filter of Pillow's."""
    if image.shape[:2] == size:
        return image
    # Where both sides change and rows become fewer, Pillow's own sizes say which pass comes first.
    if resample == _NEAREST or (size[0] < image.shape[0] and size[1] != image.shape[1]):
        from PIL import Image

        given = Image.fromarray(packed(image))
        return packed(borrowed(given.resize((size[1], size[0]), Image.Resampling(resample))))
    return resize(image, size, resample)


def packed(image: Rgb) -> Rgb:
    """A copy without gaps between pixels."""
    return resize(image, (image.shape[0], image.shape[1]), _ANY)


def cropped(image: Rgb, size: Size) -> Rgb:
    """The middle. REQUIRES: the image is as large"""
    top, left = (image.shape[0] - size[0]) // 2, (image.shape[1] - size[1]) // 2
    return image[top : top + size[0], left : left + size[1]]


def squared(image: Rgb, colour: tuple[int, ...]) -> Rgb:
    """In the middle of a square of one colour."""
    height, width = image.shape[:2]
    side = max(height, width)
    canvas = np.empty((side, side, 3), np.uint8)
    canvas[:] = colour
    top, left = (side - height) // 2, (side - width) // 2
    canvas[top : top + height, left : left + width] = image
    return canvas
