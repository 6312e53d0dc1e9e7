"""Image files → pixels: those of transformers whatever the file's mode, and files that would take long to read."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import pytest

from bequest.engine.errors import InvalidImage
from bequest.engine.vision.decode import decode
from bequest.engine.vision.parts import MOST_PARTS, MOST_SCANS
from tests.tiny_seeing import picture

pillow = pytest.importorskip("PIL.Image")
MOST = 10**6


def saved(mode: str, kind: str, **options: Any) -> bytes:
    image, file = pillow.fromarray(picture(37, 53, 1)), io.BytesIO()
    if mode in ("RGBA", "LA", "PA"):
        image.putalpha(pillow.fromarray(picture(37, 53, 2)[:, :, 0]))
    image = image if mode == "RGB" else image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode)
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int, kind: str) -> bytes:
    exif = pillow.Exif()
    exif[0x0112] = orientation
    return saved("RGB", kind, exif=exif)


MODES = {
    **{f"{mode} in PNG": saved(mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")},
    **{f"{mode} in JPEG": saved(mode, "JPEG") for mode in ("L", "RGB", "CMYK")},
    "progressive": saved("RGB", "JPEG", progressive=True),
    "transparent palette": saved("P", "PNG", transparency=3),
    "alpha in WebP": saved("RGBA", "WEBP"),
    "GIF": saved("P", "GIF", transparency=5),
    "animated GIF": saved("RGB", "GIF", save_all=True, append_images=[pillow.new("RGB", (53, 37))]),
    "animated WebP": saved("RGB", "WEBP", save_all=True, append_images=[pillow.new("RGB", (53, 37))]),
    "animated PNG": saved("RGB", "PNG", save_all=True, append_images=[pillow.new("RGB", (53, 37))]),
    **{f"turned {number} in {kind}": turned(number, kind) for number in (3, 5, 6, 8) for kind in ("JPEG", "PNG")},
    "turned in WebP": turned(7, "WEBP"),
}


@pytest.mark.parametrize("name", MODES)
def test_pixels_are_those_of_the_library(name: str) -> None:
    from transformers.image_utils import load_image

    expected = np.asarray(load_image(pillow.open(io.BytesIO(MODES[name]))))
    assert np.array_equal(decode(MODES[name], MOST), expected)


def test_broken_notes_are_left_alone() -> None:
    data = turned(6, "JPEG")
    assert decode(data, MOST).shape == (53, 37, 3)
    at = data.index(b"MM\x00*")
    assert decode(data[:at] + b"\xff" * 12 + data[at + 12 :], MOST).shape == (37, 53, 3)


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


def test_files_of_too_many_parts() -> None:
    """They are small, and so are their images. Each of these parts is read by itself."""
    png, jpeg, gif = saved("RGB", "PNG"), saved("RGB", "JPEG"), saved("P", "GIF")
    many = MOST_PARTS + 1
    begins = 13 + 3 * 256  # the table of colours
    for data in (
        png[:33] + chunk(b"teSt") * many + png[33:],
        jpeg[:2] + b"\xff\xfe\x00\x02" * many + jpeg[2:],
        jpeg[:2] + b"\xff" * many + jpeg[2:],
        gif[:begins] + b"\x21\xfe\x01a\x00" * many + gif[begins:],
        gif[:begins] + b"\x01" * many + gif[begins:],
    ):
        with pytest.raises(InvalidImage, match=f"more than {MOST_PARTS} chunks"):
            decode(data, MOST)


def test_a_jpeg_of_too_many_scans() -> None:
    """Each scan of a few bytes goes over the whole image."""
    data = saved("RGB", "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    few = MOST_SCANS - data.count(b"\xff\xda")
    assert decode(data[:end] + data[last:end] * few + data[end:], MOST).shape == (37, 53, 3)
    with pytest.raises(InvalidImage, match=f"more than {MOST_SCANS} scans"):
        decode(data[:end] + data[last:end] * (few + 1) + data[end:], MOST)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_size_of_a_canvas_is_known_before(kind: str) -> None:
    """And a file that ends anywhere is a broken one."""
    file = io.BytesIO()
    pillow.new("L", (2000, 1000)).save(file, kind)
    with pytest.raises(InvalidImage, match="2000 × 1000"):
        decode(file.getvalue(), MOST)
    data = saved("RGB", kind)
    for length in range(0, len(data) - 20, 97):
        with pytest.raises(InvalidImage):
            decode(data[:length], MOST)
