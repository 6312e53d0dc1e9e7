"""Pixels where Pillow has them are those that it copies for numpy, and stay when the image is gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from bequest.engine.vision.borrowing import borrowed


@pytest.mark.parametrize("size", [(1, 1), (7, 3), (64, 33)])
def test_as_numpy_has_them(size: tuple[int, int]) -> None:
    values = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    image = Image.fromarray(values)
    pixels = borrowed(image)
    assert pixels.strides == (4 * size[1], 4, 1)
    del image
    others = [Image.new("RGB", (size[1], size[0]), (1, 2, 3)) for _ in range(8)]  # where the memory was, if it is not
    assert np.array_equal(pixels, values), len(others)


def test_memory_in_several_pieces_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    memory: Any = Image.core  # type: ignore[attr-defined]
    before = memory.get_block_size()
    memory.set_block_size(4096)
    try:
        image = Image.fromarray(values)
        with pytest.raises(ValueError):
            image.__arrow_c_array__()
        assert np.array_equal(borrowed(image), values)
    finally:
        memory.set_block_size(before)
    monkeypatch.delattr(Image.Image, "__arrow_c_array__")
    assert np.array_equal(borrowed(Image.fromarray(values)), values)
