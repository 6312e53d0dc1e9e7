"""Pixels on the host: csrc/ops/cpu/resize.h. No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bequest.engine import _C
from bequest.engine.types.image import Rgb


def copy_bytes(to: npt.NDArray[np.uint8], given: npt.NDArray[np.uint8]) -> None:
    """Of an array to another one as large, both without gaps. A large one by several threads."""
    assert to.dtype == given.dtype == np.uint8 and to.nbytes == given.nbytes
    assert to.flags.c_contiguous and given.flags.c_contiguous
    _C.copy_in_parts(to.ctypes.data, given.ctypes.data, given.nbytes)


def resize(image: Rgb, size: tuple[int, int], filter_: int) -> Rgb:
    """[height, width, 3] → [*size, 3], by a filter of Pillow's number 1 to 5. The image may be a view of pixels that
    have a fourth byte each."""
    assert image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8
    height, width = image.shape[:2]
    pixel = 4 if image.strides == (4 * width, 4, 1) else 3
    given, made = image if pixel == 4 else np.ascontiguousarray(image), np.empty((*size, 3), np.uint8)
    _C.resize_pixels(given.ctypes.data, (height, width), pixel, made.ctypes.data, size, filter_)
    return made
