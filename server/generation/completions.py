"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import orjson
from aiohttp import web

from bequest.engine.text.whole_answers import json_rows
from bequest.engine.types import ChoiceDelta, TokenLogprob
from bequest.server.answers.chunks import Chunks, PromptLogprobs
from bequest.server.answers.generated import Head, Shape, answer_of, answered, head_of
from bequest.server.answers.logprobs import Offsets, Spelling, completion_logprobs, finite_sum, prompt_logprobs
from bequest.server.answers.report import Report
from bequest.server.answers.running import Collector
from bequest.server.asks.ask import Ask
from bequest.server.asks.call import Call, begin
from bequest.server.asks.images import shown_ids
from bequest.server.asks.inheriting import on_its_way
from bequest.server.asks.prompt import Prompt
from bequest.server.context import Context
from bequest.server.generation.asks import Waiting, at_rest, completion_ask, kept_open
from bequest.server.generation.scoring import ScoreShape, score_ask
from bequest.server.wire.bodies import CompletionBody


async def completions(http: web.Request) -> web.StreamResponse:
    call = await begin(http, CompletionBody, "cmpl-")
    with on_its_way(call):
        return await answered(call, *await _asked(call, kept_open(call)))


async def whole_completion(call: Call[CompletionBody]) -> bytes:
    """The answer as JSON, for whoever keeps it."""
    with on_its_way(call):
        return await answer_of(call, *await _asked(call, at_rest))


async def _asked(call: Call[CompletionBody], waiting: Waiting) -> tuple[Ask, Head, Shape]:
    head = head_of(call, "text_completion")
    if call.body.continuation_suffixes is not None:
        return await score_ask(call, call.body.continuation_suffixes), head, ScoreShape(call)
    ask = await completion_ask(call, waiting)
    return ask, head, CompletionShape(call, ask)


class CompletionShape:
    """The choices of all prompts, one prompt's after another's."""

    thought_tokens = None  # no chat, no thoughts

    def __init__(self, call: Call[CompletionBody], ask: Ask) -> None:
        self._call = call
        self._ask = ask

    def chunks(self, head: Head, index: int, report: Report) -> CompletionChunks:
        call, ask = self._call, self._ask
        return CompletionChunks(call.context, call.body, head, ask.prompts[index], index, ask.n, report)

    def choices(self, results: Sequence[Collector]) -> list[dict[str, Any]] | orjson.Fragment:
        if len(results) == 1 and (rows := _rows(self._call.body, self._ask.prompts[0], results[0])) is not None:
            return orjson.Fragment(rows)
        whole = (self.chunks({}, index, Report()).whole_choices(result) for index, result in enumerate(results))
        return [choice for choices in whole for choice in choices]

    def extras(self, results: Sequence[Collector]) -> dict[str, Any]:
        return {}


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
        self._context = context
        self._tokenizer = context.text.tokenizer
        self._spelling = Spelling(self._tokenizer, body.return_tokens_as_token_ids)
        self._prompt_logprobs: orjson.Fragment | None = None  # all choices have the same
        self._offsets: dict[int, Offsets] = {}  # by choice

    def whole_choices(self, result: Collector) -> list[dict[str, Any]]:
        """All choices of a whole answer. Those that tell little cost one dict each."""
        choices = [result.choices[index] for index in sorted(result.choices)]
        if self._detailed or result.prompt_logprobs is not None or self._body.prompt_logprobs is not None:
            return [self.choice(choice, True, result.prompt_logprobs) for choice in choices]
        prompt, first = self._prompt.text, self._indices[0]
        whole = [
            {
                "index": first + choice.index,
                "text": prompt + choice.text,
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "cumulative_logprob": choice.cumulative_logprob,
                "beam_score": choice.beam_score,
            }
            for choice in choices
        ]
        if not _all_finite(choices):
            for shown, choice in zip(whole, choices, strict=True):
                del shown["cumulative_logprob"], shown["beam_score"]
                shown.update(_scores(choice))
        return whole

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
                shown["prompt_token_ids"] = shown_ids(self._context, self._prompt.token_ids, self._prompt.images)
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
        token_ids, before = list(choice.token_ids), self._offsets_of(choice.index)
        offsets: list[int] = []
        if self._body.echo and prompt is not None:
            entries = [*prompt, *entries]
            token_ids = [*self._prompt.token_ids, *token_ids]
            offsets = before.of_prompt(self._prompt.token_ids, self._prompt.text)
        offsets += before.of_answer(choice.token_ids)
        return completion_logprobs(entries, token_ids, offsets, self._body.logprobs, self._spelling)

    def _offsets_of(self, choice: int) -> Offsets:
        if choice not in self._offsets:
            body = self._body
            shows = body.catalogue is not None if body.skip_special_tokens is None else not body.skip_special_tokens
            self._offsets[choice] = Offsets(self._tokenizer, shows, self._prompt.said_ids)
        return self._offsets[choice]


def _rows(body: CompletionBody, prompt: Prompt, result: Collector) -> bytes | None:
    """The choices of a search as a list of JSON, written in one go; None: there is more to tell of each."""
    beams = result.beams
    more = body.logprobs is not None or body.return_token_ids or body.prompt_logprobs is not None
    if beams is None or more or prompt.text or result.prompt_logprobs is not None:
        return None
    ends = f'"finish_reason":"{beams.finish_reason}","stop_reason":{orjson.dumps(beams.stop_reason).decode()}'
    parts = ('{"index":', ',"text":', f',"logprobs":null,{ends},"cumulative_logprob":', ',"beam_score":', "}")
    return json_rows(parts, beams.texts, beams.scores, beams.beam_scores)


def _all_finite(choices: Sequence[ChoiceDelta]) -> bool:
    """Whether each has both scores, and JSON can tell them."""
    total = 0.0
    for choice in choices:
        if choice.cumulative_logprob is None or choice.beam_score is None:
            return False
        total += choice.cumulative_logprob + choice.beam_score
    return isfinite(total)


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
