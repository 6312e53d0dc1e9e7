"""A scheduler with its records over the paged fake, driven step by step by a random number generator.

Requests come, some as groups of beams, continue from records of every grade, are leased, prolonged, forgotten, run into
NaN, leave, want hidden states. After every move all that the engine counts is counted again from what there is:
references, rows, the budget, the memory of leases.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

import numpy as np
from msgspec import structs

from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.cache.entries import host_block, is_on_host
from bequest.engine.cache.tiers.host import HostTier
from bequest.engine.errors import EngineError, InsufficientRetention, InvalidRequest, RetentionTooLarge
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.passing import Footprint, Queue
from bequest.engine.scheduling.limits import ExtractionLimits, SchedulerLimits
from bequest.engine.scheduling.results import Samples
from bequest.engine.state.capture import capture_of
from bequest.engine.state.launch import Launch
from bequest.engine.state.record import KeptChoice, Record
from bequest.engine.state.sequence import Group, Sequence, Status, Work
from bequest.engine.types import (
    NO_DRAFT,
    NO_ROW,
    BeamParams,
    IntArray,
    Lineage,
    ModelInfo,
    OutputMode,
    Request,
    Retain,
    SamplingParams,
    StepMoves,
    StepPlan,
)
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.hidden import present_positions
from bequest.engine.types.recurrent import StateSizes
from bequest.engine.work import scoring
from bequest.engine.work.owed import Owed, StatesOfTokens
from bequest.engine.work.scoring import Scoring
from bequest.engine.work.search import Search, most_blocks
from tests.engine.beam_oracle import expected_beams
from tests.engine.drafters import DRAFTING, OracleDrafter
from tests.engine.drawn_states import with_states
from tests.engine.harness import EOS, request
from tests.engine.paged_fake import (
    CROSS,
    HIDDEN,
    NUM_LAYERS,
    VOCAB,
    PagedFakeRunner,
    expected_encoder_states,
    expected_states,
    expected_tokens,
    history_in,
)

_Kind = TypeVar("_Kind", bound=Work)
MOST_TOKENS = 60
MOST_WIDTH = 9  # of beams
NAN_TOKEN = 666
_NO_PAIRS = np.empty((0, 2), np.int32)
_STILL = StepMoves(swaps_out=_NO_PAIRS, swaps_in=_NO_PAIRS, copies=_NO_PAIRS)
_NEAR_THE_END = 8  # tokens before the end of a lease that its windows are promised for
INFO = ModelInfo("fake", "fake", MOST_TOKENS, VOCAB, (EOS,), "float32", 0, num_layers=NUM_LAYERS, hidden_size=HIDDEN)


@dataclass(frozen=True)
class Shape:
    """What a world is made of; everything else is drawn while it runs."""

    block_size: int
    num_blocks: int
    num_host_blocks: int
    num_lease_blocks: int
    limits: SchedulerLimits
    depth: int
    windows: tuple[int, ...]  # of the strips
    state_interval: int

    @staticmethod
    def draw(draw: random.Random, most_encoder: int, windows: tuple[int, ...]) -> Shape:
        block_size = draw.choice([1, 3, 4, 16])
        enough = -(-MOST_TOKENS // block_size) * len(windows) + -(-most_encoder // block_size)
        leases = draw.choice([0, 1, enough, 3 * enough])
        num_blocks = 1 + enough + leases + draw.choice([0, 0, 2, enough, 6 * enough])
        num_host = draw.choice([1, 5, enough, 100])
        limits = SchedulerLimits(
            max_num_seqs=draw.choice([3, 8, 16]),
            max_num_batched_tokens=draw.choice([1, 5, 32, 512]),
            prefix_caching=draw.random() < 0.7,
            tuning=DRAFTING,
            max_num_tokens_alone=draw.choice([None, 7, 64]),
            extraction=ExtractionLimits(
                share=draw.choice([0.0, 0.1, 0.6]),
                max_step_rows=draw.choice([6, 20, 1000]),
                max_step_tokens=draw.choice([None, 1, 24]),
                short_steps=draw.choice([(), (2, 8, 16)]),
                queues_steps=draw.random() < 0.5,
            ),
        )
        if most_encoder:
            limits = replace(limits, max_num_encoder_tokens=draw.choice([1, 20, 64, 1000]))
        return Shape(
            block_size, num_blocks, num_host, leases, limits, draw.choice([1, 2]), windows, draw.choice([8, 32, 1000])
        )

    def yielding(self) -> Shape:
        """The same, with extractions that others pass."""
        extraction = replace(self.limits.extraction, yields_from=1)
        return replace(self, limits=replace(self.limits, extraction=extraction), depth=2)


@dataclass(frozen=True)
class Promise:
    """What a child was promised when it came: its parent was leased."""

    inherits: int


class World:
    def __init__(
        self,
        seed: int,
        most_encoder: int = 0,
        windows: tuple[int, ...] = (0,),
        *,
        recurrent: bool = False,
        yields: bool = False,
    ) -> None:
        """`most_encoder`: of an encoder-decoder model, the longest encoder input; `recurrent`: it has such layers;
        `yields`: others pass steps of extractions."""
        self.draw = random.Random(seed)
        self.draw_pass = random.Random(-1 - seed)  # of who passes whom
        self.shape = shape = Shape.draw(self.draw, most_encoder, windows)
        if yields:
            self.shape = shape = shape.yielding()
        self.now = 0.0
        self.states = self._draw_states() if recurrent else None
        sizes = CacheSizes(
            shape.block_size,
            shape.num_blocks,
            shape.num_host_blocks,
            shape.num_lease_blocks,
            self.states,
            shape.windows,
            shape.state_interval,
        )
        self.drafter = OracleDrafter(seed, self.draw.random()) if self.draw.random() < 0.4 else None
        self.scheduler = make_scheduler(
            shape.limits, sizes, (EOS,), max_records=40, wall=lambda: self.now, drafter=self.drafter
        )
        self.retention = self.scheduler.retention
        self.pool, self.host = self.scheduler.pool, self.scheduler.cache.host
        num_states = 0 if self.states is None else self.states.num_slots + self.states.num_host_slots
        self.runner = PagedFakeRunner(
            shape.num_blocks, shape.block_size, shape.num_host_blocks, num_states=num_states, windows=shape.windows
        )
        self.runner.bad_prompt_token = NAN_TOKEN
        self.launched: deque[Launch] = deque()
        self.open: list[Group] = []
        self.known: deque[tuple[str, str]] = deque(maxlen=60)  # (tenant, id) of what may be continued from
        self.promises: dict[Group, Promise] = {}
        self.seen: Counter[str] = Counter()  # what happened, so that a test can tell that it did
        self.num_arrived = 0
        self.num_encoded = 0  # positions
        self.late: set[Group] = set()  # whose time was up before all their tokens were there
        self.moved = True  # since everything was checked
        draw = self.draw
        self.prompts = [[draw.randrange(10, VOCAB) for _ in range(draw.randint(1, 40))] for _ in range(6)]
        # So few that equal ones often meet, and all about the edges of blocks.
        self.encoder_inputs = [
            EncoderInput.of_tokens(draw.randrange(10, VOCAB) for _ in range(length))
            for length in [1, 3, 4, 5, 16, 17, 32, 47, most_encoder]
            if 0 < length <= most_encoder
        ]

    def _draw_states(self) -> StateSizes:
        leases = self.draw.choice([0, 4, 40])
        most = self.shape.limits.max_num_seqs
        beside = self.draw.choice([2 * most, 3 * max(most, MOST_WIDTH) + 3])  # the first is what a small server has
        return StateSizes(
            num_slots=beside + leases + self.draw.choice([0, 5, 60]),
            num_lease_slots=leases,
            interval=self.draw.choice([1, 7, 16, 50]),
            num_host_slots=self.draw.choice([0, 3, 40]),
        )

    # --- moves ---------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        self.moved = True
        asked = self.draw_request()
        if asked is None:
            return
        self.num_arrived += 1
        seed, number = asked.params.seed or 0, self.num_arrived
        group = self.scheduler.new_group(asked, lambda _: None, seed=seed, arrival_number=number, now=self.now)
        budget = self.retention.leases.budget
        before = budget.used
        parent = None if asked.terms.lineage is None else self.retention.get(asked.tenant, asked.terms.lineage.parent)
        if self.states is not None:
            try:
                self.scheduler.kind_of(asked).check(asked, INFO, self.scheduler)
            except InvalidRequest:
                self.seen["too wide"] += 1
                return
        try:
            self.retention.open(group)
        except (RetentionTooLarge, InsufficientRetention):
            assert asked.terms.retain is not None and budget.used == before
            self.seen["refused"] += 1
            return
        counts = parent is not None and parent.leased and self.states is None  # recurrent layers cannot start anywhere
        if counts and parent is not None and asked.terms.lineage is not None and parent.encoder == asked.encoder:
            estate = parent.choice(asked.terms.lineage.choice)
            assert isinstance(estate, KeptChoice)
            most = len(asked.prompt_token_ids) - 1
            if (capture := capture_of(asked)) is not None and asked.extracts:
                most = capture.goal_len
            inherits = min(asked.terms.lineage.at, estate.computed, most)
            if self.pool.slides and (capture is not None or inherits < estate.computed - _NEAR_THE_END):
                inherits = 0  # what is promised is that the tokens are right
            self.promises[group] = Promise(inherits)
        self.scheduler.add(group, ChoiceOutput(asked, 0, None))
        self.open.append(group)
        if not asked.encodes_only:
            self.known.append((asked.tenant, asked.id))

    def draw_request(self) -> Request | None:
        draw = self.draw
        lineage = None
        tenant = draw.choice("aab")
        encoder = draw.choice(self.encoder_inputs) if self.encoder_inputs else None
        prompt = list(draw.choice(self.prompts))
        prompt = prompt[: draw.randint(1, len(prompt))] + [draw.randrange(10, VOCAB)] * draw.randint(0, 3)
        if draw.random() < 0.02:
            prompt[draw.randrange(len(prompt))] = NAN_TOKEN
        if self.known and draw.random() < 0.6:
            tenant, parent = draw.choice(self.known)
            record = self.retention.get(tenant, parent)
            choices = [] if record is None or record.failed else record.as_parent().choices
            if not choices:
                return None
            choice = draw.randrange(len(choices))
            tokens = choices[choice].token_ids
            at = draw.choice([len(tokens), choices[choice].shown_len, draw.randint(1, len(tokens))])
            suffix = [draw.randrange(10, VOCAB) for _ in range(draw.choice([0, 1, 2, 9]))]
            prompt = [*tokens[:at], *suffix]
            lineage = Lineage(parent, choice, at)
            if encoder is not None and draw.random() < 0.95:  # else it has the tokens alone from its parent
                assert record is not None
                encoder = record.encoder
        if len(prompt) > MOST_TOKENS:
            return None
        retain = Retain(draw.choice([3.0, 30.0, 300.0])) if draw.random() < 0.4 else None
        fields = {"priority": draw.choice([0, 0, 1]), "tenant": tenant, "lineage": lineage, "retain": retain}
        fields["encoder"] = encoder
        if draw.random() < 0.25 and len(prompt) < MOST_TOKENS:
            return self.draw_beams(prompt, fields)
        if draw.random() < 0.15 and len(prompt) < MOST_TOKENS:
            return self.draw_scoring(prompt, fields)
        sampled = draw.random() < 0.5
        params = SamplingParams(
            max_tokens=draw.choice([0, draw.randint(0, MOST_TOKENS - len(prompt))]) if len(prompt) < MOST_TOKENS else 0,
            n=draw.choice([1, 1, 2, 3]),
            temperature=1 if sampled else 0,
            seed=draw.randrange(100),
        )
        if draw.random() >= 0.4:
            return request(prompt, params, **fields)
        params = replace(params, n=1) if params.max_tokens == 0 else params
        return with_states(draw, request(prompt, params, **fields))

    def draw_beams(self, prompt: list[int], fields: dict[str, object]) -> Request | None:
        """A group of beams, if it could run alone: others are refused before they get here."""
        draw = self.draw
        width = draw.choice([1, 2, 3, 5, MOST_WIDTH])
        most = min(draw.choice([1, 2, 3, 6, 12, 30]), MOST_TOKENS - len(prompt))
        beams = BeamParams(width, draw.choice([0.0, 1.0, 2.0]), draw.choice([False, True, "never"]))
        params = SamplingParams(
            max_tokens=most, n=draw.randint(1, width), min_tokens=draw.choice([0, 0, most // 2]), beams=beams
        )
        asked = request(prompt, params, output=OutputMode.FINAL, **fields)
        asked = with_states(draw, asked) if draw.random() < 0.2 else asked
        if most_blocks(asked, self.pool) > self.scheduler.blocks_beside_leases:
            return None
        return asked

    def draw_scoring(self, prompt: list[int], fields: dict[str, object]) -> Request | None:
        """Suffixes of a prompt, if each could run alone with it: others are refused before they get here."""
        draw, longest = self.draw, MOST_TOKENS - len(prompt)
        lengths = [min(draw.choice([1, 1, 2, 5, 9]), longest) for _ in range(draw.choice([1, 3, 8, 20]))]
        suffixes = tuple(tuple(draw.randrange(10, VOCAB) for _ in range(length)) for length in lengths)
        asked = request(prompt, SamplingParams(max_tokens=0, logprobs=0), suffixes=suffixes, **fields)
        needed = scoring.most_blocks(asked, self.pool)
        return asked if needed <= self.scheduler.blocks_beside_leases else None

    def leave(self) -> None:
        """Somebody goes away, or runs out of time: then what it has is its answer."""
        self.moved = True
        if not self.open:
            return
        searching = [
            g for g in self.open if isinstance(g.kind, Search) and g.kind.beams is not None
        ]  # briefly: they leave oftener than their share
        group = self.draw.choice(searching if searching and self.draw.random() < 0.7 else self.open)
        complete = group.times.first_token is not None and self.draw.random() < 0.5
        self.seen["late" if complete else "aborted"] += 1
        if complete:
            self.seen["cut"] += is_searching(group)
            group.kind.cut()
            if not group.finished:  # hidden states are owed
                self.late.add(group)
                return
            self.check_states(group)
        self.end(group, complete)

    def meddle(self) -> None:
        """An owner changes the time of a record, or forgets it."""
        self.moved = True
        if not self.known:
            return
        record = self.retention.get(*self.draw.choice(self.known))
        if record is None:
            return
        if self.draw.random() < 0.3:
            self.retention.forget(record)
            self.seen["forgotten"] += 1
            return
        try:
            self.retention.set_ttl(record, self.draw.choice([None, 5.0, 50.0]), self.now)
        except EngineError:
            self.seen["not prolonged"] += 1
            return
        if record.leased:
            assert all(kept.table is not None for kept in record.kept.values())

    def launch(self) -> bool:
        yielding = sum(launch.plan.yields for launch in self.launched)
        ordered = len(self.launched) - yielding
        if ordered >= self.shape.depth:
            return False
        launch = self.scheduler.plan(self.now, behind=ordered > 0, yielding=yielding)
        self.check_promises()
        self.moved = True
        if launch is None:
            return False
        limits = self.shape.limits
        widest = max((len(spec.scores) for spec in launch.plan.beams), default=0)  # may have a step to itself
        most = max(limits.max_num_batched_tokens, limits.max_num_tokens_alone or 0, widest)
        assert launch.plan.num_tokens <= most
        self.seen["beams"] += sum(len(spec.scores) > 1 for spec in launch.plan.beams)
        self.seen["preempted"] += launch.num_preempted
        drafts = launch.plan.samples.drafts
        self.seen["drafted"] += 0 if drafts is None else int((drafts != NO_DRAFT).sum())
        tapped = {sequence for s in launch.expected if isinstance(s, StatesOfTokens) for sequence in [s.sequence]}
        samples = launch.expected[0]
        assert isinstance(samples, Samples)
        self.seen["drafted with states"] += drafts is not None and any(s in tapped for s in samples.sequences)
        self.seen["swapped out"] += len(launch.plan.moves.swaps_out)
        self.seen["swapped in"] += len(launch.plan.moves.swaps_in)
        self.note_moved_states(launch.plan.moves.states)
        self.check_encoders(launch.plan)
        self.launched.append(launch)
        return True

    def apply(self) -> None:
        if not self.launched:
            return
        launch = self.take_launched()
        result = structs.replace(
            self.runner.launch(launch.plan), device_seconds=self.draw.choice([0.0, 0.001, 0.004, 0.1])
        )
        self.moved = True
        applied = self.scheduler.apply(launch, result, self.now)
        for group in applied.failed:
            assert NAN_TOKEN in [t for s in group.sequences for t in s.tokens.to_list()]
            self.end(group, complete=False)
            self.seen["NaN"] += 1
        for group in [g for g in self.open if g.finished]:
            if group not in self.late:
                self.check_tokens(group)
            self.check_states(group)
            self.end(group, complete=True)
            self.seen["finished"] += 1

    def take_launched(self) -> Launch:
        """The oldest, or one that passes those before it."""
        plans = Queue[None]()
        for launch in itertools.islice(self.launched, 1, None):
            plans.put(launch.plan)
        first = self.launched[0]
        if first.plan.yields and self.draw_pass.random() < 0.7:
            ahead = Footprint(first.plan, self.shape.block_size)
            passing = plans.take_passing(ahead, self.shape.block_size)
            if passing is not None:
                self.seen["passed"] += 1
                launch = next(one for one in self.launched if one.plan is passing)
                self.launched.remove(launch)
                self.begin(first)
                return launch
            self.seen["could not pass"] += any(not one.plan.yields for one in self.launched)
        return self.launched.popleft()

    def begin(self, launch: Launch) -> None:
        """What a step moves it has moved before others pass it."""
        assert launch is self.launched[0]
        self.runner.move(launch.plan.moves)
        self.launched[0] = structs.replace(launch, plan=structs.replace(launch.plan, moves=_STILL))

    def end(self, group: Group, complete: bool) -> None:
        self.open.remove(group)
        record = group.ties.record
        self.scheduler.close(group)
        settlement = self.retention.close(group, complete, self.now)
        if settlement.retained is not None:
            self.seen["leased"] += 1
            assert record is not None
            for choice, kept in record.kept.items():
                capture = group.sequences[choice].capture
                last = capture is None or not capture.covers_last
                least = max(kept.num_prompt, len(kept.tokens) - last)  # an extraction may have given it more meanwhile
                assert kept.computed >= least, "a lease lacks what it promises"

    def pass_time(self) -> None:
        self.now += 1
        leases = self.retention.leases
        before = len(leases.holders()), leases.budget.used
        self.retention.expire(self.now)
        self.moved |= (len(leases.holders()), leases.budget.used) != before

    def finish_everything(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.open and not self.launched:
                break
            launched = self.launch()
            assert launched or self.launched, "requests wait, but nothing moves"
            self.apply()
        assert not self.open, "some requests never finished"
        self.check()
        self.scheduler.check_idle()

    # --- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """All of them look at the same blocks, which are asked for once: they take a third of a world's time. Where
        nothing has moved since they looked, they would see the same."""
        if not self.moved:
            return
        self.moved = False
        self.pool.check()
        self.host.check()
        held = [(s, s.table.blocks) for group in self.open for s in group.sequences]
        leased = {r: [block for table in r.tables() for block in table.blocks] for r in self.holders()}
        self.check_sequences(held)
        self.check_beams()
        self.check_blocks([*(blocks for _, blocks in held), *leased.values()])
        self.check_budget(leased)
        self.check_memory_of_leases(leased)

    def check_tokens(self, group: Group) -> None:
        prompt, params = group.request.prompt_token_ids, group.request.params
        if params.beams is not None:
            expected = [tokens for tokens, _ in expected_beams(group.request)]
            if isinstance(group.kind, Search) and group.kind.answer is not None:
                assert list(map(list, group.kind.answer.token_ids)) == expected
                self.seen["answered as one"] += 1
            else:
                assert [s.tokens[len(prompt) :] for s in group.sequences] == expected
                self.seen["answered one by one"] += 1
            self.seen["searched"] += 1
            return
        if isinstance(group.kind, Scoring):
            self.check_scores(group, group.kind)
        assert [s.choice for s in group.sequences] == list(range(params.n))
        for s in group.sequences:
            encoder = group.request.encoder
            expected = expected_tokens(
                prompt,
                params.max_tokens,
                seed=group.seed,
                choice=s.choice,
                greedy=params.greedy,
                eos=EOS,
                encoder=() if encoder is None else encoder.token_ids,
            )
            assert s.tokens[len(prompt) :] == expected

    def check_scores(self, group: Group, kind: Scoring) -> None:
        """Every token of every suffix was read behind the prompt and what precedes it."""
        encoder = group.request.encoder
        before = [CROSS + token for token in (() if encoder is None else encoder.token_ids)]
        before += group.request.prompt_token_ids
        told = kind.take_deltas(True)
        assert tuple(choice.token_ids for choice in told) == group.request.suffixes
        for choice in told:
            assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        read = set(self.runner.scored)
        for suffix in group.request.suffixes:
            assert all(((*before, *suffix[:i]), token) in read for i, token in enumerate(suffix))
        self.seen["scored"] += len(group.request.suffixes)

    def note_moved_states(self, moves: IntArray) -> None:
        for source, destination in moves.tolist():
            assert self.states is not None
            is_here = [slot < self.states.num_slots for slot in (source, destination)]
            assert is_here[0] != is_here[1], "between the device and the host"
            self.seen["states out" if is_here[0] else "states in"] += 1

    def check_states(self, group: Group) -> None:
        """Exactly the rows that were asked for."""
        wanted = group.request.hidden_states
        if wanted is None:
            return
        for s in group.sequences:
            assert s.capture is not None
            tokens = s.tokens.to_list()
            states = s.capture.states(s.choice, INFO)
            encoder = group.request.encoder
            read = () if encoder is None else encoder.token_ids
            if wanted.stack == "encoder":
                positions = present_positions(wanted.positions, len(read))
                assert states.positions.tolist() == positions.tolist()
                assert (states.assemble() == expected_encoder_states(read, positions.tolist(), wanted.layers)).all()
                self.seen["states of an encoder"] += 1
                continue
            first = 0 if wanted.include_prompt or group.request.extracts else s.num_prompt
            positions = first + present_positions(wanted.positions, len(tokens) - first)
            assert states.positions.tolist() == positions.tolist()
            expected = expected_states(tokens, positions.tolist(), wanted.layers, read).reshape(states.shape)
            assert (states.assemble() == expected).all()
        self.seen["extracted" if group.request.extracts else "with states"] += 1

    def check_promises(self) -> None:
        """A child of a lease inherits all that it could, from blocks here or on the host."""
        for group in [g for g in self.promises if g.ties.inheritance is not None or g.closed]:
            promise, told = self.promises.pop(group), group.ties.inheritance
            if told is None:
                continue
            # An extraction may have given the parent more meanwhile.
            assert told.inherited_tokens == group.ties.cached_tokens >= promise.inherits
            if not group.request.extracts:
                length = len(group.request.prompt_token_ids) + sum(map(len, group.request.suffixes))
                assert told.inherited_tokens + told.computed_tokens == length
            assert told.source in ("blocks", "host") or (self.pool.slides and promise.inherits == 0)
            self.seen[told.source] += 1

    def check_sequences(self, held: list[tuple[Sequence, list[int]]]) -> None:
        rows = []
        running = 0
        slides, num_strips, block_size = self.pool.slides, len(self.shape.windows), self.shape.block_size
        for s, blocks in held:
            work, status, in_flight, num_tokens = s.work, s.status, s.num_in_flight, len(s.tokens)
            if s.choice > 0 and isinstance(work, Scoring):  # a candidate: its tokens are given
                assert s.num_output == 0 and s.num_computed <= s.planned_len == num_tokens - 1
                continue
            drafting = in_flight > 1
            owed = _is(work, Owed)
            # A step launched past the end is never applied.
            if status is not Status.FINISHED and not owed and not drafting:
                assert s.planned_len == num_tokens + in_flight
            assert s.num_output == num_tokens - s.num_prompt
            assert len(set(blocks)) == len(blocks)
            if status is Status.RUNNING:
                running += not (owed or is_searching(s.group))
                if not slides:  # so a table has no gaps
                    for table in blocks_of_beams(s.group, ended=False) or [blocks]:
                        assert len(table) // num_strips * block_size >= s.num_computed
                assert s.num_computed <= s.planned_len + (in_flight - 1 if drafting else 0)
            else:
                assert s.row == NO_ROW
                assert s.table.capacity >= s.num_computed or not blocks
            if s.row != NO_ROW:
                rows.append(s.row)
        assert running <= min(self.scheduler.num_running, self.shape.limits.max_num_seqs)
        assert len(rows) == len(set(rows)) <= self.shape.limits.max_num_seqs

    def check_beams(self) -> None:
        """A group's beams have as many blocks as it was let in for, and no more of them run than there is room for."""
        groups = [g for g in self.open if is_searching(g) and not g.finished]
        for group in groups:
            assert len(group.sequences) == 1 and group.sequences[0].row == NO_ROW
            kind = group.kind
            assert isinstance(kind, Search) and kind.search is not None and group.request.params.beams is not None
            own = blocks_of_beams(group)
            distinct = {block for table in own for block in table}
            assert len(distinct) <= most_blocks(group.request, self.pool)
            if kind.beams is None:
                continue
            assert len(kind.beams) == kind.search.num_running
            assert not group.sequences[0].table.blocks
            assert group.sequences[0].tokens[group.sequences[0].num_prompt :] == kind.search.path_of(0)
        running = [g.kind.num_slots for g in groups if g.sequences[0].status is Status.RUNNING]
        assert len(running) <= 1 or sum(running) <= self.shape.limits.max_num_beams

    def check_encoders(self, plan: StepPlan) -> None:
        """Encoders run within their budget, or alone; and never twice for what is there."""
        self.seen["encoded"] += len(plan.encoders)
        self.num_encoded += sum(spec.input.length for spec in plan.encoders)
        total = sum(spec.input.length for spec in plan.encoders)
        assert total <= self.shape.limits.max_num_encoder_tokens or len(plan.encoders) == 1
        for group in self.open:
            holds = any(s.status is Status.RUNNING or len(s.table) for s in group.sequences)
            reads = group.request.encoder is not None and not group.request.encodes_only
            assert (group.cross is not None) == (holds and reads)
            if group.cross is not None and group.request.encoder is not None:
                assert len(group.cross.table) == -(-group.request.encoder.length // self.shape.block_size)
                self.seen["shared"] += not group.runs or group.cross.table.num_shared > 0
                self.seen["cross on the host"] += not group.cross.table.resident
                assert group.cross.table.resident or not group.runs
        held = sum(group.cross is not None for group in self.open) + sum(len(r.inputs) for r in self.holders())
        assert self.retention.cross.num_held() == held

    def holders(self) -> list[Record]:
        return self.retention.leases.holders()

    def check_blocks(self, held: list[list[int]]) -> None:
        """Every reference is a sequence's or a lease's (`held`), a group's on its encoder input or a beam's."""
        held += [group.cross.table.blocks for group in self.open if group.cross is not None]
        held += [blocks for group in self.open for blocks in held_by_beams(group)]
        owners = Counter(itertools.chain.from_iterable(held))
        for pool, sign in ((self.pool, 1), (self.host, -1)):
            num = pool.num_blocks
            counts = map(owners.get, range(sign, sign * num, sign), itertools.repeat(0))
            assert list(counts) == list(map(pool.ref_count, range(1, num)))

    def check_budget(self, tables: dict[Record, list[int]]) -> None:
        budget = self.retention.leases.budget
        held = {(r.tenant, block) for r, blocks in tables.items() for block in blocks}
        assert budget.num_held == len(held) == len({block for _, block in held}), "tenants share no blocks"
        assert budget.held_on_host == sum(is_on_host(block) for _, block in held)
        running = [g.ties.record for g in self.open if g.ties.record is not None]
        assert budget.num_promised == sum(record.lease.charge for record in running)
        assert budget.used <= budget.capacity, "more is leased than there may be"
        here = {r for r, blocks in tables.items() if not all(map(is_on_host, blocks))}
        assert here == set(self.retention.leases.on_device())
        for record in tables:
            assert record.leased or record.pins > 0 or record.group is not None
            if record.leased:
                assert all(kept.table is not None for kept in record.kept.values())
                assert len(record.inputs) == (record.encoder is not None)

    def check_memory_of_leases(self, holders: Iterable[Record]) -> None:
        """Where no step is in flight the memory must hold the tokens of every lease."""
        if self.launched:
            return
        num_strips = len(self.shape.windows)
        for record in holders:
            for kept in record.kept.values():
                for strip in range(num_strips if kept.table is not None else 0):
                    self.check_strip(kept, kept.table.entries[strip::num_strips], self.shape.windows[strip])
            if record.inputs and record.encoder is not None:
                wanted = [CROSS + token for token in record.encoder.token_ids]
                assert self.content(record.inputs[0].table.blocks)[: len(wanted)] == wanted

    def check_strip(self, kept: KeptChoice, entries: list[int], window: int) -> None:
        """It holds the tokens, or in a window the history up to each, and the end of it all."""
        tokens = kept.tokens[: kept.computed]
        if not window:
            assert self.content(entries)[: kept.computed] == tokens
            return
        size = self.shape.block_size
        assert all(entries[max(0, kept.computed - window + 1) // size : -(-kept.computed // size)]) or window == 1
        for row, entry in enumerate(entries):
            if entry:
                begin = row * size
                held = self.content([entry])[: max(0, kept.computed - begin)]
                # A child that goes on inside a block of a window that saw nothing of it leaves its beginning empty.
                for position, slot in enumerate(held, begin):
                    assert history_in(slot) == tokens[: position + 1] or window == 1
        self.seen["windows of leases"] += 1

    def content(self, entries: list[int]) -> list[int]:
        tier = self.scheduler.cache.tier
        assert isinstance(tier, HostTier)
        size = self.shape.block_size
        content: list[int] = []
        for block in entries:
            slots = self.runner.slots
            if is_on_host(block):
                going = tier.going_out(host_block(block))  # by the next step: until then the device has it
                slots, block = (self.runner.host_slots, host_block(block)) if going is None else (slots, going)
            content += slots[block * size : (block + 1) * size].tolist()
        return content


def blocks_of_beams(group: Group, ended: bool = True) -> list[list[int]]:
    """Of the running beams, and of those that have `ended`."""
    beams = group.kind.beams if _is(group.kind, Search) else None
    if beams is None:
        return []
    running = [beams.blocks(beam) for beam in range(len(beams))]
    return running + beams.ended_blocks() if ended else running


def held_by_beams(group: Group) -> list[list[int]]:
    """A list for each reference: what running beams begin with is held once."""
    beams = group.kind.beams if _is(group.kind, Search) else None
    if beams is None:
        return []
    front, tails = beams.front_blocks(), [beams.blocks(beam) for beam in range(len(beams))]
    assert all(blocks[: len(front)] == front for blocks in tails)
    return [front, *(blocks[len(front) :] for blocks in tails), *beams.ended_blocks()]


def is_searching(group: Group) -> bool:
    return _is(group.kind, Search) and group.kind.search is not None


def _is(work: Work, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """What isinstance says, which asks an abstract class in Python, and worlds ask a million times."""
    return _is_of(type(work), kind)


_is_of = functools.cache(issubclass)
