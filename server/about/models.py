"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from bequest.server.asks.reading import dialect_of
from bequest.server.context import CONTEXT, Context, unknown_model
from bequest.server.transport.replies import json_response


async def list_models(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return json_response({"object": "list", "data": [_model(context, name) for name in context.model_names]})


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
        "root": context.engine.info.name,
        "parent": None,
        "max_model_len": context.engine.info.max_model_len,
        "reasoning_parser": dialect.reasoning,
        "tool_call_parser": dialect.calls.name,
    }
