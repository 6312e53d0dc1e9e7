"""What is peculiar to a body of the Responses API: checks, log-probabilities, formats."""

from __future__ import annotations

from bequest.server.asks.constraints import format_constraint, only_one
from bequest.server.asks.sampling import check_logprobs
from bequest.server.stores.grammars import Constraint
from bequest.server.wire.bodies import ResponseBody
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
    if body.background and body.store is False:
        message = "`background` needs `store`: what is made while nobody waits must be kept. Leave `store` out."
        raise invalid(message, "background")
    included = body.include or []
    return [f"include[{name}]" for name in included if name != _LOGPROBS and name not in _NOTHING_TO_INCLUDE]


def logprobs_of(body: ResponseBody) -> int | None:
    """Alternatives per token; None: log-probabilities are not asked for."""
    if _LOGPROBS not in (body.include or []) and not body.top_logprobs:
        return None
    return check_logprobs(body.top_logprobs or 0, "top_logprobs")


def response_constraint(body: ResponseBody) -> Constraint | None:
    """The grammar of `text.format`, or of `structured_outputs`."""
    given = (body.text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise ApiError(400, "invalid_type", "`text.format` must be an object with `type`.", param="text.format")
    form = None if given is None else format_constraint(given, "text.format", nested=None)
    return only_one(form, "text.format", body.structured_outputs)
