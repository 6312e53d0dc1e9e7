"""Beam search of one request, as Hugging Face's generate(num_beams=…) defines it: which beams live on, which are done.

Pure: candidates in, decisions out. Who owns which blocks is the scheduler's affair; scores are float32, as there.

A step offers the best `num_candidates` continuations of all running beams, best first. One that ends (an end token, or
the last length) leaves the race, and counts as finished if it is among the first `width`; the best `width` of the
others run on. A finished beam's score is its summed log-probability divided by length^length_penalty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from engine.catalogue import ROOT
from engine.types import BeamCandidates, SamplingParams

Alternatives = tuple[tuple[int, float], ...]  # (token, log-probability), best first


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """The tokens of a beam, last one first: beams share their beginnings."""

    before: Path | None
    token: int
    logprob: float  # the raw model's
    top: Alternatives = ()

    def steps(self) -> list[Path]:
        """Its tokens in the order of the text."""
        steps = list(self._backwards())
        steps.reverse()
        return steps

    def _backwards(self) -> Iterator[Path]:
        path: Path | None = self
        while path is not None:
            yield path
            path = path.before


@dataclass(frozen=True, slots=True)
class Beam:
    path: Path | None  # None: nothing generated yet
    score: np.float32  # summed log-probability
    node: int = ROOT  # of the catalogue, if there is one


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    path: Path
    score: np.float32  # summed log-probability
    beam_score: np.float32  # with the length penalty
    parent: int  # the running beam it came from, at the step it ended in


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step led to. Parents are numbered as the running beams were before it."""

    survivors: tuple[tuple[int, int], ...]  # (parent, token) of each beam that runs on, best first
    finished: tuple[Finished, ...]  # that joined the finished ones in this step
    dropped: tuple[Finished, ...]  # that had to leave them for better ones
    done: bool


@dataclass(slots=True)
class BeamSearch:
    params: SamplingParams
    stop_token_ids: frozenset[int]  # end tokens among them, unless they are ignored
    running: list[Beam] = field(default_factory=lambda: [Beam(None, np.float32(0.0))])
    finished: list[Finished] = field(default_factory=list)  # best first, at most `width`
    length: int = 0  # tokens generated

    @classmethod
    def start(cls, params: SamplingParams, stop_token_ids: frozenset[int]) -> BeamSearch:
        """With the token that the model forces to be first, if there is one; it costs nothing."""
        first = None if params.rules is None else params.rules.opening(params.max_tokens)
        if first is None:
            return cls(params, stop_token_ids)
        return cls(params, stop_token_ids, [Beam(Path(None, first, 0.0), np.float32(0.0))], length=1)

    @property
    def width(self) -> int:
        assert self.params.beams is not None
        return self.params.beams.width

    @property
    def num_candidates(self) -> int:
        """Enough for `width` beams to run on even if every beam could end in each of the stop tokens."""
        return max(2, 1 + len(self.stop_token_ids)) * self.width

    @property
    def scores(self) -> np.ndarray:
        return np.asarray([beam.score for beam in self.running], dtype=np.float32)

    @property
    def may_end(self) -> bool:
        """Whether the next token may be an end token."""
        return self.length >= self.params.min_tokens

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that must not come next."""
        tokens = set() if self.may_end else set(self.stop_token_ids)
        rules = self.params.rules
        if rules is not None:
            tokens.update(rules.never)
            if self.length == (rules.opening(self.params.max_tokens) is not None):
                tokens.update(rules.not_first)
        return tuple(sorted(tokens))

    def advance(self, candidates: BeamCandidates, tops: list[Alternatives] | None = None) -> Turn:
        """Takes the candidates of a step, best first, and the likeliest tokens of each running beam, if wanted."""
        self.length += 1
        last = self.length >= self.params.max_tokens
        rules = self.params.rules
        if last and rules is not None and (token := rules.closing(self.params.max_tokens)) is not None:
            candidates = self._all_end_in(token)
        survivors: list[tuple[int, int]] = []
        beams: list[Beam] = []
        ended: list[Finished] = []
        continues = False
        offered = zip(
            candidates.rows.tolist(),
            candidates.tokens.tolist(),
            candidates.scores,
            candidates.logprobs.tolist(),
            strict=True,
        )
        for rank, (parent, token, score, logprob) in enumerate(offered):
            path = Path(self.running[parent].path, token, logprob, tops[parent] if tops else ())
            if last or token in self.stop_token_ids:
                if rank < self.width:
                    ended.append(Finished(path, score, self._penalised(score, self.length), parent))
                continue
            continues = True
            if len(beams) < self.width:
                survivors.append((parent, token))
                beams.append(Beam(path, score, self._step_down(parent, token)))
        joined, dropped = self._merge(ended)
        self.running = beams
        return Turn(tuple(survivors), joined, dropped, done=not continues or self._is_done())

    @property
    def nodes(self) -> np.ndarray | None:
        """Where the running beams stand in the catalogue."""
        if self.params.catalogue is None:
            return None
        return np.asarray([beam.node for beam in self.running], dtype=np.int32)

    def cut(self) -> Turn:
        """Ends the search where it stands: the running beams count as finished."""
        beams = [(i, b.path, b.score) for i, b in enumerate(self.running) if b.path is not None]
        ended = [Finished(path, score, self._penalised(score, self.length), i) for i, path, score in beams]
        joined, dropped = self._merge(ended)
        return Turn((), joined, dropped, done=True)

    def best(self) -> list[Finished]:
        """The answer: the n best, best first; fewer if not as many could be completed."""
        return self.finished[: self.params.n]

    def _all_end_in(self, token: int) -> BeamCandidates:
        """The model forces the last token, at no cost: the running beams, best first, are all that there is."""
        num = len(self.running)
        return BeamCandidates(
            self.scores, np.arange(num, dtype=np.int32), np.full(num, token, np.int32), np.zeros(num, np.float32)
        )

    def _step_down(self, parent: int, token: int) -> int:
        catalogue = self.params.catalogue
        return ROOT if catalogue is None else catalogue.child(self.running[parent].node, token)

    def _merge(self, ended: list[Finished]) -> tuple[tuple[Finished, ...], tuple[Finished, ...]]:
        if not ended:
            return (), ()
        before = set(self.finished)
        ranked = sorted([*self.finished, *ended], key=lambda f: -f.beam_score)
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
        best = self._penalised(self.running[0].score, self.params.max_tokens if hopeful else self.length)
        return not best > self.finished[-1].beam_score

    def _penalised(self, score: np.float32, length: int) -> np.float32:
        assert self.params.beams is not None
        return np.float32(score / np.float32(length**self.params.beams.length_penalty))
