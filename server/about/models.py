"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from bequest.engine.types.adapter import AdapterRef
from bequest.server.access.marks import CALLER
from bequest.server.asks.reading import dialect_of
from bequest.server.context import CONTEXT, Context
from bequest.server.transport.replies import json_response


async def list_models(request: web.Request) -> web.Response:
    """All of them on one page, as OpenAI's clients and Anthropic's expect it."""
    context = request.app[CONTEXT]
    own = [_model(context, name) for name in context.model_names]
    data = [*own, *(adapter_object(context, ref) for ref in context.adapters_for(request[CALLER]))]
    page = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    return json_response({"object": "list", "data": data, **page})


async def retrieve_model(request: web.Request) -> web.Response:
    """Ids may hold slashes, quoted or not: the id is the whole rest of the path."""
    context = request.app[CONTEXT]
    name = request.match_info["id"]
    ref = context.adapter(name, request[CALLER])
    return json_response(_model(context, name) if ref is None else adapter_object(context, ref))


def adapter_object(context: Context, ref: AdapterRef) -> dict[str, Any]:
    """An adapter is a model whose parent is the one that it belongs to."""
    return {**_model(context, ref.name), "root": ref.name, "parent": context.model_names[0]}


def _model(context: Context, name: str) -> dict[str, Any]:
    dialect, created = dialect_of(context), context.created(name)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "bequest",
        "type": "model",
        "lifecycle": "active",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "root": context.engine.info.name,
        "parent": None,
        "max_model_len": context.engine.info.max_model_len,
        "max_input_tokens": context.engine.info.max_model_len,
        "reasoning_parser": dialect.reasoning,
        "tool_call_parser": dialect.calls.name,
    }
