"""The bytes of an image file → its pixels. Nothing is decoded before its size is known to be within bounds."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any

from bequest.engine.errors import ImageTooLarge, InvalidImage
from bequest.engine.types.image import Rgb
from bequest.engine.vision.borrowing import borrowed
from bequest.engine.vision.parts import check_parts

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_ELONGATED = 100  # times that one side may be longer than the other: a line would be blown up to a huge canvas
# What Pillow raises for a file that is broken, by its format.
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, struct.error, ArithmeticError)
_ORIENTATION = 0x0112
# Pillow's numbers of transpositions (Image.Transpose) that turn an image as its file says, by what the file says.
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


def decode(data: bytes | bytearray | memoryview, max_pixels: int) -> Rgb:
    """[height, width, 3], turned as the file says; of an animation the first frame. There may be a byte between pixels.
    Raises InvalidImage."""
    pillow = _pillow()
    if not data:
        raise InvalidImage("The image is empty: it has no bytes.", reason="image_empty")
    check_parts(bytes(data))
    try:
        with pillow.open(io.BytesIO(data), formats=FORMATS) as file:
            _check_size(file.width, file.height, max_pixels)
            return _pixels(file)
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
        raise ImageTooLarge(
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


def _pixels(file: PillowImage) -> Rgb:
    """As ImageOps.exif_transpose has it, which also writes what is left of the file's notes anew."""
    from PIL.Image import Transpose

    file.load()  # the notes of a PNG may come behind its pixels
    turn = _TURNS.get(_orientation(file))
    turned = file if turn is None else file.transpose(Transpose(turn))
    return borrowed(turned if turned.mode == "RGB" else turned.convert("RGB"))


def _orientation(file: PillowImage) -> int:
    """1: as it is, also where notes are broken, which say nothing of the pixels."""
    try:
        said = file.getexif().get(_ORIENTATION, 1)
    except Exception:  # whatever a parser of TIFF may raise
        return 1
    return said if isinstance(said, int) else 1
