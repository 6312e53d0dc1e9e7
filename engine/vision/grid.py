"""An image as it is, in whole patches, as Qwen's towers take it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bequest.engine.types.image import Detail, Image, PreparedImage, Rgb
from bequest.engine.vision.processor import FULL, Normalisation
from bequest.engine.vision.resizing import Size, packed, resized

_LOW_PIXELS = 512 * 512  # of an image that is looked at in few tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GridProcessor:
    """A Processor. The sides become multiples of a merged patch's, and the image has so many pixels."""

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    normalisation: Normalisation
    resample: int

    @property
    def max_tokens(self) -> int:
        return self.max_pixels // (self.patch * self.merge) ** 2

    @property
    def pixel_bounds(self) -> tuple[int, int]:
        return (self.patch * self.merge) ** 2, self.max_pixels

    def prepare(self, image: Rgb, detail: Detail = FULL) -> PreparedImage:
        least, most = self._bounds(detail)
        height, width = _whole_patches(image.shape[0], image.shape[1], self.patch * self.merge, least, most)
        made = resized(image, (height, width), self.resample)
        pixels = (packed(image) if made is image else made)[None]
        rows, columns = height // self.patch, width // self.patch
        grid = rows // self.merge, columns // self.merge
        return PreparedImage(pixels, (grid[0] * grid[1],), rows * columns, grid)

    def fits(self, image: Image) -> bool:
        if image.grid is None or min(image.grid) < 1:
            return False
        (rows, columns), side = image.grid, self.patch * self.merge
        counts = rows * columns, rows * columns * self.merge**2
        shape = (1, rows * side, columns * side, 3)
        return image.content.shape == shape and (image.num_rows, image.num_patches) == counts

    def _bounds(self, detail: Detail) -> tuple[int, int]:
        """Of pixels. What was asked for goes before what the model's files say, and that before `low`."""
        most = detail.max_pixels or self.max_pixels
        least = detail.min_pixels or min(self.min_pixels, most)
        if detail.low and detail.max_pixels is None:
            most = max(least, min(most, _LOW_PIXELS))
        return least, most


def _whole_patches(height: int, width: int, side: int, least: int, most: int) -> Size:
    """As near to the image's own sides as these pixels allow."""
    whole = round(height / side) * side, round(width / side) * side
    if whole[0] * whole[1] > most:
        shrink = math.sqrt(height * width / most)
        return tuple(max(side, math.floor(length / shrink / side) * side) for length in (height, width))  # type: ignore[return-value]
    if whole[0] * whole[1] < least:
        grow = math.sqrt(least / (height * width))
        return math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
    return whole
