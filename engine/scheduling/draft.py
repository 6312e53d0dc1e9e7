"""A step while it is being planned: its limits, and what it holds so far. Owned by the event-loop thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from bequest.engine.scheduling.chunk import Chunk, EncoderRun
from bequest.engine.scheduling.sequence import Sequence
from bequest.engine.scheduling.shares import SlotShares
from bequest.engine.states.capture import EncoderCapture
from bequest.engine.states.extraction import ExtractionLimits
from bequest.engine.types import MAX_BEAM_WIDTH, IntArray
from bequest.engine.types.encoder import EncoderInput, EncoderSpec, Slots


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    max_num_tokens_alone: int | None = None  # of a step that no running stream waits for; None: as of the others
    extraction: ExtractionLimits = ExtractionLimits()
    max_num_encoder_tokens: int = 1 << 30  # positions of all encoder inputs of a step; a longer one is alone in it
    # How fast prompts are computed while requests wait for slots, by how fast slots become free: the faster, the fewer
    # slots hold a prompt that is not done, and the longer are the steps that streams wait for. Below 1 it is the part
    # of the slots that stream.
    prompt_pace: float = 2.0

    @property
    def max_num_beams(self) -> int:
        """Of all groups that run at once. Beams take no sampler rows: how much a step may compute limits them."""
        return max(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_chunks(self) -> int:
        """Pieces of sequences in one step."""
        return max(self.max_num_seqs, MAX_BEAM_WIDTH)

    def tokens_of_step(self, streaming: bool) -> int:
        """The budget of a step, by whether a running sequence is past its prompt."""
        if streaming or self.max_num_tokens_alone is None:
            return self.max_num_batched_tokens
        return self.max_num_tokens_alone


@dataclass(slots=True)
class Draft:
    """A plan being made."""

    now: float
    budget: int
    state_rows: int  # room for hidden states
    chunks: list[Chunk] = field(default_factory=list)
    used: set[Sequence] = field(default_factory=set)
    copies: list[tuple[int, int]] = field(default_factory=list)
    copies_of_beams: list[IntArray] = field(default_factory=list)  # [C, 2] of each group
    num_beams: int = 0  # of the step, no more than the widest group may have
    num_preempted: int = 0
    short: bool = False  # blocks ran out: nobody is let in
    encoders: list[EncoderRun] = field(default_factory=list)
    shares: SlotShares | None = None  # of tenants, where prompts have to be computed
    prompt_tokens: int = 0  # that are left to tenants which have their share of the slots
    overdrawn: int = 0  # positions that encoders read for extractions, beyond what was left of the budget

    def divide(self, shares: SlotShares, prompt_tokens: int) -> None:
        """`prompt_tokens`: for tenants that have their share of the slots. REQUIRES: nothing was added."""
        self.shares, self.prompt_tokens = shares, prompt_tokens

    def most_tokens(self, sequence: Sequence) -> int:
        """That the sequence may compute in this step."""
        most = min(sequence.num_pending, self.budget)
        return min(most, self.prompt_tokens) if most > 1 and self._has_share(sequence) else most

    def has_no_prompt_tokens(self, sequence: Sequence) -> bool:
        return self.prompt_tokens == 0 and self._has_share(sequence)

    def _has_share(self, sequence: Sequence) -> bool:
        return self.shares is not None and self.shares.has_share(sequence.group.account)

    def takes_encoder(self, encoder: EncoderInput | None, limits: SchedulerLimits) -> bool:
        """Whether an encoder that has to run still fits the step's own budget for them."""
        if encoder is None or not self.encoders:
            return True
        length = sum(run.spec.input.length for run in self.encoders) + encoder.length
        return length <= limits.max_num_encoder_tokens and len(self.encoders) < limits.max_num_seqs

    def add_encoder(self, sequence: Sequence, slots: Slots | None) -> None:
        """Runs the encoder of a sequence, which fills `slots`, with its hidden states if they are wanted."""
        capture, tapped, group = sequence.capture, None, sequence.group
        if isinstance(capture, EncoderCapture):
            tapped = capture.plan_run(self.state_rows)
            self.state_rows -= 0 if tapped is None else len(tapped) * capture.num_layers
        assert group.request.encoder is not None
        self.encoders.append(EncoderRun(group, EncoderSpec(group.request.encoder, slots), tapped))

    def read_encoder(self, sequence: Sequence, limits: SchedulerLimits) -> bool:
        """Runs it for the states that the sequence is owed, if there is room. A run is not cut: it may overdraw."""
        capture = sequence.capture
        assert isinstance(capture, EncoderCapture)
        length = capture.num_owed()
        if not length or self.state_rows < capture.num_layers:
            return False
        if not self.takes_encoder(sequence.group.request.encoder, limits):
            return False
        self.add_encoder(sequence, None)
        self.used.add(sequence)
        if sequence.extracts:
            self.overdrawn += max(0, length - self.budget)
        self.budget = max(0, self.budget - length)
        sequence.group.states_tokens += length
        sequence.group.account.served += length
        return True

    def add(self, sequence: Sequence, begin: int, count: int, read_only: bool = False) -> None:
        """The sequence computes positions [begin, begin + count), with the hidden states that are wanted of them."""
        capture, tapped = sequence.capture, None
        if capture is not None:
            tapped = capture.plan(begin, begin + count, self.state_rows)
            self.state_rows -= 0 if tapped is None else len(tapped) * capture.num_layers
            if sequence.owing:
                sequence.group.states_tokens += count
        self.chunks.append(Chunk(sequence, begin, count, tapped, read_only))
        self.used.add(sequence)
        self.budget -= count
        if count > 1:
            self.prompt_tokens = max(0, self.prompt_tokens - count)
        self.num_beams += sequence.group.search is not None  # the first of a group: it may be ranked in this step
        sequence.group.account.served += count

    def add_token(self, sequence: Sequence, copies: list[tuple[int, int]]) -> None:
        """The sequence computes its next position, of which no hidden states are wanted. It is no search."""
        self.copies += copies
        self.chunks.append(Chunk(sequence, sequence.num_computed, 1))
        self.used.add(sequence)
        self.budget -= 1
        sequence.num_computed += 1
        sequence.group.account.served += 1

    def add_beams(self, leader: Sequence, num_beams: int, copies: IntArray) -> None:
        """Every beam of a group computes its next token. A group wider than the budget has a step to itself."""
        if len(copies):
            self.copies_of_beams.append(copies)
        self.chunks.append(Chunk(leader, leader.num_computed, 1))
        self.used.add(leader)
        self.budget = max(0, self.budget - num_beams)
        self.num_beams += num_beams
        leader.group.account.served += num_beams
