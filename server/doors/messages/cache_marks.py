"""`cache_control`: where it may stand, for how long it asks, and how many tokens of a prompt lie before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bequest.server.asks.extension import shown
from bequest.server.asks.messages import wrong_type
from bequest.server.interfaces import TokenizerLike
from bequest.server.wire.errors import invalid, unsupported
from bequest.server.wire.reading import shorten

SECONDS = {"5m": 300.0, "1h": 3600.0}
MAX_PLACES = 4


@dataclass(frozen=True, slots=True)
class Place:
    """The end of a block that has it: of a tool, or of the last part or call so far of a turn."""

    ttl: str
    tool: int | None = None
    turn: int = 0
    part: int = 0  # texts and images of the turn before it
    call: int = 0  # calls of the turn before it


def ttl_of(block: Mapping[str, Any], path: str) -> str | None:
    """What the block's `cache_control` asks for; None: it has none."""
    given = block.get("cache_control")
    if given is None:
        return None
    param = f"{path}.cache_control" if path else "cache_control"
    if not isinstance(given, dict):
        raise wrong_type(param, "an object with `type`")
    if given.get("type") != "ephemeral":
        kind = shorten(repr(given.get("type")))
        raise unsupported(f"{param}.type", f"`{param}.type` must be 'ephemeral', not {kind}.")
    ttl = given.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in SECONDS:
        raise invalid(f"`{param}.ttl` must be '5m' or '1h', not {shorten(repr(ttl))}.", f"{param}.ttl")
    return ttl


def check_places(places: Sequence[Place]) -> None:
    if len(places) > MAX_PLACES:
        message = f"At most {MAX_PLACES} blocks may have `cache_control`, not {len(places)}: a later one covers those."
        raise invalid(message, "cache_control")


def longest_places(places: Sequence[Place]) -> list[Place]:
    """Prompts that end at these places begin with each other: the last of each duration covers the others."""
    return list({place.ttl: place for place in places}.values())


def tokens_before(tokenizer: TokenizerLike, token_ids: Sequence[int], text: str, num_chars: int) -> int:
    """How many tokens of a prompt, which was made of `text`, lie within its first `num_chars` characters."""
    written, ends = shown([tokenizer.token_bytes(token) for token in token_ids])
    before = written.find(text.encode())
    if before >= 0:
        limit = before + len(text[:num_chars].encode())
        return sum(end <= limit for end in ends)
    # The tokenizer rewrites what it reads.
    alone = tokenizer.encode(text[:num_chars], add_special_tokens=False)
    return next((i for i, pair in enumerate(zip(alone, token_ids, strict=False)) if pair[0] != pair[1]), len(alone))
