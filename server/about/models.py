"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from bequest.server.asks.reading import dialect_of
from bequest.server.context import CONTEXT, Context, unknown_model
from bequest.server.transport.replies import json_response


async def list_models(request: web.Request) -> web.Response:
    """All of them on one page, as OpenAI's clients and Anthropic's expect it."""
    context = request.app[CONTEXT]
    names = context.model_names
    page = {"first_id": names[0], "last_id": names[-1], "has_more": False}
    return json_response({"object": "list", "data": [_model(context, name) for name in names], **page})


async def retrieve_model(request: web.Request) -> web.Response:
    """Ids may hold slashes, quoted or not: the id is the whole rest of the path."""
    context = request.app[CONTEXT]
    name = request.match_info["id"]
    if name not in context.model_names:
        raise unknown_model(name, context.model_names)
    return json_response(_model(context, name))


def _model(context: Context, name: str) -> dict[str, Any]:
    dialect = dialect_of(context)
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "bequest",
        "type": "model",
        "lifecycle": "active",
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.started, UTC).isoformat(),
        "root": context.engine.info.name,
        "parent": None,
        "max_model_len": context.engine.info.max_model_len,
        "reasoning_parser": dialect.reasoning,
        "tool_call_parser": dialect.calls.name,
    }
