"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from bequest.engine.text.tool_calls import ToolCallReader
from bequest.engine.types import ChoiceDelta, Delta, Request
from bequest.server.access.marks import ANSWER_ID, TENANT
from bequest.server.answers.chunks import Chunks, PromptLogprobs
from bequest.server.answers.generated_states import GeneratedStates, generated_states
from bequest.server.answers.logprobs import Spelling, chat_logprobs, finite_sum, prompt_logprobs
from bequest.server.answers.report import Report, report_of
from bequest.server.answers.running import collect
from bequest.server.answers.streams import in_stream, open_stream, send_stream
from bequest.server.answers.tool_deltas import DeltaMaker, reason_with_calls, whole_message
from bequest.server.answers.usage import usage_object
from bequest.server.answers.whole import made_response
from bequest.server.asks import sampling
from bequest.server.asks.ask import check_stream_options, engine_requests
from bequest.server.asks.constraints import constraint_of
from bequest.server.asks.lineage import chat_prompt
from bequest.server.asks.prompt import Prompt
from bequest.server.asks.terms import terms_of
from bequest.server.asks.tool_use import Calls
from bequest.server.asks.tools import chat_tools
from bequest.server.asks.wish import completion_states
from bequest.server.context import CONTEXT, Context
from bequest.server.transport.intake import read_object
from bequest.server.wire import fields
from bequest.server.wire.bodies import ChatBody
from bequest.server.wire.names import new_id

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
    calls = Calls(context, chat_tools(body.tools, body.tool_choice, body.parallel_tool_calls), body.chat_template)
    params = await calls.constrain(context, body, params, constraint_of(body))
    terms = terms_of(context, http, body, sampling.default_tokens(params, None))
    wish = completion_states(body.return_hidden_states, context.engine.info)
    if wish is None:
        context.engine.check_room(terms.tenant)
    headers = fields.ignored_header(ignored)
    finding = chat_prompt(context, terms, body)
    prompt = await (in_stream(http, headers, finding) if body.stream and body.continuation_of else finding)
    [request] = engine_requests(context, body, answer_id, [prompt], params, terms, wish)
    states = generated_states(context, wish, [request])
    report = report_of(request)
    if body.stream:
        return await _stream(http, context, body, head, request, states, report, calls, headers)
    [result] = await collect(context.engine, [request])

    def answer() -> dict[str, Any]:
        shape = ChatShape(context, body, prompt, calls)
        choices = [shape.whole(choice) for _, choice in sorted(result.choices.items())]
        usage = usage_object([result.usage] if result.usage is not None else [])
        told = {**report.continuation(result.delivery), **report.retained(result.delivery)}
        return {**head, "choices": choices, "usage": usage, **shape.extras(result.prompt_logprobs), **told}

    if states is not None:
        return await states.send_whole(http, answer(), [result.delivery], headers)
    return await made_response(context, [result], answer, headers)


async def _stream(
    http: web.Request,
    context: Context,
    body: ChatBody,
    head: dict[str, Any],
    request: Request,
    states: GeneratedStates | None,
    report: Report,
    calls: Calls,
    headers: dict[str, str],
) -> web.StreamResponse:
    stream, chunk_head, report = open_stream(context, body, head, report, states)
    shape = ChatShape(context, body, Prompt(request.prompt_token_ids), calls)
    kind = ToolChunks if calls.tools.active else ChatChunks
    source = stream.add_source(kind(shape, chunk_head, request.params.n, report))
    return await send_stream(context.engine, http, [request], [source], stream, headers)


class ChatShape:
    """What choices look like, whole or in chunks."""

    def __init__(self, context: Context, body: ChatBody, prompt: Prompt, calls: Calls) -> None:
        self._body = body
        self._calls = calls
        self._prompt = prompt
        self._tokenizer = context.text.tokenizer
        self._spelling = Spelling(self._tokenizer, body.return_tokens_as_token_ids)

    @property
    def detailed(self) -> bool:
        return self._body.logprobs or self._body.return_token_ids

    def whole(self, choice: ChoiceDelta) -> dict[str, Any]:
        reader = self.reader()
        if reader is None:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            return {"index": choice.index, "message": message, **self.beside(choice, choice.finish_reason)}
        message = {"role": "assistant", **whole_message([*reader.feed(choice.text), *reader.finish()]), "refusal": None}
        reason = reason_with_calls(choice.finish_reason, reader)
        return {"index": choice.index, "message": message, **self.beside(choice, reason)}

    def reader(self) -> ToolCallReader | None:
        return self._calls.reader()

    def chunk(self, choice: ChoiceDelta, first: bool) -> dict[str, Any]:
        """`role` comes once: clients concatenate the strings of deltas."""
        if first:
            delta = {"role": "assistant", "content": choice.text}
        else:
            delta = {"content": choice.text} if choice.text else {}
        return {"index": choice.index, "delta": delta, **self.beside(choice, choice.finish_reason)}

    def extras(self, logprobs: PromptLogprobs) -> dict[str, Any]:
        """On the answer, or on its first chunk."""
        extras: dict[str, Any] = {}
        if self._body.return_token_ids:
            extras["prompt_token_ids"] = self._prompt.token_ids
        if self._body.prompt_logprobs is not None and logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(logprobs, self._body.prompt_logprobs, self._tokenizer)
        return extras

    def beside(self, choice: ChoiceDelta, reason: str | None) -> dict[str, Any]:
        wanted = self._body.logprobs
        shown: dict[str, Any] = {
            "logprobs": chat_logprobs(choice.logprobs or (), self._spelling) if wanted else None,
            "finish_reason": reason,
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


class ToolChunks(ChatChunks):
    """The events of answers that may hold calls. A call is told of in several deltas, each in an event of its own."""

    def __init__(self, shape: ChatShape, head: dict[str, Any], n: int, report: Report) -> None:
        super().__init__(shape, head, n, report)
        self._deltas = [DeltaMaker(shape.reader()) for _ in range(n)]

    def event(self, choices: Sequence[ChoiceDelta], opening: Delta | None = None, ending: Delta | None = None) -> bytes:
        rows = [self._objects(choice, opening is not None) for choice in choices]
        rounds = [[row[k] for row in rows if k < len(row)] for k in range(max(map(len, rows), default=0))]
        beside: list[dict[str, Any]] = [{} for _ in rounds] or [{}]
        if opening is not None:
            beside[0] |= {**self.extras(opening.prompt_logprobs), **self._report.continuation(opening)}
        if ending is not None:
            beside[-1] |= self._report.retained(ending)
        events = zip(rounds or [[]], beside, strict=True)
        return b"".join(
            b"data: " + orjson.dumps({**self._head, "choices": objects, **more}) + b"\n\n"
            for objects, more in events
            if objects or more
        )

    def _objects(self, choice: ChoiceDelta, first: bool) -> list[dict[str, Any]]:
        """The choice once for each delta that its text gives; what else there is to tell comes with the last."""
        maker = self._deltas[choice.index]
        deltas = maker.deltas(choice.text, first, choice.finish_reason is not None)
        if not deltas:
            if choice.finish_reason is None and not (self._detailed and choice.token_ids):
                return []
            deltas = [{}]
        earlier = [
            {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas[:-1]
        ]
        last = self._shape.beside(choice, maker.reason(choice.finish_reason))
        return [*earlier, {"index": choice.index, "delta": deltas[-1], **last}]
