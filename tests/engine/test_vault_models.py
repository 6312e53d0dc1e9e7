"""Leases in files of models with more than one table of blocks: windows, encoder inputs, recurrent layers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from bequest.engine._C import BlockPool, BlockTable
from bequest.engine.cache.filed import served
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import ParentLost
from bequest.engine.formats.estate_file import from_bytes, to_bytes
from bequest.engine.types import Lineage, Request, SamplingParams
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.estate import NO_BLOCK
from bequest.engine.types.recurrent import StateSizes
from tests.engine.harness import Answer, Setup, ask, ask_all, request
from tests.engine.paged_fake import PagedFakeRunner, expected_tokens
from tests.engine.test_estates import child_of, params
from tests.engine.test_scoring import SCORED, histories
from tests.engine.test_vault import LASTING, files, vault

STATES = StateSizes(num_slots=60, num_lease_slots=30, interval=24)
BASE = Setup(num_blocks=300, num_host_blocks=80, num_lease_blocks=150, num_file_blocks=4000, max_model_len=300, eos=())
WINDOWS = replace(BASE, windows=(0, 6, 6), state_interval=48)
ENCODING = replace(BASE, encoder_len=40)
RECURRENT = replace(BASE, states=STATES)
SETUPS = {
    "windows": WINDOWS,
    "nothing but windows": replace(BASE, windows=(3, 20), state_interval=32),
    "encoder": ENCODING,
    "recurrent": RECURRENT,
}
ENCODER = EncoderInput.of_tokens(range(20, 53))


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(10, 900) for _ in range(length)]


def encoder_of(setup: Setup) -> EncoderInput | None:
    return None if setup.encoder_len is None else ENCODER


async def lease(engine: AsyncEngine, setup: Setup, length: int, **fields: object) -> tuple[Request, Answer]:
    parent = request(prompt(length), params(10), retain=LASTING, encoder=encoder_of(setup), **fields)
    answer = await ask(engine, parent)
    assert answer.retained is not None and answer.retained.durable, answer.retained
    return parent, answer


def check_tokens(asked: Request, answer: Answer) -> None:
    before = () if asked.encoder is None else asked.encoder.token_ids
    assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, asked.params.max_tokens, encoder=before)


async def check_child(engine: AsyncEngine, parent: str, sources: tuple[str, ...] = ("file",)) -> None:
    child = child_of(engine, parent, [7, 8, 9])
    answer = await ask(engine, child)
    check_tokens(child, answer)
    assert answer.inheritance is not None
    assert (answer.inheritance.source in sources, answer.inheritance.computed_tokens) == (True, 4), answer.inheritance


def runner_of(engine: AsyncEngine) -> PagedFakeRunner:
    runner = engine._device._runner
    assert isinstance(runner, PagedFakeRunner)
    return runner


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("length", [1, 4, 17, 100])
@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_a_lease_outlives_its_process(tmp_path: Path, name: str, length: int, prefix_caching: bool) -> None:
    setup = replace(SETUPS[name], prefix_caching=prefix_caching)
    async with vault(tmp_path, setup) as engine:
        parent, _ = await lease(engine, setup, length)
    async with vault(tmp_path, setup) as engine:
        await check_child(engine, parent.id)
        assert runner_of(engine).num_encoded == 0, "what is in files is not encoded again"
        await check_child(engine, parent.id, ("blocks",))
    async with vault(tmp_path, setup) as engine:
        await check_child(engine, parent.id)
        engine.forget("t", parent.id)
        assert engine.retention.books.used == 0


@pytest.mark.parametrize("name", ["windows", "recurrent"])
@pytest.mark.parametrize("length", [3, 14])
async def test_suffixes_are_scored_behind_a_lease_in_files(tmp_path: Path, name: str, length: int) -> None:
    """Its last block comes with a step, and cannot be copied for candidates in the same one."""
    async with vault(tmp_path, SETUPS[name]) as engine:
        parent, _ = await lease(engine, SETUPS[name], length)
    async with vault(tmp_path, SETUPS[name]) as engine:
        before = engine.parent("t", parent.id).choices[0].token_ids
        asked = request([*before], SCORED, suffixes=((7,), (8, 9)), lineage=Lineage(parent.id, 0, len(before)))
        answer = await ask(engine, asked)
        assert answer.inheritance is not None and answer.inheritance.source == "file"
        assert set(runner_of(engine).scored) == histories([*before], asked.suffixes)


@pytest.mark.parametrize("name", SETUPS)
async def test_a_branch_in_the_middle_is_right(tmp_path: Path, name: str) -> None:
    """It starts where windows and states were kept; of keys and values alone, anywhere."""
    setup = SETUPS[name]
    async with vault(tmp_path, setup) as engine:
        parent, answer = await lease(engine, setup, 130)
        tokens = [*parent.prompt_token_ids, *answer.token_ids[0]]
    inherited = {}
    for at in (1, 5, 24, 48, 60, 100, 130, 139):
        async with vault(tmp_path, setup) as engine:
            lineage = Lineage(parent.id, 0, at)
            child = request([*tokens[:at], 9, 9], params(12), lineage=lineage, encoder=parent.encoder)
            answer = await ask(engine, child)
            check_tokens(child, answer)
            assert answer.inheritance is not None
            inherited[at] = answer.inheritance.inherited_tokens
    assert inherited[139] == 139 and inherited[130] >= 120, inherited
    if name == "encoder":
        assert all(count == at for at, count in inherited.items())
    if name == "recurrent":
        assert inherited[60] == 48 and inherited[24] == 24


@pytest.mark.parametrize("name", SETUPS)
async def test_choices_that_say_the_same(tmp_path: Path, name: str) -> None:
    """Each has a state of its own behind the same tokens, of which one is enough."""
    setup, several = SETUPS[name], SamplingParams(max_tokens=9, n=3, temperature=0, ignore_eos=True)
    async with vault(tmp_path, setup) as engine:
        parent = request(prompt(18), several, retain=LASTING, encoder=encoder_of(setup))
        answer = await ask(engine, parent)
        assert answer.retained is not None and answer.retained.durable, answer.retained
        assert answer.token_ids[0] == answer.token_ids[1] == answer.token_ids[2]
        data = to_bytes(await engine.export_estate("t", parent.id))
    assert from_bytes(data).deed.id == parent.id, "it has no flaws"
    async with vault(tmp_path, setup) as engine:
        for choice in range(3):
            child = child_of(engine, parent.id, [5, 6], choice=choice)
            answer = await ask(engine, child)
            check_tokens(child, answer)
            assert answer.inheritance is not None and answer.inheritance.computed_tokens == 3
        engine.forget("t", parent.id)
        assert engine.retention.books.used == 0


@pytest.mark.parametrize("name", SETUPS)
async def test_choices_trees_and_a_crowd(tmp_path: Path, name: str) -> None:
    setup = replace(SETUPS[name], num_blocks=160, num_lease_blocks=100)
    encoder = encoder_of(setup)
    async with vault(tmp_path, setup) as engine:
        asked = SamplingParams(max_tokens=6, n=3, temperature=1, seed=3, ignore_eos=True)
        several = request(prompt(18), asked, retain=LASTING, encoder=encoder)
        await ask(engine, several)
        first, _ = await lease(engine, setup, 30)
        size = engine.retention.books.used
        second = child_of(engine, first.id, [5] * 8, retain=LASTING)
        await ask(engine, second)
        assert engine.retention.books.used - size < 12 * len(setup.windows) + 3 * 48, "shared blocks are there once"
    async with vault(tmp_path, setup) as engine:
        children = [child_of(engine, several.id, [i, 5], choice=i % 3) for i in range(6)]
        children += [child_of(engine, parent.id, [i, 6]) for i in range(4) for parent in (first, second)]
        crowd = [request(prompt(40, i), params(20), encoder=encoder) for i in range(6)]
        answers = await ask_all(engine, [*children, *crowd])
        for one, answer in zip([*children, *crowd], answers, strict=True):
            check_tokens(one, answer)
        for answer in answers[: len(children)]:
            assert answer.inheritance is not None and answer.inheritance.computed_tokens == 3
        for parent in (several, first, second):
            engine.forget("t", parent.id)


@pytest.mark.parametrize("name", SETUPS)
async def test_a_drain_and_memory_that_is_short(tmp_path: Path, name: str) -> None:
    """Leases in files give way in memory, states included; each is continued, from wherever it is."""
    setup = replace(SETUPS[name], num_blocks=200, num_lease_blocks=60, num_host_blocks=2)
    async with vault(tmp_path, setup) as engine:
        parents = [(await lease(engine, setup, 40 + i))[0] for i in range(8)]
        for parent in parents:
            await check_child(engine, parent.id, ("file", "blocks", "host", "prefix_cache"))
    async with vault(tmp_path, setup) as engine:
        for parent in parents:
            await check_child(engine, parent.id)
            engine.forget("t", parent.id)


@pytest.mark.parametrize("name", SETUPS)
async def test_an_estate_travels_out_of_files_and_into_another_engine(tmp_path: Path, name: str) -> None:
    setup = SETUPS[name]
    async with vault(tmp_path / "one", setup) as engine:
        parent, _ = await lease(engine, setup, 60)
        held = await engine.export_estate("t", parent.id)
    async with vault(tmp_path / "one", setup) as engine, vault(tmp_path / "two", setup) as other:
        estate = await engine.export_estate("t", parent.id)
        assert sorted(map(bytes, estate.content)) == sorted(map(bytes, held.content))
        await other.import_estate("t", estate, 600)
        await check_child(other, parent.id, ("blocks",))
        if name == "recurrent":
            assert other.retention.leases.num_states > 0
        other.forget("t", parent.id)
        engine.forget("t", parent.id)


@pytest.mark.parametrize("name", SETUPS)
async def test_broken_bytes_are_found_wherever_they_are(tmp_path: Path, name: str) -> None:
    setup = SETUPS[name]
    async with vault(tmp_path, setup) as engine:
        parent, _ = await lease(engine, setup, 30)
    [segment] = files(tmp_path, "blocks")
    whole = segment.read_bytes()
    for at in (0, len(whole) // 3, len(whole) - 1):
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        async with vault(tmp_path, setup) as engine:
            with pytest.raises(ParentLost):
                await ask(engine, child_of(engine, parent.id, [7]))
            with pytest.raises(ParentLost):
                await engine.reach("t", parent.id, 0)


async def test_states_are_charged_in_files(tmp_path: Path) -> None:
    layout_rows = 1500 // 32 + 1  # the fake's state, in blocks of four tokens
    async with vault(tmp_path, RECURRENT) as engine:
        parent, _ = await lease(engine, RECURRENT, 60)
        num_states = len(engine.retention.find("t", parent.id).states)
        assert engine.retention.books.used == -(-69 // 4) + num_states * layout_rows
        assert num_states == 4, "of 24, 48, 56 and the end"


async def test_leases_in_files_give_way_to_states(tmp_path: Path) -> None:
    setup = replace(RECURRENT, states=StateSizes(num_slots=40, num_lease_slots=8, interval=24))
    async with vault(tmp_path, setup) as engine:
        parents = [(await lease(engine, setup, 40 + i))[0] for i in range(6)]
        for parent in parents:
            await check_child(engine, parent.id, ("file", "blocks", "prefix_cache"))


async def test_a_lease_in_files_gives_way_to_the_states_of_its_child(tmp_path: Path) -> None:
    """Which then shares no block with it, and pays for all of its own."""
    setup = replace(RECURRENT, states=StateSizes(num_slots=40, num_lease_slots=6, interval=24))
    async with vault(tmp_path, setup) as engine:
        parent, _ = await lease(engine, setup, 40)
        assert engine.retention.leases.num_states > 2
        child = child_of(engine, parent.id, [7, 8, 9], retain=LASTING)
        answer = await ask(engine, child)
        check_tokens(child, answer)
        assert answer.inheritance is not None and answer.inheritance.computed_tokens == 4
        assert answer.retained is not None and answer.retained.durable, answer.retained
        for one in (child.id, parent.id):
            await check_child(engine, one, ("file", "blocks"))


def test_what_is_served_is_what_a_table_serves() -> None:
    draw = random.Random(4)
    for _ in range(400):
        windows = tuple(draw.choice([0, 1, 2, 5, 9]) for _ in range(draw.randint(1, 3)))
        size, length = draw.choice([1, 4]), draw.randint(1, 40)
        rows = -(-length // size)
        present = [not windows[i % len(windows)] or draw.random() < 0.8 for i in range(rows * len(windows))]
        pool = BlockPool(200, size, strips=(windows, 48, 0))
        table = BlockTable(pool)
        assert table.try_append(present, length)
        numbered = [i if there else NO_BLOCK for i, there in enumerate(present)]
        for most in range(length + 1):
            assert served(numbered, windows, size, most) == table.servable(most)
        table.free()
