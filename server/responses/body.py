"""What a body of the Responses API asks for: the checks that are its own, and the rest said as a chat body."""

from __future__ import annotations

from typing import Any

from bequest.server.asks.constraints import constraint_of, format_constraint
from bequest.server.stores.grammars import Constraint
from bequest.server.wire.bodies import ChatBody, GenerationBody, ResponseBody
from bequest.server.wire.errors import ApiError, invalid
from bequest.server.wire.reading import shorten

_LOGPROBS = "message.output_text.logprobs"
# What OpenAI can include and a text model has none of: asking for it changes nothing.
_NOTHING_TO_INCLUDE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)


def check_body(body: ResponseBody) -> list[str]:
    """Raises for what cannot be done; returns the names of what is ignored."""
    if body.truncation not in (None, "auto", "disabled"):
        given = shorten(repr(body.truncation))
        raise invalid(f"`truncation` must be 'auto' or 'disabled', not {given}.", "truncation")
    if body.max_output_tokens is not None and body.max_output_tokens < 0:
        message = f"`max_output_tokens` must be at least 0, not {body.max_output_tokens}; leave it out for no limit."
        raise invalid(message, "max_output_tokens")
    included = body.include or []
    return [f"include[{name}]" for name in included if name != _LOGPROBS and name not in _NOTHING_TO_INCLUDE]


def as_chat(body: ResponseBody) -> ChatBody:
    """A response samples as a chat does: the same fields, some of them under another name."""
    shared: dict[str, Any] = {name: getattr(body, name) for name in GenerationBody.__struct_fields__}
    wanted = _LOGPROBS in (body.include or []) or bool(body.top_logprobs)
    return ChatBody(
        **{**shared, "max_completion_tokens": body.max_output_tokens},
        logprobs=wanted,
        top_logprobs=body.top_logprobs if wanted else None,
    )


def response_constraint(body: ResponseBody) -> Constraint | None:
    """The grammar of `text.format`, or of `structured_outputs`."""
    structured = constraint_of(as_chat(body))
    given = (body.text or {}).get("format")
    if given is None:
        return structured
    if not isinstance(given, dict):
        raise ApiError(400, "invalid_type", "`text.format` must be an object with `type`.", param="text.format")
    wanted = format_constraint(given, "text.format", nested=None)
    if wanted is not None and structured is not None:
        message = "`text.format` and `structured_outputs` both say what the answer looks like: send one of them."
        raise invalid(message, "structured_outputs")
    return wanted or structured
