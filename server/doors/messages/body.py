"""Bodies of the Messages API, and what is peculiar to their fields."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import structs

from bequest.server.wire.bodies import GenerationBody, SampledBody
from bequest.server.wire.errors import ApiError, invalid, missing
from bequest.server.wire.fields import Rules, Shape
from bequest.server.wire.reading import shorten

_TIERS = ("auto", "standard_only")
_MAX_STOPS, _MAX_STOP_CHARS = 64, 1024
_ELSEWHERE = "it belongs to /v1/completions and /v1/chat/completions"
_OWN: dict[str, tuple[tuple[Any, ...], str]] = {
    **{
        field.name: ((field.default,), _ELSEWHERE)
        for field in structs.fields(GenerationBody)
        if field.name not in (*SampledBody.__struct_fields__, "max_tokens")
    },
    "logprobs": ((False,), "the Messages API tells no log-probabilities; /v1/chat/completions does"),
    "mcp_servers": (([],), "this server calls no other servers"),
    "n": ((1,), "a message is one answer"),
    "parallel_tool_calls": ((True,), "use `tool_choice.disable_parallel_tool_use`"),
    "prompt": (("", []), "it takes `messages`"),
    "reasoning_effort": ((), "use `output_config.effort`"),
    "response_format": ((), "use `output_config.format`"),
    "stop": ((), "use `stop_sequences`"),
    "stream_options": ((), "a stream of messages always tells its usage"),
    "continuation_of": ((), "a conversation that goes on is recognised by its messages"),
}
_SHAPE: Shape = {
    "metadata": {"user_id": None},
    "output_config": {"effort": None, "format": {"type": None, "schema": None}},
    "thinking": dict.fromkeys(("type", "budget_tokens", "display")),
    "tool_choice": dict.fromkeys(("type", "name", "disable_parallel_tool_use")),
    "cache_control": dict.fromkeys(("type", "ttl")),
}


class ConversingBody(SampledBody, frozen=True, kw_only=True):
    """What a prompt is made of."""

    rules: ClassVar[Rules] = Rules(_OWN, _SHAPE)

    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(ConversingBody, frozen=True, kw_only=True):
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None


class CountTokensBody(ConversingBody, frozen=True, kw_only=True):
    """The same conversation, of which the tokens are counted."""


def check_body(body: MessagesBody) -> int:
    """Raises for what cannot be done; returns `max_tokens`."""
    if body.max_tokens is None:
        raise missing("max_tokens", "`max_tokens` is missing: the most tokens that the answer may have.")
    if body.max_tokens < 0:
        raise invalid(f"`max_tokens` must be at least 0, not {body.max_tokens}.", "max_tokens")
    if body.service_tier not in (None, *_TIERS):
        given = shorten(repr(body.service_tier))
        raise invalid(f"`service_tier` must be 'auto' or 'standard_only', not {given}.", "service_tier")
    user = (body.metadata or {}).get("user_id")
    if user is not None and not isinstance(user, str):
        raise ApiError(400, "invalid_type", "`metadata.user_id` must be a string.", param="metadata.user_id")
    _check_stops(body.stop_sequences or [])
    return body.max_tokens


def _check_stops(stops: list[str]) -> None:
    if len(stops) > _MAX_STOPS:
        message = f"`stop_sequences` may hold {_MAX_STOPS} strings at most, not {len(stops)}."
        raise invalid(message, "stop_sequences")
    for index, text in enumerate(stops):
        if not 0 < len(text) <= _MAX_STOP_CHARS:
            param = f"stop_sequences[{index}]"
            raise invalid(f"`{param}` must have 1 to {_MAX_STOP_CHARS} characters, not {len(text)}.", param)


# What is told of it in /openapi.json.


class Message(msgspec.Struct):
    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class MessageTokensCount(msgspec.Struct):
    input_tokens: int


class MessageError(msgspec.Struct):
    type: str
    error: dict[str, Any]
