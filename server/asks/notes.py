"""What a chat was made of, as bytes: it leaves with an estate and comes back with it, on this server or another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from bequest.engine.errors import InvalidEstate
from bequest.server.asks.extension import Conversation


class ConversationNotes:
    """The engine's `Notes`: of `Terms.origin`, which is a Conversation or nothing."""

    def to_bytes(self, origin: object) -> bytes:
        return msgspec.msgpack.encode(origin) if isinstance(origin, Conversation) else b""

    def from_bytes(self, data: bytes, images: Mapping[int, int]) -> object:
        if not data:
            return None
        try:
            conversation = msgspec.msgpack.decode(data, type=Conversation)
        except (msgspec.DecodeError, UnicodeError) as error:
            message = f"The conversation of the estate cannot be read: {error}."
            raise InvalidEstate(message) from None
        if not images:
            return conversation
        return replace(conversation, messages=tuple(_renumbered(message, images) for message in conversation.messages))


def _renumbered(message: Mapping[str, Any], images: Mapping[int, int]) -> Mapping[str, Any]:
    """With the ids that images have now; those of others, whose pixels did not come, stay as they are."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_renumbered_part(part, images) for part in content]}


def _renumbered_part(part: Any, images: Mapping[int, int]) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image" or part.get("image") not in images:
        return part
    return {**part, "image": images[part["image"]]}
