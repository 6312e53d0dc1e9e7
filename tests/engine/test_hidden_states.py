"""Hidden states over the paged fake: exactly the rows that were asked for, whatever was cached, cut or preempted."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import AnswerTooLarge, DeadlineExceeded, InvalidRequest, QueueFull
from bequest.engine.scheduling.limits import ExtractionLimits
from bequest.engine.types import BeamParams, Lineage, OutputMode, Request, Retain, SamplingParams
from bequest.engine.types.hidden import HiddenStatesParams, Positions, Span
from tests.engine.harness import Answer, Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import HIDDEN, NUM_LAYERS, expected_states, expected_tokens

PROMPT = list(range(20, 57))
EXTRACT = SamplingParams(max_tokens=0)
LAST = (NUM_LAYERS,)


def wants(positions: Positions = "last", layers: tuple[int, ...] = LAST, **options: object) -> HiddenStatesParams:
    return HiddenStatesParams(layers, positions, **options)  # type: ignore[arg-type]


def extraction(prompt: Sequence[int], wanted: HiddenStatesParams, **fields: object) -> Request:
    return request(prompt, EXTRACT, hidden_states=wanted, **fields)


def check(
    answer: Answer, tokens: Sequence[int], positions: Sequence[int], layers: Sequence[int], choice: int = 0
) -> None:
    assert answer.states is not None
    states = answer.states.choices[choice]
    assert states.index == choice and states.layers == tuple(layers)
    assert states.positions.tolist() == list(positions)
    np.testing.assert_array_equal(states.assemble(), expected_states(tokens, positions, layers))


async def ended(engine: AsyncEngine, tokens: Sequence[int], max_tokens: int, **fields: object) -> tuple[str, list[int]]:
    """A parent: its id and all its tokens."""
    asked = request(tokens, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True), **fields)
    answer = await ask(engine, asked)
    return asked.id, [*tokens, *answer.token_ids.get(0, [])]


SETUPS = {
    "ample": Setup(),
    "plain": Setup(pipelined=False),
    "chunk 1": Setup(chunk=1),
    "chunk 7": Setup(chunk=7),
    "no index": Setup(prefix_caching=False),
    "few rows": Setup(extraction=ExtractionLimits(max_step_rows=NUM_LAYERS + 1)),
    "block 1": Setup(block_size=1),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize(
    ("positions", "rows"),
    [
        ("last", [36]),
        ("all", list(range(37))),
        ((3, -1, 3, 0), [3, 36, 3, 0]),
        (Span(5, 9), [5, 6, 7, 8]),
        (Span(-3), [34, 35, 36]),
        (tuple(range(0, 37, 2)), list(range(0, 37, 2))),
    ],
)
async def test_of_a_prompt_fresh_and_again(setup: Setup, positions: Positions, rows: list[int]) -> None:
    layers = (2, 0, NUM_LAYERS)
    async with running(setup) as (engine, runner):
        answer = await ask(engine, extraction(PROMPT, wants(positions, layers)))
        check(answer, PROMPT, rows, layers)
        assert answer.states is not None and answer.states.computed_tokens == max(rows) + 1 == runner.num_tokens
        assert answer.usage is not None and answer.usage.prompt_tokens == 37 and answer.usage.completion_tokens == 0
        again = await ask(engine, extraction(PROMPT, wants(positions, layers)))
        check(again, PROMPT, rows, layers)
        if setup.prefix_caching:
            assert again.states is not None
            assert again.states.computed_tokens <= len(set(rows)) + setup.block_size


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("grade", ["leased", "warm"])
async def test_positions_of_a_parent_cost_their_own_tokens(setup: Setup, grade: str) -> None:
    setup = dataclasses.replace(setup, num_lease_blocks=100, eos=())
    async with running(setup) as (engine, runner):
        parent, tokens = await ended(engine, PROMPT, 9, retain=Retain(60) if grade == "leased" else None)
        for rows in ([44], [3, 4, 5, 20, 44], [36, 0]):
            before = runner.num_tokens
            wanted = wants(tuple(rows), (1, NUM_LAYERS))
            answer = await ask(engine, extraction(tokens, wanted, lineage=Lineage(parent, 0, len(tokens))))
            check(answer, tokens, rows, (1, NUM_LAYERS))
            assert answer.states is not None and answer.inheritance is not None
            assert answer.states.computed_tokens == runner.num_tokens - before == len(rows)
            assert answer.inheritance.computed_tokens == len(rows) and answer.inheritance.source == "blocks"
        before = runner.num_tokens
        answer = await ask(engine, extraction(tokens, wants(), lineage=Lineage(parent, 0, len(tokens))))
        check(answer, tokens, [45], LAST)
        assert runner.num_tokens - before == 1, "the last sampled token costs one token"


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("include_prompt", [False, True])
@pytest.mark.parametrize("positions", ["last", "all", (0, -2, 4), Span(2, 5), Span(-4, -1), Span(1, -1), (50, 1)])
async def test_with_generation(setup: Setup, n: int, include_prompt: bool, positions: Positions) -> None:
    params = SamplingParams(max_tokens=9, n=n, seed=5)
    layers = (0, 4)
    wanted = wants(positions, layers, include_prompt=include_prompt)
    async with running(setup) as (engine, _):
        for _ in range(2):  # the second finds its prompt in the index
            answer = await ask(engine, request(PROMPT, params, hidden_states=wanted))
            for choice in range(n):
                made = answer.token_ids[choice]
                assert made == expected_tokens(PROMPT, 9, seed=5, choice=choice, greedy=False, eos=5)
                tokens = [*PROMPT, *made]
                first = 0 if include_prompt else len(PROMPT)
                candidates = list(range(first, len(tokens)))
                if positions == "last":
                    rows = candidates[-1:]
                elif positions == "all":
                    rows = candidates
                elif isinstance(positions, Span):
                    rows = candidates[positions.start : positions.end]
                else:
                    rows = [candidates[p] for p in positions if -len(candidates) <= p < len(candidates)]
                check(answer, tokens, rows, layers, choice)


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("output", list(OutputMode))
async def test_what_a_generation_pays(pipelined: bool, output: OutputMode) -> None:
    """One token more than without, whose KV is kept: a child then computes its suffix alone."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    async with running(Setup(pipelined=pipelined, eos=())) as (engine, runner):
        asked = request(PROMPT, params, hidden_states=wants("all"), output=output)
        answer = await ask(engine, asked)
        tokens = [*PROMPT, *answer.token_ids[0]]
        check(answer, tokens, list(range(37, 45)), LAST)
        assert answer.states is not None and answer.states.computed_tokens == 1
        assert runner.num_tokens == 37 + 8
        child = request([*tokens, 7, 8], params, lineage=Lineage(asked.id, 0, len(tokens)))
        heir = await ask(engine, child)
        assert heir.inheritance is not None and heir.inheritance.computed_tokens == 2
        assert heir.token_ids[0] == expected_tokens([*tokens, 7, 8], 8)


async def test_a_generation_that_ends_early_has_the_state_of_its_last_token() -> None:
    prompt = next(
        p for p in ([i, i + 1, i + 2] for i in range(500)) if len(expected_tokens(p, 30, eos=5)) in range(3, 20)
    )
    made = expected_tokens(prompt, 30, eos=5)
    for pipelined, positions in itertools.product([True, False], ["last", "all"]):
        async with running(Setup(pipelined=pipelined)) as (engine, _):
            params = SamplingParams(max_tokens=30, temperature=0)
            answer = await ask(engine, request(prompt, params, hidden_states=wants(positions)))  # type: ignore[arg-type]
            assert answer.token_ids[0] == made
            rows = range(len(prompt), len(prompt) + len(made))
            check(answer, [*prompt, *made], list(rows)[-1:] if positions == "last" else list(rows), LAST)


@pytest.mark.parametrize("include_prompt", [False, True])
@pytest.mark.parametrize(
    "setup", [Setup(), Setup(pipelined=False), Setup(num_blocks=46)], ids=["ample", "plain", "tiny"]
)
async def test_beams(setup: Setup, include_prompt: bool) -> None:
    params = SamplingParams(max_tokens=6, n=3, temperature=0, beams=BeamParams(4))
    wanted = wants("all", (1, 3), include_prompt=include_prompt)
    async with running(setup) as (engine, _):
        alone = await ask(engine, request(PROMPT, params, hidden_states=wanted))
        answers = await ask_all(engine, [request(PROMPT, params, hidden_states=wanted) for _ in range(3)])
        for answer in (alone, *answers):
            for choice in range(3):
                tokens = [*PROMPT, *answer.token_ids[choice]]
                check(answer, tokens, list(range(0 if include_prompt else 37, len(tokens))), (1, 3), choice)


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("num_host_blocks", [1, 60])
async def test_a_crowd_in_a_cache_that_preempts(pipelined: bool, num_host_blocks: int) -> None:
    """Generations with and without states, and extractions of all sorts, where blocks and rows are short."""
    setup = Setup(
        num_blocks=40,
        chunk=13,
        max_num_seqs=5,
        pipelined=pipelined,
        num_host_blocks=num_host_blocks,
        extraction=ExtractionLimits(share=0.3, max_step_rows=14),
    )
    params = SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)
    prompts = [[*PROMPT[: 5 * i % 37 + 1], 100 + i] for i in range(12)]
    async with running(setup) as (engine, _):
        asked = []
        for i, prompt in enumerate(prompts):
            asked.append(request(prompt, params, hidden_states=wants("all", (i % 3, 5), include_prompt=i % 2 == 0)))
            asked.append(request(prompt, params, hidden_states=None if i % 2 else wants("last")))
            asked.append(extraction(prompt, wants("all", (1,))))
            asked.append(extraction(prompt[::-1], wants((0, -1), (0, 5))))
        answers = await ask_all(engine, asked)
        for one, answer in zip(asked, answers, strict=True):
            tokens = [*one.prompt_token_ids, *expected_tokens(one.prompt_token_ids, one.params.max_tokens)]
            assert answer.token_ids[0] == tokens[len(one.prompt_token_ids) :]
            wanted = one.hidden_states
            if wanted is None:
                assert answer.states is None
                continue
            first = 0 if wanted.include_prompt or one.extracts else len(one.prompt_token_ids)
            rows = list(range(first, len(tokens)))
            if wanted.positions == "last":
                rows = rows[-1:]
            elif wanted.positions == (0, -1):
                rows = [rows[0], rows[-1]]
            check(answer, tokens, rows, wanted.layers)
            assert answer.states is not None
            answer.states.release()
        await asyncio.sleep(0)
        assert engine.scheduler.extractions.memory.used == 0


async def test_pooling() -> None:
    async with running(Setup()) as (engine, runner):
        rows = expected_states(PROMPT, range(37), LAST)
        mean = await ask(engine, extraction(PROMPT, wants("all", pooling="mean")))
        assert mean.states is not None and mean.states.choices[0].shape == (1, HIDDEN)
        np.testing.assert_allclose(mean.states.choices[0].assemble(), rows.mean(1), rtol=1e-6)
        before = runner.num_tokens
        last = await ask(engine, extraction(PROMPT, wants(Span(3, 8), pooling="last")))
        assert last.states is not None and last.states.choices[0].positions.tolist() == [7]
        np.testing.assert_array_equal(last.states.choices[0].assemble(), rows[:, 7])
        assert runner.num_tokens - before == 1


async def test_what_cannot_be_had_is_said_at_once() -> None:
    limits = ExtractionLimits(max_queued=2, max_request_bytes=4 * HIDDEN * 40, max_bytes=4 * HIDDEN * 60)
    async with running(Setup(extraction=limits)) as (engine, runner):
        for wanted, field in (
            (wants(layers=(NUM_LAYERS + 1,)), "layers"),
            (wants((37,)), "positions"),
            (wants(Span(37)), "positions"),
        ):
            with pytest.raises(InvalidRequest) as told:
                await ask(engine, extraction(PROMPT, wanted))
            assert told.value.field == field
        with pytest.raises(AnswerTooLarge) as large:
            await ask(engine, extraction(PROMPT, wants("all", (0, 1))))
        assert large.value.details == {"budget": 4 * HIDDEN * 40, "needed": 4 * HIDDEN * 74}
        with pytest.raises(AnswerTooLarge):
            params = SamplingParams(max_tokens=21, n=2)
            await ask(engine, request(PROMPT, params, hidden_states=wants("all")))
        assert engine.scheduler.extractions.memory.used == 0 and engine.num_open == 0
        assert runner.num_tokens == 0


async def test_the_queue_is_bounded_and_generations_are_not_affected() -> None:
    limits = ExtractionLimits(max_queued=2)
    async with running(Setup(extraction=limits, num_blocks=12, max_model_len=40)) as (engine, runner):
        import threading

        runner.gate = threading.Event()
        asked = [extraction([*PROMPT[:-1], 60 + i], wants("all")) for i in range(8)]
        tasks = []
        for one in asked:
            tasks.append(asyncio.ensure_future(ask(engine, one)))
            await asyncio.sleep(0.01)
        full = [task for task in tasks if task.done() and isinstance(task.exception(), QueueFull)]
        assert 0 < len(full) < 8 and len(engine.scheduler.extractions.waiting) == 2
        generation = asyncio.ensure_future(ask(engine, request(PROMPT[:20])))
        await asyncio.sleep(0.01)
        assert not generation.done()
        runner.gate.set()
        assert (await generation).token_ids[0] == expected_tokens(PROMPT[:20], 8, eos=5)
        for one, task in zip(asked, tasks, strict=True):
            if task not in full:
                check(await task, one.prompt_token_ids, range(37), LAST)


async def test_memory_that_is_held_holds_back_extractions_alone() -> None:
    limits = ExtractionLimits(max_bytes=4 * HIDDEN * 40)
    async with running(Setup(extraction=limits)) as (engine, _):
        first = await ask(engine, extraction(PROMPT, wants("all")))  # its reader takes its time
        second = asyncio.ensure_future(ask(engine, extraction(PROMPT, wants("all"))))
        assert (await ask(engine, request(PROMPT))).token_ids[0] == expected_tokens(PROMPT, 8, eos=5)
        with pytest.raises(QueueFull):
            await ask(engine, request(PROMPT, hidden_states=wants("all")))
        small = request(PROMPT, hidden_states=wants("last"))
        check(await ask(engine, small), [*PROMPT, *expected_tokens(PROMPT, 8, eos=5)], [44], LAST)
        await asyncio.sleep(0.02)
        assert not second.done()
        assert first.states is not None
        first.states.release()
        first.states.release()  # idempotent
        check(await second, PROMPT, range(37), LAST)


async def test_an_extraction_can_be_aborted_and_has_a_deadline() -> None:
    import threading
    import time

    async with running(Setup(chunk=4)) as (engine, runner):
        runner.gate = threading.Event()
        gone = asyncio.ensure_future(ask(engine, extraction(PROMPT, wants("all"))))
        late = asyncio.ensure_future(ask(engine, extraction(PROMPT, wants("all"), deadline=time.monotonic() + 0.05)))
        await asyncio.sleep(0.01)
        gone.cancel()
        with pytest.raises(DeadlineExceeded):
            await late
        runner.gate.set()
        await until(lambda: engine.num_open == 0)
        assert engine.scheduler.extractions.memory.used == 0
        assert runner.num_tokens <= 8, "nothing more is computed"


async def test_a_deadline_while_generating_gives_what_there_is_with_its_state() -> None:
    import threading
    import time

    for positions in ("last", "all"):
        async with running(Setup(eos=())) as (engine, runner):
            runner.gate, runner.hold_from = threading.Event(), 6
            params = SamplingParams(max_tokens=50, temperature=0)
            wanted = wants(positions)  # type: ignore[arg-type]
            asked = request(PROMPT, params, hidden_states=wanted, deadline=time.monotonic() + 0.3)
            task = asyncio.ensure_future(ask(engine, asked))
            await asyncio.sleep(0.35)
            runner.gate.set()
            answer = await task
            made = answer.token_ids[0]
            assert answer.finish[0] == ("length", "deadline") and 4 <= len(made) <= 7
            tokens = [*PROMPT, *made]
            assert made == expected_tokens(PROMPT, len(made))
            rows = list(range(37, len(tokens)))
            check(answer, tokens, rows[-1:] if positions == "last" else rows, LAST)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
async def test_shares(share: float) -> None:
    """Beside generations that fill every step extractions get their share, and no more."""
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    setup = Setup(chunk=4, num_blocks=2000, extraction=ExtractionLimits(share=share), eos=())
    async with running(setup) as (engine, _):
        extractions = [asyncio.ensure_future(ask(engine, extraction([*PROMPT, i], wants("all")))) for i in range(40)]
        await ask_all(engine, [request([i], params) for i in range(30, 34)])
        done = sum(task.done() for task in extractions) * 38
        generated = 4 * 200
        # What is due in whole tokens, and the extractions that ran before the first generation did.
        assert abs(done - generated * share / (1 - share)) <= 3 * 38 and done < 40 * 38
        await asyncio.gather(*extractions)


async def test_a_running_parent() -> None:
    import threading

    async with running(Setup(eos=())) as (engine, runner):
        runner.gate, runner.hold_from = threading.Event(), 8
        params = SamplingParams(max_tokens=20, temperature=0)
        parent = request(PROMPT, params)
        task = asyncio.ensure_future(ask(engine, parent))
        await until(lambda: runner.num_steps >= 8 and len(engine.parent("t", parent.id).choices[0].token_ids) > 42)
        tokens = engine.parent("t", parent.id).choices[0].token_ids
        child = extraction(tokens, wants((1, -2, -1)), lineage=Lineage(parent.id, 0, len(tokens)))
        states = asyncio.ensure_future(ask(engine, child))
        await asyncio.sleep(0.01)
        runner.gate.set()
        answer = await states
        check(answer, tokens, [1, len(tokens) - 2, len(tokens) - 1], LAST)
        assert answer.states is not None and answer.states.computed_tokens <= 3 + 1
        assert (await task).token_ids[0] == expected_tokens(PROMPT, 20)


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("grade", ["leased", "warm"])
async def test_the_last_token_of_a_parent_is_computed_once(grade: str, length: int) -> None:
    """Its KV stays with the parent: a child computes its suffix alone. The parent holds no block more than it needs."""
    params = SamplingParams(max_tokens=3, temperature=0)
    async with running(Setup(num_lease_blocks=100, eos=())) as (engine, runner):
        retain = Retain(60) if grade == "leased" else None
        parent, tokens = await ended(engine, PROMPT[:length], 2, retain=retain)
        lineage = Lineage(parent, 0, len(tokens))
        for cost in (1, 1):
            before = runner.num_tokens
            check(await ask(engine, extraction(tokens, wants(), lineage=lineage)), tokens, [length + 1], LAST)
            assert runner.num_tokens - before == cost
        heir = await ask(engine, request([*tokens, 7, 8], params, lineage=lineage))
        assert heir.inheritance is not None and heir.inheritance.computed_tokens == 2
        assert heir.token_ids[0] == expected_tokens([*tokens, 7, 8], 3)
        if grade == "leased":
            assert engine.record("t", parent).choices[0].blocks == -(-len(tokens) // 4)
            engine.forget("t", parent)


async def test_nothing_is_saved_up_while_nobody_extracts() -> None:
    """An extraction that comes after a long generation began gets small pieces of steps, not one large one."""
    largest = 0
    async with running(Setup(chunk=64, num_blocks=2000, eos=())) as (engine, _):
        plan = engine.scheduler.plan

        def recording(now: float, *ahead: int):
            nonlocal largest
            launch = plan(now, *ahead)
            if launch is not None and engine.scheduler.num_running > 1:
                largest = max(largest, launch.plan.num_tokens)
            return launch

        engine.scheduler.plan = recording  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=300, temperature=0)
        generation = asyncio.ensure_future(ask(engine, request([7], params)))
        await until(
            lambda: (
                engine.scheduler.num_running and len(engine.parent("t", _running(engine)).choices[0].token_ids) > 100
            )
        )
        answer = asyncio.ensure_future(ask(engine, extraction(PROMPT, wants("all"))))
        await generation
        check(await answer, PROMPT, range(37), LAST)
    assert 1 < largest <= 1 + 7


def _running(engine: AsyncEngine) -> str:
    return next(iter(engine._groups))
