"""Resizing to the bit as Pillow does it, by every filter, larger and smaller, with sizes that no vector divides."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from bequest.engine import _C
from bequest.engine.types.image import Rgb
from bequest.engine.vision.resizing import Size, packed, resized

FILTERS = [1, 2, 3, 4, 5]
CANARY = 77


def picture(height: int, width: int, seed: int = 0) -> Rgb:
    """Noise of the extreme: filters overshoot at both ends."""
    random = np.random.default_rng(seed)
    values = random.integers(0, 256, (height, width, 3), np.uint8)
    values[random.random((height, width)) < 0.3] = 255
    values[random.random((height, width)) < 0.3] = 0
    return values


def by_pillow(image: Rgb, size: Size, resample: int) -> Rgb:
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling(resample)))


SIZES: list[tuple[Size, Size]] = [
    ((1, 1), (1, 1)),
    ((1, 1), (7, 5)),
    ((3, 2), (1, 1)),
    ((1, 300), (1, 20)),
    ((300, 1), (19, 1)),
    ((15, 16), (16, 15)),
    ((16, 17), (33, 16)),
    ((17, 40), (17, 28)),
    ((40, 17), (28, 17)),
    ((64, 64), (28, 28)),
    ((97, 131), (140, 84)),
    ((31, 500), (56, 28)),
    ((256, 256), (259, 252)),
]


@pytest.mark.parametrize("resample", FILTERS)
def test_as_pillow_does_it(resample: int) -> None:
    for number, (before, after) in enumerate(SIZES):
        image = picture(*before, seed=number)
        assert np.array_equal(resized(image, after, resample), by_pillow(image, after, resample)), (before, after)


def test_random_sizes() -> None:
    random = np.random.default_rng(1)
    for number in range(60):
        before, after = (tuple(int(n) for n in random.integers(1, 90, 2)) for _ in range(2))
        image, resample = picture(*before, seed=number), FILTERS[number % len(FILTERS)]
        assert np.array_equal(resized(image, after, resample), by_pillow(image, after, resample)), (before, after)


def test_a_view_of_a_larger_image() -> None:
    image = picture(50, 60)[3:40, 5:50]
    assert np.array_equal(resized(image, (20, 30), 3), by_pillow(np.ascontiguousarray(image), (20, 30), 3))


@pytest.mark.parametrize("size", [(37, 47), (64, 16), (38, 1), (90, 5), (11, 41), (1, 41)])
def test_nothing_is_written_beside_it(size: Size) -> None:
    image, count = picture(37, 41), size[0] * size[1] * 3
    room = np.full(count + 128, CANARY, np.uint8)
    _C.resize_pixels(image.ctypes.data, (37, 41), 3, room.ctypes.data + 64, size, 3)
    assert (room[:64] == CANARY).all() and (room[-64:] == CANARY).all()
    assert np.array_equal(room[64:-64].reshape(*size, 3), by_pillow(image, size, 3))


def test_what_is_refused() -> None:
    with pytest.raises(_C.Error, match="an image has pixels"):
        _C.resize_pixels(0, (0, 4), 3, 0, (2, 2), 3)
    image = picture(4, 4)
    with pytest.raises(_C.Error, match="no such filter"):
        _C.resize_pixels(image.ctypes.data, (4, 4), 3, image.ctypes.data, (2, 2), 9)


def test_pixels_of_four_bytes() -> None:
    """As Pillow has them, and where nothing is resized."""
    whole = np.random.default_rng(0).integers(0, 256, (37, 41, 4), np.uint8)
    image = whole[:, :, :3]
    for size in [(40, 47), (40, 41), (37, 47)]:
        assert np.array_equal(resized(image, size, 3), by_pillow(np.ascontiguousarray(image), size, 3))
    copy = packed(image)
    assert np.array_equal(copy, image) and copy.flags.c_contiguous and copy.flags.writeable


def test_several_threads_make_the_same() -> None:
    """Of a large image; rows of each of them end within sixteen others."""
    image = picture(700, 523)
    assert np.array_equal(resized(image, (709, 531), 1), by_pillow(image, (709, 531), 1))
