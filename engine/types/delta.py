"""What a request is answered with: engine → server. Frozen, complete when constructed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import msgspec

from bequest.engine.errors import EngineError
from bequest.engine.types.states import ExtractedStates

FinishReason = Literal["stop", "length"]


StopReason = int | str | None  # None: the end token. str: the stop string, or "deadline". int: the stop token id


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The raw model's log-probability of one token at one position, and the best alternatives, best first."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()


class ChoiceDelta(msgspec.Struct, frozen=True, gc=False):
    """What one choice gained. `text` and `token_ids` are new or cumulative as the request's OutputMode says."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token of token_ids, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    cumulative_logprob: float | None = None  # set with finish_reason if logprobs were asked for, or of a beam
    beam_score: float | None = None  # of a beam, with finish_reason: the same with the length penalty


Choices = Sequence[ChoiceDelta]


@dataclass(frozen=True, slots=True, eq=False)
class BeamChoices(Choices):
    """The complete choices of a search, best first, that all ended alike: columns, until somebody wants one of them."""

    texts: list[str]
    token_ids: list[tuple[int, ...]]
    scores: list[float]  # summed log-probabilities
    beam_scores: list[float]
    finish_reason: FinishReason
    stop_reason: StopReason

    def __len__(self) -> int:
        return len(self.texts)

    @overload
    def __getitem__(self, index: int) -> ChoiceDelta: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChoiceDelta]: ...
    def __getitem__(self, index: int | slice) -> ChoiceDelta | list[ChoiceDelta]:
        return list(self)[index]

    def __iter__(self) -> Iterator[ChoiceDelta]:
        told = zip(self.texts, self.token_ids, self.scores, self.beam_scores, strict=True)
        for index, (text, token_ids, score, beam_score) in enumerate(told):
            yield ChoiceDelta(index, text, token_ids, None, self.finish_reason, self.stop_reason, score, beam_score)


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    predicted_tokens: int | None = None  # of the client's prediction, that were drafted and right; None: it made none
    mispredicted_tokens: int = 0  # and wrong


Source = Literal["blocks", "host", "file", "prefix_cache", "recompute"]


class Inheritance(msgspec.Struct, frozen=True):
    """What a continuation took over and what it had to compute; `source` is the costliest way that was used."""

    parent: str
    at: int
    inherited_tokens: int
    computed_tokens: int
    source: Source


@dataclass(frozen=True, slots=True)
class Retained:
    """A lease that was granted. `tokens` and `blocks` are those of all choices, shared ones counted once."""

    id: str
    expires_at: float  # seconds since 1970
    tokens: int
    blocks: int
    durable: bool | None = None  # whether it outlives the process; None: that was not asked for
    durable_reason: str | None = None  # why not


class Delta(msgspec.Struct, frozen=True, gc=False):
    """One delivery to one request: choices that moved since the last one, in index order.

    `first` marks the first delivery; it names every choice of the request, with what each has so far (maybe nothing).
    The last delivery has `usage`, or `error`, and nothing follows it.
    """

    request_id: str
    choices: Choices = ()
    first: bool = False
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # on the first delivery, if asked for
    cached_tokens: int = 0  # on the first delivery: of the prompt, that were found computed
    usage: Usage | None = None
    error: EngineError | None = None
    inheritance: Inheritance | None = None  # on the first delivery of a continuation
    retained: Retained | None = None  # on the last delivery, if a lease was asked for and granted
    retention_lost: str | None = None  # on the last delivery, if a lease was asked for and outgrew the budget: why
    hidden_states: ExtractedStates | None = None  # on the last delivery, if asked for

    @property
    def finished(self) -> bool:
        return self.usage is not None or self.error is not None


# Called on the event-loop thread for each Delta. It must not block, and it must not raise.
Sink = Callable[[Delta], None]
