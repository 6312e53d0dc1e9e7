"""/api/tags, /api/show, /api/ps, /api/version, /api/pull: what there is to talk to."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import structs

from bequest.engine.types import ModelInfo
from bequest.server.access.marks import CALLER
from bequest.server.asks.call import HttpCall, call_of
from bequest.server.asks.ranges import agreed
from bequest.server.asks.reading import dialect_of
from bequest.server.context import CONTEXT, Context
from bequest.server.doors.ollama.body import OllamaBody, OllamaModelBody
from bequest.server.doors.ollama.replies import one_line
from bequest.server.operation.version import installed_version
from bequest.server.transport.intake import read_body
from bequest.server.transport.replies import json_response
from bequest.server.wire.errors import missing

# The release of Ollama whose API this is. Some clients refuse to talk to an older one than they know.
API_VERSION = "0.12.6"
_LATEST = ":latest"  # the tag of a name that has none
# What weights are kept in, as Ollama's clients know it.
_LEVELS = {
    r"float32": "F32",
    r"bfloat16": "BF16",
    r"float16": "F16",
    r"(?:codes of |int)(\d).*": r"Q\1",
    r"(?:fp8|float8).*": "FP8",
    r"mxfp4": "MXFP4",
}
_FOREVER = datetime(9999, 12, 31, tzinfo=UTC).isoformat()

_Body = TypeVar("_Body", bound=OllamaBody)


async def begin_named(http: web.Request, kind: type[_Body]) -> HttpCall[_Body]:
    """As every request begins; its model may be named with the tag `latest`."""
    context = http.app[CONTEXT]
    body, ignored = await read_body(http, context, kind)
    named: _Body = structs.replace(body, model=_plain(context, body.model))
    return call_of(http, named, ignored, "ollama-")


async def tags(http: web.Request) -> web.Response:
    context = http.app[CONTEXT]
    return json_response({"models": [_entry(context, name) for name in context.names_for(http[CALLER])]})


async def running(http: web.Request) -> web.Response:
    """All of them: a model stays as long as its server."""
    context = http.app[CONTEXT]
    told = {
        "expires_at": _FOREVER,
        "size_vram": _num_bytes(context),
        "context_length": context.engine.info.max_model_len,
    }
    return json_response({"models": [{**_entry(context, name), **told} for name in context.names_for(http[CALLER])]})


async def show(http: web.Request) -> web.Response:
    context = http.app[CONTEXT]
    body, _ = await read_body(http, context, OllamaModelBody)
    name = _served(http, body)
    info, template = context.engine.info, context.text.chat_template
    family = info.architecture
    return json_response(
        {
            "modelfile": f"FROM {info.name}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in info.default_sampling.items()),
            "template": "" if template is None else template.source,
            "details": _details(context, name),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": info.num_parameters,
                f"{family}.context_length": info.max_model_len,
                f"{family}.embedding_length": info.hidden_size,
                f"{family}.block_count": info.num_layers,
                f"{family}.vocab_size": info.vocab_size,
            },
            "capabilities": _capabilities(context),
            "modified_at": _since(context, name),
        }
    )


async def version(http: web.Request) -> web.Response:
    return json_response({"version": API_VERSION, "bequest": installed_version()})


async def pull(http: web.Request) -> web.Response:
    """Of a model that is here. Another one is not found: a server has one, and fetches it when it starts."""
    context = http.app[CONTEXT]
    body, _ = await read_body(http, context, OllamaModelBody)
    _served(http, body)
    return one_line({"status": "success"}, body.stream, {})


def _served(http: web.Request, body: OllamaModelBody) -> str:
    context = http.app[CONTEXT]
    model, name = _plain(context, body.model or None), _plain(context, body.name or None)
    _, given = agreed("model", model, "name", name)
    if given is None:
        raise missing("model")
    return context.served_name(given, http[CALLER])


def _plain(context: Context, model: str | None) -> str | None:
    if model is not None and model not in context.model_names:
        return model.removesuffix(_LATEST)
    return model


def _entry(context: Context, name: str) -> dict[str, Any]:
    info = context.engine.info
    told = f"{name} {info.name} {info.architecture} {info.num_parameters} {info.dtype}"
    return {
        "name": name,
        "model": name,
        "modified_at": _since(context, name),
        "size": _num_bytes(context),
        "digest": hashlib.sha256(told.encode()).hexdigest(),
        "details": _details(context, name),
    }


def _details(context: Context, name: str) -> dict[str, Any]:
    info = context.engine.info
    return {
        "parent_model": "" if name in context.model_names else context.model_names[0],  # of an adapter
        "format": info.numbers.weight_files,
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": _short(info.num_parameters),
        "quantization_level": _level(info),
    }


def _capabilities(context: Context) -> list[str]:
    template = context.text.chat_template
    found = ["completion", "embedding"]
    if template is not None and "tools" in template.tool_source:
        found.append("tools")
    if dialect_of(context).reasoning is not None:
        found.append("thinking")
    if context.images is not None:
        found.append("vision")
    return found


def _num_bytes(context: Context) -> int:
    return sum(context.engine.info.numbers.weight_bytes.values())


def _level(info: ModelInfo) -> str:
    """Of most of its weights."""
    kept = info.numbers.weight_bytes
    most = max(kept, key=lambda name: kept[name]) if kept else info.dtype
    for pattern, level in _LEVELS.items():
        if (match := re.fullmatch(pattern, most)) is not None:
            return match.expand(level)
    return most


def _since(context: Context, name: str) -> str:
    return datetime.fromtimestamp(context.created(name), UTC).isoformat()


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


# What is told of it in /openapi.json.


class OllamaModels(msgspec.Struct):
    models: list[dict[str, Any]]


class OllamaModel(msgspec.Struct):
    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    version: str
    bequest: str


class OllamaStatus(msgspec.Struct):
    status: str
