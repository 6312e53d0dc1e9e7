"""The response object: what was asked for, echoed as OpenAI does, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from bequest.engine.types import FinishReason, Usage
from bequest.server.asks.sampling import Chosen
from bequest.server.asks.tools import Function, Tools
from bequest.server.wire.bodies import SERVICE_TIERS, ResponseBody
from bequest.server.wire.reading import written

_VERBOSITIES = ("low", "medium", "high")
_RETENTIONS = ("in_memory", "24h")


def in_progress(
    body: ResponseBody, answer_id: str, created_at: int, model: str, chosen: Chosen, tools: Tools
) -> dict[str, Any]:
    """The object as it stands before anything is known of the answer."""
    reasoning = body.reasoning or {}
    text = body.text or {}
    return {
        "id": answer_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": body.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": _told(body.max_tool_calls, "max_tool_calls"),
        "metadata": _told(body.metadata or {}, "metadata"),
        "model": model,
        "output": [],
        "parallel_tool_calls": True if body.parallel_tool_calls is None else body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": _one_of(body.prompt_cache_retention, _RETENTIONS),
        "reasoning": _told({name: reasoning.get(name) for name in ("effort", "summary")}, "reasoning"),
        "safety_identifier": body.safety_identifier,
        "service_tier": _one_of(body.service_tier, SERVICE_TIERS) or "default",
        "store": body.store is not False,
        "temperature": chosen["temperature"],
        "text": {
            "format": _told(text.get("format") or {"type": "text"}, "text.format"),
            "verbosity": _one_of(text.get("verbosity"), _VERBOSITIES) or "medium",
        },
        "tool_choice": _told(body.tool_choice or "auto", "tool_choice"),
        "tools": [_tool(function) for function in tools.functions],
        "top_logprobs": chosen["logprobs"] or 0,
        "top_p": chosen["top_p"] if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def finished(
    head: dict[str, Any],
    items: list[dict[str, Any]],
    reason: FinishReason,
    usage: Usage,
    now: int,
    thought_tokens: int = 0,
) -> dict[str, Any]:
    """The object at its end; `head` is what it was in progress."""
    whole = reason == "stop"
    status = "completed" if whole else "incomplete"
    return {
        **head,
        "status": status,
        "completed_at": now if whole else None,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": items,
        "usage": _usage(usage, thought_tokens),
    }


def failed(head: dict[str, Any], items: list[dict[str, Any]], message: str) -> dict[str, Any]:
    """The object after a failure in mid-stream. OpenAI's list of codes is closed, and has one for us."""
    return {
        **head,
        "status": "failed",
        "error": {"code": "server_error", "message": message},
        "output": items,
    }


def cancelled(head: dict[str, Any], items: list[dict[str, Any]]) -> dict[str, Any]:
    """The object after somebody ended it."""
    return {**head, "status": "cancelled", "output": items}


def begun(response: dict[str, Any]) -> dict[str, Any]:
    """What a finished object was in progress: how its stream is told again."""
    later = ("stop_reason", "retained", "retained_reason")
    earlier = {name: value for name, value in response.items() if name not in later}
    return {
        **earlier,
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


def _usage(usage: Usage, thought_tokens: int) -> dict[str, Any]:
    written = usage.prompt_tokens - usage.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _one_of(given: Any, known: Sequence[str]) -> str | None:
    """OpenAI's lists are closed: a client that checks types would fail at any other value."""
    return given if given in known else None


def _told(given: Any, param: str) -> orjson.Fragment:
    """What the client said, as it is told back: written once for all the times that the object is."""
    return orjson.Fragment(written(given, param))


def _tool(function: Function) -> dict[str, Any]:
    return {
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": orjson.Fragment(function.schema.source.text),
        "strict": function.strict,
    }
