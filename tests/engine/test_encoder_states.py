"""Hidden states of encoders over the paged fake: exactly the rows that were asked for, whatever is shared or cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import AnswerTooLarge, InvalidRequest, QueueFull
from bequest.engine.scheduling.limits import ExtractionLimits
from bequest.engine.types import BeamParams, OutputMode, Request, SamplingParams
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.hidden import HiddenStatesParams, Positions, Span
from tests.engine.harness import Answer, Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import HIDDEN, NUM_ENCODER_LAYERS, expected_encoder_states, expected_tokens
from tests.engine.test_encoder_decoder import START, encoder_of

EXTRACT = SamplingParams(max_tokens=0)
LAYERS = (NUM_ENCODER_LAYERS, 0, 2)
BASE = Setup(num_blocks=400, block_size=4, max_model_len=160, encoder_len=64)
SETUPS = {
    "ample": BASE,
    "plain": replace(BASE, pipelined=False),
    "chunk 1": replace(BASE, chunk=1),
    "short encoder steps": replace(BASE, encoder_tokens=20),
    "few rows": replace(BASE, extraction=ExtractionLimits(max_step_rows=NUM_ENCODER_LAYERS + 1)),
    "short steps": replace(BASE, extraction=ExtractionLimits(max_step_tokens=1, queues_steps=False)),
}


def wants(positions: Positions = "all", **options: object) -> HiddenStatesParams:
    return HiddenStatesParams(LAYERS, positions, stack="encoder", **options)  # type: ignore[arg-type]


def extraction(encoder: EncoderInput, wanted: HiddenStatesParams | None = None, **fields: object) -> Request:
    return request([START], EXTRACT, encoder=encoder, hidden_states=wanted or wants(), **fields)


def check(answer: Answer, encoder: EncoderInput, rows: Sequence[int], choice: int = 0) -> None:
    assert answer.states is not None
    states = answer.states.choices[choice]
    assert (states.index, states.layers, states.positions.tolist()) == (choice, LAYERS, list(rows))
    np.testing.assert_array_equal(states.assemble(), expected_encoder_states(encoder.token_ids, rows, LAYERS))


async def held(engine: AsyncEngine) -> int:
    await asyncio.sleep(0)
    return engine.load().states_bytes


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize(
    ("positions", "rows"),
    [("all", list(range(17))), ("last", [16]), ((3, -1, 3, 0), [3, 16, 3, 0]), (Span(5, 9), [5, 6, 7, 8])],
)
async def test_of_an_input(setup: Setup, positions: Positions, rows: list[int]) -> None:
    """The decoder does not run, no block is taken, and nothing is left to continue from."""
    encoder = encoder_of(17)
    async with running(setup) as (engine, runner):
        asked = extraction(encoder, wants(positions))
        answer = await ask(engine, asked)
        check(answer, encoder, rows)
        assert runner.num_tokens == 0 and answer.token_ids == {0: []}
        assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (17, 0)
        assert answer.states is not None and answer.states.computed_tokens == runner.num_encoded
        if setup.extraction.max_step_rows > 17 * len(LAYERS):
            assert runner.num_encoded == 17, "one run brings them all"
        assert engine.records("t") == []


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
async def test_a_crowd_of_mixed_lengths_beside_generations(setup: Setup) -> None:
    """In a cache that is as small as may be, too."""
    encoders = [encoder_of(length, seed) for seed, length in enumerate((1, 3, 4, 5, 63, 64, 17, 2) * 2)]
    params = SamplingParams(max_tokens=9, temperature=0)
    for blocks in (setup.num_blocks, 60):
        async with running(replace(setup, num_blocks=blocks)) as (engine, runner):
            asked = [extraction(encoder) for encoder in encoders]
            asked += [request([START], params, encoder=encoder, hidden_states=wants()) for encoder in encoders]
            asked += [request([START], params, encoder=encoder_of(30, i)) for i in range(8)]
            answers = await ask_all(engine, asked)
            for one, answer in zip(asked, answers, strict=True):
                assert one.encoder is not None
                if one.hidden_states is not None:
                    check(answer, one.encoder, range(one.encoder.length))
                made = expected_tokens([START], one.params.max_tokens, eos=5, encoder=one.encoder.token_ids)
                assert answer.token_ids == {0: made}
            assert runner.most_encoded <= max(64, setup.encoder_tokens)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("output", [OutputMode.DELTA, OutputMode.FINAL])
async def test_with_generation(setup: Setup, n: int, output: OutputMode) -> None:
    encoder = encoder_of(9)
    params = SamplingParams(max_tokens=6, n=n, seed=5)
    async with running(setup) as (engine, runner):
        asked = request([START, 30], params, encoder=encoder, hidden_states=wants(), output=output)
        answer = await ask(engine, asked)
        for choice in range(n):
            check(answer, encoder, range(9), choice)
            made = expected_tokens(
                [START, 30], 6, seed=5, choice=choice, greedy=False, eos=5, encoder=encoder.token_ids
            )
            assert answer.token_ids[choice] == made
        assert answer.states is not None
        if setup.extraction.max_step_rows > 9 * len(LAYERS):
            assert answer.states.computed_tokens == 0 and runner.num_encoded == 9, "captured as it ran"


async def test_cross_blocks_of_others_bring_no_states() -> None:
    """The encoder runs once more for them, and says so."""
    encoder = encoder_of(30)
    params = SamplingParams(max_tokens=6, temperature=0)
    async with running(BASE) as (engine, runner):
        await ask(engine, request([START], params, encoder=encoder))
        assert runner.num_encoded == 30
        answer = await ask(engine, request([START], params, encoder=encoder, hidden_states=wants()))
        check(answer, encoder, range(30))
        assert answer.states is not None and answer.states.computed_tokens == 30
        assert runner.num_encoded == 60


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
async def test_beams_have_them_in_common(setup: Setup) -> None:
    encoder = encoder_of(9)
    params = SamplingParams(max_tokens=5, n=3, temperature=0, beams=BeamParams(4))
    asked = request([START], params, encoder=encoder, hidden_states=wants(), output=OutputMode.FINAL)
    async with running(setup) as (engine, runner):
        answer = await ask(engine, asked)
        for choice in range(3):
            check(answer, encoder, range(9), choice)
        if setup.extraction.max_step_rows > 9 * len(LAYERS):
            assert runner.num_encoded == 9


async def test_bytes_are_counted_once_for_all_choices() -> None:
    needed = 20 * len(LAYERS) * HIDDEN * 4
    encoder = encoder_of(20)
    params = SamplingParams(max_tokens=6, n=3, temperature=0)
    setup = replace(BASE, extraction=ExtractionLimits(max_request_bytes=needed, max_bytes=needed))
    async with running(setup) as (engine, _):
        answer = await ask(engine, request([START], params, encoder=encoder, hidden_states=wants()))
        assert await held(engine) == needed
        with pytest.raises(QueueFull):
            await ask(engine, request([START], params, encoder=encoder, hidden_states=wants()))
        waiting = asyncio.ensure_future(ask(engine, extraction(encoder)))
        await asyncio.sleep(0.02)
        assert not waiting.done(), "an extraction waits for memory"
        assert answer.states is not None
        answer.states.release()
        check(await waiting, encoder, range(20))
        with pytest.raises(AnswerTooLarge):
            await ask(engine, extraction(encoder_of(21)))


async def test_an_abort_gives_everything_back() -> None:
    async with running(BASE) as (engine, runner):
        for asked in (
            extraction(encoder_of(40)),
            request([START], SamplingParams(max_tokens=100), encoder=encoder_of(41), hidden_states=wants()),
        ):
            runner.gate = threading.Event()
            task = asyncio.ensure_future(ask(engine, asked))
            await until(lambda: engine.load().running > 0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            runner.gate.set()
            assert await held(engine) == 0


async def test_generations_keep_their_share_beside_long_inputs() -> None:
    """An input that is not cut may overdraw the share once, and is paid for before the next."""
    setup = replace(BASE, extraction=ExtractionLimits(share=0.25), eos=())
    async with running(setup) as (engine, runner):
        params = SamplingParams(max_tokens=140, temperature=0, ignore_eos=True)
        extractions: list[asyncio.Future[Answer]] = []

        async def num_done_when_generated() -> int:
            """Counted where the answer arrives: whoever waits for this hears of it later, and extractions go on."""
            await ask(engine, request([START], params, encoder=encoder_of(1)))
            return sum(task.done() for task in extractions)

        generation = asyncio.ensure_future(num_done_when_generated())
        await until(lambda: runner.num_tokens > 3)
        extractions += [asyncio.ensure_future(ask(engine, extraction(encoder_of(60, i)))) for i in range(8)]
        done = await generation
        assert done <= 2, "60 positions are a quarter where 180 tokens were generated"
        await asyncio.gather(*extractions)


@pytest.mark.parametrize(
    ("wanted", "param"),
    [(wants((17,)), "positions"), (HiddenStatesParams((NUM_ENCODER_LAYERS + 1,), stack="encoder"), "layers")],
)
async def test_what_is_not_there(wanted: HiddenStatesParams, param: str) -> None:
    async with running(BASE) as (engine, _):
        for params in (EXTRACT, SamplingParams(max_tokens=4)):
            with pytest.raises(InvalidRequest) as caught:
                await ask(engine, request([START], params, encoder=encoder_of(17), hidden_states=wanted))
            assert caught.value.field == param
