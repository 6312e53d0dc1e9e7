"""An estate: all that a record owns, as data that another engine of the same model can take over.

engine/formats/estate_file.py has it as a file. Dims: N blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np

from bequest.engine.errors import InvalidEstate
from bequest.engine.types.blocks import BlockBytes, BlockLayout
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.image import FIRST_ID, LAST_ID, Detail, Image

_REFERENCE = re.compile(r"[A-Za-z0-9._:-]{1,200}\Z")
NO_BLOCK = -1


class Notes(Protocol):
    """What the server keeps with a record (`Terms.origin`), as bytes: the engine does not look into it."""

    def to_bytes(self, origin: object) -> bytes: ...

    def from_bytes(self, data: bytes, images: Mapping[int, int]) -> object:
        """`images`: by their first ids when the notes were written, those that they have now. Raises InvalidEstate if
        they are not what `to_bytes` made."""


class NoNotes:
    """Of an engine whose requests have none."""

    def to_bytes(self, origin: object) -> bytes:
        return b""

    def from_bytes(self, data: bytes, images: Mapping[int, int]) -> object:
        return None


NO_NOTES = NoNotes()


@dataclass(frozen=True, slots=True, kw_only=True)
class EstateIdentity:
    """What keys and values depend on beside the tokens, and whose they are."""

    weights: str  # a fingerprint
    dtype: str  # that they were computed in
    cache: BlockLayout
    tenant: str
    adapter: str = ""  # the name and the digest of a LoRA adapter; "": none

    def differs(self, other: EstateIdentity) -> list[str]:
        """The names of what is not the same."""
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstateState:
    """What recurrent layers have behind the first `position` tokens of a choice: bytes in rows of the content, filled
    up with zeros."""

    position: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstateChoice:
    """A choice: its tokens, and the blocks that hold the first `computed` of them: row by row, strip beside strip."""

    index: int
    token_ids: tuple[int, ...]
    num_prompt: int
    shown_len: int
    computed: int
    rows: tuple[int, ...]  # of the content, or NO_BLOCK where a window has nothing any more; choices share rows
    states: tuple[EstateState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EstateEncoder:
    """What the encoder read: tokens, or features of audio."""

    length: int
    rows: tuple[int, ...]  # of the content, its cross blocks
    token_ids: tuple[int, ...] = ()
    num_mels: int = 0
    features: bytes = b""  # [num_mels, frames] float32

    @classmethod
    def of(cls, encoder: EncoderInput, rows: tuple[int, ...]) -> EstateEncoder:
        if encoder.features is None:
            return cls(length=encoder.length, rows=rows, token_ids=encoder.token_ids)
        features = encoder.features.astype("<f4").tobytes()
        return cls(length=encoder.length, rows=rows, num_mels=len(encoder.features), features=features)

    def as_input(self) -> EncoderInput:
        if not self.num_mels:
            return EncoderInput.of_tokens(self.token_ids)
        features = np.frombuffer(self.features, "<f4").reshape(self.num_mels, -1).astype(np.float32)
        return EncoderInput(EncoderInput.of_audio(features, 1).key, self.length, features=features)

    @property
    def is_whole(self) -> bool:
        if not self.num_mels:
            return 0 < self.length == len(self.token_ids) and not self.features
        return min(self.length, self.num_mels, len(self.features)) > 0 and len(self.features) % (4 * self.num_mels) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EstateImage:
    """An image, or rows that the request brought. Its ids are those of the process that wrote them."""

    first_id: int
    token_ids: tuple[int, ...]  # its tokens in a prompt
    shape: tuple[int, ...]  # [F, height, width, 3] of pixels, [rows, H] of rows
    content: bytes  # uint8 of pixels, float32 of rows
    num_patches: int
    grid: tuple[int, int] | None = None
    digest: bytes  # what it is found by, with the detail
    detail: Detail = Detail()

    @classmethod
    def of(cls, image: Image) -> EstateImage:
        content = image.content if image.is_seen else image.content.astype("<f4")
        return cls(
            first_id=image.first_id,
            token_ids=image.token_ids,
            shape=image.content.shape,
            content=content.tobytes(),
            num_patches=image.num_patches,
            grid=image.grid,
            digest=image.digest,
            detail=image.detail,
        )

    def as_image(self, first_id: int) -> Image:
        """With other ids. REQUIRES: it is whole"""
        content = np.frombuffer(self.content, self._dtype).reshape(self.shape)
        return Image(
            first_id=first_id,
            num_rows=self.num_rows,
            token_ids=tuple(id_ + first_id - self.first_id if id_ >= FIRST_ID else id_ for id_ in self.token_ids),
            content=content.astype(np.uint8 if len(self.shape) == 4 else np.float32),  # a copy, which may be written to
            num_patches=self.num_patches,
            grid=self.grid,
        )

    @property
    def _dtype(self) -> np.dtype[np.generic]:
        return np.dtype(np.uint8 if len(self.shape) == 4 else "<f4")

    @property
    def num_rows(self) -> int:
        return sum(id_ >= FIRST_ID for id_ in self.token_ids)

    @property
    def is_whole(self) -> bool:
        ids = [id_ for id_ in self.token_ids if id_ >= FIRST_ID]
        if not ids or ids != list(range(self.first_id, self.first_id + len(ids))) or min(self.token_ids) < 0:
            return False
        sizes = min(self.shape, default=0) > 0 and len(self.shape) in (2, 4) and self.num_patches >= 0
        return sizes and len(self.content) == self._dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What an estate says of its content."""

    identity: EstateIdentity
    id: str
    name: str | None = None
    cache_salt: str = ""
    num_choices: int = 1
    choices: tuple[EstateChoice, ...]
    encoder: EstateEncoder | None = None
    created_at: float = 0.0  # seconds since 1970
    parent: str | None = None  # that it continued, at token `at` of it
    parent_choice: int = 0
    at: int = 0
    origin: bytes = b""  # the server's notes
    images: tuple[EstateImage, ...] = ()  # whose ids are among the tokens

    def flaws(self, num_rows: int) -> Iterator[str]:
        """Where it contradicts itself or a content of so many blocks."""
        size, owned, state_rows = self.identity.cache.shape[-2], set[int](), set[int]()
        windows = self.identity.cache.windows
        indices = [choice.index for choice in self.choices]
        if not indices or len(set(indices)) < len(indices) or not all(0 <= i < self.num_choices for i in indices):
            yield "its choices have no numbers of their own"
        if not all(_REFERENCE.match(reference) for reference in (self.id, self.name or self.id)):
            yield "its names are no names"
        if not (0 <= self.created_at < 2**40 and self.at >= 0 and self.parent_choice >= 0):
            yield "it has no time, or continues no token"
        for choice in self.choices:
            rows = [row for row in choice.rows if row != NO_BLOCK]
            owned.update(rows)
            if not 0 < choice.num_prompt <= choice.shown_len <= len(choice.token_ids) < 2**31:
                yield "the lengths of a choice contradict each other"
            if not all(0 <= token < 2**31 for token in choice.token_ids):
                yield "a token has no number"
            if not 0 < choice.computed <= len(choice.token_ids):
                yield "more is computed than there are tokens, or nothing"
            if len(choice.rows) != -(-choice.computed // size) * len(windows) or len(set(rows)) < len(rows):
                yield "a choice has not the blocks that hold its tokens"
            if any(row == NO_BLOCK and not windows[i % len(windows)] for i, row in enumerate(choice.rows)):
                yield "a choice lacks blocks that hold its tokens"
            yield from self._flaws_of_states(choice)
            state_rows.update(row for state in choice.states for row in state.rows)
        if not owned.isdisjoint(state_rows):
            yield "a block is a state, too"
        owned |= state_rows
        if (encoder := self.encoder) is not None:
            if not encoder.is_whole:
                yield "its encoder input is not whole"
            if len(encoder.rows) != -(-encoder.length // size) or not owned.isdisjoint(encoder.rows):
                yield "its encoder input has not the blocks that hold it"
            owned.update(encoder.rows)
        yield from self._flaws_of_images()
        if owned != set(range(num_rows)):
            yield "blocks are missing, or nobody's"

    def _flaws_of_images(self) -> Iterator[str]:
        if not all(image.is_whole for image in self.images):
            yield "an image is not whole"
            return
        known: set[int] = set()
        for image in self.images:
            ids = range(image.first_id, image.first_id + image.num_rows)
            if ids.stop - 1 > LAST_ID or not known.isdisjoint(ids):
                yield "images have no ids of their own"
            known.update(ids)
        if not all(id_ < FIRST_ID or id_ in known for choice in self.choices for id_ in choice.token_ids):
            yield "a token is that of an image which is not there"

    def _flaws_of_states(self, choice: EstateChoice) -> Iterator[str]:
        positions, needed = [state.position for state in choice.states], self.identity.cache.rows_of_state
        if positions and not needed:
            yield "it has states of a model without any"
        if len(set(positions)) < len(positions) or not all(0 < p <= choice.computed for p in positions):
            yield "a choice has states behind no tokens of its own"
        if any(len(set(state.rows)) != needed or min(state.rows, default=0) < 0 for state in choice.states):
            yield "a state is not whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """Where a block is in the files of leases."""

    segment: str
    index: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A lease in files: rows of the deed are blocks of it."""

    deed: Deed
    expires_at: float  # seconds since 1970
    blocks: tuple[StoredBlock, ...]
    warm: bool = False  # it is no lease, and nobody was promised it


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceBytes:
    """All bytes of a choice, out of files."""

    choice: EstateChoice
    blocks: BlockBytes  # in the order of its rows, without those that windows have not
    encoder: BlockBytes  # of its encoder input's blocks, if it has one
    states: dict[int, BlockBytes]  # by position: [bytes of a state]

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.encoder.nbytes + sum(state.nbytes for state in self.states.values())


@dataclass(frozen=True, slots=True, eq=False)
class Estate:
    """Whole when constructed: raises InvalidEstate otherwise."""

    deed: Deed
    content: BlockBytes  # [N, bytes of a block]

    def __post_init__(self) -> None:
        cache = self.deed.identity.cache
        if len(cache.shape) < 2 or cache.shape[-2] < 1 or not cache.windows:
            raise InvalidEstate("The estate's blocks have no size.")
        if self.content.shape[1:] != (self.deed.identity.cache.num_bytes,) or self.content.dtype != np.uint8:
            raise InvalidEstate("The estate's content is not made of its blocks.")
        for flaw in self.deed.flaws(len(self.content)):
            raise InvalidEstate(f"The estate is broken: {flaw}.")

    def renamed(self, name: str) -> Estate:
        return Estate(replace(self.deed, name=name), self.content)
