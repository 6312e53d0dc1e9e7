"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from bequest.engine.dialects.reader import AnswerReader
from bequest.engine.types import ChoiceDelta, Delta
from bequest.server.answers.chunks import Chunks, PromptLogprobs
from bequest.server.answers.deltas import DeltaMaker, reason_with_calls
from bequest.server.answers.generated import Head, answer_of, answered, head_of
from bequest.server.answers.logprobs import Spelling, chat_logprobs, finite_sum, prompt_logprobs
from bequest.server.answers.report import Report
from bequest.server.answers.running import Collector
from bequest.server.answers.thought_tokens import ThoughtTokens
from bequest.server.asks.ask import Ask
from bequest.server.asks.call import Call, begin
from bequest.server.asks.images import shown_ids
from bequest.server.asks.inheriting import on_its_way
from bequest.server.asks.reading import Reading
from bequest.server.asks.spoken import whole_message
from bequest.server.asks.tools import chat_tools
from bequest.server.generation.asks import Waiting, at_rest, chat_ask, kept_open
from bequest.server.transport.work import apart
from bequest.server.wire.bodies import SERVICE_TIERS, ChatBody


async def chat_completions(http: web.Request) -> web.StreamResponse:
    call = await begin(http, ChatBody, "chatcmpl-")
    with on_its_way(call):
        return await answered(call, *await _asked(call, kept_open(call)))


async def whole_chat(call: Call[ChatBody]) -> bytes:
    """The answer as JSON, for whoever keeps it."""
    with on_its_way(call):
        return await answer_of(call, *await _asked(call, at_rest))


async def _asked(call: Call[ChatBody], waiting: Waiting) -> tuple[Ask, Head, ChatShape]:
    body = call.body
    if body.tools is None and body.tool_choice is None:  # nothing that another thread would be faster with
        tools = chat_tools(None, None, body.parallel_tool_calls)
    else:
        tools = await apart(call.context, lambda: chat_tools(body.tools, body.tool_choice, body.parallel_tool_calls))
    reading = Reading(call.context, tools, body.chat_template)
    ask = await chat_ask(call, reading, waiting)
    head = head_of(call, "chat.completion.chunk" if body.stream else "chat.completion")
    if body.service_tier in SERVICE_TIERS:
        head["service_tier"] = body.service_tier
    return ask, head, ChatShape(call, ask, reading)


class ChatShape:
    """What choices look like, whole or in chunks. A chat is one prompt."""

    def __init__(self, call: Call[ChatBody], ask: Ask, reading: Reading) -> None:
        self._body = call.body
        self._reading = reading
        self._n = ask.n
        [self._prompt] = ask.prompts
        self._context = call.context
        self._tokenizer = call.context.text.tokenizer
        self._spelling = Spelling(self._tokenizer, call.body.return_tokens_as_token_ids)
        self._thoughts = ThoughtTokens(self._tokenizer, not ask.params[0].skip_special_tokens)
        self.with_thoughts = call.body.include_reasoning

    def chunks(self, head: Head, index: int, report: Report) -> ChatChunks:
        readers = [reader for _ in range(self._n) if (reader := self.reader()) is not None]
        if not readers:
            return ChatChunks(self, head, self._n, report)
        return ReadChunks(self, head, readers, report)

    def choices(self, results: Sequence[Collector]) -> list[dict[str, Any]]:
        return [self.whole(choice) for _, choice in sorted(results[0].choices.items())]

    def extras(self, results: Sequence[Collector]) -> dict[str, Any]:
        return self.beside_choices(results[0].prompt_logprobs)

    @property
    def thought_tokens(self) -> int | None:
        return self._thoughts.total if self._reading.shows_thoughts else None

    @property
    def detailed(self) -> bool:
        return self._body.logprobs or self._body.return_token_ids

    def whole(self, choice: ChoiceDelta) -> dict[str, Any]:
        reader = self.reader()
        if reader is None:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            return {"index": choice.index, "message": message, **self.beside(choice, choice.finish_reason)}
        said = whole_message([*reader.feed(choice.text), *reader.finish()], self.with_thoughts)
        self.count_thoughts(choice, reader)
        message = {"role": "assistant", **said, "refusal": None}
        reason = reason_with_calls(choice.finish_reason, reader)
        return {"index": choice.index, "message": message, **self.beside(choice, reason)}

    def reader(self) -> AnswerReader | None:
        return self._reading.reader(self._prompt)

    def count_thoughts(self, choice: ChoiceDelta, reader: AnswerReader) -> None:
        """`reader` has read the choice, or what it gained."""
        if self._reading.shows_thoughts:
            self._thoughts.take(choice, reader)

    def chunk(self, choice: ChoiceDelta, first: bool) -> dict[str, Any]:
        """`role` comes once: clients concatenate the strings of deltas."""
        if first:
            delta = {"role": "assistant", "content": choice.text}
        else:
            delta = {"content": choice.text} if choice.text else {}
        return {"index": choice.index, "delta": delta, **self.beside(choice, choice.finish_reason)}

    def beside_choices(self, logprobs: PromptLogprobs) -> dict[str, Any]:
        """On the answer, or on its first chunk."""
        extras: dict[str, Any] = {}
        if self._body.return_token_ids:
            extras["prompt_token_ids"] = shown_ids(self._context, self._prompt.token_ids, self._prompt.images)
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
        return self._shape.beside_choices(prompt_logprobs)


class ReadChunks(ChatChunks):
    """The events of answers that hold more than content. A call is told of in several deltas, each in an event."""

    def __init__(self, shape: ChatShape, head: dict[str, Any], readers: Sequence[AnswerReader], report: Report) -> None:
        super().__init__(shape, head, len(readers), report)
        self._readers = readers
        self._deltas = [DeltaMaker(reader, shape.with_thoughts) for reader in readers]

    def around_text(self) -> None:
        """What a text tells depends on those before it."""

    def event(self, choices: Sequence[ChoiceDelta], opening: Delta | None = None, ending: Delta | None = None) -> bytes:
        rows = [self._objects(choice, opening is not None) for choice in choices]
        # The first delta of every choice, then the second of those that have one.
        rounds = ([row[k] for row in rows if k < len(row)] for k in range(max(map(len, rows), default=0)))
        return self._written(choices, [shown for objects in rounds for shown in objects], opening, ending)

    def _objects(self, choice: ChoiceDelta, first: bool) -> list[dict[str, Any]]:
        """The choice once for each delta that its text gives; what else there is to tell comes with the last."""
        maker = self._deltas[choice.index]
        deltas = maker.deltas(choice.text, first, choice.finish_reason is not None)
        self._shape.count_thoughts(choice, self._readers[choice.index])
        if not deltas:
            if choice.finish_reason is None and not (self._detailed and choice.token_ids):
                return []
            deltas = [{}]
        earlier = [
            {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas[:-1]
        ]
        last = self._shape.beside(choice, maker.reason(choice.finish_reason))
        return [*earlier, {"index": choice.index, "delta": deltas[-1], **last}]
