"""What is retained, as those see it who continue from it or own it. Frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.image import Image

Grade = Literal["running", "leased", "stored", "warm", "tokens"]


@dataclass(frozen=True, slots=True)
class ParentChoice:
    """The tokens of a parent's choice at this moment."""

    token_ids: tuple[int, ...]  # prompt and sampled
    num_prompt: int
    shown_len: int  # tokens the client was shown: without a trailing end token or what reaches into a stop string


class Parent(msgspec.Struct, frozen=True):
    """A record as somebody who wants to continue from it sees it."""

    id: str
    running: bool
    cache_salt: str
    choices: Sequence[ParentChoice]
    origin: object
    encoder: EncoderInput | None = None  # a child has the same one
    adapter: AdapterRef | None = None  # a child has the same one
    images: tuple[Image, ...] = ()  # of its prompt: a child has those that it inherits


@dataclass(frozen=True, slots=True)
class ChoiceEntry:
    index: int
    tokens: int
    blocks: int  # that are still there, on the device or on the host
    shared_blocks: int  # of those, that somebody else holds too


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """What a record keeps for layers of one kind: those that see all tokens, those of a window, recurrent ones."""

    kind: Literal["full", "window", "state"]
    window: int | None  # tokens, of a window
    blocks: int  # or states; a block counts once for each choice that has it
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """A record as its owner may inspect it."""

    id: str
    name: str | None
    created_at: float  # seconds since 1970
    expires_at: float | None  # of a lease
    grade: Grade
    parent: str | None
    at: int | None
    children: int
    choices: tuple[ChoiceEntry, ...]
    groups: tuple[GroupEntry, ...] = ()
    adapter: str | None = None  # that it was computed with


@dataclass(frozen=True, slots=True)
class GradeLoad:
    """The records of one grade."""

    records: int = 0
    tokens: int = 0
    blocks: int = 0
