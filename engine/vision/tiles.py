"""Tiles of an image and the whole of it once more, as Idefics 3 and SmolVLM take it.

The image is resized until each side is a multiple of a tile's, cut, and the whole is resized to one more tile. In the
prompt each tile says where it stands, and the whole comes last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bequest.engine.types.image import Detail, Image, PreparedImage, Rgb
from bequest.engine.vision.processor import FULL, Normalisation
from bequest.engine.vision.resizing import Size, resized

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
LANCZOS = 1  # Pillow's number of it
_LONGEST = 4096  # whatever the files say
_TEXT_TOKENS = 3  # of a tile, beside its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TileProcessor:
    """A Processor."""

    side: int  # of a tile
    longest: int | None  # side of the resized image; None: as it came
    splits: bool
    num_rows: int  # of a tile
    num_patches: int  # likewise
    normalisation: Normalisation
    resample: int = LANCZOS

    @property
    def max_tokens(self) -> int:
        across = -(-min(self.longest or _LONGEST, _LONGEST) // self.side) if self.splits else 0
        return (across * across + 1) * (self.num_rows + _TEXT_TOKENS)

    @property
    def pixel_bounds(self) -> None:
        return None

    def prepare(self, image: Rgb, detail: Detail = FULL) -> PreparedImage:
        if self.longest is not None:
            image = resized(image, _by_longest(image.shape[0], image.shape[1], self.longest), self.resample)
        square = (self.side, self.side)
        if detail.low or not self.splits:
            return self._prepared([resized(image, square, self.resample)], 0, 0)
        image = resized(image, _whole_tiles(image.shape[0], image.shape[1], self.side), self.resample)
        rows, columns = image.shape[0] // self.side, image.shape[1] // self.side
        if (rows, columns) == (1, 1):
            return self._prepared([image], 0, 0)
        tiles = [_tile(image, row, column, self.side) for row in range(rows) for column in range(columns)]
        return self._prepared([*tiles, resized(image, square, self.resample)], rows, columns)

    def fits(self, image: Image) -> bool:
        frames = len(image.content)
        shape, counts = (frames, self.side, self.side, 3), (frames * self.num_rows, frames * self.num_patches)
        return image.grid is None and image.content.shape == shape and (image.num_rows, image.num_patches) == counts

    def _prepared(self, tiles: list[Rgb], rows: int, columns: int) -> PreparedImage:
        """`rows`, `columns`: of tiles beside the whole."""
        layout: list[int | str] = []
        between = ""
        for row in range(rows):
            for column in range(columns):
                layout += [f"{between}{_AROUND}<row_{row + 1}_col_{column + 1}>", self.num_rows]
                between = ""
            between = "\n"
        before = f"{between}\n" if rows else ""
        layout += [f"{before}{_AROUND}{_WHOLE}", self.num_rows, _AROUND]
        return PreparedImage(np.stack(tiles), tuple(layout), self.num_patches * len(tiles))


def _tile(image: Rgb, row: int, column: int, side: int) -> Rgb:
    return image[row * side : (row + 1) * side, column * side : (column + 1) * side]


def _by_longest(height: int, width: int, longest: int) -> Size:
    """The longer side becomes `longest`; the other one follows, as an even number."""
    ratio = width / height
    if width >= height:
        width, height = longest, _even(int(longest / ratio))
    else:
        height, width = longest, _even(int(longest * ratio))
    return _at_most(max(height, 1), max(width, 1), _LONGEST)


def _even(length: int) -> int:
    return length + length % 2


def _at_most(height: int, width: int, most: int) -> Size:
    ratio = width / height
    if width >= height and width > most:
        width, height = most, int(most / ratio)
    elif height > width and height > most:
        height, width = most, int(most * ratio)
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, side: int) -> Size:
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / ratio) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * ratio) / side) * side
