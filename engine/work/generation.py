"""Generation: tokens are sampled, one choice beside the other, until each has its end.

Choices share the prompt and part ways where it ends. A drafter may guess how a sequence goes on: the step then samples
behind each guess as well, and the samples count as long as the guesses before them were right, so that an answer is
the same with and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import takewhile

from bequest.engine._C import BlockTable, TokenList
from bequest.engine.constraints.grammar import UNSPELLABLE, is_stray
from bequest.engine.errors import EngineError, GrammarTooLarge, InternalError, InvalidRequest
from bequest.engine.state.capture import capture_of
from bequest.engine.state.guesses import Guesses
from bequest.engine.state.output import Output
from bequest.engine.state.prompt_logprobs import logprob_of
from bequest.engine.state.sequence import Applied, Group, Kind, Outcome, Room, Sequence, Status, Wish
from bequest.engine.state.step import Stretch
from bequest.engine.types import (
    FinishReason,
    LogprobArrays,
    ModelInfo,
    Request,
    SamplingParams,
    StopReason,
    TokenLogprob,
)
from bequest.engine.types.image import FIRST_ID
from bequest.engine.work.desk import Desk
from bequest.engine.work.owed import end
from bequest.engine.work.wanted_states import check_states


class Generation(Kind):
    def __init__(self, group: Group, desk: Desk) -> None:
        params = group.request.params
        self.group = group
        self._desk = desk
        self._params = params
        self._most_len = group.num_prompt + params.max_tokens
        self._num_slots = min(params.n, desk.max_num_seqs, desk.states.most_choices(group.request))
        self._eos = _set_of(desk.eos_token_ids if params.ends_at_eos else ())
        self._ends = self._eos | params.stop_token_ids if params.stop_token_ids else self._eos
        self._num_logprobs = params.logprobs
        self._closing = None if params.rules is None else params.rules.closing(params.max_tokens)
        self._drafter = desk.drafter
        self._guesses: dict[Sequence, Guesses] = {}  # of the choices that somebody drafts for
        self._may_be_plain = group.request.hidden_states is None

    @classmethod
    def takes(cls, request: Request) -> bool:
        return request.params.max_tokens > 0

    @classmethod
    def check(cls, request: Request, info: ModelInfo, desk: Desk) -> None:
        check_states(request, info)

    # --- its choices ---------------------------------------------------------------------------------------------

    def begin(self, output: Output) -> None:
        tokens = TokenList(self.group.request.prompt_token_ids)
        table = BlockTable(self._desk.pool, self.group.salt)
        leader = Sequence(self.group, 0, tokens, table, output, self, capture=capture_of(self.group.request))
        self._prepare(leader)
        self.group.sequences.append(leader)

    def _prepare(self, sequence: Sequence) -> None:
        """The model may force the first token: it is known before anything is computed."""
        sequence.most_len = self._most_len
        if self._drafter is not None and (guesses := self._drafter.guesses_of(sequence)) is not None:
            self._guesses[sequence] = guesses
        else:
            sequence.ends = self._ends
            self._let_pass(sequence)
        rules = self._params.rules
        first = None if rules is None else rules.opening(self._params.max_tokens)
        if first is not None:
            sequence.accept_known(first)
            sequence.output.push(first, TokenLogprob(first, 0.0, 1), shown=True)

    @property
    def num_slots(self) -> int:
        """Before the fork it already holds those of its later choices."""
        return self._num_slots

    def slots(self, sequence: Sequence) -> int:
        return 1 if self.forked else self.num_slots

    def _part_ways(self, leader: Sequence) -> list[Sequence]:
        """The choices of the group, whose prefill ends here: as many as there are slots for. The others wait for those,
        and find the prompt in the index."""
        self.forked = True
        leader.plain = self._may_be_plain
        for choice in range(1, self._params.n):
            child = self._sibling(leader, choice)
            child.plain = self._may_be_plain
            self.group.sequences.append(child)
            if choice < self.num_slots:
                self._desk.run(child)
            else:
                self._desk.queue(child)
        return [child for child in self.group.sequences if child.status is Status.RUNNING]

    def _sibling(self, leader: Sequence, choice: int) -> Sequence:
        other = Sequence(
            self.group,
            choice,
            TokenList(self.group.request.prompt_token_ids),
            leader.table.fork(),
            leader.output.sibling(choice),
            self,
            num_computed=leader.num_computed,
            status=Status.RUNNING,
            capture=None if leader.capture is None else leader.capture.sibling(),
        )
        self._desk.states.fork(leader, other)
        self._prepare(other)
        return other

    # --- steps ---------------------------------------------------------------------------------------------------

    def num_ready(self, sequence: Sequence) -> int:
        """One that wants no more samples only waits for its last token to come back, unless its prompt is not done."""
        planned_len, num_computed = sequence.planned_len, sequence.num_computed
        if sequence.num_in_flight and self._guesses and self._waits(sequence):
            return 0  # a guess is made behind a token that is known
        if planned_len < self._most_len or num_computed < sequence.num_prompt:
            return planned_len - num_computed
        return 0

    def wishes(self, sequence: Sequence, room: Room) -> Iterator[Wish]:
        count, begin = room.most_tokens(sequence), sequence.num_computed
        if count <= 0:
            return
        if sequence.capture is not None:
            count = sequence.capture.most_tokens(begin, count, room.state_rows)
        drafts = self._draft(sequence, room)
        yield Stretch(begin, count + len(drafts), drafts=drafts)

    def _draft(self, sequence: Sequence, room: Room) -> tuple[int, ...]:
        """Guesses are made behind a token that is known, where the step has room for them and for their states."""
        guesses = self._guesses.get(sequence)
        if guesses is None or not guesses.waits or not self.forked:
            return ()
        if sequence.num_pending != 1 or sequence.num_in_flight:
            return ()
        most = min(self._most_len - sequence.planned_len - 1, room.budget - 1, self._desk.most_drafted)
        if sequence.capture is not None:
            most = sequence.capture.most_tokens(sequence.num_computed, most + 1, room.state_rows) - 1
        most = min(most, self._desk.states.room_for_drafts(sequence))
        drafts = guesses.draft(sequence.tokens, most) if most > 0 else ()
        drafts = tuple(takewhile(lambda token: token < FIRST_ID, drafts))  # what followed may have been an image
        self._desk.states.promise_drafts(sequence, len(drafts))
        return drafts

    def _look_ahead(self, sequence: Sequence, guesses: Guesses) -> None:
        """Its tokens are known up to here: whether something is worth drafting behind them."""
        if len(sequence.tokens) + sequence.num_in_flight < sequence.planned_len:
            return  # the same result has more of them
        most = self._desk.most_drafted
        if most > 0:
            most = min(most, self._desk.states.room_for_drafts(sequence))
        guesses.look(sequence.tokens, most, beside=not self._desk.is_alone(sequence))
        sequence.plain = self._may_be_plain and not guesses.waits

    def _waits(self, sequence: Sequence) -> bool:
        guesses = self._guesses.get(sequence)
        return guesses is not None and guesses.waits and sequence.status is not Status.FINISHED

    def note_drafts(self, sequence: Sequence, num_drafted: int, num_right: int) -> None:
        sequence.settle_drafts(num_right)
        self._desk.states.settle_drafts(sequence, num_right)
        if sequence.capture is not None:
            sequence.capture.take_back(sequence.planned_len - 1)
        if (guesses := self._guesses.get(sequence)) is not None:
            guesses.learn(num_drafted, num_right)

    @property
    def predicted(self) -> tuple[int, int]:
        guesses = self._guesses.values()
        return sum(one.num_predicted for one in guesses), sum(one.num_mispredicted for one in guesses)

    def conclude(self, outcome: Outcome, sequence: Sequence, stretch: Stretch, start: int) -> None:
        drafts = stretch.drafts
        if stretch.begin + stretch.count - len(drafts) < sequence.planned_len:
            return
        last = start + stretch.count - len(drafts) - 1
        if self.forked:
            outcome.sample(sequence, last, drafts)
            return
        for choice in self._part_ways(sequence):
            outcome.sample(choice, last)

    # --- results -------------------------------------------------------------------------------------------------

    def take_sample(
        self, sequence: Sequence, token: int | None, number: int, logprobs: LogprobArrays | None, applied: Applied
    ) -> None:
        if token is None:
            self._desk.distrust(sequence)
            applied.failed[self.group] = _why_nothing_was_sampled(sequence)
            return
        output, params, logprob = sequence.output, self._params, None
        if before := sequence.last_token_at:  # nearly always
            sequence.last_token_at = applied.now
            applied.inter_token_seconds.append(applied.now - before)
        else:
            applied.note_first(sequence)
        if self._num_logprobs is not None and logprobs is not None:
            logprob = logprob_of(logprobs, number, token, self._num_logprobs)
        if self._closing is not None and sequence.num_output + 1 == params.max_tokens:
            token = self._closing  # whatever was sampled
            logprob = None if logprob is None else TokenLogprob(token, 0.0, 1, logprob.top)
        self._desk.accept(sequence, token)
        if (guesses := self._guesses.get(sequence)) is not None:
            self._look_ahead(sequence, guesses)
        elif sequence.num_output >= sequence.free_until:
            self._let_pass(sequence)
        ended = token in self._ends and sequence.num_output >= params.min_tokens
        if sequence.outlet is not None and not ended and applied.one_each and sequence.num_output < params.max_tokens:
            applied.passed.append(sequence)  # nearly always
            applied.passed_tokens.append(token)
            return
        applied.moved[self.group] = None
        if ended:
            output.push(token, logprob, output.shows_end(token))
            self._end(sequence, "stop", None if token in self._eos else token)
        elif (stop_string := output.push(token, logprob, True)) is not None:
            self._end(sequence, "stop", stop_string)
        elif sequence.num_output >= params.max_tokens:
            self._end(sequence, "length", None)

    def _let_pass(self, sequence: Sequence) -> None:
        """Says which of the next tokens need not be looked at, unless they are ends: all before the last one, and
        before the first that its lease was not charged for."""
        sequence.free_until = min(self._params.max_tokens, self.group.ties.charged_output + 1)

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: StopReason) -> None:
        sequence.output.finish(reason, stop_reason)
        end(sequence, self._desk)

    def cut(self) -> None:
        for sequence in self.group.sequences:
            if sequence.status is not Status.FINISHED and sequence.work is self:
                self._end(sequence, "length", "deadline")


@lru_cache(maxsize=8)
def _set_of(token_ids: tuple[int, ...]) -> frozenset[int]:
    """One for all requests: each looks at it in every step, and finds it in a near cache."""
    return frozenset(token_ids)


def _why_nothing_was_sampled(sequence: Sequence) -> EngineError:
    """A sampler row says that it found no token, not why. Where something must be left to sample, it is NaN."""
    params = sequence.group.request.params
    if sequence.matcher is not None and (why := sequence.matcher.why_nothing) is not None:
        if why == UNSPELLABLE:
            message = f"The grammar has no end: {why}."
            return InvalidRequest(message, reason="grammar_endless", field=params.grammar_field, why=why)
        if is_stray(why):
            return InternalError(f"A token left the grammar: {why}.", reason="grammar_left", why=why)
        message = f"The grammar became too large: {why}."
        return GrammarTooLarge(message, reason="grammar_grew", field=params.grammar_field, why=why)
    excludes = params.min_tokens > 0 or bool(params.bad_words)
    allows = [part for part in (params.allowed_token_ids, params.grammar) if part is not None]
    if params.catalogue is None and len(allows) < 2 and not (allows and excludes):
        return InternalError("The model produced NaN.", reason="not_a_number")
    return InvalidRequest(
        "Nothing is allowed to follow: the rules of this request exclude each other.",
        reason="nothing_allowed",
        field=_narrowest(params),
    )


def _narrowest(params: SamplingParams) -> str:
    """Of the rules that exclude each other one that has the same name in every body: a grammar has many."""
    if params.catalogue is not None:
        return "catalogue"
    if params.allowed_token_ids is not None:
        return "allowed_token_ids"
    return "bad_words" if params.bad_words else "min_tokens"
