"""The state of a request: a Group of Sequences, one per choice. Owned by the event-loop thread.

A sequence has tokens and a count of computed ones; every step lets the count chase the tokens:

    tokens      [ prompt ............ | sampled, applied ... ]( in flight )
    computed    [ ........................ )
                                           └ next chunk ┘

`planned_len` counts the token in flight too: sampled on the device by a launched step, not yet known here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bequest.engine._C import BeamTables, BlockTable, TokenList
from bequest.engine.beams.answers import BeamAnswer
from bequest.engine.beams.search import BeamSearch
from bequest.engine.cache.cross import CrossTable
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.scheduling.fairness import Account
from bequest.engine.states.capture import Capture
from bequest.engine.types import NO_ROW, ChoiceDelta, Inheritance, Matcher, Request, Sink, TokenLogprob

if TYPE_CHECKING:
    from bequest.engine.inheritance.records import Record

NEVER = 1 << 62  # more tokens than anybody samples


# A continuation that computes this little may pass requests that came shortly before it: by so many arrivals, and no
# further, so that nobody starves.
_CHEAP_TOKENS = 64
_HEAD_START = 64
_BELOW = 1 << 40  # added to the priority of extractions: beyond any that a client may send


def _head_start(request: Request) -> int:
    cheap = request.lineage is not None and len(request.prompt_token_ids) - request.lineage.at <= _CHEAP_TOKENS
    return _HEAD_START if cheap else 0


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    group: Group
    choice: int
    tokens: TokenList
    table: BlockTable
    salt: bytes  # divides the prefix index
    output: ChoiceOutput
    num_computed: int = 0  # tokens whose KV a launched step has written or will write
    num_in_flight: int = 0  # sampled by a launched step, not yet applied
    row: int = NO_ROW
    status: Status = Status.WAITING
    last_token_at: float = 0.0
    capture: Capture | None = None  # of hidden states, if they were asked for
    owing: bool = False  # its tokens are final: what it is still there for are hidden states
    num_prompt: int = field(init=False)
    num_output: int = field(init=False, default=0)  # sampled and applied
    planned_len: int = field(init=False)  # len(tokens) + num_in_flight
    most_len: int = field(init=False)  # prompt + max_tokens
    matcher: Matcher | None = field(init=False)  # where it stands in its grammar, if it has one
    extracts: bool = field(init=False)  # as its request
    # Sorts: lower runs earlier and is preempted later. No two are equal, whatever head start they have.
    urgency: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        request = self.group.request
        self.num_prompt = self.planned_len = len(request.prompt_token_ids)
        self.most_len = self.num_prompt + request.params.max_tokens
        grammar = request.params.grammar
        self.matcher = None if grammar is None else grammar.matcher()
        arrival = self.group.arrival_number
        self.extracts = request.extracts
        priority = request.priority + (_BELOW if self.extracts else 0)
        self.urgency = (priority, arrival - _head_start(request), arrival, self.choice)

    def sibling(self, choice: int) -> Sequence:
        """Another choice of its group, which parts ways with this one where the prompt ends."""
        other = Sequence(
            self.group,
            choice,
            TokenList(self.group.request.prompt_token_ids),
            self.table.fork(),
            self.salt,
            self.output.sibling(choice),
            num_computed=self.num_computed,
            status=Status.RUNNING,
            capture=None if self.capture is None else self.capture.sibling(),
        )
        other.begin()
        return other

    # Plain counts, moved by these two and nobody else: they are read several times per token.

    def note_sampling(self) -> None:
        """A launched step samples a token for it."""
        self.num_in_flight += 1
        self.planned_len += 1

    def accept(self, token_id: int) -> None:
        """The token in flight is known."""
        self.tokens.append(token_id)
        self.num_output += 1

    def accept_known(self, token_id: int) -> None:
        """A token that no step had announced: beams choose theirs when the result is here."""
        self.planned_len += 1
        self.accept(token_id)

    def begin(self) -> None:
        """The model may force the first token: it is known before anything is computed. Beams note it on their own."""
        params = self.group.request.params
        first = None if params.rules is None else params.rules.opening(params.max_tokens)
        if first is not None:
            self.accept_known(first)
            if self.group.search is None:
                self.output.push(first, TokenLogprob(first, 0.0, 1), shown=True)

    def owe(self) -> None:
        """Its tokens are final; steps launched past its end do not count, except for what they know of its tokens."""
        assert self.capture is not None
        if not self.capture.ended:
            self.capture.end(len(self.tokens))
        self.planned_len = len(self.tokens)
        self.num_computed = min(self.num_computed, self.planned_len)
        self.owing = True

    @property
    def ended(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def may_owe_blocks(self) -> bool:
        """Its end may be in flight, and its blocks are promised to a lease: they stay until that is known."""
        record = self.group.record
        return self.num_in_flight > 0 and record is not None and record.ttl is not None

    @property
    def num_pending(self) -> int:
        """Tokens the next step could compute."""
        return self.planned_len - self.num_computed

    @property
    def goal_len(self) -> int:
        """Tokens whose KV it needs."""
        return self.capture.goal_len if self.owing and self.capture is not None else len(self.tokens)

    @property
    def most_inherited(self) -> int:
        """Tokens whose KV it may find in place; who samples has to compute the last one."""
        return self.goal_len if self.owing else len(self.tokens) - 1

    def num_to_compute(self, num_computed: int) -> int:
        """Tokens of forward until it has what it needs, from so many computed ones on."""
        if not self.owing or self.capture is None:
            return len(self.tokens) - num_computed
        return self.capture.num_owed(num_computed) + max(0, self.capture.goal_len - num_computed)

    @property
    def num_slots(self) -> int:
        """Running slots it takes; the first of a group takes those that its group is going to need."""
        if self.extracts or self.owing:
            return 0  # it samples nothing
        return 1 if self.group.forked and self.group.search is None else self.group.num_slots

    @property
    def wants_sample(self) -> bool:
        """Whether completing the pending tokens should sample one more."""
        return self.planned_len < self.most_len


@dataclass(slots=True, eq=False)
class Group:
    """One request and its choices. Before the end of the prefill it has one sequence, which then forks."""

    request: Request
    sink: Sink
    seed: int
    arrival_number: int
    arrived_at: float
    account: Account = field(default_factory=Account)  # its tenant's
    sequences: list[Sequence] = field(default_factory=list)
    forked: bool = False
    max_slots: int = NEVER  # of those that there are; choices beyond them begin when others have ended
    num_finished: int = 0  # of its sequences
    closed: bool = False  # finished, failed or aborted: owns nothing any more
    delivered: bool = False  # the first Delta is out
    cached_tokens: int = 0
    record: Record | None = None  # what others may continue from; None once it is closed, or when nobody may
    parent: Record | None = None  # what it continues from, if that is there
    inheritance: Inheritance | None = None  # of a continuation, from its admission on
    search: BeamSearch | None = None  # of beams
    beams: BeamTables | None = None  # the blocks of the running beams, from the first result on
    answer: BeamAnswer | None = None  # of a search that is over, where its choices are no sequences
    cross: CrossTable | None = None  # of an encoder-decoder model, while a sequence runs or keeps blocks on the host
    charged_output: int = NEVER  # tokens of each choice that its lease is charged for
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])  # nothing precedes token 0
    prompt_logprobs_planned: int = 0  # positions that launched steps tell of
    states_bytes: int = 0  # most that its hidden states can take
    holds_states_memory: bool = False  # they are charged for
    states_tokens: int = 0  # tokens of forward that only they needed; of an extraction all
    admitted_at: float | None = None
    first_token_at: float | None = None

    @property
    def num_slots(self) -> int:
        """Running slots it takes: before the fork it already holds those of its later choices, or of its beams."""
        beams = self.request.params.beams
        return min(self.request.params.n, self.max_slots) if beams is None else beams.width

    @property
    def runs(self) -> bool:
        return any(s.status is Status.RUNNING for s in self.sequences)

    @property
    def growth(self) -> int:
        """Blocks that each of its running sequences may need next."""
        if self.request.encodes_only:
            return 0
        return 1 if self.beams is None else len(self.beams)

    @property
    def finished(self) -> bool:
        """Every choice is complete. Before the fork there is no other choice than the first."""
        return self.num_finished == len(self.sequences)

    @property
    def num_prompt_tokens(self) -> int:
        """Of both prompts, if it has two and both are read; audio has no tokens."""
        encoder = self.request.encoder
        decoder = 0 if self.request.encodes_only else len(self.request.prompt_token_ids)
        return decoder + (0 if encoder is None else len(encoder.token_ids))

    @property
    def completion_tokens(self) -> int:
        return sum(s.num_output for s in self.sequences) if self.answer is None else self.answer.num_tokens

    @property
    def cut_short(self) -> bool:
        """Whether a choice of a finished group ended for its length."""
        if self.answer is not None:
            return self.answer.cut_short
        return any(s.output.finish_reason == "length" for s in self.sequences)

    def take_deltas(self, first: bool) -> tuple[ChoiceDelta, ...]:
        """What its choices have to deliver now."""
        if self.answer is not None:
            return self.answer.deltas(self.sequences[0].output)
        if len(self.sequences) == 1:
            delta = self.sequences[0].output.take(first)
            return () if delta is None else (delta,)
        return tuple([d for s in self.sequences if (d := s.output.take(first)) is not None])
