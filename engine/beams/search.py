"""Beam search of one request, as Hugging Face's generate(num_beams=…) defines it: which beams live on, which are done.

Pure: candidates in, decisions out. Who owns which blocks is the scheduler's affair; scores are float32, as there.

A step offers the best `num_candidates` continuations of all running beams, best first. One that ends (an end token, or
the last length) leaves the race, and counts as finished if it is among the first `width`; the best `width` of the
others run on. A finished beam's score is its summed log-probability divided by length^length_penalty.

Beams are rows of arrays, one array per step: a search makes no object per beam before the beam is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np

from bequest.engine.types import BeamCandidates, FloatArray, IntArray, SamplingParams, TokenLogprob
from bequest.engine.types.catalogue import ROOT

NO_PLACE = -1  # blocks that are those of a running beam
Alternatives = tuple[tuple[int, float], ...]  # (token, log-probability), best first


class _Generation(msgspec.Struct, frozen=True):
    """The beams that ran on after a step, best first."""

    parents: IntArray  # [B] their numbers before the step
    tokens: IntArray  # [B]
    logprobs: FloatArray  # [B]
    tops: list[Alternatives] | None  # of each beam before the step


class Finished(msgspec.Struct, eq=False, gc=False):
    """A complete beam."""

    blocks_of: int  # the running beam whose blocks it shares when it joins
    parent: int  # the running beam that its last token continued
    length: int  # in tokens, with the last
    token: int
    logprob: float  # of the last token
    top: Alternatives  # likewise
    score: float  # summed log-probability
    beam_score: float  # with the length penalty
    place: int = NO_PLACE  # of its blocks among those of ended beams (BeamTables), when it has joined


class Ending(msgspec.Struct, frozen=True):
    """Complete beams that all ended in the last step, best first."""

    rows: IntArray  # [B] the running beams that they continued
    paths: IntArray  # [B, L] their tokens
    scores: list[float]  # summed log-probabilities
    beam_scores: list[float]  # with the length penalty


class Turn(msgspec.Struct, frozen=True):
    """What a step led to. Parents are numbered as the running beams were before it."""

    parents: IntArray  # [B] of each beam that runs on, best first
    tokens: IntArray  # [B]
    finished: tuple[Finished, ...]  # that joined the finished ones in this step
    dropped: tuple[Finished, ...]  # that had to leave them for better ones
    done: bool


def tuples_of(paths: IntArray) -> list[tuple[int, ...]]:
    """The rows of [B, L]. Tuples: unlike lists, the collector of cycles looks at them once."""
    return list(zip(*paths.T.tolist(), strict=True))


_NOTHING = np.empty(0, np.int32)
_START = np.zeros(1, np.float32)
_START.setflags(write=False)
_BY_SCORE = attrgetter("beam_score")


@dataclass(slots=True)
class BeamSearch:
    params: SamplingParams
    stop_token_ids: frozenset[int]  # end tokens among them, unless they are ignored
    scores: FloatArray = field(default_factory=lambda: _START)  # [B] summed, of the running beams
    nodes: IntArray | None = None  # [B] where they stand in the catalogue, if there is one
    finished: list[Finished] = field(default_factory=list)  # best first, at most `width`
    _generations: list[_Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.params.catalogue is not None:
            self.nodes = np.asarray([ROOT], np.int32)

    @property
    def length(self) -> int:
        """Tokens of a running beam."""
        return len(self._generations)

    @property
    def num_running(self) -> int:
        return len(self.scores)

    @classmethod
    def start(cls, params: SamplingParams, stop_token_ids: frozenset[int]) -> BeamSearch:
        """With the token that the model forces to be first, if there is one; it costs nothing."""
        first = None if params.rules is None else params.rules.opening(params.max_tokens)
        if first is None:
            return cls(params, stop_token_ids)
        forced = _Generation(np.zeros(1, np.int32), np.asarray([first], np.int32), np.zeros(1, np.float32), None)
        return cls(params, stop_token_ids, _generations=[forced])

    @property
    def width(self) -> int:
        assert self.params.beams is not None
        return self.params.beams.width

    @property
    def num_candidates(self) -> int:
        """Enough for `width` beams to run on even if every beam could end in each of the stop tokens."""
        return max(2, 1 + len(self.stop_token_ids)) * self.width

    @property
    def may_end(self) -> bool:
        """Whether the next token may be an end token."""
        return self._may_end_behind(self.length)

    def _may_end_behind(self, length: int) -> bool:
        return length >= self.params.min_tokens

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that must not come next."""
        return self.forbidden_behind(self.length)

    def forbidden_behind(self, length: int) -> tuple[int, ...]:
        """Tokens that must not come behind so many."""
        tokens = set() if self._may_end_behind(length) else set(self.stop_token_ids)
        rules = self.params.rules
        if rules is not None:
            tokens.update(rules.never)
            if length == (rules.opening(self.params.max_tokens) is not None):
                tokens.update(rules.not_first)
        return tuple(sorted(tokens)) if tokens else ()

    def path_of(self, beam: int) -> list[int]:
        """The tokens of a running beam."""
        return [int(g.tokens[i]) for g, i in self._ancestry(beam, self.length)]

    def tokens_of(self, ended: Sequence[Finished]) -> list[tuple[int, ...]]:
        """The tokens of each of them."""
        lengths = {f.length for f in ended}
        if len(lengths) == 1:  # mostly: all ended for their length
            return self._tokens_alike(ended, *lengths)
        tokens: dict[Finished, tuple[int, ...]] = {}
        for length in lengths:
            alike = [f for f in ended if f.length == length]
            tokens.update(zip(alike, self._tokens_alike(alike, length), strict=True))
        return [tokens[f] for f in ended]

    def _tokens_alike(self, ended: Sequence[Finished], length: int) -> list[tuple[int, ...]]:
        last = np.asarray([f.token for f in ended], np.int32)
        parents = np.asarray([f.parent for f in ended], np.int32)
        return tuples_of(self._paths(parents, last, length))

    def _paths(self, beams: IntArray, last: IntArray, length: int) -> IntArray:
        """[B, length] of these beams, each with a last token behind it."""
        paths = np.empty((len(last), length), np.int32)
        paths[:, length - 1] = last
        for place in range(length - 2, -1, -1):
            generation = self._generations[place]
            paths[:, place] = generation.tokens.take(beams)
            if place:
                beams = generation.parents.take(beams)
        return paths

    def logprobs_of(self, ended: Finished) -> list[TokenLogprob]:
        """Of its tokens; ranks are not known."""
        known = [
            TokenLogprob(int(g.tokens[i]), float(g.logprobs[i]), 0, g.tops[g.parents[i]] if g.tops else ())
            for g, i in self._ancestry(ended.parent, ended.length - 1)
        ]
        return [*known, TokenLogprob(ended.token, ended.logprob, 0, ended.top)]

    def advance(self, candidates: BeamCandidates, tops: list[Alternatives] | None = None) -> Turn:
        """Takes the candidates of a step, best first, and the likeliest tokens of each running beam, if wanted."""
        rules = self.params.rules
        closing = None if rules is None else rules.closing(self.params.max_tokens)
        if closing is not None and self.length + 1 == self.params.max_tokens:
            candidates = self._all_end_in(closing)
        ends, goes_on = self._divide(candidates.tokens)
        ended = self._end(candidates, ends, self.length + 1, tops)
        parents, tokens = candidates.rows[goes_on], candidates.tokens[goes_on]
        self._generations.append(_Generation(parents, tokens, candidates.logprobs[goes_on], tops))
        self.scores = candidates.scores[goes_on]
        if self.nodes is not None and self.params.catalogue is not None:
            self.nodes = self.params.catalogue.child_of_each(self.nodes[parents], tokens)
        joined, dropped = self._merge(ended)
        return Turn(parents, tokens, joined, dropped, done=not len(parents) or self._is_done())

    def cut(self) -> Turn:
        """Ends the search where it stands: the running beams count as finished."""
        ended: list[Finished] = []
        if self.length:
            last = self._generations[-1]
            everyone = BeamCandidates(scores=self.scores, rows=last.parents, tokens=last.tokens, logprobs=last.logprobs)
            ended = self._end(everyone, range(self.num_running), self.length, last.tops)
            for beam, finished in enumerate(ended):
                finished.blocks_of = beam
        joined, dropped = self._merge(ended)
        return Turn(_NOTHING, _NOTHING, joined, dropped, done=True)

    @property
    def ends_at_once(self) -> bool:
        """Whether the next candidates are the answer as they are: all end for their length, and none has before."""
        rules = self.params.rules
        closes = rules is not None and rules.closing(self.params.max_tokens) is not None
        return self.length + 1 >= self.params.max_tokens and not self.finished and not closes

    def ended_by(self, candidates: BeamCandidates) -> Ending:
        """The answer: of the last candidates the n best. REQUIRES: ends_at_once"""
        best = slice(0, min(self.params.n, self.width))
        rows, tokens, scores = candidates.rows[best], candidates.tokens[best], candidates.scores[best]
        return Ending(
            rows=rows,
            paths=self._paths(rows, tokens, self.length + 1),
            scores=scores.tolist(),
            beam_scores=self._penalised(scores, self.length + 1).tolist(),
        )

    def best(self) -> list[Finished]:
        """The answer: the n best, best first; fewer if not as many could be completed."""
        return self.finished[: self.params.n]

    def _all_end_in(self, token: int) -> BeamCandidates:
        """The model forces the last token, at no cost: the running beams, best first, are all that there is."""
        num = self.num_running
        return BeamCandidates(
            scores=self.scores,
            rows=np.arange(num, dtype=np.int32),
            tokens=np.full(num, token, np.int32),
            logprobs=np.zeros(num, np.float32),
        )

    def _divide(self, tokens: IntArray) -> tuple[list[int], slice | list[int]]:
        """The candidates that count as finished, and those that run on."""
        if self.length + 1 >= self.params.max_tokens:
            return list(range(min(self.width, len(tokens)))), slice(0, 0)
        offered = tokens.tolist() if self.stop_token_ids else ()
        if self.stop_token_ids.isdisjoint(offered):
            return [], slice(0, self.width)
        ends = [rank for rank, token in enumerate(offered[: self.width]) if token in self.stop_token_ids]
        goes_on = [rank for rank, token in enumerate(offered) if token not in self.stop_token_ids]
        return ends, goes_on[: self.width]

    def _end(
        self, candidates: BeamCandidates, ends: Sequence[int], length: int, tops: list[Alternatives] | None
    ) -> list[Finished]:
        if not ends:
            return []
        chosen = np.asarray(ends)
        scores = candidates.scores[chosen]
        ended = zip(
            candidates.rows[chosen].tolist(),
            candidates.tokens[chosen].tolist(),
            candidates.logprobs[chosen].tolist(),
            scores.tolist(),
            self._penalised(scores, length).tolist(),
            strict=True,
        )
        return [
            Finished(row, row, length, token, logprob, tops[row] if tops else (), score, beam_score)
            for row, token, logprob, score, beam_score in ended
        ]

    def _ancestry(self, beam: int, length: int) -> list[tuple[_Generation, int]]:
        """A beam's number in each of the first `length` generations, where it has this number in the last of them."""
        line = []
        for generation in reversed(self._generations[:length]):
            line.append((generation, beam))
            beam = int(generation.parents[beam])
        line.reverse()
        return line

    def _merge(self, ended: list[Finished]) -> tuple[tuple[Finished, ...], tuple[Finished, ...]]:
        if not ended:
            return (), ()
        if not self.finished and len(ended) <= self.width:
            self.finished = sorted(ended, key=_BY_SCORE, reverse=True)
            return tuple(self.finished), ()
        before = set(self.finished)
        ranked = sorted([*self.finished, *ended], key=_BY_SCORE, reverse=True)
        self.finished, left = ranked[: self.width], ranked[self.width :]
        return tuple(f for f in self.finished if f not in before), tuple(f for f in left if f in before)

    def _is_done(self) -> bool:
        assert self.params.beams is not None
        rule = self.params.beams.early_stopping
        if len(self.finished) < self.width:
            return False
        if rule is True:
            return True
        hopeful = rule == "never" and self.params.beams.length_penalty > 0
        best = self._penalised(self.scores[:1], self.params.max_tokens if hopeful else self.length)
        return not float(best[0]) > self.finished[-1].beam_score

    def _penalised(self, scores: FloatArray, length: int) -> FloatArray:
        assert self.params.beams is not None
        return scores / np.float32(length**self.params.beams.length_penalty)
