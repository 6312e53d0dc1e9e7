"""Sliding windows over the paged fake: what is given back, what is kept for whom, and that every token stays right."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bequest.engine._C import BlockPool, BlockTable
from bequest.engine.engine import AsyncEngine
from bequest.engine.formats import estate_file
from bequest.engine.types import BeamParams, Retain, SamplingParams
from tests.engine.harness import Setup, ask, ask_all, request, running
from tests.engine.paged_fake import expected_tokens
from tests.engine.test_continuation import child_of, params

SLACK = 16  # csrc/cache/strips.h
INTERVAL = 48
SETUP = Setup(
    num_blocks=900, num_lease_blocks=300, num_host_blocks=300, windows=(0, 6, 6), state_interval=INTERVAL, eos=()
)
WINDOWS = [(0, 5), (0, 2, 13), (7,), (3, 20)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 900) for _ in range(length)]


# --- every token is right ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 7), (4, 1), (4, 64), (16, 7), (16, 64)])
@pytest.mark.parametrize("tiny", [False, True])
async def test_a_crowd_with_windows(windows: tuple[int, ...], block_size: int, chunk: int, tiny: bool) -> None:
    """Long and short prompts with common beginnings, beside choices and beams; a tiny cache preempts and swaps."""
    rows = -(-150 // block_size)
    num_blocks = 1 + len(windows) * rows * (1 if tiny else 8)
    setup = replace(
        SETUP, windows=windows, block_size=block_size, chunk=chunk, num_blocks=num_blocks, num_lease_blocks=0
    )
    async with running(setup) as (engine, _):
        common = prompt_of(60)
        prompts = [common[: 10 * i] + prompt_of(40, i) for i in range(1, 7)]
        asked = [request(prompt, params(30)) for prompt in prompts]
        sampled = SamplingParams(max_tokens=20, n=3, seed=5, ignore_eos=True)
        beams = SamplingParams(max_tokens=10, n=2, temperature=0, beams=BeamParams(width=2), ignore_eos=True)
        answers = await ask_all(engine, [*asked, request(common, sampled), request(prompts[0], beams)])
        for one, answer in zip(prompts, answers, strict=False):
            assert answer.token_ids[0] == expected_tokens(one, 30)
        for choice in range(3):
            assert answers[6].token_ids[choice] == expected_tokens(common, 20, seed=5, choice=choice, greedy=False)
        assert len(answers[7].token_ids) == 2


@pytest.mark.parametrize("windows", WINDOWS)
async def test_ten_turnovers_leave_a_lease_whole(windows: tuple[int, ...]) -> None:
    setup = replace(SETUP, windows=windows, num_blocks=1 + 60 * len(windows), num_lease_blocks=15 * len(windows))
    async with running(setup) as (engine, runner):
        first = await ask(engine, request(prompt_of(33), params(9), retain=Retain(600)))
        assert first.retained is not None
        while runner.num_tokens < 10 * 60 * 4:
            await ask_all(engine, [request(prompt_of(70, runner.num_tokens + i), params(12)) for i in range(4)])
        asked = child_of(engine, first.id, [3, 4])
        second = await ask(engine, asked)
        assert second.token_ids[0] == expected_tokens(asked.prompt_token_ids, 5)
        assert second.inheritance is not None and second.inheritance.computed_tokens == 3
        assert second.inheritance.source in ("blocks", "host")
        engine.forget("t", first.id)


# --- what is given back ------------------------------------------------------------------------------------------


async def test_a_window_keeps_no_more_than_it_reaches() -> None:
    """Of a sequence that runs, sampled when its blocks are most: behind its last step."""
    async with running(replace(SETUP, max_model_len=2000, chunk=32)) as (engine, _):
        pool = engine.scheduler.pool
        most = 0
        async for _delta in engine.generate(request(prompt_of(1000), params(200))):
            most = max(most, pool.num_used)
        whole, window = -(-1200 // 4), -(-(6 + SLACK) // 4) + 2
        assert whole < most <= whole + 2 * window


def held_by_sequences_of(length: int, windows: tuple[int, ...], num_blocks: int) -> int:
    """How many sequences of so many tokens a pool holds at once, written a chunk at a time."""
    pool = BlockPool(num_blocks, 16, strips=(windows, 4096, 512))
    tables: list[BlockTable] = []
    while True:
        table = BlockTable(pool)
        for begin in range(0, length, 512):
            if table.try_prepare_write(begin, begin + 512) is None:
                return len(tables)
        table.slide(length)
        tables.append(table)


def test_windows_hold_several_times_as_many_sequences() -> None:
    """Five strips of a window of 1024 beside one of all tokens, as Gemma 3 has them, at 32k tokens."""
    num_blocks = 1 + 10 * 6 * 2048
    without = held_by_sequences_of(32768, (0,) * 6, num_blocks)
    assert without == 10
    assert held_by_sequences_of(32768, (0, *(1024,) * 5), num_blocks) >= 4 * without


# --- who starts where ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(0, 6, 6), *WINDOWS])
@pytest.mark.parametrize("pipelined", [True, False])
async def test_a_child_at_the_end_of_a_lease_computes_its_suffix_and_one(
    windows: tuple[int, ...], pipelined: bool
) -> None:
    async with running(replace(SETUP, windows=windows, pipelined=pipelined)) as (engine, _):
        for length in (1, 5, 30, 77):
            first = await ask(engine, request(prompt_of(length), params(21), retain=Retain(60)))
            for suffix in ([], [7, 8, 9]):
                asked = child_of(engine, first.id, suffix)
                second = await ask(engine, asked)
                assert second.token_ids[0] == expected_tokens(asked.prompt_token_ids, 5)
                assert second.inheritance is not None and second.inheritance.source == "blocks"
                assert second.inheritance.computed_tokens == len(suffix) + 1
            engine.forget("t", first.id)


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_a_child_anywhere_computes_an_interval_more_at_most(prefix_caching: bool) -> None:
    async with running(replace(SETUP, prefix_caching=prefix_caching)) as (engine, _):
        first = await ask(engine, request(prompt_of(90), params(40), retain=Retain(60)))
        for at in (*range(1, 130, 7), 48, 90, 96):
            asked = child_of(engine, first.id, [9, 9], at=at)
            second = await ask(engine, asked)
            assert second.token_ids[0] == expected_tokens(asked.prompt_token_ids, 5)
            assert second.inheritance is not None
            told = second.inheritance
            assert told.inherited_tokens + told.computed_tokens == at + 2
            assert told.computed_tokens <= (2 if at in (48, 90, 96) else 2 + INTERVAL)
        engine.forget("t", first.id)


async def test_a_grandchild_finds_what_its_grandparent_kept() -> None:
    """Windows at the intervals go from lease to lease."""
    async with running(replace(SETUP, prefix_caching=False)) as (engine, _):
        first = await ask(engine, request(prompt_of(120), params(20), retain=Retain(60)))
        second = await ask(engine, child_of(engine, first.id, [4] * 30, retain=Retain(60)))
        engine.forget("t", first.id)
        third = await ask(engine, child_of(engine, second.id, [9, 9], at=70))
        assert third.inheritance is not None and INTERVAL <= third.inheritance.inherited_tokens < 70
        engine.forget("t", second.id)


async def test_a_prompt_that_parts_hits_what_is_common() -> None:
    """Blocks that slid out stay findable: a prompt that parts anywhere finds all that it has in common."""
    async with running(SETUP) as (engine, _):
        common = prompt_of(80)
        await ask(engine, request(common, params(10)))
        for same in (79, 61, 60, 41, 8):
            asked = request([*common[:same], 950, *common[same:]], params(6))
            answer = await ask(engine, asked)
            assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, 6)
            assert answer.usage is not None and answer.usage.cached_tokens == same


async def test_a_lease_holds_less_than_without_windows() -> None:
    async with running(replace(SETUP, state_interval=1000, max_model_len=900, chunk=64)) as (engine, _):
        first = await ask(engine, request(prompt_of(400), params(100), retain=Retain(60)))
        assert first.retained is not None
        whole, window = 125, -(-(6 + SLACK) // 4) + 1
        assert whole < first.retained.blocks <= whole + 2 * 2 * window  # at the end, and where the prompt ends
        entry = engine.record("t", first.id)
        assert entry.choices[0].blocks == first.retained.blocks
        full, *windows = entry.groups
        assert (full.kind, full.window, full.blocks) == ("full", None, whole)
        assert [(group.kind, group.window) for group in windows] == [("window", 6)]
        assert sum(group.blocks for group in entry.groups) == first.retained.blocks
        assert full.num_bytes == whole * engine.block_layout.num_bytes
        kept = entry.groups
        engine.set_ttl("t", first.id, None)
        assert engine.record("t", first.id).grade == "warm"
        assert engine.record("t", first.id).groups == kept, "what is warm is still there"
        engine.forget("t", first.id)


# --- estates -------------------------------------------------------------------------------------------------------


async def check_alike(here: AsyncEngine, there: AsyncEngine, parent: str, at: int | None) -> None:
    one = await ask(here, child_of(here, parent, [5, 6], at=at))
    other = await ask(there, child_of(there, parent, [5, 6], at=at))
    assert one.token_ids == other.token_ids
    assert one.inheritance is not None and other.inheritance is not None
    assert other.inheritance.computed_tokens == one.inheritance.computed_tokens


async def test_an_estate_has_the_windows_of_its_lease() -> None:
    setup = replace(SETUP, prefix_caching=False)
    async with running(setup) as (here, runner), running(setup) as (there, _):
        sampled = SamplingParams(max_tokens=30, n=2, seed=3, ignore_eos=True)
        first = await ask(here, request(prompt_of(75), sampled, retain=Retain(60)))
        assert first.retained is not None
        estate = await here.export_estate("t", first.id)
        assert len(estate.content) == runner.num_read == first.retained.blocks
        await there.import_estate("t", estate_file.from_bytes(estate_file.to_bytes(estate)), 60)
        for at in (None, 75, 50):
            await check_alike(here, there, first.id, at)
        for engine in (here, there):
            engine.forget("t", first.id)
