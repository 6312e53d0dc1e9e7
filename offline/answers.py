"""What comes back: answers and their choices, pieces of a stream, scores, hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from bequest.engine.dialects.events import AnswerEvent, Content, Thought
from bequest.engine.dialects.reader import AnswerReader
from bequest.engine.types import ChoiceDelta, Delta, Inheritance, Retained, TokenLogprob, Usage
from bequest.engine.types.states import StatesArray
from bequest.server.answers.deltas import reason_with_calls
from bequest.server.answers.running import Collector
from bequest.server.asks.ask import Ask
from bequest.server.asks.images import shown_ids
from bequest.server.asks.reading import Reading
from bequest.server.asks.spoken import whole_message
from bequest.server.context import Context
from bequest.server.transport.pieces import release

_Llm = TypeVar("_Llm")


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # "stop", "length" or "tool_calls"
    stop_reason: int | str | None = None  # the stop string or token, or "deadline"; None: the end token
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if asked for
    cumulative_logprob: float | None = None
    beam_score: float | None = None
    message: dict[str, Any] | None = None  # of a chat: to be sent back, with its thoughts and tool calls
    reasoning: str = ""  # what a chat's model thought first; it is not in `text`
    hidden_states: StatesArray | None = None  # [layers, positions, H], if asked for


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt or conversation."""

    id: str  # to continue from
    prompt_token_ids: tuple[int, ...]  # with the model's own token for each row of an image
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    inheritance: Inheritance | None = None  # of a continuation: what it took over
    retained: Retained | None = None  # the lease, if one was asked for
    is_chat: bool = False

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        return self.choices[0].finish_reason

    @property
    def message(self) -> dict[str, Any] | None:
        """Of the first choice, in a chat."""
        return self.choices[0].message

    @property
    def reasoning(self) -> str:
        """Of the first choice."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Of the first choice."""
        return list((self.message or {}).get("tool_calls", ()))


class OwnCompletion(Completion, Generic[_Llm]):
    """One that knows whose it is. That is no field of it: an answer can be kept, as JSON or in a pickle, and the model
    cannot."""

    __slots__ = ("_llm",)
    _llm: _Llm

    @classmethod
    def of(cls, answer: Completion, llm: _Llm) -> Self:
        own = cls(**{entry.name: getattr(answer, entry.name) for entry in fields(Completion)})
        object.__setattr__(own, "_llm", llm)
        return own

    @property
    def _owner(self) -> _Llm:
        try:
            return self._llm
        except AttributeError:
            message = "a copy of an answer has no model: continue it with `continuation_of=answer`"
            raise RuntimeError(message) from None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice gained in a step of a stream."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    reasoning: str = ""  # what it thought


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a suffix is."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class States:
    """Hidden states of one input."""

    values: StatesArray  # [layers, positions, H], pooled [layers, H]; bfloat16 as the bits in uint16
    layers: tuple[int, ...]
    positions: npt.NDArray[np.int64]
    usage: Usage


class Growing:
    """Choices of an answer while their deltas come. Tool calls are taken out of the text."""

    def __init__(self, context: Context, ask: Ask, reading: Reading | None) -> None:
        self._context = context
        self._ask = ask
        self._is_chat = reading is not None
        self._readers: list[AnswerReader | None] = [
            None if reading is None else reading.reader(ask.prompts[0]) for _ in range(ask.n)
        ]
        self._events: list[list[AnswerEvent]] = [[] for _ in range(ask.n)]
        self._shows_thoughts = reading is not None and reading.shows_thoughts
        self._text = [""] * ask.n
        self._tokens: list[list[int]] = [[] for _ in range(ask.n)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(ask.n)]
        self._last: dict[int, ChoiceDelta] = {}
        self._opening: Delta | None = None

    def take(self, delta: Delta) -> list[Piece]:
        if delta.first:
            self._opening = delta
        return [self._piece(choice) for choice in delta.choices]

    def completion(self, ending: Delta) -> Completion:
        """REQUIRES: `ending` is the last delta"""
        assert ending.usage is not None
        opening = self._opening or ending
        states = {} if ending.hidden_states is None else {one.index: one for one in ending.hidden_states.choices}
        arrays = {index: one.assemble() for index, one in states.items()}
        release(ending)
        prompt = self._ask.prompts[0]
        return Completion(
            id=self._ask.requests[0].id,
            prompt_token_ids=tuple(shown_ids(self._context, prompt.token_ids, prompt.images)),
            choices=tuple(self._choice(self._last[index], arrays.get(index)) for index in sorted(self._last)),
            usage=ending.usage,
            prompt_logprobs=opening.prompt_logprobs,
            inheritance=opening.inheritance,
            retained=ending.retained,
            is_chat=self._is_chat,
        )

    def _piece(self, choice: ChoiceDelta) -> Piece:
        index, reader, text = choice.index, self._readers[choice.index], choice.text
        events: list[AnswerEvent] = []
        if reader is not None:
            events = [*reader.feed(text), *(reader.finish() if choice.finish_reason else ())]
            self._events[index] += events
            text = _said(events)
        self._text[index] += text if self._shows_thoughts else choice.text
        self._tokens[index] += choice.token_ids
        self._logprobs[index] += choice.logprobs or ()
        self._last[index] = choice
        reason = reason_with_calls(choice.finish_reason, reader)
        return Piece(index, text, choice.token_ids, reason, _thought(events))

    def _choice(self, last: ChoiceDelta, states: StatesArray | None) -> Choice:
        index = last.index
        return Choice(
            index=index,
            text=self._text[index],
            token_ids=tuple(self._tokens[index]),
            finish_reason=reason_with_calls(last.finish_reason, self._readers[index]),
            stop_reason=last.stop_reason,
            logprobs=None if last.logprobs is None else tuple(self._logprobs[index]),
            cumulative_logprob=last.cumulative_logprob,
            beam_score=last.beam_score,
            message=self._message(index) if self._is_chat else None,
            reasoning=_thought(self._events[index]),
            hidden_states=states,
        )

    def _message(self, index: int) -> dict[str, Any]:
        if self._readers[index] is None:
            return {"role": "assistant", "content": self._text[index]}
        return {"role": "assistant", **whole_message(self._events[index])}


def _said(events: Sequence[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def _thought(events: Sequence[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Thought))


def completion_of(context: Context, ask: Ask, result: Collector, reading: Reading | None) -> Completion:
    """Of an answer that came whole."""
    growing = Growing(context, ask, reading)
    growing.take(result.delivery)
    return growing.completion(result.delivery)


def scores_of(choices: Sequence[ChoiceDelta]) -> list[Score]:
    return [
        Score(choice.text, choice.token_ids, choice.logprobs or (), choice.cumulative_logprob or 0.0)
        for choice in choices
    ]
