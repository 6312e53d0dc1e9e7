"""What a chat was made of, as bytes: it leaves with an estate and comes back with it, on this server or another."""

from __future__ import annotations

import msgspec

from bequest.engine.errors import InvalidEstate
from bequest.server.asks.extension import Conversation


class ConversationNotes:
    """The engine's `Notes`: of `Terms.origin`, which is a Conversation or nothing."""

    def to_bytes(self, origin: object) -> bytes:
        return msgspec.msgpack.encode(origin) if isinstance(origin, Conversation) else b""

    def from_bytes(self, data: bytes) -> object:
        if not data:
            return None
        try:
            return msgspec.msgpack.decode(data, type=Conversation)
        except (msgspec.DecodeError, UnicodeError) as error:
            message = f"The conversation of the estate cannot be read: {error}."
            raise InvalidEstate(message) from None
