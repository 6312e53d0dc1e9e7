"""Scoring: how likely each of some suffixes is behind one prompt. Nothing is sampled, and all of them share the prompt.

The leader computes the prompt, or inherits it. Each suffix is a candidate, a sequence of its own that forks the
prompt's blocks and computes the last prompt token and the suffix without its last token:

    leader       [ prompt .................... )
    candidate                               [ p | s0 | s1 ) s2        p tells of s0, s0 of s1, s1 of s2

So where the prompt is there, all suffixes that fit a step are scored in one. Candidates leave nothing behind; what
others may continue from is the prompt. One that has to give way begins again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bequest.engine._C import BlockPool, TokenList
from bequest.engine.errors import InternalError, InvalidRequest
from bequest.engine.state.prompt_logprobs import logprob_of
from bequest.engine.state.sequence import Applied, Begin, Group, Outcome, Room, Sequence, Status, Wish
from bequest.engine.state.step import Stretch
from bequest.engine.types import ChoiceDelta, ModelInfo, Request, StepResult, TokenLogprob
from bequest.engine.work.desk import Desk
from bequest.engine.work.reading import Reading


class Scoring(Reading):
    def __init__(self, group: Group, desk: Desk) -> None:
        super().__init__(group, desk)
        self._suffixes = group.request.suffixes
        self._waiting = deque(range(len(self._suffixes)))  # numbers of those that have not begun
        self._scores: list[list[TokenLogprob]] = [[] for _ in self._suffixes]
        self._num_left = len(self._suffixes)
        self._is_read = False  # the prompt is computed

    @classmethod
    def takes(cls, request: Request) -> bool:
        return bool(request.suffixes)

    @classmethod
    def check(cls, request: Request, info: ModelInfo, desk: Desk) -> None:
        """The prompt and a suffix must fit the cache by themselves."""
        needed, most = most_blocks(request, desk.pool), desk.blocks_beside_leases
        if needed > most:
            raise InvalidRequest(
                f"The prompt and its longest suffix may take {needed} cache blocks, but there are {most}.",
                reason="suffixes_too_large",
                field="suffixes",
                details={"needed_blocks": needed, "blocks": most},
            )

    @property
    def leader(self) -> Sequence:
        return self.group.sequences[0]

    def slots(self, sequence: Sequence) -> int:
        return int(sequence is self.leader)

    # --- steps ---------------------------------------------------------------------------------------------------

    def num_ready(self, sequence: Sequence) -> int:
        """A leader with suffixes to begin needs more than one token: streams come before it."""
        pending = sequence.planned_len - sequence.num_computed
        if sequence is self.leader and self._waiting and pending <= 1:
            return 1 + len(self._suffixes[self._waiting[0]])
        return pending

    def spare_blocks(self, sequence: Sequence) -> int:
        """A leader that has suffixes to begin is let in where there is room for one of them, too."""
        return candidate_blocks(self.group.request, self._desk.pool) if self._waiting else 0

    def most_passed(self, sequence: Sequence) -> int:
        """Candidates go on from the prompt without its last token. Those that run may have to begin again."""
        return sequence.num_prompt - 1 if sequence is self.leader and self._num_left else super().most_passed(sequence)

    def num_to_begin(self, sequence: Sequence) -> int:
        """Candidates go one after the other where there is no room for more."""
        return int(self._num_left > 0 and len(self.group.sequences) == 1)

    def num_to_compute(self, sequence: Sequence, num_computed: int) -> int:
        """Each candidate computes as many tokens as its suffix has."""
        return super().num_to_compute(sequence, num_computed) + sum(map(len, self._suffixes))

    def wishes(self, sequence: Sequence, room: Room) -> Iterator[Wish]:
        if sequence is self.leader:
            # Before the leader writes: a block that it copies in this step cannot be copied on in the same step.
            yield from self._begin_candidates(sequence, room)
        if sequence.status is Status.RUNNING:
            yield from super().wishes(sequence, room)

    def _begin_candidates(self, leader: Sequence, room: Room) -> Iterator[Wish]:
        """Those that fit, once all that they share was computed by steps before this one."""
        if not self._num_left:
            return
        shared, states = leader.num_prompt - 1, self._desk.states
        states.want(leader, shared)
        if leader.num_computed >= shared and leader.table.copyable(shared) < shared:
            return  # its last block comes from a file with this step, and cannot be copied on in the same one
        reserved = sum(map(_blocks_to_end, self.group.sequences[1:]))
        while self._waiting and states.can_fork(leader, shared) and room.budget > 0 and room.chunks_left > 1:
            if not self._has_room_beside(reserved):
                if len(self.group.sequences) == 1:
                    self._desk.preempt(leader)
                return
            candidate = self._candidate(leader, self._waiting.popleft())
            self.group.sequences.append(candidate)
            yield Begin(candidate)
            if candidate.num_computed < leader.num_prompt:
                # It found no room, and no other will in this step. If nobody runs, those who wait have the room:
                # whoever is let in alone gets it from them.
                if self._desk.is_alone(leader):
                    self._desk.preempt(leader)
                return
            reserved += _blocks_to_end(candidate)

    def _has_room_beside(self, reserved: int) -> bool:
        """For one more. If it took the blocks of those that run, it would begin in their place again and again; but the
        first one may. Where nobody else runs it needs all its room, too, or it would begin and give way for ever."""
        pool = self._desk.pool
        if pool.num_free >= reserved + candidate_blocks(self.group.request, pool):
            return True
        return len(self.group.sequences) == 1 and not self._desk.is_alone(self.leader)

    def _candidate(self, leader: Sequence, number: int) -> Sequence:
        shared = leader.num_prompt - 1
        table = leader.table.fork()
        table.truncate(shared)
        tokens = TokenList((*self.group.request.prompt_token_ids, *self._suffixes[number]))
        output = leader.output.sibling(number)
        candidate = Sequence(self.group, number + 1, tokens, table, output, self, shared, Status.RUNNING)
        candidate.planned_len = len(tokens) - 1  # nothing follows its last token
        self._desk.states.fork(leader, candidate)
        return candidate

    def leaves_cache(self, sequence: Sequence) -> bool:
        return sequence is self.leader

    def gives_way(self, sequence: Sequence) -> bool:
        if sequence is self.leader:
            return False
        self._scores[sequence.choice - 1].clear()
        self._waiting.appendleft(sequence.choice - 1)
        self._drop(sequence)
        return True

    def conclude(self, outcome: Outcome, sequence: Sequence, stretch: Stretch, start: int) -> None:
        end = stretch.begin + stretch.count
        if sequence is self.leader:
            if end == sequence.planned_len:
                outcome.expect(_PromptRead(self))
            return
        request, top = self.group.request, self.group.request.params.logprobs or 0
        targets = np.asarray(sequence.tokens[stretch.begin + 1 : end + 1], np.int32)
        number = outcome.score(request.id, start, targets, top)
        outcome.expect(_Scores(self, sequence, number, targets.tolist(), is_last=end == sequence.planned_len))

    # --- results -------------------------------------------------------------------------------------------------

    def take_scores(self, candidate: Sequence, scores: list[TokenLogprob], is_last: bool, applied: Applied) -> None:
        self._scores[candidate.choice - 1] += scores
        if is_last:
            self._num_left -= 1
            self._drop(candidate)
            self._end_if_done(applied)

    def note_read(self, applied: Applied) -> None:
        self._is_read = True
        self._end_if_done(applied)

    def _end_if_done(self, applied: Applied) -> None:
        leader = self.leader
        if self._num_left or not self._is_read or leader.status is Status.FINISHED:
            return
        if leader.num_computed == leader.num_prompt:  # else it gave its blocks up since, and reads the prompt again
            leader.output.finish("length", None)
            self._desk.finish(leader)
            applied.moved[self.group] = None

    def distrust(self) -> None:
        """The cache of the prompt or of a suffix may hold NaNs."""
        for candidate in self.group.sequences[1:]:
            candidate.table.uncommit(0)
        self._desk.distrust(self.leader)

    def _drop(self, candidate: Sequence) -> None:
        self._desk.leave(candidate)
        self.group.sequences.remove(candidate)
        self._desk.release_cross(self.group)  # it may have been the last that ran

    def abandon(self) -> None:
        for candidate in self.group.sequences[1:]:
            self._drop(candidate)

    # --- its answer ----------------------------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        return super().num_prompt_tokens + sum(map(len, self._suffixes))

    def take_deltas(self, first: bool) -> tuple[ChoiceDelta, ...]:
        """One choice for each suffix, when all are there."""
        if self.leader.status is not Status.FINISHED:
            return ()
        texts = self.leader.output.texts_of(self._suffixes)
        return tuple(
            ChoiceDelta(
                number,
                text,
                suffix,
                tuple(scores),
                "length",
                cumulative_logprob=sum(score.logprob for score in scores),
            )
            for number, (text, suffix, scores) in enumerate(zip(texts, self._suffixes, self._scores, strict=True))
        )


def _blocks_to_end(candidate: Sequence) -> int:
    return candidate.table.blocks_to_reach(candidate.num_computed, candidate.planned_len)


def candidate_blocks(request: Request, pool: BlockPool) -> int:
    """Of the longest suffix, beside what it shares with the leader."""
    shared, longest = len(request.prompt_token_ids) - 1, max(map(len, request.suffixes))
    return (-(-(shared + longest) // pool.block_size) - shared // pool.block_size) * pool.num_strips


def most_blocks(request: Request, pool: BlockPool) -> int:
    """That a leader and one candidate take."""
    encoder = 0 if request.encoder is None else -(-request.encoder.length // pool.block_size)
    prompt = -(-len(request.prompt_token_ids) // pool.block_size)
    return prompt * pool.num_strips + candidate_blocks(request, pool) + encoder


@dataclass(frozen=True, slots=True)
class _PromptRead:
    scoring: Scoring

    def apply(self, result: StepResult, applied: Applied) -> None:
        if not self.scoring.group.closed and self.scoring.group not in applied.failed:
            self.scoring.note_read(applied)


@dataclass(frozen=True, slots=True)
class _Scores:
    """A step tells log-probabilities of a candidate's tokens."""

    scoring: Scoring
    candidate: Sequence
    number: int  # in the result
    targets: list[int]
    is_last: bool

    def apply(self, result: StepResult, applied: Applied) -> None:
        group, arrays = self.scoring.group, result.prompt_logprobs[self.number]
        if group.closed or group in applied.failed or self.candidate.status is Status.FINISHED:
            return  # it gave way since, and begins again
        if np.isnan(arrays.chosen).any():
            self.scoring.distrust()
            applied.failed[group] = InternalError("The model produced NaN.", reason="not_a_number")
            return
        top = group.request.params.logprobs or 0
        scores = [logprob_of(arrays, i, token, top) for i, token in enumerate(self.targets)]
        self.scoring.take_scores(self.candidate, scores, self.is_last, applied)
