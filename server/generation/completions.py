"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import orjson
from aiohttp import web

from bequest.engine.types import ChoiceDelta, Request, TokenLogprob
from bequest.server.access.marks import ANSWER_ID, TENANT
from bequest.server.answers.chunks import Chunks, PromptLogprobs
from bequest.server.answers.generated_states import GeneratedStates, generated_states
from bequest.server.answers.logprobs import Offsets, Spelling, completion_logprobs, finite_sum, prompt_logprobs
from bequest.server.answers.report import Report, report_of
from bequest.server.answers.running import Collector, collect
from bequest.server.answers.streams import in_stream, open_stream, send_stream
from bequest.server.answers.usage import usage_object
from bequest.server.answers.whole import made_response
from bequest.server.asks import sampling
from bequest.server.asks.ask import check_stream_options, engine_requests
from bequest.server.asks.constraints import constraint_of
from bequest.server.asks.lineage import completion_prompts
from bequest.server.asks.prompt import Prompt
from bequest.server.asks.terms import terms_of
from bequest.server.asks.wish import completion_states
from bequest.server.context import CONTEXT, Context
from bequest.server.transport.intake import read_object
from bequest.server.wire import fields
from bequest.server.wire.bodies import CompletionBody
from bequest.server.wire.names import new_id


async def completions(http: web.Request) -> web.StreamResponse:
    context = http.app[CONTEXT]
    body, ignored = fields.read(await read_object(http, context), CompletionBody)
    answer_id = http[ANSWER_ID] = new_id("cmpl-")
    head = {
        "id": answer_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": context.served_name(body.model),
    }
    check_stream_options(body)
    catalogue = context.catalogues.named(http[TENANT], body.catalogue)
    params = sampling.sampling_params(body, context.engine.info, context.text.tokenizer, catalogue)
    if (constraint := constraint_of(body)) is not None:
        params = replace(params, grammar=await context.grammars.compiled(constraint))
    terms = terms_of(context, http, body, sampling.default_tokens(params, sampling.COMPLETION_DEFAULT_TOKENS))
    wish = completion_states(body.return_hidden_states, context.engine.info)
    if wish is None:
        context.engine.check_room(terms.tenant)
    headers = fields.ignored_header(ignored)
    finding = completion_prompts(context, terms, body)
    prompts = await (in_stream(http, headers, finding) if body.stream and body.continuation_of else finding)
    requests = engine_requests(context, body, answer_id, prompts, params, terms, wish)
    states = generated_states(context, wish, requests)
    # Only a single prompt may have a parent or a lease.
    report = report_of(requests[0])
    if body.stream:
        return await _stream(http, context, body, head, prompts, requests, states, report, headers)
    results = await collect(context.engine, requests)

    def answer() -> dict[str, Any]:
        objects = []
        for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            chunks = CompletionChunks(context, body, head, prompt, index, params.n, report)
            objects += chunks.whole_choices(result)
        usage = usage_object([result.usage for result in results if result.usage is not None])
        beside = {**report.continuation(results[0].delivery), **report.retained(results[0].delivery)}
        return {**head, "choices": objects, "usage": usage, **beside}

    if states is not None:
        return await states.send_whole(http, answer(), [result.delivery for result in results], headers)
    return await made_response(context, results, answer, headers)


async def _stream(
    http: web.Request,
    context: Context,
    body: CompletionBody,
    head: dict[str, Any],
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    states: GeneratedStates | None,
    report: Report,
    headers: dict[str, str],
) -> web.StreamResponse:
    stream, chunk_head, report = open_stream(context, body, head, report, states)
    sources = [
        stream.add_source(CompletionChunks(context, body, chunk_head, prompt, index, request.params.n, report))
        for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
    ]
    return await send_stream(context.engine, http, requests, sources, stream, headers)


class CompletionChunks(Chunks):
    """The choices of one prompt: numbers [prompt · n, (prompt + 1) · n) of the answer."""

    plain_prefix = '{"index":%d,"text":'
    plain_suffix = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def __init__(
        self,
        context: Context,
        body: CompletionBody,
        head: dict[str, Any],
        prompt: Prompt,
        prompt_index: int,
        n: int,
        report: Report,
    ) -> None:
        indices = range(prompt_index * n, (prompt_index + 1) * n)
        super().__init__(head, indices, body.logprobs is not None or body.return_token_ids, report)
        self._body = body
        self._prompt = prompt
        self._tokenizer = context.text.tokenizer
        self._spelling = Spelling(self._tokenizer, body.return_tokens_as_token_ids)
        shows_special = body.catalogue is not None if body.skip_special_tokens is None else not body.skip_special_tokens
        self._prompt_logprobs: orjson.Fragment | None = None  # all choices have the same
        self._offsets = [Offsets(self._tokenizer, shows_special) for _ in indices]

    def whole_choices(self, result: Collector) -> list[dict[str, Any]]:
        """All choices of a whole answer. A search has many that tell little: these cost one dict each."""
        choices = [result.choices[index] for index in sorted(result.choices)]
        if self._detailed or result.prompt_logprobs is not None or self._body.prompt_logprobs is not None:
            return [self.choice(choice, True, result.prompt_logprobs) for choice in choices]
        prompt, indices = self._prompt.text, self._indices
        return [
            {
                "index": indices[choice.index],
                "text": prompt + choice.text,
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **_scores(choice),
            }
            for choice in choices
        ]

    def choice(self, choice: ChoiceDelta, first: bool, prompt_logprobs_: PromptLogprobs) -> dict[str, Any]:
        body = self._body
        shown: dict[str, Any] = {
            "index": self._indices[choice.index],
            "text": self._prompt.text + choice.text if first else choice.text,
            "logprobs": self._logprobs(choice, prompt_logprobs_ if first else None),
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            shown["stop_reason"] = choice.stop_reason
            shown.update(_scores(choice))
        if body.return_token_ids:
            shown["token_ids"] = choice.token_ids
            if first:
                shown["prompt_token_ids"] = self._prompt.token_ids
                if self._prompt.encoder is not None:
                    shown["encoder_prompt_token_ids"] = self._prompt.encoder.token_ids
        if first and body.prompt_logprobs is not None and prompt_logprobs_ is not None:
            if self._prompt_logprobs is None:
                entries = prompt_logprobs(prompt_logprobs_, body.prompt_logprobs, self._tokenizer)
                self._prompt_logprobs = orjson.Fragment(orjson.dumps(entries))
            shown["prompt_logprobs"] = self._prompt_logprobs
        return shown

    def _logprobs(self, choice: ChoiceDelta, prompt: PromptLogprobs) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        entries: list[TokenLogprob | None] = list(choice.logprobs or ())
        token_ids, before = list(choice.token_ids), self._offsets[choice.index]
        offsets: list[int] = []
        if self._body.echo and prompt is not None:
            entries = [*prompt, *entries]
            token_ids = [*self._prompt.token_ids, *token_ids]
            offsets = before.of_prompt(self._prompt.token_ids, self._prompt.text)
        offsets += before.of_answer(choice.token_ids)
        return completion_logprobs(entries, token_ids, offsets, self._body.logprobs, self._spelling)


def _scores(choice: ChoiceDelta) -> dict[str, float]:
    """Of a choice that has ended, where it has any."""
    total, score = choice.cumulative_logprob, choice.beam_score
    if total is None:
        return {}
    if score is None:
        return {"cumulative_logprob": finite_sum(total)}
    if isfinite(total) and isfinite(score):  # nearly always
        return {"cumulative_logprob": total, "beam_score": score}
    return {"cumulative_logprob": finite_sum(total), "beam_score": finite_sum(score)}
