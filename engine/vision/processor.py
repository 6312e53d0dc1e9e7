"""What all ways to prepare images have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bequest.engine.types.image import Detail, Image, PreparedImage, Rgb

FULL = Detail()


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Of the values of pixels, per channel: (value * scale - mean) / std."""

    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)


class Processor(Protocol):
    @property
    def normalisation(self) -> Normalisation:
        """What the tower does to the pixels first."""
        ...

    @property
    def max_tokens(self) -> int:
        """Of any image, near enough."""
        ...

    @property
    def pixel_bounds(self) -> tuple[int, int] | None:
        """As `VisionInfo.pixels`."""
        ...

    def fits(self, image: Image) -> bool:
        """Whether it is one that `prepare` could have made."""
        ...

    def prepare(self, image: Rgb, detail: Detail = FULL) -> PreparedImage: ...
