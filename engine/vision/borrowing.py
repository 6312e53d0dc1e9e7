"""The pixels of a Pillow image where they lie: what Pillow copies for numpy takes a fifth as long as reading a JPEG.

Pillow tells where they are by Arrow's C interface (arrow.apache.org/docs/format/CDataInterface.html), from version 11.2
on. A pixel has four bytes there, of which three count.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from bequest.engine.types.image import Rgb

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

_PIXEL = 4  # bytes


class _Array(ctypes.Structure):
    """Arrow's `ArrowArray`, as far as it is read."""


_Array._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Memory:
    """What numpy makes an array of, and keeps as long as the array lives: the capsule holds the image's memory."""

    def __init__(self, capsule: object, address: int, shape: tuple[int, int, int]) -> None:
        self._capsule = capsule
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": "|u1", "data": (address, True)}


def borrowed(image: PillowImage) -> Rgb:
    """[height, width, 3], read-only; a copy where the memory is in several pieces, or cannot be told. REQUIRES: mode
    RGB"""
    try:
        _, capsule = image.__arrow_c_array__()
    except (AttributeError, ValueError):  # an older Pillow; a large image
        return np.asarray(image)
    pixels = ctypes.cast(_pointer_of(capsule, b"arrow_array"), ctypes.POINTER(_Array)).contents
    count = image.width * image.height
    assert (pixels.length, pixels.offset, pixels.n_children) == (count, 0, 1)
    values = pixels.children[0].contents
    assert (values.length, values.offset, values.n_buffers) == (count * _PIXEL, 0, 2)
    shape = (image.height, image.width, _PIXEL)
    return np.asarray(_Memory(capsule, values.buffers[1], shape))[:, :, :3]
