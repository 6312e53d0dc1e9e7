"""JPEG files to the bit as Pillow decodes them, or not at all: whole ones of many sizes, and broken ones."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from PIL import Image, ImageOps

from bequest.engine import _C
from bequest.engine.kernels.pixels import decode_jpeg
from bequest.engine.types.image import Rgb
from bequest.engine.vision.decode import decode

NOISE, BLOCKS, SOFT, LINES = range(4)


def picture(kind: int, height: int, width: int, seed: int) -> Rgb:
    drawn = np.random.default_rng(seed)
    if kind == NOISE:
        return drawn.integers(0, 256, (height, width, 3), np.uint8)
    if kind == SOFT:
        return drawn.normal(128, 20, (height, width, 3)).clip(0, 255).astype(np.uint8)
    if kind == LINES:  # of one colour against another: chroma at its extremes
        return np.where(np.indices((height, width)).sum(0)[:, :, None] % 2, drawn.integers(0, 2, 3) * 255, 255).astype(
            np.uint8
        )
    coarse = drawn.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return np.kron(coarse, np.ones((8, 8, 1), np.uint8))[:height, :width]


def encoded(image: Rgb, **how: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", **how)
    return file.getvalue()


def by_pillow(file: bytes) -> Rgb:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def test_as_pillow_decodes_it() -> None:
    dice, taken = random.Random(0), 0
    for number in range(240):
        size = dice.randrange(1, 120), dice.randrange(1, 120)
        how = {"quality": dice.choice([5, 30, 75, 90, 100]), "subsampling": dice.choice([0, 2])}
        file = encoded(picture(number % 4, *size, seed=number), **how, optimize=dice.random() < 0.5)
        pixels = decode_jpeg(file, size)
        taken += pixels is not None
        assert pixels is None or np.array_equal(pixels, by_pillow(file)), (size, how)
    assert taken > 180  # narrow ones are not, nor noise in its purest form


def test_by_two_threads() -> None:
    file = encoded(picture(SOFT, 300, 411, 0), quality=92)
    for _ in range(5):
        pixels = decode_jpeg(file, (300, 411))
        assert pixels is not None and np.array_equal(pixels, by_pillow(file))


@pytest.mark.parametrize("size", [(40, 50), (290, 300)])
def test_broken_files_are_left_alone_or_as_pillow_has_them(size: tuple[int, int]) -> None:
    """A change may make another image of a file. Then it is the one that Pillow sees."""
    dice, outcomes = random.Random(3), set()
    whole = encoded(picture(SOFT, *size, seed=1), quality=80)
    for _ in range(150):
        file = bytearray(whole)
        for _ in range(dice.randrange(1, 3)):
            place = dice.randrange(len(file) if dice.random() < 0.5 else 700)
            file[place : place + dice.randrange(2)] = bytes([dice.choice([0, 0xFF, 0xD9, dice.randrange(256)])])
        cut = bytes(file[: dice.randrange(len(file))] if dice.random() < 0.2 else file)
        pixels = decode_jpeg(cut, size)
        outcomes.add(pixels is None)
        if pixels is not None:
            assert np.array_equal(pixels, by_pillow(cut))
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff\xda\x00\x02",
        encoded(picture(SOFT, 40, 40, 0), progressive=True),
        encoded(picture(SOFT, 40, 40, 0), subsampling=1),
        encoded(picture(SOFT, 40, 40, 0)[:, :, 0]),
        encoded(picture(SOFT, 40, 41, 0)),
        encoded(picture(SOFT, 40, 40, 0), restart_marker_blocks=2),
    ],
    ids=["empty", "start", "scan", "progressive", "half", "grey", "size", "restarts"],
)
def test_what_is_left_to_pillow(file: bytes) -> None:
    assert decode_jpeg(file, (40, 40)) is None


def test_nothing_is_written_beside_it() -> None:
    file = encoded(picture(SOFT, 33, 47, 0), quality=80)
    room = np.full(33 * 47 * 4 + 128, 77, np.uint8)
    assert _C.decode_jpeg(memoryview(file), (33, 47), room.ctypes.data + 64)
    assert (room[:64] == 77).all() and (room[-64:] == 77).all()
    assert np.array_equal(room[64:-64].reshape(33, 47, 4)[:, :, :3], by_pillow(file))


def test_a_file_that_is_to_be_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(picture(BLOCKS, 40, 64, 0))
    image.save(file := io.BytesIO(), "JPEG", exif=exif)
    turned = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue()))))
    assert turned.shape == (64, 40, 3) and np.array_equal(decode(file.getvalue(), 1 << 20), turned)
