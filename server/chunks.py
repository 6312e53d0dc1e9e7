"""Events of a stream as bytes. The parts that never change are formatted once per request: a plain token costs one
dump of its text and two joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from engine.types import ChoiceDelta, TokenLogprob

PromptLogprobs = Sequence[TokenLogprob | None] | None


class Chunks:
    """The events of one engine request. A subclass says what a choice looks like in its endpoint."""

    # Around the text of a choice in an event that holds nothing else.
    plain_prefix: str
    plain_suffix: bytes

    def __init__(self, head: dict[str, Any], indices: Sequence[int], detailed: bool) -> None:
        """`indices` are the client's indices of this request's choices; `detailed` choices tell of every token."""
        self._head = head
        self._indices = indices
        self._detailed = detailed
        self._opening = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._prefixes = [self._opening + (self.plain_prefix % index).encode() for index in indices]

    def first(self, choices: Sequence[ChoiceDelta], prompt_logprobs: PromptLogprobs) -> bytes:
        objects = [self.choice(choice, True, prompt_logprobs) for choice in choices]
        head = {**self._head, "choices": objects, **self.extras(prompt_logprobs)}
        return b"data: " + orjson.dumps(head) + b"\n\n"

    def event(self, choices: Sequence[ChoiceDelta]) -> bytes:
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


def usage_event(head: dict[str, Any], usage: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({**head, "choices": [], "usage": usage}) + b"\n\n"
