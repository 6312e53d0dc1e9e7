"""A step while it is being planned: what it has room for, and what it holds so far. Owned by the event-loop thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from bequest.engine._C import BeamTables, BlockTable, TokenList, count_accounts
from bequest.engine.state.account import Account
from bequest.engine.state.capture import EncoderCapture
from bequest.engine.state.sequence import Copies, Group, Lane, Sequence
from bequest.engine.state.step import Stretch
from bequest.engine.types import MAX_BEAM_WIDTH
from bequest.engine.types.encoder import EncoderInput, EncoderSpec, Slots
from bequest.engine.types.hidden import Indices


class Chunk(Stretch, frozen=True, eq=False, gc=False, kw_only=True):
    """A stretch of a sequence, to be computed."""

    sequence: Sequence
    tables: BlockTable | BeamTables
    tokens: TokenList  # those that it computes are among them, drafts too
    num_tokens: int = 1  # of the step: a stretch of beams has as many for each
    tapped: Indices | None = None  # positions whose hidden states are stored


@dataclass(frozen=True, slots=True)
class EncoderRun:
    """An encoder that runs before the chunks are computed."""

    group: Group
    spec: EncoderSpec
    tapped: Indices | None = None  # positions whose hidden states are stored


class Quota(Protocol):
    """How many tokens of prompts a step has for whom (engine/scheduling/policy)."""

    def most_tokens(self, account: Account, most: int) -> int:
        """Of `most` tokens of a prompt, those that the step may compute."""

    def allow(self, num_tokens: int) -> None:
        """So many of a prompt at least."""

    def spend(self, num_tokens: int) -> None:
        """Of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    max_chunks: int
    max_encoders: int
    max_encoder_tokens: int  # positions of all encoder inputs; a longer one is alone in its step


@dataclass(slots=True)
class Draft:
    """A plan being made."""

    now: float
    limits: StepLimits
    quota: Quota
    budget: int
    state_rows: int  # room for hidden states
    # Of plain work, those that compute their last token and sample behind it: in most steps all there is. They come
    # before the chunks.
    streams: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    used: set[Sequence] = field(default_factory=set)
    copies: list[tuple[int, int]] = field(default_factory=list)
    copies_of_beams: list[Copies] = field(default_factory=list)  # [C, 2] of each group
    num_beams: int = 0  # of the step, no more than the widest group may have
    num_preempted: int = 0
    short: bool = False  # blocks ran out: nobody is let in
    encoders: list[EncoderRun] = field(default_factory=list)
    overdrawn: int = 0  # positions that encoders read for extractions, beyond what was left of the budget

    @contextmanager
    def allowing(self, most: int) -> Iterator[None]:
        """So many tokens of its budget at most are spent meanwhile."""
        kept = max(0, self.budget - most)
        self.budget -= kept
        yield
        self.budget += kept

    @property
    def empty(self) -> bool:
        return not self.streams and not self.chunks

    @property
    def chunks_left(self) -> int:
        return self.limits.max_chunks - len(self.streams) - len(self.chunks)

    @property
    def beams_left(self) -> int:
        return MAX_BEAM_WIDTH - self.num_beams

    @property
    def num_copies_of_beams(self) -> int:
        return sum(map(len, self.copies_of_beams))

    def most_tokens(self, sequence: Sequence) -> int:
        most = min(sequence.num_pending, self.budget)
        return self.quota.most_tokens(sequence.group.account, most) if most > 1 else most

    # --- encoders ------------------------------------------------------------------------------------------------

    def takes_encoder(self, encoder: EncoderInput | None) -> bool:
        """Whether an encoder that has to run still fits the step's own budget for them."""
        if encoder is None or not self.encoders:
            return True
        length = sum(run.spec.input.length for run in self.encoders) + encoder.length
        return length <= self.limits.max_encoder_tokens and len(self.encoders) < self.limits.max_encoders

    def add_encoder(self, sequence: Sequence, slots: Slots | None) -> None:
        """Runs the encoder of a sequence, which fills `slots`, with its hidden states if they are wanted."""
        capture, tapped, group = sequence.capture, None, sequence.group
        if isinstance(capture, EncoderCapture):
            tapped = capture.plan_run(self.state_rows)
            self.state_rows -= 0 if tapped is None else len(tapped) * capture.num_layers
        assert group.request.encoder is not None
        self.encoders.append(EncoderRun(group, EncoderSpec(group.request.encoder, slots, group.adapter), tapped))

    def read_encoder(self, sequence: Sequence) -> bool:
        """Runs it for the states that the sequence is owed, if there is room. A run is not cut: it may overdraw."""
        capture = sequence.capture
        assert isinstance(capture, EncoderCapture)
        length = capture.num_owed()
        if not length or self.state_rows < capture.num_layers:
            return False
        if not self.takes_encoder(sequence.group.request.encoder):
            return False
        self.add_encoder(sequence, None)
        self.used.add(sequence)
        if sequence.group.kind.lane is Lane.EXTRACTION:
            self.overdrawn += max(0, length - self.budget)
        self.budget = max(0, self.budget - length)
        sequence.group.states.num_tokens += length
        sequence.group.account.served += length
        return True

    # --- chunks --------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, stretch: Stretch) -> None:
        """The sequence computes a stretch, with the hidden states that are wanted of it."""
        capture, tapped = sequence.capture, None
        if capture is not None:
            tapped = capture.plan(stretch.begin, stretch.begin + stretch.count, self.state_rows)
            self.state_rows -= 0 if tapped is None else len(tapped) * capture.num_layers
        begin, count, drafts = stretch.begin, stretch.count, stretch.drafts
        sequence.work.note_planned(sequence, stretch)
        work, tokens = sequence.work, sequence.tokens
        num_tokens = count * work.num_rows(sequence)
        self.chunks.append(
            Chunk(
                begin,
                count,
                stretch.read_only,
                drafts,
                sequence=sequence,
                tables=work.tables(sequence),
                tokens=tokens.fork([max(0, token) for token in drafts]) if drafts else tokens,  # DRAFTED: 0
                num_tokens=num_tokens,
                tapped=tapped,
            )
        )
        self.used.add(sequence)
        self.budget = max(0, self.budget - num_tokens)  # a group of beams that is wider has a step to itself
        if count - len(drafts) > 1:
            self.quota.spend(count)
        self.num_beams += work.num_beams(sequence)
        sequence.group.account.served += num_tokens

    def add_streams(self, sequences: list[Sequence], copies: list[tuple[int, int]]) -> None:
        """Plain work computes its last token. REQUIRES: as of csrc/bindings/bind_streams.cpp, plan_streams"""
        self.copies += copies
        self.streams += sequences
        self.budget -= len(sequences)
        for account, num_tokens in count_accounts(sequences):
            account.served += num_tokens

    def all_chunks(self) -> list[Chunk]:
        """As if the streams were some, too."""
        streams = [Chunk(s.num_computed - 1, 1, sequence=s, tables=s.table, tokens=s.tokens) for s in self.streams]
        return [*streams, *self.chunks]

    def add_copies(self, copies: Copies) -> None:
        """Blocks that are copied before the step."""
        if isinstance(copies, list):
            self.copies += copies
        elif len(copies):
            self.copies_of_beams.append(copies)
