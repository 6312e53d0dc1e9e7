"""The answer of a search that is over: its best beams as choices. Owned by the event-loop thread.

Arrays and lists of all beams, until somebody wants one of them: a group of beams has as many choices as other requests
have tokens, and few of them are ever continued from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from bequest.engine.beams.search import NO_PLACE, BeamSearch, Ending, Finished, tuples_of
from bequest.engine.state.output import Output
from bequest.engine.types import (
    MAX_BEAM_WIDTH,
    BeamChoices,
    ChoiceDelta,
    Choices,
    FinishReason,
    IntArray,
    StopReason,
    TokenLogprob,
)

_NO_PLACES = np.full(MAX_BEAM_WIDTH, NO_PLACE, np.int32)


@dataclass(slots=True, eq=False)
class BeamAnswer:
    search: BeamSearch
    output: Output  # of the group's leader, which has no tokens
    deadline: bool  # it was cut off
    beams: list[Finished] | None  # best first; None: all ended in the last step, and nobody needs them one by one
    rows: IntArray  # of each beam: whose blocks it shares when it joins
    places: IntArray  # or where its own are
    token_ids: list[tuple[int, ...]]
    tokens: IntArray  # the same in one row
    scores: list[float]
    beam_scores: list[float]
    lengths: list[int] = field(init=False)  # of each beam, in tokens
    stopped: bool = field(init=False)  # a beam ended with an end token
    num_shown: list[int] = field(init=False)  # of the tokens of each, those that have text

    def __post_init__(self) -> None:
        ends, ids = self.search.stop_token_ids, self.token_ids
        self.num_shown = self.lengths = list(map(len, ids))
        self.stopped = bool(ends) and not ends.isdisjoint([tokens[-1] for tokens in ids])
        if self.stopped:
            hidden = {end for end in ends if not self.output.shows_end(end)}
            self.num_shown = [len(tokens) - (tokens[-1] in hidden) for tokens in ids]

    @classmethod
    def of(cls, search: BeamSearch, output: Output, deadline: bool) -> BeamAnswer:
        """Of the beams that have finished."""
        beams = search.best()
        rows = np.asarray([beam.blocks_of for beam in beams], np.int32)
        places = np.asarray([beam.place for beam in beams], np.int32)
        token_ids = search.tokens_of(beams)
        tokens = np.fromiter(chain.from_iterable(token_ids), np.int32)
        scores, beam_scores = [beam.score for beam in beams], [beam.beam_score for beam in beams]
        return cls(search, output, deadline, beams, rows, places, token_ids, tokens, scores, beam_scores)

    @classmethod
    def at_once(cls, search: BeamSearch, output: Output, ending: Ending) -> BeamAnswer:
        places, token_ids = _NO_PLACES[: len(ending.rows)], tuples_of(ending.paths)
        found = token_ids, ending.paths.reshape(-1), ending.scores, ending.beam_scores
        return cls(search, output, False, None, ending.rows, places, *found)

    @property
    def num_tokens(self) -> int:
        """Of all beams."""
        return len(self.tokens)

    @property
    def cut_short(self) -> bool:
        """Whether a beam ended for its length."""
        return not self.stopped or any(self.end_of(tokens[-1])[0] == "length" for tokens in self.token_ids)

    def end_of(self, token: int) -> tuple[FinishReason, StopReason]:
        """Of a beam with this last token."""
        if token in self.search.stop_token_ids:
            return "stop", token if token in self.search.params.stop_token_ids else None
        return "length", "deadline" if self.deadline else None

    def deltas(self) -> Choices:
        output = self.output
        shown, ids = self.token_ids, self.token_ids
        if not self.stopped and self.search.params.logprobs is None:  # mostly
            return BeamChoices(output.texts_of(ids), ids, self.scores, self.beam_scores, *self.end_of(-1))
        if self.stopped:
            shown = [tokens[:num] for tokens, num in zip(ids, self.num_shown, strict=True)]
        ends = [self.end_of(tokens[-1]) for tokens in ids]
        told = zip(output.texts_of(shown), ids, self._logprobs(), ends, self.scores, self.beam_scores, strict=True)
        return tuple(
            [
                ChoiceDelta(index, text, token_ids, logprobs, end[0], end[1], score, beam_score)
                for index, (text, token_ids, logprobs, end, score, beam_score) in enumerate(told)
            ]
        )

    def _logprobs(self) -> list[tuple[TokenLogprob, ...] | None]:
        if self.search.params.logprobs is None:
            return [None] * len(self.token_ids)
        assert self.beams is not None
        return [tuple(self.search.logprobs_of(beam)) for beam in self.beams]
