"""POST /v1/hidden_states: the states of prompts, or of what a parent has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import orjson
from aiohttp import web

from bequest.engine.types import Request, SamplingParams
from bequest.server.access.marks import ANSWER_ID
from bequest.server.answers.encoding import JsonBody, SafetensorsBody, states_object
from bequest.server.answers.extraction import Extracted, extracted, is_small
from bequest.server.answers.report import report_of
from bequest.server.answers.usage import usage_object
from bequest.server.asks.ask import engine_requests
from bequest.server.asks.lineage import completion_prompts
from bequest.server.asks.terms import terms_of
from bequest.server.asks.wish import Encoding, prompt_states
from bequest.server.context import CONTEXT
from bequest.server.transport.intake import read_object
from bequest.server.transport.pieces import Body
from bequest.server.transport.sending import send_body
from bequest.server.wire import fields
from bequest.server.wire.bodies import CompletionBody, EmbeddingsBody, HiddenStatesBody, PromptField
from bequest.server.wire.errors import invalid
from bequest.server.wire.names import new_id

_MOST_INPUTS = 2048  # OpenAI's limit of embeddings
NOTHING_SAMPLED = SamplingParams(max_tokens=0, temperature=0.0)


async def hidden_states(http: web.Request) -> web.StreamResponse:
    context = http.app[CONTEXT]
    body, ignored = fields.read(await read_object(http, context), HiddenStatesBody)
    answer_id = http[ANSWER_ID] = new_id("hs-")
    head = {"id": answer_id, "object": "list", "model": context.served_name(body.model)}
    wish = prompt_states(body, context.engine.info)
    completion = as_completion(body)
    terms = terms_of(context, http, completion, default_tokens=None)
    prompts = await completion_prompts(context, terms, completion, "input")
    if context.engine.info.encoder is not None:
        head["stack"] = wish.params.stack
    if wish.params.stack == "encoder":  # of a parent it has the encoder's input alone
        prompts = [replace(prompt, lineage=None) for prompt in prompts]
    requests = engine_requests(context, completion, answer_id, prompts, NOTHING_SAMPLED, terms, wish)
    headers = fields.ignored_header(ignored)
    async with extracted(context, requests) as results:
        answer = _body(head, requests[0], results, wish.encoding)
        small = is_small([result.states for result in results])
        if wish.encoding != "safetensors":
            return await send_body(http, answer, small, "application/json", headers, context.encoder)
        headers["Content-Disposition"] = f'attachment; filename="{answer_id}.safetensors"'
        return await send_body(http, answer, small, "application/octet-stream", headers, context.encoder)


def as_completion(body: HiddenStatesBody | EmbeddingsBody) -> CompletionBody:
    """An extraction is a completion that samples nothing: the same fields mean the same."""
    if isinstance(body.input, list) and len(body.input) > _MOST_INPUTS and not isinstance(body.input[0], int):
        count = len(body.input)
        raise invalid(f"`input` may hold {_MOST_INPUTS} inputs at most, not {count}: send several requests.", "input")
    shared = {name for name in body.__struct_fields__ if name in CompletionBody.__struct_fields__}
    return CompletionBody(
        prompt=cast(PromptField | None, body.input), max_tokens=0, **{name: getattr(body, name) for name in shared}
    )


def _body(head: dict[str, Any], request: Request, results: Sequence[Extracted], encoding: Encoding) -> Body:
    """`request` is the first one: only a single input may have a parent or a lease."""
    answers = [result.states for result in results]
    report = report_of(request)
    beside = {
        "usage": usage_object([result.usage for result in results]),
        "computed_tokens": sum(result.computed_tokens for result in results),
        **report.continuation(results[0].delivery),
        **report.retained(results[0].delivery),
    }
    if encoding == "safetensors":
        told = {name: value for name, value in head.items() if name != "object"}
        return SafetensorsBody(
            answers, {**told, **{name: orjson.dumps(value).decode() for name, value in beside.items()}}
        )
    data = [states_object(states, index) for index, states in enumerate(answers)]
    return JsonBody({**head, "data": data, **beside}, answers, encoding)
