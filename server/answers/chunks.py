"""Events of a stream as bytes. The parts that never change are formatted once per request: a plain token costs one
dump of its text and two joins.

An event holds one choice: some clients read no more than the first. Events of one delivery are one write.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import orjson

from bequest.engine.types import ChoiceDelta, Delta, TokenLogprob
from bequest.server.answers.report import Report
from bequest.server.transport.sse import ChunkFormat

PromptLogprobs = Sequence[TokenLogprob | None] | None


class Chunks(ChunkFormat):
    """The events of one engine request. A subclass says what a choice looks like in its endpoint."""

    # Around the text of a choice in an event that holds nothing else.
    plain_prefix: str
    plain_suffix: bytes

    def __init__(self, head: dict[str, Any], indices: Sequence[int], detailed: bool, report: Report) -> None:
        """`indices` are the client's indices of this request's choices; `detailed` choices tell of every token."""
        self._report = report
        self._head = head
        self._indices = indices
        self._detailed = detailed
        self._num_written = 0  # tokens of all choices

    @cached_property
    def _opening(self) -> bytes:
        return b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['

    @cached_property
    def _prefixes(self) -> list[bytes]:
        return [self._opening + (self.plain_prefix % index).encode() for index in self._indices]

    def around_text(self) -> tuple[bytes, bytes] | None:
        if self._detailed or self._report.counts or len(self._indices) != 1:
            return None
        return self._prefixes[0], self.plain_suffix

    def event(self, choices: Sequence[ChoiceDelta], opening: Delta | None = None, ending: Delta | None = None) -> bytes:
        """One event for each choice."""
        if opening is None and ending is None and not self._report.counts:
            return b"".join(map(self._middle, choices))
        if opening is not None:
            logprobs = opening.prompt_logprobs
            objects = [self.choice(choice, True, logprobs) for choice in choices]
        else:
            objects = [self.choice(choice, False, None) for choice in choices if self._visible(choice)]
        return self._written(choices, objects, opening, ending)

    def _written(
        self,
        choices: Sequence[ChoiceDelta],
        objects: Sequence[dict[str, Any]],
        opening: Delta | None,
        ending: Delta | None,
    ) -> bytes:
        """An event for each of the objects, which tell of the choices. What else there is to tell stands on the first
        of a stream, or on its last."""
        self._num_written += sum(len(choice.token_ids) for choice in choices)
        usage = self._report.usage(self._num_written)
        first: dict[str, Any] = {}
        if opening is not None:
            first = {**self.extras(opening.prompt_logprobs), **self._report.continuation(opening)}
        last = {} if ending is None else self._report.retained(ending)
        if not objects:
            beside = {**first, **last}
            return self._dumped([], {**beside, **usage}) if beside else b""
        events = []
        for number, shown in enumerate(objects):
            beside = {**(first if number == 0 else {}), **(last if number == len(objects) - 1 else {})}
            events.append(self._dumped([shown], {**beside, **usage}))
        return b"".join(events)

    def _dumped(self, choices: list[dict[str, Any]], beside: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._head, "choices": choices, **beside}) + b"\n\n"

    def _middle(self, choice: ChoiceDelta) -> bytes:
        """An event that only tells of its choice."""
        if not self._detailed and choice.finish_reason is None:
            if not choice.text:
                return b""
            return self._prefixes[choice.index] + orjson.dumps(choice.text) + self.plain_suffix
        if not self._visible(choice):
            return b""
        return self._opening + orjson.dumps(self.choice(choice, False, None)) + b"]}\n\n"

    def _visible(self, choice: ChoiceDelta) -> bool:
        return bool(choice.text or choice.finish_reason or (self._detailed and choice.token_ids))

    def choice(self, choice: ChoiceDelta, first: bool, prompt_logprobs: PromptLogprobs) -> dict[str, Any]:
        """The choice as JSON; `first` where the client sees it for the first time."""
        raise NotImplementedError

    def extras(self, prompt_logprobs: PromptLogprobs) -> dict[str, Any]:
        """What the first event holds beside its choices."""
        return {}


def usage_event(head: dict[str, Any], usage: dict[str, Any], beside: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({**head, "choices": [], "usage": usage, **beside}) + b"\n\n"
