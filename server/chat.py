"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from engine.types import ChoiceDelta, Request
from server import fields, sampling
from server.chunks import Chunks, PromptLogprobs
from server.context import ANSWER_ID, CONTEXT, TENANT, Context
from server.generated_states import GeneratedStates, generated_states
from server.generation import (
    Prompt,
    check_stream_options,
    collect,
    engine_requests,
    json_response,
    open_stream,
    send_stream,
    terms_of,
    usage_object,
)
from server.intake import read_object
from server.lineage import chat_prompt
from server.logprobs import Spelling, chat_logprobs, finite_sum, prompt_logprobs
from server.names import new_id
from server.report import Report, report_of
from server.states_wish import completion_states
from server.wire import ChatBody

_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority")


async def chat_completions(http: web.Request) -> web.StreamResponse:
    context = http.app[CONTEXT]
    body, ignored = fields.read(await read_object(http, context), ChatBody)
    answer_id = http[ANSWER_ID] = new_id("chatcmpl-")
    head: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": context.served_name(body.model),
    }
    if body.service_tier in _SERVICE_TIERS:
        head["service_tier"] = body.service_tier
    check_stream_options(body)
    catalogue = context.catalogues.named(http[TENANT], body.catalogue)
    params = sampling.sampling_params(body, context.engine.info, context.text.tokenizer, catalogue)
    terms = terms_of(context, http, body, sampling.default_tokens(params, None))
    wish = completion_states(body.return_hidden_states, context.engine.info)
    prompt = await chat_prompt(context, terms, body)
    [request] = engine_requests(context, body, answer_id, [prompt], params, terms, wish)
    states = generated_states(context, wish, [request])
    headers = fields.ignored_header(ignored)
    report = report_of(request)
    if body.stream:
        return await _stream(http, context, body, head, request, states, report, headers)
    [result] = await collect(context.engine, [request])
    shape = ChatShape(context, body, prompt)
    choices = [shape.whole(choice) for _, choice in sorted(result.choices.items())]
    usage = usage_object([result.usage] if result.usage is not None else [])
    told = {**report.continuation(result.delivery), **report.retained(result.delivery)}
    extras = shape.extras(result.prompt_logprobs)
    answer = {**head, "choices": choices, "usage": usage, **extras, **told}
    if states is not None:
        return await states.send_whole(http, answer, [result.delivery], headers)
    return json_response(answer, headers)


async def _stream(
    http: web.Request,
    context: Context,
    body: ChatBody,
    head: dict[str, Any],
    request: Request,
    states: GeneratedStates | None,
    report: Report,
    headers: dict[str, str],
) -> web.StreamResponse:
    stream, chunk_head, report = open_stream(context, body, head, report, states)
    shape = ChatShape(context, body, Prompt(request.prompt_token_ids))
    source = stream.add_source(ChatChunks(shape, chunk_head, request.params.n, report))
    return await send_stream(context.engine, http, [request], [source], stream, headers)


class ChatShape:
    """What choices look like, whole or in chunks."""

    def __init__(self, context: Context, body: ChatBody, prompt: Prompt) -> None:
        self._body = body
        self._prompt = prompt
        self._tokenizer = context.text.tokenizer
        self._spelling = Spelling(self._tokenizer, body.return_tokens_as_token_ids)

    @property
    def detailed(self) -> bool:
        return self._body.logprobs or self._body.return_token_ids

    def whole(self, choice: ChoiceDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": choice.index, "message": message, **self._beside(choice)}

    def chunk(self, choice: ChoiceDelta, first: bool) -> dict[str, Any]:
        """`role` comes once: clients concatenate the strings of deltas."""
        if first:
            delta = {"role": "assistant", "content": choice.text}
        else:
            delta = {"content": choice.text} if choice.text else {}
        return {"index": choice.index, "delta": delta, **self._beside(choice)}

    def extras(self, logprobs: PromptLogprobs) -> dict[str, Any]:
        """On the answer, or on its first chunk."""
        extras: dict[str, Any] = {}
        if self._body.return_token_ids:
            extras["prompt_token_ids"] = self._prompt.token_ids
        if self._body.prompt_logprobs is not None and logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(logprobs, self._body.prompt_logprobs, self._tokenizer)
        return extras

    def _beside(self, choice: ChoiceDelta) -> dict[str, Any]:
        wanted = self._body.logprobs
        shown: dict[str, Any] = {
            "logprobs": chat_logprobs(choice.logprobs or (), self._spelling) if wanted else None,
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            shown["stop_reason"] = choice.stop_reason
            if choice.cumulative_logprob is not None:
                shown["cumulative_logprob"] = finite_sum(choice.cumulative_logprob)
            if choice.beam_score is not None:
                shown["beam_score"] = finite_sum(choice.beam_score)
        if self._body.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown


class ChatChunks(Chunks):
    plain_prefix = '{"index":%d,"delta":{"content":'
    plain_suffix = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def __init__(self, shape: ChatShape, head: dict[str, Any], n: int, report: Report) -> None:
        super().__init__(head, range(n), shape.detailed, report)
        self._shape = shape

    def choice(self, choice: ChoiceDelta, first: bool, prompt_logprobs: PromptLogprobs) -> dict[str, Any]:
        return self._shape.chunk(choice, first)

    def extras(self, prompt_logprobs: PromptLogprobs) -> dict[str, Any]:
        return self._shape.extras(prompt_logprobs)
