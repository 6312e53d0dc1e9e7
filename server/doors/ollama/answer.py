"""What an answer looks like: whole, or in lines of JSON as it comes, with the times at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from bequest.engine.dialects.events import AnswerEvent, CallArguments, CallBegun, Content, Thought
from bequest.engine.dialects.reader import AnswerReader
from bequest.engine.types import ChoiceDelta, Delta, Usage
from bequest.server.answers.logprobs import Spelling, chat_logprobs
from bequest.server.asks.ask import Ask
from bequest.server.asks.call import HttpCall
from bequest.server.asks.reading import Reading
from bequest.server.doors.ollama.body import GeneratingBody, OllamaGenerateBody
from bequest.server.doors.ollama.errors import error_body
from bequest.server.transport.sse import ChunkFormat
from bequest.server.wire.errors import ApiError
from bequest.server.wire.reading import arguments_of


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer gained: a text, a thought, or a call of a tool."""

    text: str = ""
    thought: str = ""
    calls: tuple[dict[str, Any], ...] = ()


class Saying:
    """Reads an answer. A call is told when it is whole: clients expect its arguments as an object."""

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader
        self._name: str | None = None  # of a call that is being written
        self._arguments: list[str] = []

    def take(self, choice: ChoiceDelta) -> list[Said]:
        if self._reader is None:
            return [Said(choice.text)] if choice.text else []
        ended = choice.finish_reason is not None
        said: list[Said] = []
        for event in (*self._reader.feed(choice.text), *(self._reader.finish() if ended else ())):
            said += self._heard(event)
        return [*said, *(self._end_call() if ended else ())]

    def _heard(self, event: AnswerEvent) -> list[Said]:
        if isinstance(event, CallArguments):
            self._arguments.append(event.text)
            return []
        before = self._end_call()
        if isinstance(event, CallBegun):
            self._name, self._arguments = event.name, []
            return before
        return [*before, Said(thought=event.text) if isinstance(event, Thought) else _text(event)]

    def _end_call(self) -> list[Said]:
        """One that was cut off has no arguments to be called with: it is shown as the text that it is."""
        if self._name is None:
            return []
        name, written = self._name, "".join(self._arguments)
        self._name = None
        try:
            arguments = arguments_of(written)
        except ValueError:
            return [Said(f"{name}({written}")]
        return [Said(calls=({"function": {"name": name, "arguments": arguments}},))]


def _text(event: Content) -> Said:
    return Said(event.text)


class Answer:
    """One answer, as /api/chat or /api/generate shows it."""

    def __init__(self, call: HttpCall[Any], ask: Ask, reading: Reading) -> None:
        body: GeneratingBody = call.body
        self._call = call
        self._ask = ask
        self._is_chat = not isinstance(body, OllamaGenerateBody)
        self._saying = Saying(reading.reader(ask.prompts[0]))
        self._spelling = Spelling(call.context.text.tokenizer, as_ids=False) if body.logprobs else None
        self._logprobs: list[dict[str, Any]] = []  # that were not told yet
        self._token_ids: list[int] = []
        self._reason = "stop"

    def whole(self, choice: ChoiceDelta, usage: Usage) -> dict[str, Any]:
        said = self._take(choice)
        together = Said(
            "".join(one.text for one in said),
            "".join(one.thought for one in said),
            tuple(call for one in said for call in one.calls),
        )
        return {**self._head(), **self._shown(together), **self._told_logprobs(), **self._end(usage)}

    def lines(self, choices: Sequence[ChoiceDelta], ending: Delta | None) -> bytes:
        said = [one for choice in choices for one in self._take(choice)]
        shown = [{**self._head(), **self._shown(one), **self._told_logprobs(), "done": False} for one in said]
        if ending is not None:
            assert ending.usage is not None
            shown.append({**self._head(), **self._shown(Said()), **self._told_logprobs(), **self._end(ending.usage)})
        return b"".join(orjson.dumps(line) + b"\n" for line in shown)

    def _take(self, choice: ChoiceDelta) -> list[Said]:
        self._token_ids += choice.token_ids
        self._reason = choice.finish_reason or self._reason
        if self._spelling is not None:
            self._logprobs += chat_logprobs(choice.logprobs or (), self._spelling)["content"]
        return self._saying.take(choice)

    def _head(self) -> dict[str, Any]:
        return {"model": self._call.model, "created_at": now()}

    def _shown(self, said: Said) -> dict[str, Any]:
        told: dict[str, Any] = {"thinking": said.thought} if said.thought else {}
        if not self._is_chat:
            return {"response": said.text, **told}
        if said.calls:
            told["tool_calls"] = said.calls
        return {"message": {"role": "assistant", "content": said.text, **told}}

    def _told_logprobs(self) -> dict[str, Any]:
        """Those of tokens that have come, beside the next text."""
        told, self._logprobs = self._logprobs, []
        return {"logprobs": told} if told else {}

    def _end(self, usage: Usage) -> dict[str, Any]:
        ended: dict[str, Any] = {
            "done": True,
            "done_reason": self._reason,
            **durations(self._call),
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
        }
        prompt = self._ask.prompts[0]
        # Tokens alone do not lead back to an image, nor to what an encoder has read.
        if not self._is_chat and not self._call.body.raw and not prompt.images and prompt.encoder is None:
            ended["context"] = [*prompt.token_ids, *self._kept_ids()]
        return ended

    def _kept_ids(self) -> list[int]:
        """The answer without its end, which the template writes anew."""
        ids, ends = self._token_ids, self._call.context.engine.info.eos_token_ids
        return ids[:-1] if ids and ids[-1] in ends else ids


class Lines(ChunkFormat):
    """The lines of a streamed answer: a ChunkFormat and the stream's Ending."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def event(self, choices: Sequence[ChoiceDelta], opening: Delta | None = None, ending: Delta | None = None) -> bytes:
        return self._answer.lines(choices, ending)

    def finished(self, endings: Sequence[Delta]) -> bytes:
        return b""  # the last line says so itself

    def failed(self, error: ApiError) -> bytes:
        return error_body(error) + b"\n"


def loaded(call: HttpCall[Any], empty: dict[str, Any]) -> dict[str, Any]:
    """The answer to nothing, by which clients have a model loaded: it is."""
    return {"model": call.model, "created_at": now(), **empty, "done": True, "done_reason": "load"}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def durations(call: HttpCall[Any]) -> dict[str, int]:
    """In nanoseconds. The model was loaded before."""
    account = call.context.metrics.spending.of(call.id)
    return {
        "total_duration": _nanoseconds(time.monotonic() - call.arrived),
        "load_duration": 0,
        "prompt_eval_duration": _nanoseconds(0.0 if account is None else account.first_seconds),
        "eval_duration": _nanoseconds(0.0 if account is None else account.decode_seconds),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
