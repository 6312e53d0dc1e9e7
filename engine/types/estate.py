"""An estate: all that a record owns, as data that another engine of the same model can take over.

As bytes it is one container, all or nothing:

    magic and version | lengths of the two parts | deed (msgpack) | content (bytes of the blocks) | digest of it all

Dims: N blocks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields

import msgspec
import numpy as np

from bequest.engine.errors import InvalidEstate
from bequest.engine.types.blocks import BlockBytes, BlockLayout
from bequest.engine.types.encoder import EncoderInput

_MAGIC = b"BQESTATE"
_VERSION = 1
_HEAD = struct.Struct("<8sIIQQ")  # magic, version, bytes of a block, of the deed, of the content
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EstateIdentity:
    """What keys and values depend on beside the tokens, and whose they are."""

    weights: str  # a fingerprint
    dtype: str  # that they were computed in
    cache: BlockLayout
    tenant: str

    def differs(self, other: EstateIdentity) -> list[str]:
        """The names of what is not the same."""
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstateChoice:
    """A choice: its tokens, and the blocks that hold the first `computed` of them."""

    index: int
    token_ids: tuple[int, ...]
    num_prompt: int
    shown_len: int
    computed: int
    rows: tuple[int, ...]  # of the content; choices share rows


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
class Deed:
    """What an estate says of its content."""

    identity: EstateIdentity
    id: str
    name: str | None = None
    cache_salt: str = ""
    num_choices: int = 1
    choices: tuple[EstateChoice, ...]
    encoder: EstateEncoder | None = None

    def flaws(self, num_rows: int) -> Iterator[str]:
        """Where it contradicts itself or a content of so many blocks."""
        size, owned = self.identity.cache.shape[-2], set[int]()
        indices = [choice.index for choice in self.choices]
        if not indices or len(set(indices)) < len(indices) or not all(0 <= i < self.num_choices for i in indices):
            yield "its choices have no numbers of their own"
        for choice in self.choices:
            owned.update(choice.rows)
            if not 0 < choice.num_prompt <= choice.shown_len <= len(choice.token_ids) < 2**31:
                yield "the lengths of a choice contradict each other"
            if not all(0 <= token < 2**31 for token in choice.token_ids):
                yield "a token has no number"
            if not 0 < choice.computed <= len(choice.token_ids):
                yield "more is computed than there are tokens, or nothing"
            if len(choice.rows) != -(-choice.computed // size) or len(set(choice.rows)) < len(choice.rows):
                yield "a choice has not the blocks that hold its tokens"
        if (encoder := self.encoder) is not None:
            if not encoder.is_whole:
                yield "its encoder input is not whole"
            if len(encoder.rows) != -(-encoder.length // size) or not owned.isdisjoint(encoder.rows):
                yield "its encoder input has not the blocks that hold it"
            owned.update(encoder.rows)
        if owned != set(range(num_rows)):
            yield "blocks are missing, or nobody's"


@dataclass(frozen=True, slots=True, eq=False)
class Estate:
    """Whole when constructed: raises InvalidEstate otherwise."""

    deed: Deed
    content: BlockBytes  # [N, bytes of a block]

    def __post_init__(self) -> None:
        if len(self.deed.identity.cache.shape) < 2 or self.deed.identity.cache.shape[-2] < 1:
            raise InvalidEstate("The estate's blocks have no size.")
        if self.content.shape[1:] != (self.deed.identity.cache.num_bytes,) or self.content.dtype != np.uint8:
            raise InvalidEstate("The estate's content is not made of its blocks.")
        for flaw in self.deed.flaws(len(self.content)):
            raise InvalidEstate(f"The estate is broken: {flaw}.")

    def to_bytes(self) -> bytes:
        """Takes as long as hashing and copying the content does: not for the event loop."""
        deed, content = msgspec.msgpack.encode(self.deed), np.ascontiguousarray(self.content)
        head = _HEAD.pack(_MAGIC, _VERSION, self.content.shape[1], len(deed), content.nbytes)
        digest = hashlib.blake2b(head + deed, digest_size=_DIGEST_BYTES)
        digest.update(content.data)
        return b"".join((head, deed, content.data, digest.digest()))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Estate:
        """Raises InvalidEstate if it is not, to the bit, what `to_bytes` made. Not for the event loop either."""
        view = memoryview(data).cast("B")
        if len(view) < _HEAD.size:
            raise InvalidEstate(f"An estate of {len(view)} bytes is too short to be one.")
        magic, version, block_bytes, deed_bytes, content_bytes = _HEAD.unpack(view[: _HEAD.size])
        if magic != _MAGIC or version != _VERSION:
            raise InvalidEstate(f"These bytes are no estate of version {_VERSION}.")
        total = _HEAD.size + deed_bytes + content_bytes + _DIGEST_BYTES
        if len(view) != total:
            raise InvalidEstate(f"The estate has {len(view)} bytes instead of {total}.")
        body = view[:-_DIGEST_BYTES]
        if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != view[-_DIGEST_BYTES:]:
            raise InvalidEstate("The estate's bytes have changed since it was made.")
        deed = _read_deed(body[_HEAD.size : _HEAD.size + deed_bytes])
        if block_bytes == 0 or content_bytes % block_bytes:
            raise InvalidEstate("The estate's content is not made of its blocks.")
        content = np.frombuffer(body[_HEAD.size + deed_bytes :], np.uint8).reshape(-1, block_bytes)
        return cls(deed, content)


def _read_deed(data: memoryview) -> Deed:
    try:
        return msgspec.msgpack.decode(data, type=Deed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidEstate(f"The estate's deed cannot be read: {error}.") from None
