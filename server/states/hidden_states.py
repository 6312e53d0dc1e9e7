"""POST /v1/hidden_states: the states of prompts, or of what a parent has left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web
from msgspec import structs

from bequest.server.answers.encoding import JsonBody, SafetensorsBody, states_object
from bequest.server.answers.extraction import Extracted, extracted, is_small
from bequest.server.answers.report import report_of
from bequest.server.answers.usage import usage_object
from bequest.server.asks.ask import Ask, ask_of
from bequest.server.asks.call import Call, begin
from bequest.server.asks.continued import text_prompts
from bequest.server.asks.inheriting import text_inheriting
from bequest.server.asks.sampling import NOTHING_SAMPLED
from bequest.server.asks.terms import record_terms
from bequest.server.asks.wish import StatesWish, prompt_states
from bequest.server.states.inputs import check_count, input_source
from bequest.server.transport.pieces import Body
from bequest.server.transport.sending import send_body
from bequest.server.transport.work import apart
from bequest.server.wire.bodies import HiddenStatesBody


async def hidden_states(http: web.Request) -> web.StreamResponse:
    call = await begin(http, HiddenStatesBody, "hs-")
    context, body = call.context, call.body
    wish = await apart(context, lambda: prompt_states(body, context.engine.info))
    ask = await states_ask(call, wish)
    head = {"id": call.id, "object": "list", "model": call.model}
    if context.engine.info.encoder is not None:
        head["stack"] = wish.params.stack
    headers = call.headers
    async with extracted(context, ask.requests) as results:
        answer = _body(head, ask, wish, results)
        small = is_small([result.states for result in results])
        if wish.encoding != "safetensors":
            return await send_body(http, answer, small, "application/json", headers, context.encoder)
        headers["Content-Disposition"] = f'attachment; filename="{call.id}.safetensors"'
        return await send_body(http, answer, small, "application/octet-stream", headers, context.encoder)


async def states_ask(call: Call[HiddenStatesBody], wish: StatesWish) -> Ask:
    body = call.body
    check_count(body.input)
    terms = record_terms(call, open_ended=False)
    source = input_source(body, body.input)
    wanted = text_inheriting(body, source)
    prompts = await text_prompts(call.context, terms, source, wanted, body.continuation_fallback)
    if wish.params.stack == "encoder":  # of a parent it has the encoder's input alone
        prompts = [structs.replace(prompt, lineage=None) for prompt in prompts]
    context = call.context
    return await apart(context, lambda: ask_of(context, call.id, prompts, NOTHING_SAMPLED, terms, wish))


def _body(head: dict[str, Any], ask: Ask, wish: StatesWish, results: Sequence[Extracted]) -> Body:
    answers = [result.states for result in results]
    report, encoding = report_of(ask), wish.encoding  # only a single input may have a parent or a lease
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
