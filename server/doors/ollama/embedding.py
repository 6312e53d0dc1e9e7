"""POST /api/embed, and its older form /api/embeddings."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from bequest.server.answers.extraction import extracted
from bequest.server.asks.call import HttpCall
from bequest.server.asks.prompt import Truncation
from bequest.server.asks.prompts import TextSource
from bequest.server.asks.terms import passing_terms
from bequest.server.doors.ollama.answer import durations
from bequest.server.doors.ollama.body import OllamaEmbedBody, OllamaEmbeddingsBody
from bequest.server.doors.ollama.models import begin_named
from bequest.server.states.embeddings import pooled_ask, vector_length, vectors_of
from bequest.server.states.inputs import check_count
from bequest.server.transport.replies import json_response
from bequest.server.wire.bodies import InputField
from bequest.server.wire.errors import missing

_NUMPY = orjson.OPT_SERIALIZE_NUMPY


async def embed(http: web.Request) -> web.Response:
    call = await begin_named(http, OllamaEmbedBody)
    body = call.body
    if body.input is None:
        raise missing("input", "`input` is missing: send a text, or a list of them.")
    given: InputField = [body.input] if isinstance(body.input, str) else [*body.input]
    if given in ([], [""]):  # clients load a model so
        return json_response({"model": call.model, "embeddings": []}, call.headers)
    check_count(given)
    length = vector_length(body.dimensions, call.context.engine.info.hidden_size)
    vectors, tokens = await _vectors(call, given, "input", body.truncate, length)
    answer = {
        "model": call.model,
        "embeddings": [orjson.Fragment(vector) for vector in vectors],
        **durations(call),
        "prompt_eval_count": tokens,
    }
    return json_response(answer, call.headers)


async def embeddings(http: web.Request) -> web.Response:
    call = await begin_named(http, OllamaEmbeddingsBody)
    if not call.body.prompt:
        return json_response({"embedding": []}, call.headers)
    length = call.context.engine.info.hidden_size
    [vector], _ = await _vectors(call, [call.body.prompt], "prompt", True, length)
    return json_response({"embedding": orjson.Fragment(vector)}, call.headers)


async def _vectors(
    call: HttpCall[Any], given: InputField, field: str, truncate: bool, length: int
) -> tuple[list[bytes], int]:
    """As JSON, and the tokens that they are made of."""
    truncation = Truncation(-1 if truncate else None, completion=0)
    source = TextSource(given=given, field=field, truncation=truncation)
    ask = await pooled_ask(call.context, call.id, source, passing_terms(call, None))
    async with extracted(call.context, ask.requests) as results:
        vectors = await vectors_of(call.context, [result.states for result in results], length, normalize=True)
        written = [orjson.dumps(vector.assemble(), option=_NUMPY) for vector in vectors]
    return written, sum(result.usage.prompt_tokens for result in results)
