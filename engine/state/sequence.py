"""The state of a request: a Group of Sequences, one per choice, and the verbs of what it is there for.

Owned by the event-loop thread. A sequence has tokens and a count of computed ones; every step lets the count chase the
tokens:

    tokens      [ prompt ............ | sampled, applied ... ]( in flight )
    computed    [ ........................ )
                                           └ next chunk ┘

`planned_len` counts the token in flight too: sampled on the device by a launched step, not yet known here. A chunk that
checks drafted tokens runs beyond it, and its sequence waits for the result: how many of them count is not known before.

    tokens      [ ................. )
    chunk                       [ last | draft | draft )        computed ends here until the result comes

What a sequence wants of the next step, what a planned chunk leads to and how a result is applied is its `work`'s
matter (engine/work): the scheduler knows these verbs and no kind of work.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import msgspec

from bequest.engine._C import BeamTables, BlockPool, BlockTable, Progress, TokenList
from bequest.engine.errors import EngineError
from bequest.engine.state.account import Account
from bequest.engine.state.capture import Capture
from bequest.engine.state.cross import CrossTable
from bequest.engine.state.output import Output
from bequest.engine.state.parts import PromptParts, StatesCharge, Ties, Times
from bequest.engine.state.record import Holding, Record, count_by_strip
from bequest.engine.state.step import EncoderWish, Stretch
from bequest.engine.types import BeamSpec, ChoiceEntry, IntArray, LogprobArrays, Request, StepResult
from bequest.engine.types.adapter import NO_ADAPTER
from bequest.engine.types.delta import ChoiceDelta, Choices, Sink

Copies = list[tuple[int, int]] | IntArray  # (source, destination) blocks, of the latter [C, 2]

# A continuation that computes this little may pass requests that came shortly before it: by so many arrivals, and no
# further, so that nobody starves.
_CHEAP_TOKENS = 64
_HEAD_START = 64
_BELOW = 1 << 40  # added to the priority of the lane below: beyond any that a client may send


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Lane(enum.Enum):
    """Where work waits. Extractions have a lane of their own, below generations."""

    GENERATION = "generation"
    EXTRACTION = "extraction"


# --- steps, as work sees them --------------------------------------------------------------------------------------


class Room(Protocol):
    """A step while it is planned, as far as it has room."""

    @property
    def budget(self) -> int:
        """Tokens that are left."""

    @property
    def state_rows(self) -> int:
        """Hidden states, of one token and one layer each, that it can still store."""

    @property
    def chunks_left(self) -> int: ...

    @property
    def beams_left(self) -> int: ...

    @property
    def num_copies_of_beams(self) -> int:
        """Copies of blocks that groups of beams have in it."""

    @property
    def empty(self) -> bool:
        """Nothing is in it yet."""

    def most_tokens(self, sequence: Sequence) -> int:
        """Pending tokens of the sequence that it may compute, by the step's and its tenant's budget."""


@dataclass(slots=True)
class Applied:
    """What the result of a step led to, while it is applied."""

    now: float
    moved: dict[Group, None] = field(default_factory=dict)  # an ordered set: have something to deliver
    one_each: bool = True  # no sequence has more than one sample in the step
    passed: list[Sequence] = field(default_factory=list)  # those whose token goes to their outlet
    passed_tokens: list[int] = field(default_factory=list)  # as these
    failed: dict[Group, EngineError] = field(default_factory=dict)
    num_generated: int = 0  # sampled, and those of the answers of searches that ended
    first_token_seconds: list[float] = field(default_factory=list)
    inter_token_seconds: list[float] = field(default_factory=list)  # a step of a search is one token
    num_drafts: int = 0  # sequences for which something was drafted
    num_drafted: int = 0  # tokens
    num_right: int = 0  # of them

    @property
    def num_noted(self) -> int:
        return len(self.first_token_seconds) + len(self.inter_token_seconds)

    def note_first(self, sequence: Sequence) -> None:
        """A choice got its first token, or its first since it began again."""
        sequence.last_token_at = self.now
        times = sequence.group.times
        self.first_token_seconds.append(self.now - times.arrived)
        if times.first_token is None:
            times.first_token = self.now


class Begin(msgspec.Struct, frozen=True):
    """Another sequence of the group runs from this step on."""

    sequence: Sequence


Wish = Stretch | EncoderWish | Begin


class Expectation(Protocol):
    """A part of a step's result that somebody waits for."""

    def apply(self, result: StepResult, applied: Applied) -> None: ...


class Outcome(Protocol):
    """What the chunks of a step lead to. Tokens are numbered in the step."""

    def sample(self, sequence: Sequence, token: int, drafts: tuple[int, ...] = ()) -> None:
        """Samples behind `token`, and behind each of the drafts that follow it. The sequence's work takes them."""

    def rank(self, tokens: range, spec: Callable[[int], BeamSpec], num_logprobs: int | None) -> int:
        """Ranks the continuations of beams, behind these tokens; `spec` is told the number of their first sample.
        Returns its number in the result."""

    def score(self, request_id: str, first_token: int, targets: IntArray, top: int) -> int:
        """Tells the log-probability of target i behind token `first_token + i`. Returns its number in the result."""

    def expect(self, expectation: Expectation) -> None:
        """Applies it when the result comes."""


# --- the verbs -----------------------------------------------------------------------------------------------------


class Work(ABC):
    """What a sequence is there for."""

    @abstractmethod
    def num_ready(self, sequence: Sequence) -> int:
        """Tokens that the next step could compute; 0: it wants nothing of it. Drafts do not count."""

    @abstractmethod
    def wishes(self, sequence: Sequence, room: Room) -> Iterator[Wish]:
        """What it wants of a step that has `room`. Each wish is carried out before the next is made; where one cannot
        be, there is no next."""

    @abstractmethod
    def conclude(self, outcome: Outcome, sequence: Sequence, stretch: Stretch, start: int) -> None:
        """A stretch was planned, and begins at token `start` of the step: what it leads to."""

    def note_planned(self, sequence: Sequence, stretch: Stretch) -> None:
        """A stretch of it is in a step."""
        return

    def take_sample(
        self, sequence: Sequence, token: int | None, number: int, logprobs: LogprobArrays | None, applied: Applied
    ) -> None:
        """A step sampled a token for it, as its sample `number`; None: nothing could be. Log-probabilities are those of
        all samples. Whatever a step that was launched past its end brings is passed over."""
        return

    def note_drafts(self, sequence: Sequence, num_drafted: int, num_right: int) -> None:
        """What a step found of the tokens that were drafted for it. Who has ended meanwhile does not care."""
        return

    def blocks_needed(self, sequence: Sequence, stretch: Stretch) -> int:
        """Free blocks that writing a stretch takes."""
        return sequence.table.blocks_needed(stretch.begin, stretch.begin + stretch.count)

    def try_write(self, sequence: Sequence, stretch: Stretch) -> Copies | None:
        """Prepares its blocks; returns those to copy before, or None if there are too few free ones."""
        return sequence.table.try_prepare_write(stretch.begin, stretch.begin + stretch.count)

    def tables(self, sequence: Sequence) -> BlockTable | BeamTables:
        """Whose next positions a stretch computes."""
        return sequence.table

    def num_rows(self, sequence: Sequence) -> int:
        """How many tables that are."""
        return 1

    def num_beams(self, sequence: Sequence) -> int:
        """Beams that a step with its next stretch has to rank."""
        return 0

    def borrow(self, sequence: Sequence) -> BlockTable:
        """Its blocks, for whoever continues from it while it runs."""
        return sequence.table.fork()

    def count_blocks(self, sequence: Sequence) -> tuple[int, int]:
        """Those it holds, and of them those that somebody else holds too."""
        return len(sequence.table), sequence.table.num_shared

    def slots(self, sequence: Sequence) -> int:
        """Running slots that a sequence takes."""
        return 0

    def growth(self, sequence: Sequence) -> int:
        """Rows of blocks that a running sequence may need next."""
        return 1

    def spare_blocks(self, sequence: Sequence) -> int:
        """Blocks, of all strips, beside those of its tokens that must be free before it is let in."""
        return 0

    def goal_len(self, sequence: Sequence) -> int:
        """Tokens whose KV it needs."""
        return len(sequence.tokens)

    def most_inherited(self, sequence: Sequence) -> int:
        """Tokens whose KV it may find in place; who samples has to compute the last one."""
        return len(sequence.tokens) - 1

    def most_passed(self, sequence: Sequence) -> int:
        """Tokens that recurrent layers may have passed where it starts; others are going to fork it there."""
        return sequence.planned_len

    def num_to_begin(self, sequence: Sequence) -> int:
        """Sequences that fork it and that it cannot end without: there has to be room for their states, too."""
        return 0

    def num_to_compute(self, sequence: Sequence, num_computed: int) -> int:
        """Tokens of forward until it has what it needs, from so many computed ones on."""
        return len(sequence.tokens) - num_computed

    def leaves_cache(self, sequence: Sequence) -> bool:
        """Whether others may continue from what it has computed."""
        return True

    def gives_way(self, sequence: Sequence) -> bool:
        """It has to leave the running ones. True: it went back to the queue in its own way; False: its blocks are to be
        moved or dropped, and it goes on from there later."""
        return False


class Kind(Work):
    """What a request is there for: one object for each group."""

    lane: ClassVar[Lane] = Lane.GENERATION
    takes_beams: bool = False  # its slots are counted apart
    needs_blocks: ClassVar[bool] = True
    keeps_record: ClassVar[bool] = True  # something is left that others could continue from
    hands_over: ClassVar[bool] = False  # what it computes of its parent's tokens becomes its parent's
    forked = False  # its choices have parted ways
    group: Group

    @property
    def num_slots(self) -> int:
        """Running slots that the whole group is going to take."""
        return 0

    @property
    def num_to_enter(self) -> int:
        """Slots that must be free for a waiting sequence of it."""
        return 1 if self.forked else self.num_slots

    @abstractmethod
    def begin(self, output: Output) -> None:
        """Makes the first sequence of a new group."""

    @abstractmethod
    def cut(self) -> None:
        """The deadline has come after something was sampled: what there is, is the answer."""

    def abandon(self) -> None:
        """The group ends without a result: one sequence stands for what was computed."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of both prompts, if it has two and both are read; audio has no tokens."""
        encoder = self.group.request.encoder
        return self.group.num_prompt + (0 if encoder is None else len(encoder.token_ids))

    @property
    def completion_tokens(self) -> int:
        return sum(s.num_output for s in self.group.sequences)

    @property
    def predicted(self) -> tuple[int, int]:
        """Drafted tokens of the client's prediction that were right, and that were wrong."""
        return 0, 0

    @property
    def cut_short(self) -> bool:
        """Whether a choice of a finished group ended for its length."""
        return any(s.output.finish_reason == "length" for s in self.group.sequences)

    def take_deltas(self, first: bool) -> Choices:
        """What its choices have to deliver now."""
        sequences = self.group.sequences
        if len(sequences) == 1:
            delta = sequences[0].take_delta(first)
            return () if delta is None else (delta,)
        return tuple([d for s in sequences if (d := s.take_delta(first)) is not None])


# --- the state -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Sequence(Progress):
    """One choice of a request. While it runs it is an estate, too: others may continue from what it has."""

    group: Group
    choice: int
    tokens: TokenList
    table: BlockTable
    output: Output
    work: Work
    num_computed: int = 0  # tokens whose KV a launched step has written or will write
    status: Status = Status.WAITING
    capture: Capture | None = None  # of hidden states, if they were asked for
    # Sorts: lower runs earlier and is preempted later. No two are equal, whatever head start they have.
    urgency: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.planned_len = len(self.tokens)
        self.num_prompt = self.group.num_prompt
        params = self.group.request.params
        self.account, self.adapter = self.group.account, self.group.adapter
        if params.logprobs is not None:
            self.num_logprobs = params.logprobs
        if params.grammar is not None:
            self.matcher = params.grammar.matcher()
        self.urgency = (*self.group.urgency, self.choice)

    @property
    def num_pending(self) -> int:
        """Tokens the next step could compute."""
        return self.planned_len - self.num_computed

    @property
    def ended(self) -> bool:
        return self.status is Status.FINISHED

    # Counts are moved by these, and by the loops over streams of csrc/bindings/bind_streams.cpp.

    def note_sampling(self) -> None:
        """A launched step samples a token for it."""
        self.num_in_flight += 1
        self.planned_len += 1

    def accept(self, token_id: int) -> None:
        """The token in flight is known."""
        self.tokens.append(token_id)
        self.num_output += 1

    def note_drafting(self, num_samples: int) -> None:
        """A launched step samples that often; how many of them count is known when its result comes."""
        self.num_in_flight += num_samples

    def settle_drafts(self, num_right: int) -> None:
        """So many drafts of the step were right, and the sample behind them counts too. KV of those that were not is
        overwritten."""
        self.planned_len += num_right + 1
        self.num_computed = min(self.num_computed, self.planned_len - 1)

    def accept_known(self, token_id: int) -> None:
        """A token that no step had announced: beams choose theirs when the result is here."""
        self.planned_len += 1
        self.accept(token_id)

    def take_delta(self, always: bool) -> ChoiceDelta | None:
        """What to deliver now, or None when there is nothing new and not `always`."""
        delta = self.output.take(always)
        self.outlet = self.output.outlet
        return delta

    # --- its holding ---

    @property
    def shown_len(self) -> int:
        return len(self.tokens)

    @property
    def computed(self) -> int:
        """A step in flight has computed what it will have written."""
        return min(self.num_computed, len(self.tokens))

    @property
    def full_len(self) -> int:
        return max(self.num_prompt, len(self.tokens) - 1)

    @property
    def lease(self) -> BlockTable | None:
        return None

    @property
    def holds_blocks(self) -> bool:
        return True

    def borrow(self, pool: BlockPool) -> BlockTable:
        return self.work.borrow(self)

    def as_entry(self, pool: BlockPool) -> ChoiceEntry:
        return ChoiceEntry(self.choice, len(self.tokens), *self.work.count_blocks(self))

    def blocks_by_strip(self, pool: BlockPool) -> list[int]:
        return count_by_strip(self.table.entries, pool)


@dataclass(slots=True, eq=False)
class Group:
    """One request and its choices. Before the end of the prefill it has one sequence, which then forks."""

    request: Request
    sink: Sink
    seed: int
    salt: bytes  # divides the prefix index
    times: Times
    arrival_number: int
    kind: Kind = field(init=False, repr=False)  # given by whoever makes it; gone when it has ended
    account: Account = field(default_factory=Account)  # its tenant's
    sequences: list[Sequence] = field(default_factory=list)
    ties: Ties = field(default_factory=Ties)
    states: StatesCharge = field(default_factory=StatesCharge)
    prompt: PromptParts = field(init=False)
    cross: CrossTable | None = None  # of an encoder-decoder model, while a sequence runs or keeps blocks on the host
    closed: bool = False  # finished, failed or aborted: owns nothing any more
    delivered: bool = False  # the first Delta is out

    def __post_init__(self) -> None:
        self.prompt = PromptParts.of(self.request)

    @property
    def adapter(self) -> int:
        """The handle of its LoRA adapter, or NO_ADAPTER."""
        return NO_ADAPTER if self.request.adapter is None else self.request.adapter.handle

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def urgency(self) -> tuple[int, int, int]:
        """Its sequences have it in common."""
        lineage = self.request.terms.lineage
        cheap = lineage is not None and self.num_prompt - lineage.at <= _CHEAP_TOKENS
        below = _BELOW if self.kind.lane is Lane.EXTRACTION else 0
        number = self.arrival_number
        return (self.request.priority + below, number - (_HEAD_START if cheap else 0), number)

    @property
    def runs(self) -> bool:
        return any(s.status is Status.RUNNING for s in self.sequences)

    @property
    def finished(self) -> bool:
        """Every choice is complete. Before the fork there is no other choice than the first."""
        sequences = self.sequences
        if len(sequences) == 1:  # nearly always, and asked for every token
            return sequences[0].status is Status.FINISHED
        return all(s.status is Status.FINISHED for s in sequences)

    # --- while it runs, to its record ---

    @property
    def parent(self) -> Record | None:
        return self.ties.parent

    @property
    def charged_output(self) -> int:
        return self.ties.charged_output

    def holding(self, choice: int) -> Holding | None:
        """Of a choice that runs or waits; before the choices part ways each is the first. Of beams: the best."""
        number = choice if self.kind.forked else 0
        return next((s for s in self.sequences if s.choice == number and s.status is not Status.FINISHED), None)
