"""Events of a stream as bytes. The parts that never change are formatted once per request: a plain token costs one
dump of its text and two joins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import orjson

from bequest.engine.types import ChoiceDelta, Delta, TokenLogprob
from bequest.server.answers.report import Report

PromptLogprobs = Sequence[TokenLogprob | None] | None


class Chunks:
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

    @cached_property
    def _opening(self) -> bytes:
        return b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['

    @cached_property
    def _prefixes(self) -> list[bytes]:
        return [self._opening + (self.plain_prefix % index).encode() for index in self._indices]

    def event(self, choices: Sequence[ChoiceDelta], opening: Delta | None = None, ending: Delta | None = None) -> bytes:
        if opening is None and ending is None:
            return self._middle(choices)
        if opening is not None:
            logprobs = opening.prompt_logprobs
            objects = [self.choice(choice, True, logprobs) for choice in choices]
            beside = {**self.extras(logprobs), **self._report.continuation(opening)}
        else:
            objects, beside = [self.choice(choice, False, None) for choice in choices if self._visible(choice)], {}
        if ending is not None:
            beside.update(self._report.retained(ending))
        if not objects and not beside:
            return b""
        return b"data: " + orjson.dumps({**self._head, "choices": objects, **beside}) + b"\n\n"

    def _middle(self, choices: Sequence[ChoiceDelta]) -> bytes:
        """An event that only tells of its choices."""
        if len(choices) == 1 and not self._detailed and choices[0].finish_reason is None:
            choice = choices[0]
            if not choice.text:
                return b""
            return self._prefixes[choice.index] + orjson.dumps(choice.text) + self.plain_suffix
        objects = [self.choice(choice, False, None) for choice in choices if self._visible(choice)]
        if not objects:
            return b""
        return self._opening + b",".join(map(orjson.dumps, objects)) + b"]}\n\n"

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
