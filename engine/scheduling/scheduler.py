"""Decides what each step computes. Owned by the event-loop thread; no torch, no asyncio; the clock is passed in.

plan() builds a StepPlan and moves the sequences' counts as if the step had run; apply() takes its result. Between the
two the next plan may be made (the pipelined loop): a sampled token not yet applied is `in flight`, and its sequence's
next input is named by its sampler row instead of its id.

Rules of a step, within a budget of tokens:
  0. a tenant that waits for slots takes them from one that has more (shares.py), and is let in behind 1's first part;
  1. running sequences that need one token, then running sequences in prefill, as their turns are (fairness.py); between
     the two, waiting sequences whose turn is before any in prefill: a continuation does not wait for a long prompt;
  2. when blocks run out, leases move to the host; then the least urgent running sequence that this step has not used
     gives its blocks back;
  3. unless that happened and others run, waiting sequences in turn, as long as slots, blocks and budget last; while
     more wait than there are slots for, prompts have a part of the budget only (flow.py);
  4. extractions of hidden states (engine/states): beside generations the share of tokens that is theirs, else all there
     are. They are preempted before any generation, also to let one in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from bequest.engine._C import BeamTables, BlockPool, BlockTable, TokenList
from bequest.engine.beams import groups
from bequest.engine.beams.answers import BeamAnswer
from bequest.engine.beams.search import Alternatives, BeamSearch, Turn
from bequest.engine.cache.kv_cache import KvCache
from bequest.engine.cache.salt import salt_of
from bequest.engine.inheritance.retention import Retention
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.scheduling.assembly import BlockMoves
from bequest.engine.scheduling.draft import Draft, SchedulerLimits
from bequest.engine.scheduling.fairness import Account, FairQueue, turn
from bequest.engine.scheduling.flow import PromptFlow
from bequest.engine.scheduling.placing import Placer
from bequest.engine.scheduling.sampler_rows import SamplerRows
from bequest.engine.scheduling.sequence import Group, Sequence, Status
from bequest.engine.scheduling.shares import SlotShares
from bequest.engine.scheduling.step import Launch, StepMaker
from bequest.engine.states.capture import EncoderCapture, capture_of
from bequest.engine.states.extraction import Extractions, Room
from bequest.engine.types import MAX_BEAM_WIDTH, BeamCandidates


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
        self.extractions = Extractions(limits.extraction)
        self.waiting = FairQueue()  # generations; extractions have a queue of their own
        self._running: dict[Sequence, None] = {}  # an ordered set
        self._placer = Placer(cache)
        self._flow = PromptFlow(limits.prompt_pace, limits.max_num_seqs, limits.max_num_batched_tokens)
        self._block_size = cache.pool.block_size

    # --- what the engine calls -----------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        return self.cache.pool

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.extractions.waiting)

    def num_waiting_of(self, tenant: str) -> int:
        return self.waiting.num_waiting(tenant) + self.extractions.waiting.num_waiting(tenant)

    def add(self, group: Group, output: ChoiceOutput) -> None:
        """Queues a new request. REQUIRES: it fits the pool when it runs alone."""
        request, group.max_slots = group.request, self.limits.max_num_seqs
        salt = salt_of(request)
        leader = Sequence(group, 0, TokenList(request.prompt_token_ids), BlockTable(self.pool, salt), salt, output)
        if request.params.beams is not None:
            group.search = groups.start_search(group, self._eos)
        if request.params.beams is None or request.states_of_encoder:
            leader.capture = capture_of(request)
        leader.begin()
        if request.extracts:
            leader.owe()
        group.sequences.append(leader)
        group.account = self._queue_of(leader).account(request.tenant)
        self._enqueue(leader)

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
            self._queue_of(sequence).drop(sequence)
            self._placer.forget(sequence)
        self._rows.release(sequence)
        self.retention.keep(sequence)
        sequence.status = Status.FINISHED
        sequence.group.num_finished += 1
        self.cache.release_cross(sequence.group)

    def end(self, sequence: Sequence) -> None:
        """Its tokens are final: it is finished, unless hidden states are owed."""
        if sequence.capture is None:
            self.finish(sequence)
            return
        sequence.owe()
        self._rows.release(sequence)
        if sequence.capture.complete:
            self.finish(sequence)

    def close(self, group: Group) -> None:
        """Ends every sequence of a group: finish, abort, failure, timeout and disconnect all come here."""
        group.closed = True
        self.extractions.release_memory(group)
        groups.keep_best(group)
        for sequence in group.sequences:
            self.finish(sequence)
        self.cache.release_cross(group)

    def distrust(self, sequence: Sequence) -> None:
        """Takes the sequence's blocks out of the prefix index: its cache may hold NaNs. Nobody continues from it."""
        groups.keep_best(sequence.group)
        sequence.table.uncommit(0)
        if sequence.group.cross is not None:
            self.cache.cross.distrust(sequence.group.cross)
        if sequence.group.record is not None:
            sequence.group.record.failed = True

    def plan(self, now: float, behind: bool = False) -> Launch | None:
        """The next step, or None when nothing can move. `behind`: it will wait for another one."""
        decoding, prefilling, extracting = self._ready()
        if not (decoding or prefilling or extracting or self.num_waiting):
            return None  # all there is has been launched: whoever plans ahead asks once more than there are steps
        streaming = any(s.num_computed >= s.num_prompt and not s.extracts for s in self._running)
        most = self.limits.tokens_of_step(streaming)
        draft = Draft(now, most, self.limits.extraction.max_step_rows)
        self.cache.begin_plan()
        due = None
        if prefilling or len(self.waiting):  # in most steps neither: what runs need not be counted
            shares = self._count_slots()
            crowded = len(self.waiting) > shares.num_free
            draft.divide(shares, self._flow.tokens_of_step(shares.prompt_tokens(most), len(decoding), crowded))
            due = self._level_slots(draft, shares)
        fill = partial(self.extractions.fill, running=extracting, schedule=self._schedule, admit=self._admit)
        extracted = self.extractions.begin(draft, fill)
        self._schedule_decoding(draft, decoding)
        if due is not None and not draft.short and draft.budget > 0:
            draft.short = not self._admit(draft, due)
        if prefilling and not draft.short:
            self._admit_waiting(draft, before=prefilling[0])
        self._schedule(draft, prefilling)
        if not draft.short or not self._running:  # the last one may have given its blocks up: somebody must move
            self._admit_waiting(draft)
        generating = not all(s.extracts for s in self._running)
        queued = not behind or self.limits.extraction.queues_steps
        room = Room(most, extracted, generating=generating, queued=queued, extracting=bool(extracting))
        self.extractions.end(draft, fill, room)
        self.cache.end_plan()
        if not draft.chunks and not draft.encoders:
            return None
        self._flow.planned(len(decoding))
        moves = BlockMoves(*self.cache.take_swaps(), draft.copies, draft.copies_of_beams)
        return self._steps.make(draft.chunks, moves, draft.encoders, draft.num_preempted)

    def accept_token(self, sequence: Sequence, token_id: int) -> None:
        """A result names the token in flight: it joins the sequence, and full blocks become findable."""
        sequence.accept(token_id)
        if self.limits.prefix_caching and sequence.status is Status.RUNNING:
            known = min(sequence.num_computed, sequence.num_prompt + sequence.num_output)
            if known % self._block_size == 0:
                sequence.table.commit(sequence.tokens, known)
        if sequence.num_output > sequence.group.charged_output:
            self.retention.leases.extend(sequence.group)

    def advance_beams(self, group: Group, candidates: BeamCandidates, tops: list[Alternatives] | None) -> None:
        """A result brings the candidates of a group: beams change places, or the search is over."""
        assert group.search is not None
        groups.take_over(group)
        self._take_turn(group, group.search, group.search.advance(candidates, tops))

    def cut_beams(self, group: Group) -> None:
        """The deadline has come: what there is, is the answer."""
        assert group.search is not None
        self._take_turn(group, group.search, group.search.cut(), deadline=True)

    def _take_turn(self, group: Group, search: BeamSearch, turn: Turn, deadline: bool = False) -> None:
        if not turn.done:
            groups.keep_ended(group, turn)
            groups.reorder(group, search, turn)
            return
        answer = BeamAnswer(search, deadline)
        group.search = None
        if answer.beams and groups.ends_as_one(group):
            self.retention.keep_beams(group, groups.estates_of(group, answer))
            self._drop_search(group)
            group.answer, group.num_finished = answer, 1
            self.cache.release_cross(group)
            return
        groups.keep_ended(group, turn)
        choices = groups.choices_of(group, answer)
        self._drop_search(group)
        group.sequences = choices
        self._running.update(dict.fromkeys(choices))
        for choice in choices:
            self.end(choice)

    def check_idle(self) -> None:
        """Nothing runs or waits: then every row must be back, and every block that no lease holds."""
        assert not self._running and self.num_waiting == 0, "check_idle while requests are open"
        self.cache.check_only_leases()
        self._rows.check_all_free()

    # --- running sequences ---------------------------------------------------------------------------------------

    def _ready(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Running sequences that need one token, by urgency; those that need more and extractions, in turn."""
        # One that wants no more samples only waits for its last token to come back, unless its prompt is not done.
        ready = [
            (s.planned_len - s.num_computed > 1, s.urgency, s)
            for s in self._running
            if s.num_computed < s.planned_len
            and (s.planned_len < s.most_len or s.num_computed < s.num_prompt)
            and not s.owing
        ]
        owing = [(owed, s.urgency, s) for s in self._running if s.owing and (owed := s.num_to_compute(s.num_computed))]
        ready += [(owed > 1, urgency, s) for owed, urgency, s in owing if not s.extracts]
        ready.sort()
        num_decoding = bisect_left(ready, True, key=lambda entry: entry[0])
        ordered = [s for _, _, s in ready]
        extracting = sorted((s for _, _, s in owing if s.extracts), key=turn)
        return ordered[:num_decoding], sorted(ordered[num_decoding:], key=turn), extracting

    def _schedule(self, draft: Draft, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if draft.budget == 0:
                return
            if sequence.status is Status.RUNNING and sequence not in draft.used:  # not a victim of one before it
                self._schedule_chunk(draft, sequence)

    def _schedule_decoding(self, draft: Draft, sequences: list[Sequence]) -> None:
        """The same of sequences that need one token: in most steps all there are, and most have its place already."""
        for sequence in sequences:
            if draft.budget == 0:
                return
            if sequence.status is not Status.RUNNING or sequence in draft.used:
                continue
            group, begin = sequence.group, sequence.num_computed
            if group.search is None and group.beams is None and sequence.capture is None:
                pairs = sequence.table.try_prepare_write(begin, begin + 1)
                if pairs is not None:
                    draft.add_token(sequence, pairs)
                    continue
            self._schedule_chunk(draft, sequence)

    def _schedule_chunk(self, draft: Draft, sequence: Sequence) -> bool:
        """Gives the sequence its next chunk, preempting others if it must. False: it is not in this step."""
        if sequence.group.search is not None and draft.num_beams >= MAX_BEAM_WIDTH:
            return False  # as many as a step ranks
        if sequence.group.beams is not None:
            return self._schedule_beams(draft, sequence, sequence.group.beams)
        if sequence.owing:
            return self._schedule_owed(draft, sequence)
        count = draft.most_tokens(sequence)
        return count > 0 and self._schedule_write(draft, sequence, count)

    def _schedule_write(self, draft: Draft, sequence: Sequence, count: int) -> bool:
        """The next `count` tokens of a sequence, or fewer if there is no room for their hidden states."""
        begin = sequence.num_computed
        if sequence.capture is not None:
            count = sequence.capture.most_tokens(begin, count, draft.state_rows)
        pairs = sequence.table.try_prepare_write(begin, begin + count)
        if pairs is None:
            if not self._make_room(draft, sequence, lambda: sequence.table.blocks_needed(begin, begin + count)):
                return False
            pairs = sequence.table.try_prepare_write(begin, begin + count)
            assert pairs is not None, "the blocks were counted"
        draft.copies.extend(pairs)
        draft.add(sequence, begin, count)
        sequence.num_computed = begin + count
        return True

    def _schedule_owed(self, draft: Draft, sequence: Sequence) -> bool:
        """Hidden states that are owed: of tokens that have no KV yet, and of those that have, which are only read.

        The first come first: for their blocks the sequence itself may have to give way.
        """
        capture, num_there = sequence.capture, min(sequence.num_computed, sequence.planned_len)
        if isinstance(capture, EncoderCapture):
            return draft.read_encoder(sequence, self.limits)
        assert capture is not None
        count = min(capture.goal_len - sequence.num_computed, draft.budget)
        if count > 0 and draft.state_rows >= capture.num_layers and len(draft.chunks) < self.limits.max_chunks:
            self._schedule_write(draft, sequence, count)
            if sequence.status is not Status.RUNNING:
                return False
        for begin, end in capture.owed_runs(num_there):
            count = min(end - begin, draft.budget, draft.state_rows // capture.num_layers)
            if count == 0 or len(draft.chunks) >= self.limits.max_chunks:
                break
            draft.add(sequence, begin, count, read_only=True)
        return sequence in draft.used

    def _schedule_beams(self, draft: Draft, leader: Sequence, beams: BeamTables) -> bool:
        """Gives every beam of a group its next token, or none; one wider than what is left has a step to itself."""
        if draft.chunks and (len(beams) > draft.budget or draft.num_beams + len(beams) > MAX_BEAM_WIDTH):
            return False
        position = leader.num_computed
        if not self._make_room(draft, leader, lambda: beams.blocks_needed(position)):
            return False
        copies = beams.try_prepare_write(position)
        assert copies is not None, "the blocks were counted"
        draft.add_beams(leader, len(beams), copies)
        leader.num_computed += 1
        return True

    def _make_room(self, draft: Draft, sequence: Sequence, needed: Callable[[], int]) -> bool:
        """Frees the blocks that a sequence of this step needs. If they must, least urgent running ones that the step
        does not use give theirs up, at last the one in need itself; they may have shared some. False: it sits out."""
        while not self.cache.make_room(needed()):
            draft.short = True
            victim = max((s for s in self._running if s not in draft.used), key=lambda s: s.urgency, default=sequence)
            if not self._try_preempt(victim):
                draft.used.add(victim)  # sits this step out, and can be preempted in the next
                return False
            draft.num_preempted += 1
            if victim is sequence:
                return False
        return True

    def _try_preempt(self, sequence: Sequence) -> bool:
        """Back to the queue: its blocks move to the host, or its KV is computed again (or found in the index)."""
        if sequence.group.search is not None and sequence.group.forked:
            self._restart(sequence.group)
            return True
        if not self._placer.swap_out(sequence):
            if sequence.may_owe_blocks:
                return False
            self._placer.drop_blocks(sequence)
        del self._running[sequence]
        self._rows.release(sequence)
        self._enqueue(sequence)
        self.cache.release_cross(sequence.group)
        return True

    def _restart(self, group: Group) -> None:
        """A group of beams gives way as a whole, and searches anew from its prompt."""
        first = group.sequences[0]
        self._drop_search(group)
        prompt = TokenList(group.request.prompt_token_ids)
        table = BlockTable(self.pool, first.salt)
        group.sequences = [Sequence(group, 0, prompt, table, first.salt, first.output, capture=first.capture)]
        group.search, group.forked = groups.start_search(group, self._eos), False
        group.first_token_at = None  # whoever cuts it now gets nothing
        group.sequences[0].begin()
        self._enqueue(group.sequences[0])
        self.cache.release_cross(group)

    def _drop_search(self, group: Group) -> None:
        """The leader goes, with all beams."""
        leader = group.sequences[0]
        assert leader.status is Status.RUNNING
        del self._running[leader]
        leader.table.free()
        leader.status = Status.FINISHED
        groups.drop_beams(group)

    # --- waiting sequences ---------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._queue_of(sequence).push(sequence)

    def _queue_of(self, sequence: Sequence) -> FairQueue:
        return self.extractions.waiting if sequence.extracts else self.waiting

    def _admit_waiting(self, draft: Draft, before: Sequence | None = None) -> None:
        """Lets waiting sequences in, as their turns are; only those whose turn is before that of `before`, if given."""
        if not len(self.waiting):
            return  # most steps: what runs need not be counted
        if draft.short or draft.shares is None:
            draft.shares = self._count_slots()  # some gave way since they were counted
        shares, passed = draft.shares, set[Account]()
        while draft.budget > 0 and (sequence := self.waiting.head(passed)) is not None:
            if before is not None and turn(sequence) > turn(before):
                return
            if draft.has_no_prompt_tokens(sequence) or shares.kept_from(sequence):
                passed.add(sequence.group.account)  # what is left is for tenants that have less
                continue
            # A preempted sequence whose last token is still on the device comes back when that token is known.
            if not shares.fits(sequence) or sequence.num_in_flight > 0:
                return
            shares.enter(sequence)
            if not self._admit(draft, sequence):
                if sequence.status is not Status.WAITING:
                    return
                shares.leave(sequence)
                if not self._preempt_extraction(draft):
                    return

    def _count_slots(self) -> SlotShares:
        limits = self.limits
        return SlotShares(self._running, limits.max_num_seqs, limits.max_num_beams, several=self.waiting.several)

    def _level_slots(self, draft: Draft, shares: SlotShares) -> Sequence | None:
        """Takes slots from the tenant that has the most, for one that waits and has fewer. Returns who is due."""
        for waiting in self.waiting.heads():
            if waiting.group.search is not None or waiting.num_in_flight > 0:
                continue
            if shares.fits(waiting) and not shares.kept_from(waiting):
                return None
            if victims := shares.level(waiting):
                for victim in victims:
                    self._try_preempt(victim)
                    shares.give_way(victim)
                draft.num_preempted += len(victims)
                shares.enter(waiting)
                return waiting
        return None

    def _preempt_extraction(self, draft: Draft) -> bool:
        """Makes room for a generation that waits. False: no extraction has anything to give."""
        candidates = [s for s in self._running if s.extracts and s not in draft.used and len(s.table)]
        if not candidates or not self._try_preempt(max(candidates, key=lambda s: s.urgency)):
            return False
        draft.num_preempted += 1
        return True

    def _admit(self, draft: Draft, sequence: Sequence) -> bool:
        """Moves the head of the queue to the running ones, if blocks for all its tokens are free.

        Beside others it leaves each of them, and each beam, a block to grow into, or it would soon be preempted.
        """
        group = sequence.group
        if group.request.encodes_only:  # it needs no blocks
            if not draft.read_encoder(sequence, self.limits):
                return False
            self._enter(sequence, draft.now)
            return True
        if (placement := self._placer.place(sequence, self._running)) is None:
            return False
        if placement.runs_encoder and not draft.takes_encoder(group.request.encoder, self.limits):
            placement.drop()
            return False
        if group.admitted_at is None:
            group.cached_tokens = placement.computed
            group.inheritance = self.cache.report(placement, sequence)
        self._enter(sequence, draft.now)
        slots = self.cache.settle(placement, sequence)
        if not sequence.extracts:
            self._flow.let_in(sequence.num_pending)
        if slots is not None:
            draft.add_encoder(sequence, slots)
        scheduled = self._schedule_chunk(draft, sequence)
        placement.release_lender()
        return scheduled

    def _enter(self, sequence: Sequence, now: float) -> None:
        self._queue_of(sequence).pop(sequence)
        self._placer.forget(sequence)
        sequence.status = Status.RUNNING
        self._running[sequence] = None
        if sequence.group.admitted_at is None:
            sequence.group.admitted_at = now

    def _choices_at_end_of_prompt(self, sequence: Sequence) -> list[Sequence]:
        """The sequence, or the choices of its group when its prefill ends here and they part ways: as many as there are
        slots for. The others wait for those, and find the prompt in the index."""
        group = sequence.group
        if group.forked:
            return [sequence]
        group.forked = True
        for choice in range(1, group.request.params.n):
            child = sequence.sibling(choice)
            group.sequences.append(child)
            if choice < group.num_slots or not child.wants_sample:
                self._running[child] = None
            else:
                self._placer.drop_blocks(child)
                self._enqueue(child)
        return [child for child in group.sequences if child.status is Status.RUNNING]
