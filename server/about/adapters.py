"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs.

Operators alone may do so, and only where --allow-lora-loading names a folder: what lies outside of it, by whatever
path, is not looked at.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from bequest.engine.errors import EngineError
from bequest.server.about.models import adapter_object
from bequest.server.access.auth import check_operator
from bequest.server.access.marks import CALLER
from bequest.server.context import CONTEXT, Context
from bequest.server.transport.intake import read_body
from bequest.server.transport.replies import json_response
from bequest.server.wire import fields
from bequest.server.wire.bodies import LoadAdapterBody, UnloadAdapterBody
from bequest.server.wire.errors import ApiError, from_engine, missing

_OF_FILES = ("", "rank_too_large")


async def load(http: web.Request) -> web.Response:
    """Answers with the adapter as GET /v1/models shows it."""
    context = http.app[CONTEXT]
    folder = _permitted(http)
    body, ignored = await read_body(http, context, LoadAdapterBody)
    name, path = _given("lora_name", body.lora_name), _given("lora_path", body.lora_path)
    if name in context.model_names:
        raise _invalid(f"`lora_name` '{name}' is the name of the model itself; choose another one.", "lora_name")
    directory = await asyncio.to_thread(_below, folder, path)
    try:
        ref = await context.engine.adapters.load(name, directory, replaces=body.load_inplace)
    except EngineError as error:
        raise from_engine(error, "lora_path" if error.reason in _OF_FILES else "lora_name") from error
    return json_response(adapter_object(context, ref), fields.ignored_header(ignored))


async def unload(http: web.Request) -> web.Response:
    context = http.app[CONTEXT]
    _permitted(http)
    body, ignored = await read_body(http, context, UnloadAdapterBody)
    name = _given("lora_name", body.lora_name)
    try:
        context.engine.adapters.unload(name)
    except EngineError as error:
        raise from_engine(error, "lora_name") from error
    return json_response({"id": name, "object": "model", "deleted": True}, fields.ignored_header(ignored))


def _permitted(http: web.Request) -> Path:
    """The folder; raises 403."""
    context: Context = http.app[CONTEXT]
    if context.config.allow_lora_loading is None:
        raise ApiError(
            403,
            "permission_denied",
            "This server loads and unloads no adapters while it runs: start it with --allow-lora-loading FOLDER.",
        )
    check_operator(http[CALLER], "adapters are for all tenants")
    return Path(context.config.allow_lora_loading)


def _below(folder: Path, given: str) -> Path:
    """The directory that is meant, links followed. Raises 400 where it lies outside of the folder."""
    refusal = _invalid(
        "`lora_path` must lie below the folder that --allow-lora-loading names: send a path that is relative to it.",
        "lora_path",
    )
    try:
        root = folder.expanduser().resolve()
        directory = (root / given).resolve()
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, a circle of links
        raise refusal from None
    if directory == root or not directory.is_relative_to(root):
        raise refusal
    return directory


def _given(name: str, value: str | None) -> str:
    if not value:
        raise missing(name)
    return value


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, "invalid_adapter", message, param=param)
