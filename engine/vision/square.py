"""One square for each image, as CLIP's and SigLIP's towers take it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bequest.engine.types.image import Detail, Image, PreparedImage, Rgb
from bequest.engine.vision.processor import FULL, Normalisation
from bequest.engine.vision.resizing import Size, cropped, resized, squared

BILINEAR, BICUBIC = 2, 3  # Pillow's numbers of them


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareProcessor:
    """A Processor. The image is padded to a square, or not; then resized; then its middle is cut out, or not."""

    side: int  # of what the tower takes
    num_rows: int
    num_patches: int
    normalisation: Normalisation
    resample: int = BICUBIC
    shortest: int | None = None  # side of the resized image; None: it is the square, whatever its shape was
    pads: bool = False
    before: str = ""  # text that its rows follow

    @property
    def max_tokens(self) -> int:
        return self.num_rows + bool(self.before)

    @property
    def pixel_bounds(self) -> None:
        return None

    def fits(self, image: Image) -> bool:
        shape, counts = (1, self.side, self.side, 3), (self.num_rows, self.num_patches)
        return image.grid is None and image.content.shape == shape and (image.num_rows, image.num_patches) == counts

    def prepare(self, image: Rgb, detail: Detail = FULL) -> PreparedImage:
        if self.pads:
            image = squared(image, tuple(int(value * 255) for value in self.normalisation.mean))
        if self.shortest is None:
            image = resized(image, (self.side, self.side), self.resample)
        else:
            image = cropped(resized(image, _by_shortest(image, self.shortest), self.resample), (self.side, self.side))
        layout = (self.before, self.num_rows) if self.before else (self.num_rows,)
        return PreparedImage(np.stack([image]), layout, self.num_patches)


def _by_shortest(image: Rgb, side: int) -> Size:
    height, width = image.shape[:2]
    longest = int(side * max(height, width) / min(height, width))
    return (side, longest) if height <= width else (longest, side)
