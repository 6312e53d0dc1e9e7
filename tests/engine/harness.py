"""Runs an AsyncEngine over the paged fake, and checks at the end that nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields

from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.engine import AsyncEngine
from bequest.engine.scheduling.limits import ExtractionLimits, SchedulerLimits
from bequest.engine.state.corpus import Corpus
from bequest.engine.types import Inheritance, ModelInfo, OutputMode, Request, Retained, SamplingParams, Terms, Usage
from bequest.engine.types.encoder import EncoderInfo
from bequest.engine.types.estate import NO_NOTES, Notes
from bequest.engine.types.recurrent import StateSizes
from bequest.engine.types.states import ExtractedStates
from bequest.engine.work.desk import Drafter
from bequest.engine.work.kinds import KINDS, KindClass
from tests.engine.drafters import DRAFTING
from tests.engine.paged_fake import HIDDEN, NUM_ENCODER_LAYERS, NUM_LAYERS, VOCAB, PagedFakeRunner

EOS = 5
_ids = itertools.count()


@dataclass(frozen=True)
class Setup:
    num_blocks: int = 200
    block_size: int = 4
    max_num_seqs: int = 16
    chunk: int = 64
    prefix_caching: bool = True
    pipelined: bool = True
    max_model_len: int = 400
    max_queued: int = 1000
    eos: tuple[int, ...] = (EOS,)
    num_host_blocks: int = 1
    num_lease_blocks: int = 0
    num_file_blocks: int = 0
    max_records: int = 1024
    chunk_alone: int | None = None
    extraction: ExtractionLimits = ExtractionLimits()
    encoder_len: int | None = None  # of the longest encoder input; None: a decoder-only model
    encoder_tokens: int = 1 << 30  # of a step
    drafter: Drafter | None = None
    corpus: Corpus | None = None
    kinds: tuple[KindClass, ...] = KINDS
    states: StateSizes | None = None  # of a model with recurrent layers
    notes: Notes = NO_NOTES  # how what the server keeps with records leaves with estates
    windows: tuple[int, ...] = (0,)  # of the strips
    idle_sleep: float = 0.0
    state_interval: int = 64
    follows_beams: bool = True


@dataclass
class Answer:
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, tuple[str, object]] = field(default_factory=dict)
    usage: Usage | None = None
    id: str = ""
    inheritance: Inheritance | None = None
    retained: Retained | None = None
    retention_lost: str | None = None
    beam_scores: dict[int, float | None] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)  # of choice 0
    num_deltas: int = 0
    states: ExtractedStates | None = None


def make_engine(setup: Setup, runner: PagedFakeRunner | None = None) -> tuple[AsyncEngine, PagedFakeRunner]:
    """`runner`: one of the test's own, of the same sizes."""
    num_states = 0 if setup.states is None else setup.states.num_slots + setup.states.num_host_slots
    runner = runner or PagedFakeRunner(
        setup.num_blocks, setup.block_size, setup.num_host_blocks, num_states=num_states, windows=setup.windows
    )
    sizes = CacheSizes(
        setup.block_size,
        setup.num_blocks,
        setup.num_host_blocks,
        setup.num_lease_blocks,
        setup.states,
        setup.windows,
        setup.state_interval,
        setup.num_file_blocks,
        runner.block_layout.rows_of_state,
    )
    limits = SchedulerLimits(
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.chunk,
        prefix_caching=setup.prefix_caching,
        max_num_tokens_alone=setup.chunk_alone,
        extraction=setup.extraction,
        max_num_encoder_tokens=setup.encoder_tokens,
        follows_beams=setup.follows_beams and setup.states is None,
        tuning=DRAFTING,
    )
    encoder = (
        None
        if setup.encoder_len is None
        else EncoderInfo("tokens", setup.encoder_len, 1, (1,), num_layers=NUM_ENCODER_LAYERS)
    )
    info = ModelInfo(
        "fake",
        "fake",
        setup.max_model_len,
        VOCAB,
        setup.eos,
        "float32",
        0,
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        encoder=encoder,
    )
    kinds, drafter = setup.kinds, setup.drafter
    engine = AsyncEngine(
        info,
        make_scheduler(
            limits,
            sizes,
            setup.eos,
            max_records=setup.max_records,
            kinds=kinds,
            drafter=drafter,
            corpus=setup.corpus,
        ),
        runner,
        None,
        pipelined=setup.pipelined,
        max_queued=setup.max_queued,
        notes=setup.notes,
        idle_sleep=setup.idle_sleep,
    )
    return engine, runner


@asynccontextmanager
async def running(setup: Setup) -> AsyncIterator[tuple[AsyncEngine, PagedFakeRunner]]:
    """An engine that must be whole again when the test is done with it."""
    engine, runner = make_engine(setup)
    try:
        yield engine, runner
        if engine.state != "dead":
            assert await engine.drain(20), "requests are still open"
    finally:
        await engine.stop()
    engine.scheduler.check_idle()
    assert runner.closed


_OF_TERMS = frozenset(field.name for field in fields(Terms))


def request(prompt: Sequence[int], params: SamplingParams | None = None, **asked: object) -> Request:
    """With fields of a Request, and of its terms of inheritance."""
    params = params or SamplingParams(max_tokens=8, temperature=0)
    terms = Terms(**{name: asked.pop(name) for name in _OF_TERMS & asked.keys()})  # type: ignore[arg-type]
    return Request(f"r{next(_ids)}", str(asked.pop("tenant", "t")), tuple(prompt), params, terms=terms, **asked)  # type: ignore[arg-type]


async def ask(engine: AsyncEngine, asked: Request) -> Answer:
    answer = Answer(id=asked.id)
    async for delta in engine.generate(asked):
        answer.num_deltas += 1
        for choice in delta.choices:
            tokens = answer.token_ids.setdefault(choice.index, [])
            if asked.output is OutputMode.DELTA:
                tokens.extend(choice.token_ids)
            else:
                tokens[:] = choice.token_ids
            if choice.finish_reason is not None:
                answer.finish[choice.index] = (choice.finish_reason, choice.stop_reason)
                answer.beam_scores[choice.index] = choice.beam_score
            if choice.index == 0:
                answer.logprobs.extend(p.logprob for p in choice.logprobs or ())
        answer.usage = delta.usage
        answer.inheritance = delta.inheritance or answer.inheritance
        answer.retained, answer.retention_lost = delta.retained, delta.retention_lost
        answer.states = delta.hidden_states or answer.states
    return answer


async def ask_all(engine: AsyncEngine, requests: Sequence[Request]) -> list[Answer]:
    return await asyncio.gather(*(ask(engine, r) for r in requests))


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits for something another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.001)
