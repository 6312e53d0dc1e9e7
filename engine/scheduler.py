"""Decides what each step computes. Owned by the event-loop thread; no torch, no asyncio; the clock is passed in.

plan() builds a StepPlan and moves the sequences' counts as if the step had run; apply() takes its result. Between the
two the next plan may be made (the pipelined loop): a sampled token not yet applied is `in flight`, and its sequence's
next input is named by its sampler row instead of its id.

Rules of a step, within a budget of tokens:
  1. running sequences that need one token, then running sequences in prefill, each by urgency; between the two, waiting
     sequences that are more urgent than any in prefill: a continuation does not wait for the end of a long prompt;
  2. when blocks run out, leases move to the host; then the least urgent running sequence that this step has not used
     gives its blocks back;
  3. unless that happened and others run, waiting sequences by urgency, as long as slots, blocks and budget last.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine import beam_groups
from engine._C import BlockPool, BlockTable, TokenList
from engine.beams import Alternatives, Turn
from engine.cache import KvCache, Placement
from engine.encoder import EncoderInput, EncoderSpec
from engine.outputs import ChoiceOutput
from engine.retention import Retention
from engine.sampler_rows import SamplerRows
from engine.sequence import Group, Sequence, Status
from engine.step import BlockMoves, Chunk, Launch, StepMaker
from engine.types import BeamCandidates, BeamParams, Request


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    max_num_tokens_alone: int | None = None  # of a step that no running stream waits for; None: as of the others
    max_num_encoder_tokens: int = 1 << 30  # positions of all encoder inputs of a step; a longer one is alone in it

    def tokens_of_step(self, streaming: bool) -> int:
        """The budget of a step, by whether a running sequence is past its prompt."""
        if streaming or self.max_num_tokens_alone is None:
            return self.max_num_batched_tokens
        return self.max_num_tokens_alone


@dataclass(slots=True)
class _Draft:
    """A plan being made."""

    now: float
    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    used: set[Sequence] = field(default_factory=set)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_preempted: int = 0
    short: bool = False  # blocks ran out: nobody is let in
    encoders: list[EncoderSpec] = field(default_factory=list)

    def takes_encoder(self, placement: Placement, most: int) -> bool:
        """Whether an encoder that has to run still fits the step's own budget for them."""
        if placement.cross is None or not placement.cross.runs_encoder or not self.encoders:
            return True
        return sum(spec.input.length for spec in self.encoders) + placement.cross.encoder.length <= most


class Scheduler:
    def __init__(
        self, limits: SchedulerLimits, cache: KvCache, retention: Retention, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.retention = retention
        self._eos = eos_token_ids
        self._rows = SamplerRows(limits.max_num_seqs, eos_token_ids)
        self._steps = StepMaker(self._rows, self._choices_at_end_of_prompt, prefix_caching=limits.prefix_caching)
        self._waiting: list[tuple[tuple[int, int, int, int], Sequence]] = []  # heap; closed groups are skipped lazily
        self._num_waiting = 0
        self._running: dict[Sequence, None] = {}  # an ordered set
        self._swapped: dict[Sequence, None] = {}  # waiting, with blocks on the host; shared ones stayed on the device

    # --- what the engine calls -----------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        return self.cache.pool

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def add(self, group: Group, output: ChoiceOutput) -> None:
        """Queues a new request. REQUIRES: it fits the pool when it runs alone (`fits`)."""
        request = group.request
        salt = salt_of(request)
        leader = Sequence(group, 0, TokenList(request.prompt_token_ids), BlockTable(self.pool, salt), salt, output)
        if request.params.beams is not None:
            group.search = beam_groups.start_search(group, self._eos)
        leader.begin()
        group.sequences.append(leader)
        self._enqueue(leader)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def most_blocks_of_beams(self, request: Request, beams: BeamParams) -> int:
        """Running and ended beams each have a tail of their own; copies are made before what they replace is free."""
        prompt = len(request.prompt_token_ids)
        shared = prompt // self.pool.block_size
        tail = self.blocks_for(prompt + request.params.max_tokens) - shared
        return shared + 2 * beams.width * tail + beams.width + self.cache.cross.num_blocks(request.encoder)

    @property
    def blocks_beside_leases(self) -> int:
        """Device blocks that a request can count on when it is alone."""
        return self.pool.num_blocks - 1 - self.cache.device_budget

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence; what it holds goes to its record, or back. Idempotent: the one release path."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._running.pop(sequence, None)  # an engine that died in the middle of a plan must close it too
        else:
            self._num_waiting -= 1
            self._swapped.pop(sequence, None)
        self._rows.release(sequence)
        self.retention.keep(sequence)
        sequence.status = Status.FINISHED
        sequence.group.num_finished += 1
        self._release_cross(sequence.group)

    def close(self, group: Group) -> None:
        """Ends every sequence of a group: finish, abort, failure, timeout and disconnect all come here."""
        group.closed = True
        beam_groups.release_ended(group)
        if group.search is not None and not group.finished:
            self._drop_beams(group.sequences[1:])  # its best one stands for what was computed
            del group.sequences[1:]
        for sequence in group.sequences:
            self.finish(sequence)
        self._release_cross(group)

    def distrust(self, sequence: Sequence) -> None:
        """Takes the sequence's blocks out of the prefix index: its cache may hold NaNs. Nobody continues from it."""
        sequence.table.uncommit(0)
        if sequence.group.cross is not None:
            self.cache.cross.distrust(sequence.group.cross)
        if sequence.group.record is not None:
            sequence.group.record.failed = True

    def plan(self, now: float) -> Launch | None:
        """The next step, or None when nothing can move."""
        streaming = any(s.num_computed >= s.num_prompt for s in self._running)
        draft = _Draft(now, budget=self.limits.tokens_of_step(streaming))
        self.cache.begin_plan()
        decoding, prefilling = self._ready()
        self._schedule(draft, decoding)
        if prefilling and not draft.short:
            self._admit_waiting(draft, before=prefilling[0])
        self._schedule(draft, prefilling)
        if not draft.short or not self._running:  # the last one may have given its blocks up: somebody must move
            self._admit_waiting(draft)
        self.cache.end_plan()
        if not draft.chunks:
            return None
        swaps_out, swaps_in = self.cache.take_swaps()
        moves = BlockMoves(swaps_out, swaps_in, draft.copies)
        return self._steps.make(draft.chunks, moves, draft.encoders, draft.num_preempted)

    def accept_token(self, sequence: Sequence, token_id: int) -> None:
        """A result names the token in flight: it joins the sequence, and full blocks become findable."""
        sequence.accept(token_id)
        if self.limits.prefix_caching and sequence.status is Status.RUNNING:
            known = min(sequence.num_computed, sequence.num_prompt + sequence.num_output)
            if known % self.pool.block_size == 0:
                sequence.table.commit(sequence.tokens, known)
        if sequence.num_output > sequence.group.charged_output:
            self.retention.leases.extend(sequence.group)

    def advance_beams(self, group: Group, candidates: BeamCandidates, tops: list[Alternatives] | None) -> None:
        """A result brings the candidates of a group: beams change places, or the search is over."""
        assert group.search is not None
        self._take_turn(group, group.search.advance(candidates, tops))

    def cut_beams(self, group: Group) -> None:
        """The deadline has come: what there is, is the answer."""
        assert group.search is not None
        self._take_turn(group, group.search.cut(), deadline=True)

    def _take_turn(self, group: Group, turn: Turn, deadline: bool = False) -> None:
        assert group.search is not None
        beam_groups.keep_ended(group, turn)
        if not turn.done:
            forks, unneeded = beam_groups.reorder(group, turn)
            self._drop_beams(unneeded)
            self._running.update(dict.fromkeys(forks))
            return
        choices = beam_groups.choices_of(group, group.search, deadline)
        self._drop_beams(group.sequences)
        beam_groups.release_ended(group)
        group.sequences = choices
        self._running.update(dict.fromkeys(choices))
        for choice in choices:
            self.finish(choice)

    def check_idle(self) -> None:
        """Nothing runs or waits: then every row must be back, and every block that no lease holds."""
        assert not self._running and self._num_waiting == 0, "check_idle while requests are open"
        self.cache.check_only_leases()
        self._rows.check_all_free()

    # --- running sequences ---------------------------------------------------------------------------------------

    def _ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that need one token, and those that need more; each by urgency."""
        # One that wants no more samples only waits for its last token to come back, unless its prompt is not done.
        ready = [
            (s.planned_len - s.num_computed > 1, s.urgency, s)
            for s in self._running
            if s.num_computed < s.planned_len
            and (s.planned_len < s.most_len or s.num_computed < s.num_prompt)
            and (s.group.search is None or s is s.group.sequences[0])
        ]
        ready.sort()
        num_decoding = bisect_left(ready, True, key=lambda entry: entry[0])
        ordered = [s for _, _, s in ready]
        return ordered[:num_decoding], ordered[num_decoding:]

    def _schedule(self, draft: _Draft, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if draft.budget == 0:
                return
            if sequence.status is Status.RUNNING and sequence not in draft.used:  # not a victim of one before it
                self._schedule_chunk(draft, sequence)

    def _schedule_chunk(self, draft: _Draft, sequence: Sequence) -> bool:
        """Gives the sequence its next chunk, preempting others if it must. False: it is not in this step."""
        if sequence.group.search is not None and sequence.group.forked:
            return self._schedule_beams(draft, sequence.group)
        begin = sequence.num_computed
        count = min(sequence.num_pending, draft.budget)
        while (pairs := sequence.table.try_prepare_write(begin, begin + count)) is None:
            if self.cache.make_room(sequence.table.blocks_needed(begin, begin + count)):
                continue
            draft.short = True
            victim = self._victim(draft, sequence)
            if not self._try_preempt(victim):
                draft.used.add(victim)  # sits this step out, and can be preempted in the next
                return False
            draft.num_preempted += 1
            if victim is sequence:
                return False
        draft.copies.extend(pairs)
        draft.chunks.append(Chunk(sequence, begin, count))
        draft.used.add(sequence)
        draft.budget -= count
        sequence.num_computed = begin + count
        return True

    def _schedule_beams(self, draft: _Draft, group: Group) -> bool:
        """Gives every beam of a group its next token, or none; one wider than the budget has a step to itself."""
        beams = group.sequences
        if len(beams) > draft.budget and draft.chunks:
            return False
        needed = sum(b.table.blocks_needed(b.num_computed, b.num_computed + 1) for b in beams)
        while not self.cache.make_room(needed):
            draft.short = True
            victim = self._victim(draft, beams[0])
            if not self._try_preempt(victim):
                draft.used.add(victim)  # sits this step out, and can be preempted in the next
                return False
            draft.num_preempted += 1
            if victim.group is group:
                return False
        for beam in beams:
            pairs = beam.table.try_prepare_write(beam.num_computed, beam.num_computed + 1)
            assert pairs is not None, "the blocks were counted"
            draft.copies.extend(pairs)
            draft.chunks.append(Chunk(beam, beam.num_computed, 1))
            draft.used.add(beam)
            beam.num_computed += 1
        draft.budget = max(0, draft.budget - len(beams))
        return True

    def _victim(self, draft: _Draft, sequence: Sequence) -> Sequence:
        """The least urgent running sequence that this step does not use; the one in need itself, if it is that."""
        return max((s for s in self._running if s not in draft.used), key=lambda s: s.urgency, default=sequence)

    def _try_preempt(self, sequence: Sequence) -> bool:
        """Back to the queue: its blocks move to the host, or its KV is computed again (or found in the index)."""
        if sequence.group.search is not None and sequence.group.forked:
            self._restart(sequence.group)
            return True
        if self.cache.try_swap_out(sequence):
            self._swapped[sequence] = None
        elif _may_owe_blocks(sequence):
            return False
        else:
            self._drop_blocks(sequence)
        del self._running[sequence]
        self._rows.release(sequence)
        self._enqueue(sequence)
        self._release_cross(sequence.group)
        return True

    def _restart(self, group: Group) -> None:
        """A group of beams gives way as a whole, and searches anew from its prompt."""
        first = group.sequences[0]
        self._drop_beams(group.sequences)
        beam_groups.release_ended(group)
        prompt = TokenList(group.request.prompt_token_ids)
        group.sequences = [Sequence(group, 0, prompt, BlockTable(self.pool, first.salt), first.salt, first.output)]
        group.search, group.forked = beam_groups.start_search(group, self._eos), False
        group.sequences[0].begin()
        self._enqueue(group.sequences[0])
        self._release_cross(group)

    def _drop_beams(self, beams: Iterable[Sequence]) -> None:
        for beam in beams:
            self._running.pop(beam, None)
            beam.table.free()
            beam.status = Status.FINISHED

    def _drop_blocks(self, sequence: Sequence) -> None:
        sequence.table.free()
        sequence.num_computed = 0
        self._release_cross(sequence.group)

    def _release_cross(self, group: Group) -> None:
        """The cross table goes with the last sequence that runs or keeps blocks for when it comes back."""
        if group.cross is None or any(
            s.status is Status.RUNNING or (s.status is Status.WAITING and len(s.table)) for s in group.sequences
        ):
            return
        self.cache.cross.let_go(group.cross)
        group.cross = None

    # --- waiting sequences ---------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        heapq.heappush(self._waiting, (sequence.urgency, sequence))
        self._num_waiting += 1

    def _admit_waiting(self, draft: _Draft, before: Sequence | None = None) -> None:
        """Lets waiting sequences in, by urgency; only those that are more urgent than `before`, if it is given."""
        slots = self.limits.max_num_seqs - self._slots_in_use()
        while self._waiting and draft.budget > 0:
            sequence = self._waiting[0][1]
            if sequence.status is Status.FINISHED:
                heapq.heappop(self._waiting)
                continue
            if before is not None and sequence.urgency > before.urgency:
                return
            # A group wider than all the slots there are runs when it has them all.
            need = 1 if sequence.group.forked else min(sequence.group.num_slots, self.limits.max_num_seqs)
            # A preempted sequence whose last token is still on the device comes back when that token is known.
            if need > slots or sequence.num_in_flight > 0 or not self._admit(draft, sequence):
                return
            slots -= need

    def _slots_in_use(self) -> int:
        return sum(_slots_of(sequence) for sequence in self._running)

    def _admit(self, draft: _Draft, sequence: Sequence) -> bool:
        """Moves the head of the queue to the running ones, if blocks for all its tokens are free.

        Beside others it leaves each of them a block to grow into, or it would soon be preempted by one of them.
        """
        placement = self._place(sequence)
        if placement is None:
            return False
        if not draft.takes_encoder(placement, self.limits.max_num_encoder_tokens):
            placement.drop()
            return False
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        self._swapped.pop(sequence, None)
        sequence.status = Status.RUNNING
        self._running[sequence] = None
        encoder = self.cache.settle(placement, sequence)
        if encoder is not None:
            draft.encoders.append(encoder)
        group = sequence.group
        if group.admitted_at is None:
            group.admitted_at = draft.now
            group.cached_tokens = placement.computed
            group.inheritance = self.cache.report(placement, sequence)
        scheduled = self._schedule_chunk(draft, sequence)
        placement.release_lender()
        return scheduled

    def _place(self, sequence: Sequence) -> Placement | None:
        """Where it starts from, with room for it; None if there is none."""
        placement = self.cache.place(sequence)
        if self.cache.make_room(placement.needed + len(self._running)):
            return placement
        if not self._running and self._make_room_alone(placement, sequence):
            return placement
        if placement.table is not sequence.table:
            placement.drop()
        if self._running or any(_may_owe_blocks(s) for s in self._swapped):
            return None
        return self._place_anew(sequence)

    def _make_room_alone(self, placement: Placement, sequence: Sequence) -> bool:
        """Alone it must be able to run. Luxuries are then the copy of a partly filled block, unless a lease promises
        it, and what other waiting sequences left here and on the host when they were swapped out."""
        if placement.lease is None and self.cache.trim(placement, sequence) and self.cache.make_room(placement.needed):
            return True
        for other in sorted(self._swapped, key=lambda s: s.urgency, reverse=True):
            if other is not sequence and not _may_owe_blocks(other):
                del self._swapped[other]
                self._drop_blocks(other)
                if self.cache.make_room(placement.needed):
                    return True
        return False

    def _place_anew(self, sequence: Sequence) -> Placement | None:
        """What it has, or would share, is in the way of leases that should move to the host: they move first."""
        self._swapped.pop(sequence, None)
        self._drop_blocks(sequence)
        cross = self.cache.cross.num_blocks(sequence.group.request.encoder)
        self.cache.make_room(self.blocks_for(len(sequence.tokens)) + cross)
        placement = self.cache.place(sequence)
        if self.cache.make_room(placement.needed):
            return placement
        if self.cache.trim(placement, sequence) and self.cache.make_room(placement.needed):
            return placement
        placement.drop()
        return None

    def _choices_at_end_of_prompt(self, sequence: Sequence) -> list[Sequence]:
        """The sequence, or all choices of its group when its prefill ends here and they part ways."""
        group = sequence.group
        if group.forked:
            return [sequence]
        group.forked = True
        for choice in range(1, group.request.params.n):
            child = Sequence(
                group,
                choice,
                TokenList(group.request.prompt_token_ids),
                sequence.table.fork(),
                sequence.salt,
                sequence.output.sibling(choice),
                num_computed=sequence.num_computed,
                status=Status.RUNNING,
            )
            child.begin()
            group.sequences.append(child)
            self._running[child] = None
        return list(group.sequences)


def salt_of(request: Request) -> bytes:
    return pack_salt(request.tenant, request.cache_salt, request.encoder)


def pack_salt(tenant: str, cache_salt: str, encoder: EncoderInput | None = None) -> bytes:
    """An exact key of who may share blocks: no two (tenant, salt, encoder input) of a model give the same bytes."""
    name, salt = tenant.encode(), cache_salt.encode()
    head = len(name).to_bytes(4, "little") + name
    return head + salt if encoder is None else head + len(salt).to_bytes(4, "little") + salt + encoder.key


def _may_owe_blocks(sequence: Sequence) -> bool:
    """Its end may be in flight, and its blocks are promised to a lease: they cannot be dropped before that is known."""
    record = sequence.group.record
    return sequence.num_in_flight > 0 and record is not None and record.ttl is not None


def _slots_of(sequence: Sequence) -> int:
    """Slots that a running sequence takes; the first of a group takes those that its group is going to need."""
    group = sequence.group
    if group.forked and group.search is None:
        return 1
    return group.num_slots if sequence is group.sequences[0] else 0
