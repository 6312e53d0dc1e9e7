"""Decides what each step computes. Owned by the event-loop thread; no torch, no asyncio; the clock is passed in.

plan() builds a StepPlan and moves the sequences' counts as if the step had run. Between it and its result the next plan
may be made (the pipelined loop): a sampled token not yet applied is `in flight`, and its sequence's next input is named
by its sampler row instead of its id. What sequences want and what becomes of them is their work's matter (engine/work).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Kinds
from functools import partial
from operator import attrgetter

from bequest.engine._C import BlockPool, plan_streams
from bequest.engine.cache.images import DeviceImages
from bequest.engine.cache.kv_cache import KvCache
from bequest.engine.cache.salt import salt_of
from bequest.engine.cache.states import States
from bequest.engine.cache.tiers.ticket import Ticket
from bequest.engine.inheritance.retention import Retention
from bequest.engine.scheduling.adapter_seats import AdapterSeats
from bequest.engine.scheduling.assembly import BlockMoves
from bequest.engine.scheduling.extractions import Extractions, Spare
from bequest.engine.scheduling.fairness import FairQueue, turn
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.scheduling.placing import Placer
from bequest.engine.scheduling.policy.clock import StepClock
from bequest.engine.scheduling.policy.flow import PromptFlow
from bequest.engine.scheduling.policy.gathering import gathers
from bequest.engine.scheduling.policy.pieces import PromptPieces
from bequest.engine.scheduling.policy.quota import StepQuota
from bequest.engine.scheduling.policy.shares import SlotShares
from bequest.engine.scheduling.ready import Ready, ready_of, streams
from bequest.engine.scheduling.results import apply_result
from bequest.engine.scheduling.sampler_rows import SamplerRows
from bequest.engine.scheduling.step import StepMaker
from bequest.engine.state.account import Account
from bequest.engine.state.draft import Draft
from bequest.engine.state.launch import MOST_YIELDING, Launch
from bequest.engine.state.output import Output
from bequest.engine.state.parts import Times
from bequest.engine.state.record import KeptBeams
from bequest.engine.state.sequence import Applied, Begin, Group, Lane, Sequence, Status, Wish
from bequest.engine.state.step import EncoderWish, Stretch
from bequest.engine.types import MAX_BEAM_WIDTH, Request, Sink, StepResult
from bequest.engine.types.blocks import BytesWrite
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.work.desk import Drafter
from bequest.engine.work.kinds import KINDS, KindClass, kind_of


class Scheduler:
    def __init__(
        self,
        limits: SchedulerLimits,
        cache: KvCache,
        retention: Retention,
        eos_token_ids: tuple[int, ...],
        *,
        kinds: Kinds[KindClass] = KINDS,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self.max_num_seqs, self.follows_beams = limits.max_num_seqs, limits.follows_beams
        self.cache = cache
        self.retention = retention
        self.eos_token_ids = eos_token_ids
        self.drafter = drafter
        self._kinds = kinds
        self._step_limits = limits.step
        self.rows = SamplerRows(limits.max_num_seqs, eos_token_ids)
        self._steps = StepMaker(self.rows, self, cache.states, limits)
        self.images = DeviceImages(limits.max_image_rows, limits.max_num_encoder_tokens, limits.images_together)
        self.clock = StepClock(limits.extraction_sizes, limits.mixed_sizes, limits.tuning)
        self.extractions = Extractions(limits.extraction, self.clock)
        self.waiting = FairQueue()  # generations; extractions have a queue of their own
        self._running: dict[Sequence, None] = {}  # an ordered set: by urgency, when a step is planned
        self._in_order = True  # it is
        # Of them, those that the plan in the making has let in. What a plan brings to the device it cannot take away.
        self._entered: set[Sequence] = set()
        self._placer = Placer(cache, max(limits.max_num_beams, MAX_BEAM_WIDTH))
        self.seats = AdapterSeats()
        self._flow = PromptFlow(limits.prompt_pace, limits.max_num_seqs, limits.max_num_batched_tokens, limits.tuning)
        self._pieces = PromptPieces(self.clock, limits.tuning)
        self._block_size = cache.pool.block_size
        self.wake: Callable[[], None] = lambda: None  # what waited may move; the engine says how to plan again
        self.carry: Callable[[BytesWrite], None] = lambda write: None  # bytes out of files go before the step

    # --- what the engine calls -----------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        return self.cache.pool

    @property
    def states(self) -> States:
        return self.cache.states

    @property
    def most_drafted(self) -> int:
        rows = self.limits.tuning.draft_rows or self.limits.draft_rows
        return rows // max(1, len(self._running)) - 1

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.extractions.waiting)

    def num_waiting_of(self, tenant: str) -> int:
        return self.waiting.num_waiting(tenant) + self.extractions.waiting.num_waiting(tenant)

    @property
    def blocks_beside_leases(self) -> int:
        """Device blocks that a request can count on when it is alone."""
        return self.pool.num_blocks - 1 - self.cache.device_budget

    def kind_of(self, request: Request) -> KindClass:
        return kind_of(request, self._kinds)

    def queue_of(self, lane: Lane) -> FairQueue:
        return self.waiting if lane is Lane.GENERATION else self.extractions.waiting

    def new_group(self, request: Request, sink: Sink, *, seed: int, arrival_number: int, now: float) -> Group:
        """The state of a request that has come. It does not wait yet."""
        group = Group(request, sink, seed, salt_of(request), Times(arrived=now), arrival_number)
        group.kind = self.kind_of(request)(group, self)
        return group

    def add(self, group: Group, output: Output) -> None:
        """Queues a new request. REQUIRES: it fits the pool when it runs alone."""
        group.account = self.queue_of(group.kind.lane).account(group.request.tenant)
        group.kind.begin(output)
        self.seats.open(group)
        for sequence in group.sequences:
            self._enqueue(sequence)

    def close(self, group: Group) -> None:
        """Ends every sequence of a group: finish, abort, failure, timeout and disconnect all come here."""
        group.closed = True
        self.extractions.memory.release(group)
        group.kind.abandon()
        for sequence in group.sequences:
            self.finish(sequence)
        self.release_cross(group)
        self.seats.close(group)

    def check_idle(self) -> None:
        """Nothing runs or waits: then every row must be back, and every block that no lease holds."""
        assert not self._running and self.num_waiting == 0, "check_idle while requests are open"
        self.cache.check_only_leases()
        self.rows.check_all_free()

    def plan(self, now: float, behind: bool = False, yielding: int = 0, busy: bool = False) -> Launch | None:
        """The next step; None: nothing can move. `behind`: it will wait for one; `yielding`: it may pass so many;
        `busy`: requests may be on their way."""
        if not self._in_order:
            self._running = dict.fromkeys(sorted(self._running, key=attrgetter("urgency")))
            self._in_order = True
        ready = ready_of(self._running)
        several = self._running, self.waiting, self.extractions.waiting
        if behind and gathers(self.limits.beams_of_step, *several, busy=busy):
            return None  # they go on together
        if not ready and not self.num_waiting and not self.images.planned:
            return None  # all there is has been launched: whoever plans ahead asks once more than there are steps
        self.seats.serve()
        most = self.limits.tokens_of_step(streams(self._running))
        draft = Draft(now, self._step_limits, StepQuota(), most, self.limits.extraction.max_step_rows)
        self._entered.clear()
        self.cache.begin_plan()
        self.images.begin_plan()
        due = self._divide(draft, ready)
        extract = partial(self._extract, draft, ready)
        extracted = 0 if yielding else self.extractions.take_share(draft, extract, ready, len(self.waiting))
        self._decode(draft, ready.decoding)
        self._admit_due(draft, due)
        if ready.prefilling and not draft.short:
            self._admit_waiting(draft, before=ready.prefilling[0])
        self._schedule(draft, ready.prefilling)
        if not draft.short or not self._running:  # the last one may have given its blocks up: somebody must move
            self._admit_waiting(draft)
        self.extractions.take_rest(draft, extract, self._spare(ready, most, extracted, behind, yielding))
        self.cache.end_plan()
        for write in self.cache.take_writes():
            self.carry(write)
        return self._seal(draft, ready)

    def apply(self, launch: Launch, result: StepResult, now: float) -> Applied:
        """The result of a launched step, in the order of the launches."""
        if not launch.plan.encoders and launch.plan.images is None:
            self.clock.ran(launch.nature, launch.plan.num_tokens, result.device_seconds)
        self.extractions.ran(launch, result.device_seconds)
        return apply_result(launch, result, now)

    # --- what kinds of work call ---------------------------------------------------------------------------------

    def handle_of(self, catalogue: Catalogue) -> int:
        return self.rows.catalogues.handle_of(catalogue)

    def run(self, sequence: Sequence) -> None:
        self._running[sequence] = None
        self._in_order = False

    def queue(self, sequence: Sequence) -> None:
        self._placer.drop_blocks(sequence)
        self._enqueue(sequence)

    def leave(self, sequence: Sequence) -> None:
        assert sequence.status is Status.RUNNING
        del self._running[sequence]
        sequence.table.free()
        self.states.let_go(sequence)
        sequence.status = Status.FINISHED

    def is_alone(self, sequence: Sequence) -> bool:
        return self._running.keys() == {sequence}

    def preempt(self, sequence: Sequence) -> None:
        if sequence not in self._entered:
            self._try_preempt(sequence)

    def release_row(self, sequence: Sequence) -> None:
        self.rows.release(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence; what it holds goes to its record, or back. Idempotent: the one release path."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._running.pop(sequence, None)  # an engine that died in the middle of a plan must close it too
        else:
            self.queue_of(sequence.group.kind.lane).drop(sequence)
            self._placer.forget(sequence)
        self.rows.release(sequence)
        self.retention.keep(sequence)
        sequence.status = Status.FINISHED
        self.release_cross(sequence.group)

    def distrust(self, sequence: Sequence) -> None:
        """Takes the sequence's blocks out of the prefix index: its cache may hold NaNs. Nobody continues from it."""
        group = sequence.group
        group.kind.abandon()
        sequence.table.uncommit(0)
        self.states.distrust(sequence)
        self.cache.cross.distrust(group.cross)
        if group.ties.record is not None:
            group.ties.record.failed = True

    def accept(self, sequence: Sequence, token_id: int) -> None:
        """A result names the token in flight: it joins the sequence, and full blocks become findable."""
        sequence.accept(token_id)
        if self.limits.prefix_caching and sequence.status is Status.RUNNING:
            known = min(sequence.num_computed, len(sequence.tokens))
            # Of several tokens that are accepted at once, the first is known together with the second.
            if known % self._block_size == 0 or (self.drafter is not None and (known - 1) % self._block_size == 0):
                sequence.table.commit(sequence.tokens, known)
        if sequence.num_output > sequence.group.ties.charged_output:
            self.retention.leases.extend(sequence.group)

    def keep_beams(self, group: Group, beams: KeptBeams) -> None:
        self.retention.keep_beams(group, beams)

    def release_cross(self, group: Group) -> None:
        self.cache.release_cross(group)

    # --- quota ---------------------------------------------------------------------------------------------------

    def _divide(self, draft: Draft, ready: Ready) -> Sequence | None:
        """Says how much of the step prompts have, and takes slots for a tenant that is due: returns who gets them."""
        if not ready.prefilling and not len(self.waiting):
            return None  # in most steps: what runs need not be counted
        shares, most = self._count_slots(), draft.budget
        crowded = len(self.waiting) > shares.num_free
        of_sharers = self._flow.tokens_of_step(shares.prompt_tokens(most), len(ready.decoding), crowded)
        of_all = self._pieces.tokens_of_step(most, ready.demand(self.waiting, shares.num_free))
        draft.quota = StepQuota(shares, of_sharers, of_all)
        return self._level_slots(draft, shares)

    def _count_slots(self) -> SlotShares:
        most, several, tuning = self.limits, self.waiting.several, self.limits.tuning
        return SlotShares(self._running, most.max_num_seqs, most.max_num_beams, several=several, tuning=tuning)

    def _level_slots(self, draft: Draft, shares: SlotShares) -> Sequence | None:
        """Takes slots from the tenant that has the most, for one that waits and has fewer. Returns who is due."""
        for waiting in self.waiting.heads():
            if waiting.group.kind.takes_beams or waiting.num_in_flight > 0:
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

    def _spare(self, ready: Ready, most: int, extracted: int, behind: bool, yielding: int) -> Spare:
        generating = any(s.group.kind.lane is Lane.GENERATION for s in self._running)
        queued = yielding < MOST_YIELDING and (not behind or self.limits.extraction.queues_steps)
        return Spare(most, extracted, generating, queued, bool(ready.extracting), yielding > 0)

    # --- running sequences ---------------------------------------------------------------------------------------

    def _schedule(self, draft: Draft, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if draft.budget == 0:
                return
            if sequence.status is Status.RUNNING and sequence not in draft.used:  # not a victim of one before it
                self._schedule_work(draft, sequence)

    def _decode(self, draft: Draft, sequences: list[Sequence]) -> None:
        """The same of sequences that need one token: in most steps all there are, and most have its place already."""
        number = 0
        while number < len(sequences) and draft.budget > 0:
            planned, copies, number = plan_streams(sequences, number, draft.budget, draft.used, Status.RUNNING)
            draft.add_streams(planned, copies)
            if number < len(sequences) and draft.budget > 0:
                self._schedule_work(draft, sequences[number])
                number += 1

    def _extract(self, draft: Draft, ready: Ready) -> None:
        self._schedule(draft, ready.extracting)
        self.extractions.admit(draft, partial(self._admit, draft))

    def _schedule_work(self, draft: Draft, sequence: Sequence) -> bool:
        """Gives the sequence what it wants of the step, preempting others if it must. False: it is not in this step."""
        scheduled, images = False, sequence.group.prompt.images
        if images and self.images.lacks(images, sequence.num_computed):
            draft.quota.allow(sequence.num_pending)
        for wish in sequence.work.wishes(sequence, draft):
            scheduled = self._carry_out(draft, sequence, wish) or scheduled
            if sequence.status is not Status.RUNNING and sequence.group.kind.needs_blocks:
                return False
        return scheduled

    def _carry_out(self, draft: Draft, sequence: Sequence, wish: Wish) -> bool:
        if isinstance(wish, EncoderWish):
            return draft.read_encoder(sequence)
        if isinstance(wish, Begin):
            draft.used.add(sequence)  # it keeps what it lends
            self.run(wish.sequence)
            return self._schedule_work(draft, wish.sequence)
        if (cut := self.images.within(sequence.group.prompt.images, wish)) is None:
            return False
        if (wish := cut).read_only:
            draft.add(sequence, wish)
            return True
        work = sequence.work
        copies = work.try_write(sequence, wish)
        if copies is None and wish.drafts:  # nobody gives way to a guess
            wish = Stretch(wish.begin, wish.count - len(wish.drafts))
            copies = work.try_write(sequence, wish)
        if copies is None:
            if not self._make_room(draft, sequence, wish):
                return False
            copies = work.try_write(sequence, wish)
            assert copies is not None, "the blocks were counted"
        draft.add_copies(copies)
        draft.add(sequence, wish)
        sequence.num_computed = wish.begin + wish.count
        return True

    def _make_room(self, draft: Draft, sequence: Sequence, wish: Stretch) -> bool:
        """Frees the blocks that a sequence of this step needs. If they must, least urgent running ones that the step
        does not use give theirs up, at last the one in need itself; they may have shared some. False: it sits out."""
        while not self.cache.make_room(sequence.work.blocks_needed(sequence, wish)):
            draft.short = True
            others = (s for s in self._running if s not in draft.used and (s is sequence or s not in self._entered))
            victim = max(others, key=lambda s: s.urgency, default=sequence)
            if victim in self._entered or not self._try_preempt(victim):
                draft.used.add(victim)  # sits this step out, and can be preempted in the next
                return False
            draft.num_preempted += 1
            if victim is sequence:
                return False
        return True

    def _try_preempt(self, sequence: Sequence) -> bool:
        """Back to the queue: its blocks move to the host, or its KV is computed again (or found in the index)."""
        if sequence.work.gives_way(sequence):
            return True
        if not self._placer.take_blocks(sequence):
            return False
        del self._running[sequence]
        self.rows.release(sequence)
        self._enqueue(sequence)
        self.release_cross(sequence.group)
        return True

    # --- waiting sequences ---------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self.queue_of(sequence.group.kind.lane).push(sequence)

    def _admit_due(self, draft: Draft, due: Sequence | None) -> None:
        if due is not None and not draft.short and draft.budget > 0:
            draft.short = not self._admit(draft, due) and not self.waiting.is_aside(due)

    def _admit_waiting(self, draft: Draft, before: Sequence | None = None) -> None:
        """Lets waiting sequences in, as their turns are; only those whose turn is before that of `before`, if given."""
        if not len(self.waiting):
            return  # most steps: what runs need not be counted
        quota = draft.quota
        assert isinstance(quota, StepQuota)
        if draft.short or quota.shares is None:
            quota.shares = self._count_slots()  # some gave way since they were counted
        shares, passed = quota.shares, set[Account]()
        while draft.budget > 0 and (sequence := self.waiting.head(passed)) is not None:
            if before is not None and turn(sequence) > turn(before):
                return
            if quota.is_spent(sequence.group.account) or shares.kept_from(sequence):
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
                if self.waiting.is_aside(sequence):
                    continue
                if not self._preempt_extraction(draft):
                    return

    def _preempt_extraction(self, draft: Draft) -> bool:
        """Makes room for a generation that waits. False: no extraction has anything to give."""
        unused = (s for s in self._running if s not in draft.used and s not in self._entered)
        candidates = [s for s in unused if s.group.kind.lane is Lane.EXTRACTION and len(s.table)]
        if not candidates or not self._try_preempt(max(candidates, key=lambda s: s.urgency)):
            return False
        draft.num_preempted += 1
        return True

    def _admit(self, draft: Draft, sequence: Sequence) -> bool:
        """Moves the head of the queue to the running ones, if blocks for all its tokens are free. Beside others it
        leaves each of them, and each beam, a block to grow into, or it would soon be preempted."""
        group = sequence.group
        if (coming := self.seats.ask(group)) is not None:
            self._set_aside(sequence, coming)
            return False
        if not group.kind.needs_blocks:
            if scheduled := self._schedule_work(draft, sequence):
                self._enter(sequence, draft.now)
            return scheduled
        placement = self._placer.place(sequence, self._running)
        if isinstance(placement, Ticket):
            self._set_aside(sequence, placement)
            return False
        if placement is None:
            return False
        if placement.runs_encoder and not draft.takes_encoder(group.request.encoder):
            placement.drop()
            return False
        if group.times.admitted is None:
            group.ties.cached_tokens = placement.computed
            group.ties.inheritance = self.cache.report(placement, sequence)
        self._enter(sequence, draft.now)
        slots = self.cache.settle(placement, sequence)
        if group.kind.lane is Lane.GENERATION:
            self._flow.let_in(sequence.num_pending)
        if slots is not None:
            draft.add_encoder(sequence, slots)
        scheduled = self._schedule_work(draft, sequence)
        placement.release_lender()
        return scheduled

    def _set_aside(self, sequence: Sequence, ticket: Ticket) -> None:
        """Its bytes, or its adapter's, are on their way: it waits for them, and others pass it."""
        queue = self.queue_of(sequence.group.kind.lane)
        queue.set_aside(sequence)

        def bring_back() -> None:
            queue.bring_back(sequence)
            self.wake()

        ticket.then(bring_back)

    def _enter(self, sequence: Sequence, now: float) -> None:
        self.queue_of(sequence.group.kind.lane).pop(sequence)
        self._placer.forget(sequence)
        sequence.status = Status.RUNNING
        self.run(sequence)
        self._entered.add(sequence)
        if sequence.group.times.admitted is None:
            sequence.group.times.admitted = now

    def _seal(self, draft: Draft, ready: Ready) -> Launch | None:
        if draft.empty and not draft.encoders and not self.images.planned:
            return None
        self._flow.planned(len(ready.decoding))
        moves = BlockMoves(*self.cache.take_swaps(), draft.copies, draft.copies_of_beams)
        return self._steps.make(draft, moves, self.images)
