"""Images in prompts. An image is a word: each distinct image of a tenant has token ids of its own, from `FIRST_ID` on,
far above any vocabulary. So a list of tokens stays a list of tokens, and whatever compares tokens compares images.

Id `first_id + i` stands for row i of what the vision tower makes of the image. Rows that a request brings itself
(`prompt_embeds`) are such a word, too: nobody has to look at them.

Dims: F frames of an image, M tokens of a step that are rows of images, H hidden size of the text model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bequest.engine.errors import InvalidRequest
from bequest.engine.types.arrays import IntArray
from bequest.engine.types.data import Data

FIRST_ID = 1 << 30  # no vocabulary has so many tokens
LAST_ID = (1 << 31) - 2  # the largest int32 means something else in plans (NO_TOKEN)
MOST_TURNED = 16384  # tokens of a step that are rows of images with grids

Pixels = npt.NDArray[np.uint8]  # [F, height, width, 3]
GivenRows = npt.NDArray[np.float32]  # [rows, H]
Rgb = npt.NDArray[np.uint8]  # [height, width, 3]


@dataclass(frozen=True, slots=True)
class Detail:
    """How closely an image is looked at."""

    low: bool = False  # in few tokens, where the model can
    min_pixels: int | None = None  # that it is blown up to; None: those of the model's files
    max_pixels: int | None = None  # that it is shrunk to

    @property
    def has_pixels(self) -> bool:
        return self.min_pixels is not None or self.max_pixels is not None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """An image as the tower takes it, before it has ids."""

    pixels: Pixels
    layout: tuple[int | str, ...]  # what stands for it in a prompt: so many rows of it, or text
    num_patches: int  # what the tower works on: how long its run takes goes by them
    grid: tuple[int, int] | None = None  # rows and columns that its rows turn by; None: they turn as other tokens do

    @property
    def num_rows(self) -> int:
        return sum(part for part in self.layout if isinstance(part, int))


class Image(Data, frozen=True, kw_only=True, eq=False, weakref=True):
    """One that has ids. Two of a tenant with the same content are the same object (engine/state/contents.py)."""

    first_id: int
    num_rows: int
    token_ids: tuple[int, ...]  # its tokens in a prompt
    content: npt.NDArray[Any]  # Pixels, which the tower looks at, or GivenRows
    num_patches: int
    grid: tuple[int, int] | None = None
    digest: bytes = b""  # of the file, and of what was made of it; with the detail it tells images of a tenant apart
    detail: Detail = Detail()

    @classmethod
    def of(cls, prepared: PreparedImage, first_id: int, tokenise: Callable[[str], Iterable[int]]) -> Image:
        ids: list[int] = []
        row = first_id
        for part in prepared.layout:
            if isinstance(part, str):
                ids += tokenise(part)
            else:
                ids += range(row, row + part)
                row += part
        assert first_id >= FIRST_ID and row - 1 <= LAST_ID, (first_id, row)
        return cls(
            first_id=first_id,
            num_rows=row - first_id,
            token_ids=tuple(ids),
            content=prepared.pixels,
            num_patches=prepared.num_patches,
            grid=prepared.grid,
        )

    @classmethod
    def of_rows(cls, rows: GivenRows, first_id: int) -> Image:
        """Rows that a request brings itself."""
        ids = range(first_id, first_id + len(rows))
        return cls(first_id=first_id, num_rows=len(rows), token_ids=tuple(ids), content=rows, num_patches=0)

    @property
    def is_seen(self) -> bool:
        """Whether the tower looks at it; else its rows are given."""
        return self.content.dtype == np.uint8


@dataclass(frozen=True, slots=True)
class VisionInfo:
    """What the server has to know of a model that sees."""

    image_token: int  # what the chat template writes in the place of an image
    prepare: Callable[[Rgb, Detail], PreparedImage]
    max_tokens: int  # of one image
    turns: bool = False  # images have grids
    pixels: tuple[int, int] | None = None  # what bounds of a Detail may be; None: all images become of one size
    states_per_row: int = 1  # that the device keeps: what tokens begin with, and what deeper layers get
    row_token: int | None = None  # as which clients see each row of an image; None: the image token
    around: tuple[str, str] | None = None  # text that belongs before and behind what the template writes for an image
    together: bool = False  # rows of an image see each other, later ones too, so that they are computed at once
    settings: str = ""  # how images are prepared: those of other settings are others
    fits: Callable[[Image], bool] = lambda image: False  # whether the tower makes rows of it, as many as it says


# --- where the images of a prompt are ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Rows of an image are among positions [begin, end) of a prompt; tokens of the vocabulary may be between them.

    Where images have grids, positions of rotation are apart from those of tokens: an image takes as many as its longer
    side has rows, and tokens behind it follow.
    """

    begin: int
    end: int
    image: Image
    turn: int  # position of rotation that it begins at

    @property
    def is_whole(self) -> bool:
        """Whether all rows are there. REQUIRES: nothing is between them"""
        return self.end - self.begin == self.image.num_rows

    @property
    def shift(self) -> int:
        """From the position of a token behind it to that of its rotation."""
        return self.turn + max(self.image.grid) - self.end if self.image.grid is not None else self.turn - self.begin

    def turns(self, rows: IntArray) -> IntArray | None:
        """[M, 3] positions of rotation of rows [M]: in time, from above and from the left. None: rows of an image
        without a grid. Given rows turn as other tokens do, and say so, beside those of images that do not."""
        if not self.image.is_seen:
            return np.stack([self.turn + rows] * 3, axis=1).astype(np.int32)
        if self.image.grid is None:
            return None
        down, right = np.divmod(rows, self.image.grid[1])
        return np.stack([np.full_like(rows, self.turn), self.turn + down, self.turn + right], axis=1).astype(np.int32)


def without_images(token_ids: Iterable[int]) -> tuple[int, ...]:
    """The tokens of the vocabulary."""
    return tuple(token for token in token_ids if token < FIRST_ID)


def image_spans(prompt: Sequence[int], images: Iterable[Image]) -> tuple[ImageSpan, ...]:
    """Ascending. Raises InvalidRequest for an id that none of `images` has."""
    ids = np.asarray(prompt, np.int64)
    places = np.flatnonzero(ids >= FIRST_ID)
    if not len(places):
        return ()
    by_id = sorted(images, key=lambda image: image.first_id)
    firsts = np.asarray([image.first_id for image in by_id], np.int64)
    which = np.searchsorted(firsts, ids[places], side="right") - 1
    ends = np.asarray([image.first_id + image.num_rows for image in by_id] or [0], np.int64)
    unknown = (which < 0) | (ids[places] >= ends[which])
    if unknown.any():
        token = int(ids[places][np.argmax(unknown)])
        raise InvalidRequest(f"No image of the request has the token {token}.", reason="image_unknown", token=token)
    rows = ids[places] - firsts[which]
    begins = np.flatnonzero(np.concatenate([[True], (which[1:] != which[:-1]) | (rows[1:] <= rows[:-1])]))
    spans: list[ImageSpan] = []
    for first, end in pairwise([*begins.tolist(), len(places)]):
        begin, shift = int(places[first]), spans[-1].shift if spans else 0
        spans.append(ImageSpan(begin, int(places[end - 1]) + 1, by_id[int(which[first])], begin + shift))
    return tuple(spans)


# --- what a step does with them ------------------------------------------------------------------------------------


class ImageRows(Data, frozen=True, kw_only=True, eq=False):
    """Tokens of a step that are rows of one image."""

    image: int  # its first id
    tokens: IntArray  # [M] in [0, T)
    rows: IntArray  # [M] of the image
    turns: IntArray | None = None  # [M, 3] positions of rotation, where the image has a grid


class TogetherRows(Data, frozen=True, kw_only=True, eq=False):
    """Tokens of a step that are rows of one image and see all of it, however much of it comes behind them."""

    sequence: int  # in [0, S)
    tokens: IntArray  # [M] in [0, T), one after another
    begin: int  # position of the first
    end: int  # position behind the last row of the image


class StepImages(Data, frozen=True, kw_only=True, eq=False):
    """In this order: rows that the device forgets, images that the tower looks at, rows that tokens begin with."""

    dropped: tuple[int, ...] = ()  # first ids
    looked_at: tuple[Image, ...] = ()
    gathered: tuple[ImageRows, ...] = ()
    together: tuple[TogetherRows, ...] = ()  # of those that are gathered, where rows of an image see each other
