"""How long an answer may become, and how long a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.errors import ContextLengthExceeded, context_exceeded
from bequest.server.asks.ranges import agreed
from bequest.server.wire.bodies import GenerationBody
from bequest.server.wire.errors import invalid
from bequest.server.wire.reading import shorten

_MOST_TOKENS = 2**31  # far beyond any window


@dataclass(frozen=True, slots=True)
class Length:
    """What the client asked for, in the field of that name, or what its endpoint takes instead."""

    asked: int | None
    field: str = "max_tokens"
    least: int = 0  # `min_tokens`
    default: int | None = None  # None: all the room there is

    @property
    def open_ended(self) -> bool:
        return self.asked is None and self.default is None

    def within(self, prompt_len: int, max_model_len: int, shortest: int) -> int:
        """The most tokens behind a prompt. An answer that is not told how long to be has `shortest` tokens at least."""
        room = max_model_len - prompt_len
        if self.asked is None:
            needed, limit = shortest, room if self.default is None else min(self.default, room)
        else:
            needed = limit = self.asked
        if needed > room:
            raise context_exceeded(prompt_len, needed, max_model_len)
        if not 0 <= self.least <= limit:
            message = f"`min_tokens` must be from 0 to `{self.field}` ({limit}), not {self.least}."
            raise invalid(message, "min_tokens")
        return limit


def generation_length(body: GenerationBody, default: int | None) -> Length:
    """Of completions and chat, which have two names for it."""
    field, asked = agreed("max_completion_tokens", body.max_completion_tokens, "max_tokens", body.max_tokens)
    return length_of(asked, field, body.min_tokens, default)


def length_of(asked: int | None, field: str, least: int | None, default: int | None) -> Length:
    if asked is not None and asked < 0:
        raise invalid(f"`{field}` must be at least 0, not {asked}; leave it out for the default.", field)
    if asked is not None and asked > _MOST_TOKENS:
        raise invalid(f"`{field}` must be at most {_MOST_TOKENS}, not {shorten(str(asked))}.", field)
    return Length(asked, field, least or 0, default)


def check_prompt_len(prompt_len: int, keys: int | None) -> None:
    """The key's own limit, told as the model's is."""
    if keys is not None and prompt_len > keys:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {keys} prompt tokens with this key; the prompt is too long: "
            f"{prompt_len} tokens.",
            details={"max_prompt_tokens": keys, "prompt_tokens": prompt_len},
        )
