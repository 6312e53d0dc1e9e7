"""Search: a request whose beams step together, as Hugging Face's beam search does (engine/beams/search.py).

All beams of a group step together, and the group waits for the result of a step before the next is planned. Its one
sequence, the leader, stands for the best of them: it has that beam's tokens and all beams' counts, while the blocks of
all beams lie in BeamTables from the first result on. When beams change places, tables are forked: whole blocks by
reference, and the partly filled last one is copied by whoever writes to it first. A beam that has ended keeps its
blocks until the search is over, since the best ones become the group's choices, which others may continue from. They
become sequences only where there is more to do for each: a lease to hold, hidden states to compute.

A group that has to give way starts again from its prompt: its search is short, and its result the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bequest.engine._C import BeamTables, BlockPool, BlockTable, TokenList
from bequest.engine.beams.answers import BeamAnswer
from bequest.engine.beams.search import Alternatives, BeamSearch, Finished, Turn
from bequest.engine.errors import InternalError, InvalidRequest
from bequest.engine.state.capture import capture_of
from bequest.engine.state.output import Output
from bequest.engine.state.record import KeptBeams
from bequest.engine.state.sequence import Applied, Copies, Group, Kind, Outcome, Room, Sequence, Status, Wish
from bequest.engine.state.step import Stretch
from bequest.engine.types import (
    MAX_BEAM_CANDIDATES,
    BeamCandidates,
    BeamParams,
    BeamSpec,
    CatalogueSpec,
    Choices,
    LogprobArrays,
    ModelInfo,
    Request,
    StepResult,
)
from bequest.engine.work.beams_ahead import BeamsAhead
from bequest.engine.work.desk import Desk
from bequest.engine.work.owed import end
from bequest.engine.work.wanted_states import check_states


class Search(Kind):
    def __init__(self, group: Group, desk: Desk) -> None:
        self.group = group
        self._desk = desk
        self.search: BeamSearch | None = None  # while it searches
        self.beams: BeamTables | None = None  # the blocks of the running beams, from the first result on
        self._ahead = BeamsAhead(desk)
        self._gave_way = False
        self.answer: BeamAnswer | None = None  # of one that is over, where its choices are no sequences

    @classmethod
    def takes(cls, request: Request) -> bool:
        return request.params.beams is not None

    @classmethod
    def check(cls, request: Request, info: ModelInfo, desk: Desk) -> None:
        """All beams of a group run at once, so that it must fit the cache by itself."""
        width = _beams_of(request).width
        ends = len({*request.params.stop_token_ids, *info.eos_token_ids})
        if width * max(2, 1 + ends) > MAX_BEAM_CANDIDATES:
            raise InvalidRequest(
                f"{width} beams × (1 + {ends} end tokens) may be {MAX_BEAM_CANDIDATES} at most.",
                reason="too_many_ends",
                field="stop_token_ids",
                details={"limit": MAX_BEAM_CANDIDATES},
                width=width,
                ends=ends,
            )
        needed, most = most_blocks(request, desk.pool), desk.blocks_beside_leases
        if needed > most:
            raise InvalidRequest(
                f"{width} beams may take {needed} cache blocks, but there are {most}.",
                reason="beams_too_large",
                field="beams.width",
                details={"needed_blocks": needed, "blocks": most},
                width=width,
                max_tokens=request.params.max_tokens,
                prompt_tokens=len(request.prompt_token_ids),
            )
        if width > (limit := desk.states.most_choices(request)):
            raise InvalidRequest(
                f"{width} beams have more recurrent states than there is room for: {limit} can run.",
                reason="beams_of_states_too_many",
                field="beams.width",
                details={"limit": limit},
                width=width,
                limit=limit,
            )
        check_states(request, info)

    # --- its beginning -------------------------------------------------------------------------------------------

    def begin(self, output: Output) -> None:
        request = self.group.request
        leader = self._new_leader(output)
        if request.states_of_encoder:
            leader.capture = capture_of(request)

    def _new_leader(self, output: Output) -> Sequence:
        params = self.group.request.params
        stops = set(params.stop_token_ids)
        if params.ends_at_eos:
            stops.update(self._desk.eos_token_ids)
        self.search, self.forked, self.takes_beams = BeamSearch.start(params, frozenset(stops)), False, True
        tokens = TokenList(self.group.request.prompt_token_ids)
        leader = Sequence(self.group, 0, tokens, BlockTable(self._desk.pool, self.group.salt), output, self)
        first = None if params.rules is None else params.rules.opening(params.max_tokens)
        if first is not None:  # the search notes it on its own
            leader.accept_known(first)
        self.group.sequences = [leader]
        return leader

    @property
    def num_slots(self) -> int:
        return _beams_of(self.group.request).width

    @property
    def num_to_enter(self) -> int:
        """One whose search is over only waits to go on with the hidden states of a choice."""
        return self.num_slots if self.takes_beams else 1

    def slots(self, sequence: Sequence) -> int:
        return self.num_slots

    def growth(self, sequence: Sequence) -> int:
        return self.num_rows(sequence)

    def spare_blocks(self, sequence: Sequence) -> int:
        """One that gave way is let in where all its beams have room: it would find too little once more, since those
        who wait may keep theirs as long as it runs."""
        if not self._gave_way or self.search is None:
            return 0
        request, pool = self.group.request, self._desk.pool
        encoder = 0 if request.encoder is None else -(-request.encoder.length // pool.block_size)
        prompt = -(-len(request.prompt_token_ids) // pool.block_size)
        return most_blocks(request, pool) - encoder - prompt * pool.num_strips

    # --- steps ---------------------------------------------------------------------------------------------------

    def num_ready(self, sequence: Sequence) -> int:
        if self._ahead.can_follow(self.search, sequence):
            return 1
        most_len = sequence.num_prompt + self.group.request.params.max_tokens
        if sequence.planned_len < most_len or sequence.num_computed < sequence.num_prompt:
            return sequence.planned_len - sequence.num_computed
        return 0

    def wishes(self, sequence: Sequence, room: Room) -> Iterator[Wish]:
        """Every beam computes its next token, or none; a group wider than what is left has a step to itself."""
        if room.beams_left <= 0:
            return  # as many as a step ranks
        search = self.search
        if search is not None and not sequence.num_pending:  # it is ready, since it can follow
            fits = room.empty or search.width <= min(room.budget, room.beams_left)
            if fits and self._ahead.try_follow(search, self.beams, sequence, room):
                yield Stretch(sequence.num_computed, 1)
        elif self.beams is None:
            count = room.most_tokens(sequence)
            if count > 0:
                yield Stretch(sequence.num_computed, count)
        elif room.empty or len(self.beams) <= min(room.budget, room.beams_left):
            yield Stretch(sequence.num_computed, 1)

    def blocks_needed(self, sequence: Sequence, stretch: Stretch) -> int:
        if self.beams is None:
            return super().blocks_needed(sequence, stretch)
        return self.beams.blocks_needed(stretch.begin)

    def try_write(self, sequence: Sequence, stretch: Stretch) -> Copies | None:
        if self._ahead.step is not None:
            return self._ahead.step.copies
        if self.beams is None:
            return super().try_write(sequence, stretch)
        return self.beams.try_prepare_write(stretch.begin)

    @property
    def _planned_beams(self) -> BeamTables | None:
        return self.beams if self._ahead.step is None else self._ahead.step.tables

    def tables(self, sequence: Sequence) -> BlockTable | BeamTables:
        beams = self._planned_beams
        return sequence.table if beams is None else beams

    def num_rows(self, sequence: Sequence) -> int:
        beams = self._planned_beams
        return 1 if beams is None else len(beams)

    def num_beams(self, sequence: Sequence) -> int:
        return self.num_rows(sequence)

    def borrow(self, sequence: Sequence) -> BlockTable:
        return sequence.table.fork() if self.beams is None else self.beams.fork(0)

    def count_blocks(self, sequence: Sequence) -> tuple[int, int]:
        if self.beams is None:
            return super().count_blocks(sequence)
        best = self.beams.fork(0)  # beams share what they have
        num = len(best)
        best.free()
        return num, num

    def conclude(self, outcome: Outcome, sequence: Sequence, stretch: Stretch, start: int) -> None:
        if stretch.begin + stretch.count < sequence.planned_len:
            return
        search = self.search
        assert search is not None
        self.forked = True
        last = start + stretch.count - 1
        tokens = range(last, last + (search.num_running if self._ahead.step is None else search.width))
        assert tokens.stop == start + stretch.count * self.num_rows(sequence)
        expected = _Candidates(self, search)
        expected.number = outcome.rank(tokens, expected.spec, self.group.request.params.logprobs)
        self._ahead.note_launched(expected.number)
        outcome.expect(expected)

    def spec(self, first_sample: int) -> BeamSpec:
        search, params, catalogue, ahead = self.search, self.group.request.params, None, self._ahead.step
        assert search is not None
        scores, nodes, length = search.scores, search.nodes, search.length
        if ahead is not None:
            scores, length = np.zeros(search.width, np.float32), length + 1
            nodes = None if nodes is None else np.zeros(search.width, np.int32)
        if params.catalogue is not None:
            ends = tuple(sorted(search.stop_token_ids))
            catalogue = CatalogueSpec(handle=self._desk.handle_of(params.catalogue), end_token_ids=ends)
        return BeamSpec(
            request_id=self.group.request.id,
            first_sample=first_sample,
            scores=scores,
            num_candidates=search.num_candidates,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            held_back=search.forbidden_behind(length),
            catalogue=catalogue,
            nodes=nodes,
            following=None if ahead is None else ahead.following,
        )

    def gives_way(self, sequence: Sequence) -> bool:
        """As a whole: it searches anew from its prompt."""
        if not self.forked:
            return False
        self._gave_way = True
        group, capture = self.group, sequence.capture
        self._drop(sequence)
        self._new_leader(sequence.output).capture = capture
        group.times.first_token = None  # whoever cuts it now gets nothing
        sequence.last_token_at = 0.0
        self._desk.queue(group.sequences[0])
        self._desk.release_cross(group)
        return True

    # --- results -------------------------------------------------------------------------------------------------

    def is_at(self, search: BeamSearch) -> bool:
        """Whether a step that was launched for `search` still concerns it: one that started again has another."""
        return self.search is search

    def advance(self, candidates: BeamCandidates, tops: list[Alternatives] | None) -> None:
        """A result brings candidates: beams change places, or the search is over."""
        assert self.search is not None
        self._ahead.note_result()
        if self.beams is None:  # from now on the leader's blocks are those of the first beam
            self.beams = BeamTables(self.group.sequences[0].table)
            self._desk.states.begin_beams(self.group.sequences[0])
        self._desk.states.settle_beams(self.group.sequences[0])
        search, wants_logprobs = self.search, self.group.request.params.logprobs is not None
        if search.ends_at_once and self._ends_as_one and not wants_logprobs and len(candidates.tokens):
            output = self.group.sequences[0].output
            self._end_as_one(BeamAnswer.at_once(search, output, search.ended_by(candidates)))
        else:
            self._take_turn(search, search.advance(candidates, tops))

    def distrust(self) -> None:
        self._desk.distrust(self.group.sequences[0])

    def cut(self) -> None:
        if self.search is not None:
            self._take_turn(self.search, self.search.cut(), deadline=True)

    def _take_turn(self, search: BeamSearch, turn: Turn, deadline: bool = False) -> None:
        if not turn.done:
            self._keep_ended(turn)
            self._reorder(search, turn)
            return
        answer = BeamAnswer.of(search, self.group.sequences[0].output, deadline)
        if answer.beams and self._ends_as_one:
            self._end_as_one(answer)
            return
        self.search, self.takes_beams = None, False
        leader = self.group.sequences[0]
        self._keep_ended(turn)
        choices = self._choices(leader, answer)
        self._drop(leader)
        self.group.sequences = choices
        for choice in choices:
            self._desk.run(choice)
        for choice in choices:
            end(choice, self._desk)

    def _end_as_one(self, answer: BeamAnswer) -> None:
        """Its choices are no sequences: they are kept and delivered together."""
        self.search, self.takes_beams = None, False
        leader = self.group.sequences[0]
        self._desk.keep_beams(self.group, self._estates(leader, answer))
        self._drop(leader)
        self.answer = answer
        self._desk.release_cross(self.group)

    def _keep_ended(self, turn: Turn) -> None:
        """Beams that ended in this step share the blocks of those they came from; those they displaced give theirs
        back."""
        beams = self.beams
        assert beams is not None
        leader, states = self.group.sequences[0], self._desk.states
        if turn.finished:
            rows = np.asarray([ended.blocks_of for ended in turn.finished], np.int32)
            first = beams.end(rows)
            states.end_beams(leader, rows, first)
            for place, ended in enumerate(turn.finished, first):
                ended.place = place
        for dropped in turn.dropped:
            beams.take_ended(dropped.place).free()
            states.take_ended(leader, dropped.place, None)

    def _reorder(self, search: BeamSearch, turn: Turn) -> None:
        """Each surviving beam gets its blocks, and the leader the tokens of the best."""
        assert self.beams is not None
        leader, ahead = self.group.sequences[0], self._ahead.take()
        if ahead is None:
            self.beams.reorder(turn.parents, turn.tokens)
        else:
            ahead.tables.succeed(self.beams, turn.tokens)
            self.beams = ahead.tables
        self._desk.states.reorder_beams(leader, turn.parents)
        if turn.parents[0] != 0:
            leader.tokens.truncate(leader.num_prompt)
            leader.tokens.extend(search.path_of(0)[:-1])
        if ahead is None:
            leader.accept_known(int(turn.tokens[0]))
        else:
            leader.num_in_flight -= 1
            leader.accept(int(turn.tokens[0]))

    # --- its end -------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Its best beam stands for what was computed."""
        if self.beams is not None:
            self.group.sequences[0].table = self.beams.fork(0)
        self._drop_beams()

    def _drop(self, leader: Sequence) -> None:
        """The leader goes, with all beams."""
        self._desk.leave(leader)
        self._drop_beams()

    def _drop_beams(self) -> None:
        self._ahead.drop()
        if self.beams is not None:
            self.beams.free()
            self.beams = None

    @property
    def _ends_as_one(self) -> bool:
        """Whether the answer can be kept and delivered without a sequence for each of its choices."""
        record = self.group.ties.record
        leased = record is not None and record.lease.ttl is not None
        return not leased and self.group.request.hidden_states is None

    def _estates(self, leader: Sequence, answer: BeamAnswer) -> KeptBeams:
        """What the beams of an answer leave to those who continue from them, the tokens of the leader too."""
        assert self.beams is not None
        prompt, before = leader.tokens, leader.num_prompt - 1
        prompt.truncate(leader.num_prompt)
        # Those that ended in the last step have no tables of their own, but those of the running ones.
        lengths = np.asarray(answer.lengths, np.int32)
        epochs = self.beams.epochs(places=answer.places, rows=answer.rows, num_tokens=lengths + np.int32(before))
        return KeptBeams(prompt, self.group.salt, answer.tokens, lengths, answer.num_shown, epochs)

    def _choices(self, leader: Sequence, answer: BeamAnswer) -> list[Sequence]:
        """The best beams as the complete choices of the group, best first."""
        leader.tokens.truncate(leader.num_prompt)
        assert self.beams is not None and answer.beams is not None
        choices: list[Sequence] = []
        for index, (ended, generated) in enumerate(zip(answer.beams, answer.token_ids, strict=True)):
            tokens = leader.tokens.fork(generated)
            # Beams that were given up on the way have states that nobody wants: those of the best are computed at the
            # end. An encoder's are all the same, and may be here already.
            first = choices[0].capture if choices else leader.capture
            choice = Sequence(
                self.group,
                index,
                tokens,
                self.beams.take_ended(ended.place),
                _output(leader.output, index, answer, ended, list(generated)),
                self,
                num_computed=len(tokens) - 1,
                status=Status.RUNNING,
                capture=capture_of(self.group.request) if first is None else first.sibling(),
            )
            choice.num_output = len(generated)
            self._desk.states.take_ended(leader, ended.place, choice)
            choices.append(choice)
        return choices

    # --- its answer ----------------------------------------------------------------------------------------------

    @property
    def completion_tokens(self) -> int:
        return super().completion_tokens if self.answer is None else self.answer.num_tokens

    @property
    def cut_short(self) -> bool:
        return super().cut_short if self.answer is None else self.answer.cut_short

    def take_deltas(self, first: bool) -> Choices:
        if self.answer is None:
            return super().take_deltas(first)
        return self.answer.deltas()


def _beams_of(request: Request) -> BeamParams:
    assert request.params.beams is not None
    return request.params.beams


def most_blocks(request: Request, pool: BlockPool) -> int:
    """Running and ended beams each have a tail of their own; copies are made before what they replace is free."""
    prompt, width, size = len(request.prompt_token_ids), _beams_of(request).width, pool.block_size
    shared = prompt // size
    tail = -(-(prompt + request.params.max_tokens) // size) - shared
    cross = 0 if request.encoder is None else -(-request.encoder.length // size)
    return (shared + 2 * width * tail + width) * pool.num_strips + cross


@dataclass(slots=True)
class _Candidates:
    """A step brings the best continuations of a group's beams."""

    kind: Search
    search: BeamSearch
    number: int = 0  # in the result
    first_sample: int = 0  # of the step: its beams'

    def spec(self, first_sample: int) -> BeamSpec:
        self.first_sample = first_sample
        return self.kind.spec(first_sample)

    def apply(self, result: StepResult, applied: Applied) -> None:
        kind, group, candidates = self.kind, self.kind.group, result.beams[self.number]
        if group.closed or not kind.is_at(self.search):
            return
        if candidates.bad:
            kind.distrust()
            applied.failed[group] = InternalError("The model produced NaN.", reason="not_a_number")
            return
        leader, num_beams = group.sequences[0], self.search.num_running
        if before := leader.last_token_at or group.times.first_token:
            leader.last_token_at = applied.now
            applied.inter_token_seconds.append(applied.now - before)
        else:
            applied.note_first(leader)
        kind.advance(candidates, self._alternatives(result.logprobs, num_beams))
        if not group.sequences:
            applied.failed[group] = InvalidRequest(
                "No beam could be completed: nothing is allowed to follow.", reason="no_beam"
            )
        elif not kind.is_at(self.search):
            applied.num_generated += kind.completion_tokens
            if group.finished:
                applied.moved[group] = None

    def _alternatives(self, arrays: LogprobArrays | None, num_beams: int) -> list[Alternatives] | None:
        """The likeliest tokens of each beam, if its request wants them."""
        top = self.search.params.logprobs
        if not top or arrays is None:
            return None
        rows = range(self.first_sample, self.first_sample + num_beams)
        return [tuple(zip(arrays.top_ids[i, :top].tolist(), arrays.top[i, :top].tolist(), strict=True)) for i in rows]


def _output(first: Output, index: int, answer: BeamAnswer, ended: Finished, token_ids: list[int]) -> Output:
    search = answer.search
    logprobs = None if search.params.logprobs is None else search.logprobs_of(ended)
    output = first.whole_sibling(index, token_ids, answer.num_shown[index], logprobs)
    output.set_beam(ended.score, ended.beam_score)
    output.finish(*answer.end_of(ended.token))
    return output
