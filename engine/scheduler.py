"""Decides what each step computes. Owned by the event-loop thread; no torch, no asyncio; the clock is passed in.

plan() builds a StepPlan and moves the sequences' counts as if the step had run; apply() takes its result. Between the
two the next plan may be made (the pipelined loop): a sampled token not yet applied is `in flight`, and its sequence's
next input is named by its sampler row instead of its id.

Rules of a step, within a budget of tokens:
  1. running sequences that need one token, then running sequences in prefill, each by urgency; between the two, waiting
     sequences that are more urgent than any in prefill: a continuation does not wait for the end of a long prompt;
  2. when blocks run out, leases move to the host; then the least urgent running sequence that this step has not used
     gives its blocks back;
  3. unless that happened, waiting sequences by urgency, as long as slots, blocks and budget last.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engine._C import BlockPool, BlockTable, TokenList, prepare_batch
from engine.cache import KvCache, Placement
from engine.leases import OPEN_ENDED_TOKENS
from engine.outputs import ChoiceOutput
from engine.retention import Retention
from engine.sequence import NO_ROW, Group, Sequence, Status
from engine.types import PromptLogprobSpec, RowSpec, StepPlan


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan and whom it concerns: needed again when its result comes."""

    plan: StepPlan
    sampled: tuple[Sequence, ...]  # as plan.sample_rows
    prompt_ended: tuple[Group, ...]  # whose last prompt token this step computes without sampling (max_tokens 0)
    prompt_logprobs: tuple[Group, ...]  # as plan.prompt_logprobs
    num_prompt_tokens: int
    num_preempted: int


@dataclass(slots=True)
class _Draft:
    """A plan being made."""

    now: float
    budget: int
    chunks: list[tuple[Sequence, int, int]] = field(default_factory=list)  # (sequence, first position, count)
    used: set[Sequence] = field(default_factory=set)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_preempted: int = 0


@dataclass(slots=True)
class _Outcome:
    """What the chunks of a step lead to: samples, ends of prompts, log-probabilities of prompts."""

    sampled: list[Sequence] = field(default_factory=list)
    sample_tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    opened: list[RowSpec] = field(default_factory=list)
    ended: list[Group] = field(default_factory=list)
    specs: list[PromptLogprobSpec] = field(default_factory=list)
    spec_groups: list[Group] = field(default_factory=list)
    num_prompt_tokens: int = 0


class Scheduler:
    def __init__(
        self, limits: SchedulerLimits, cache: KvCache, retention: Retention, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.retention = retention
        self._eos = eos_token_ids
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []  # heap; closed groups are skipped lazily
        self._num_waiting = 0
        self._running: dict[Sequence, None] = {}  # an ordered set
        self._swapped: dict[Sequence, None] = {}  # waiting, with blocks on the host; shared ones stayed on the device
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._rows_to_close: list[int] = []
        self._step = 0

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
        salt = pack_salt(request.tenant, request.cache_salt)
        leader = Sequence(group, 0, TokenList(request.prompt_token_ids), BlockTable(self.pool, salt), salt, output)
        if request.retain is not None and request.retain.open_ended:
            group.charged_output = OPEN_ENDED_TOKENS
        group.sequences.append(leader)
        self._enqueue(leader)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of that many tokens can run when it is alone."""
        return self.blocks_for(num_tokens) <= self.pool.num_blocks - 1

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence; what it holds goes to its record, or back. Idempotent: the one release path."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            del self._running[sequence]
        else:
            self._num_waiting -= 1
            self._swapped.pop(sequence, None)
        self._release_row(sequence)
        self.retention.keep(sequence)
        sequence.status = Status.FINISHED
        sequence.group.num_finished += 1

    def close(self, group: Group) -> None:
        """Ends every sequence of a group: finish, abort, failure, timeout and disconnect all come here."""
        group.closed = True
        for sequence in group.sequences:
            self.finish(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """Takes the sequence's blocks out of the prefix index: its cache may hold NaNs. Nobody continues from it."""
        sequence.table.uncommit(0)
        if sequence.group.record is not None:
            sequence.group.record.failed = True

    def plan(self, now: float) -> Launch | None:
        """The next step, or None when nothing can move."""
        draft = _Draft(now, budget=self.limits.max_num_batched_tokens)
        self.cache.begin_plan()
        decoding, prefilling = self._ready()
        self._schedule(draft, decoding)
        if draft.num_preempted == 0 and prefilling:
            self._admit_waiting(draft, before=prefilling[0])
        self._schedule(draft, prefilling)
        if draft.num_preempted == 0:
            self._admit_waiting(draft)
        self.cache.end_plan()
        return self._launch(draft) if draft.chunks else None

    def accept_token(self, sequence: Sequence, token_id: int) -> None:
        """A result names the token in flight: it joins the sequence, and full blocks become findable."""
        sequence.accept(token_id)
        if self.limits.prefix_caching and sequence.status is Status.RUNNING:
            known = min(sequence.num_computed, sequence.num_prompt + sequence.num_output)
            if known % self.pool.block_size == 0:
                sequence.table.commit(sequence.tokens, known)
        if sequence.num_output > sequence.group.charged_output:
            sequence.group.charged_output += OPEN_ENDED_TOKENS
            self.retention.leases.extend(sequence.group, sequence.group.charged_output)

    def check_idle(self) -> None:
        """Nothing runs or waits: then every row must be back, and every block that no lease holds."""
        assert not self._running and self._num_waiting == 0, "check_idle while requests are open"
        self.cache.check_only_leases()
        assert len(self._free_rows) == self.limits.max_num_seqs, "sampler rows lost"

    # --- running sequences ---------------------------------------------------------------------------------------

    def _ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that need one token, and those that need more; each by urgency."""
        # One that wants no more samples only waits for its last token to come back, unless its prompt is not done.
        ready = [
            (s.planned_len - s.num_computed > 1, s.urgency, s)
            for s in self._running
            if s.num_computed < s.planned_len and (s.planned_len < s.most_len or s.num_computed < s.num_prompt)
        ]
        ready.sort()
        num_decoding = bisect_left(ready, True, key=lambda entry: entry[0])
        ordered = [s for _, _, s in ready]
        return ordered[:num_decoding], ordered[num_decoding:]

    def _schedule(self, draft: _Draft, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if draft.budget == 0:
                return
            if sequence.status is Status.RUNNING:  # not preempted by one before it
                self._schedule_chunk(draft, sequence)

    def _schedule_chunk(self, draft: _Draft, sequence: Sequence) -> bool:
        """Gives the sequence its next chunk, preempting others if it must. False: it was preempted itself."""
        begin = sequence.num_computed
        count = min(sequence.num_pending, draft.budget)
        while (pairs := sequence.table.try_prepare_write(begin, begin + count)) is None:
            if self.cache.make_room(sequence.table.blocks_needed(begin, begin + count)):
                continue
            victim = self._victim(draft, sequence)
            self._preempt(victim)
            draft.num_preempted += 1
            if victim is sequence:
                return False
        draft.copies.extend(pairs)
        draft.chunks.append((sequence, begin, count))
        draft.used.add(sequence)
        draft.budget -= count
        sequence.num_computed = begin + count
        return True

    def _victim(self, draft: _Draft, sequence: Sequence) -> Sequence:
        """The least urgent running sequence that this step does not use; the one in need itself, if it is that."""
        return max((s for s in self._running if s not in draft.used), key=lambda s: s.urgency, default=sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue: its blocks move to the host, or its KV is computed again (or found in the index)."""
        del self._running[sequence]
        self._release_row(sequence)
        if self.cache.try_swap_out(sequence):
            self._swapped[sequence] = None
        else:
            self._drop_blocks(sequence)
        self._enqueue(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        sequence.table.free()
        sequence.num_computed = 0

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
            need = 1 if sequence.group.forked else sequence.group.num_slots
            # A preempted sequence whose last token is still on the device comes back when that token is known.
            if need > slots or sequence.num_in_flight > 0 or not self._admit(draft, sequence):
                return
            slots -= need

    def _slots_in_use(self) -> int:
        unforked = sum(s.group.num_slots - 1 for s in self._running if not s.group.forked)
        return len(self._running) + unforked

    def _admit(self, draft: _Draft, sequence: Sequence) -> bool:
        """Moves the head of the queue to the running ones, if blocks for all its tokens are free.

        Beside others it leaves each of them a block to grow into, or it would soon be preempted by one of them.
        """
        placement = self.cache.place(sequence)
        if not self._has_room(placement, sequence):
            if placement.table is not sequence.table:
                placement.drop()
            return False
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        self._swapped.pop(sequence, None)
        sequence.status = Status.RUNNING
        self._running[sequence] = None
        self.cache.settle(placement, sequence)
        group = sequence.group
        if group.admitted_at is None:
            group.admitted_at = draft.now
            group.cached_tokens = placement.computed
            group.inheritance = self.cache.report(placement, sequence)
        scheduled = self._schedule_chunk(draft, sequence)
        placement.release_lender()
        return scheduled

    def _has_room(self, placement: Placement, sequence: Sequence) -> bool:
        if self.cache.make_room(placement.needed + len(self._running)):
            return True
        if self._running:
            return False
        # Alone, it must be able to run: the copy of a partly filled block is then a luxury, and so is what other
        # waiting sequences left on the device when they were swapped out.
        if self.cache.trim(placement, sequence) and self.cache.make_room(placement.needed):
            return True
        for other in sorted(self._swapped, key=lambda s: s.urgency, reverse=True):
            if other is not sequence:
                del self._swapped[other]
                self._drop_blocks(other)
                if self.cache.make_room(placement.needed):
                    return True
        return False

    # --- making the plan -----------------------------------------------------------------------------------------

    def _launch(self, draft: _Draft) -> Launch:
        batch = prepare_batch(
            [s.table for s, _, _ in draft.chunks],
            [s.tokens for s, _, _ in draft.chunks],
            [begin for _, begin, _ in draft.chunks],
            [count for _, _, count in draft.chunks],
            [s.row for s, _, _ in draft.chunks],
        )
        closing, self._rows_to_close = tuple(self._rows_to_close), []
        swaps_out, swaps_in = self.cache.take_swaps()
        outcome = _Outcome()
        for (sequence, begin, count), start in zip(draft.chunks, batch.query_start.tolist(), strict=False):
            self._conclude_chunk(outcome, sequence, begin, count, start)
        self._step += 1
        plan = StepPlan(
            step=self._step,
            input_ids=batch.input_ids,
            positions=batch.positions,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            slot_mapping=batch.slot_mapping,
            block_tables=batch.block_tables,
            swaps_out=np.asarray(swaps_out, dtype=np.int32).reshape(-1, 2),
            swaps_in=np.asarray(swaps_in, dtype=np.int32).reshape(-1, 2),
            block_copies=np.asarray(draft.copies, dtype=np.int32).reshape(-1, 2),
            close_rows=closing,
            open_rows=tuple(outcome.opened),
            sample_tokens=np.asarray(outcome.sample_tokens, dtype=np.int32),
            sample_rows=np.asarray([s.row for s in outcome.sampled], dtype=np.int32),
            sample_positions=np.asarray(outcome.positions, dtype=np.int32),
            num_logprobs=_most_logprobs(outcome.sampled),
            prompt_logprobs=tuple(outcome.specs),
        )
        return Launch(
            plan,
            tuple(outcome.sampled),
            tuple(outcome.ended),
            tuple(outcome.spec_groups),
            outcome.num_prompt_tokens,
            draft.num_preempted,
        )

    def _conclude_chunk(self, outcome: _Outcome, sequence: Sequence, begin: int, count: int, start: int) -> None:
        """What the chunk [begin, begin + count) of a sequence, at token `start` of the step, leads to."""
        if begin < sequence.num_prompt or count > 1:
            # Known tokens: whoever comes next may share them. A sampled token is committed when it is known.
            if self.limits.prefix_caching:
                sequence.table.commit(sequence.tokens, min(begin + count, len(sequence.tokens)))
            outcome.num_prompt_tokens += max(0, min(begin + count, sequence.num_prompt) - begin)
            if (spec := _prompt_logprobs(sequence, begin, count, start)) is not None:
                outcome.specs.append(spec)
                outcome.spec_groups.append(sequence.group)
        if begin + count < sequence.planned_len:
            return
        choices = self._choices_at_end_of_prompt(sequence)
        if not sequence.wants_sample:
            outcome.ended.append(sequence.group)
            return
        for choice in choices:
            if choice.row == NO_ROW:
                outcome.opened.append(self._open_row(choice))
            outcome.sampled.append(choice)
            outcome.sample_tokens.append(start + count - 1)
            outcome.positions.append(choice.planned_len)
            choice.note_sampling()

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
            group.sequences.append(child)
            self._running[child] = None
        return list(group.sequences)

    # --- rows ----------------------------------------------------------------------------------------------------

    def _open_row(self, sequence: Sequence) -> RowSpec:
        sequence.row = self._free_rows.pop()
        request = sequence.group.request
        params = request.params
        remembers_prompt = params.repetition_penalty != 1.0 or bool(params.bad_words)
        holds_back_eos = params.min_tokens > 0 and not params.ignore_eos
        return RowSpec(
            row=sequence.row,
            params=params,
            seed=sequence.group.seed,
            choice=sequence.choice,
            prompt_token_ids=request.prompt_token_ids if remembers_prompt else (),
            output_token_ids=tuple(sequence.tokens[sequence.num_prompt :]),
            eos_token_ids=self._eos if holds_back_eos else (),
        )

    def _release_row(self, sequence: Sequence) -> None:
        if sequence.row != NO_ROW:
            self._rows_to_close.append(sequence.row)
            self._free_rows.append(sequence.row)
            sequence.row = NO_ROW


def pack_salt(tenant: str, cache_salt: str) -> bytes:
    """An exact key of who may share blocks: no two (tenant, salt) pairs give the same bytes."""
    name = tenant.encode()
    return len(name).to_bytes(4, "little") + name + cache_salt.encode()


def _prompt_logprobs(sequence: Sequence, begin: int, count: int, start: int) -> PromptLogprobSpec | None:
    """What this chunk can tell of the prompt: position p gives the log-probability of token p + 1.

    A recomputed chunk does not tell again what is known (`done` entries, the first being None).
    """
    group = sequence.group
    top = group.request.params.prompt_logprobs
    if top is None or sequence.choice != 0:
        return None
    first = max(begin, group.prompt_logprobs_planned)
    last = min(begin + count, sequence.num_prompt - 1)
    if first >= last:
        return None
    group.prompt_logprobs_planned = last
    targets = np.asarray(group.request.prompt_token_ids[first + 1 : last + 1], dtype=np.int32)
    return PromptLogprobSpec(group.request.id, start + first - begin, targets, top)


def _most_logprobs(sampled: Iterable[Sequence]) -> int | None:
    wanted = [s.group.request.params.logprobs for s in sampled]
    return max((w for w in wanted if w is not None), default=None)
