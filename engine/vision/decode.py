"""The bytes of an image file → its pixels. Nothing is decoded before its size is known to be within bounds."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any

from bequest.engine.errors import InvalidImage
from bequest.engine.kernels.pixels import decode_jpeg
from bequest.engine.types.image import Rgb
from bequest.engine.vision.borrowing import borrowed

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_ELONGATED = 100  # times that one side may be longer than the other: a line would be blown up to a huge canvas
_ORIENTATION, _TURNED = 0x0112, range(2, 9)  # a tag of EXIF, and what it has for images that are to be turned
# What Pillow raises for a file that is broken, by its format.
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, struct.error, OverflowError)


def decode(data: bytes | bytearray | memoryview, max_pixels: int) -> Rgb:
    """[height, width, 3], turned as the file says; of an animation the first frame. There may be a byte between pixels.
    Raises InvalidImage."""
    pillow = _pillow()
    if not data:
        raise InvalidImage("The image is empty: it has no bytes.", reason="image_empty")
    try:
        with pillow.open(io.BytesIO(data), formats=FORMATS) as file:
            _check_size(file.width, file.height, max_pixels)
            return _pixels(file, data)
    except pillow.UnidentifiedImageError:
        message = f"The image is in no format that is read: {', '.join(FORMATS)}."
        raise InvalidImage(message, reason="image_format", formats=", ".join(FORMATS)) from None
    except _BROKEN as error:
        raise InvalidImage(
            f"The image is broken or cut short: {error}.", reason="image_broken", why=str(error)
        ) from None


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        message = "Images need Pillow, which is not installed: pip install 'bequest[vision]'."
        raise InvalidImage(message, reason="no_pillow") from None
    PIL.Image.MAX_IMAGE_PIXELS = None  # the size is checked here, by the server's own limit and without a warning
    module: Any = PIL.Image
    return module


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise InvalidImage(
            f"The image has {width} × {height} pixels, at most {max_pixels} are taken.",
            reason="image_too_large",
            details={"width": width, "height": height, "max_pixels": max_pixels},
        )
    if max(width, height) > MOST_ELONGATED * min(width, height):
        raise InvalidImage(
            f"The image is {width} × {height}: one side is more than {MOST_ELONGATED} times the other.",
            reason="image_too_long",
            details={"width": width, "height": height},
            most=MOST_ELONGATED,
        )


def _pixels(file: PillowImage, data: bytes | bytearray | memoryview) -> Rgb:
    from PIL import ImageOps

    if file.format == "JPEG" and file.mode == "RGB" and file.getexif().get(_ORIENTATION) not in _TURNED:
        pixels = decode_jpeg(data, (file.height, file.width))
        if pixels is not None:
            return pixels
    ImageOps.exif_transpose(file, in_place=True)
    return borrowed(file if file.mode == "RGB" else file.convert("RGB"))
