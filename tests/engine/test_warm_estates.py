"""Warm estates: what requests without a lease left serves equal beginnings behind a restart, and gives way."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.types import Request, Retain
from bequest.engine.types.recurrent import StateSizes
from bequest.engine.vault.shelf import Shelf
from tests.engine.harness import Answer, Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import expected_tokens
from tests.engine.test_estates import params
from tests.engine.test_vault import _is_free, files

SETUP = Setup(num_blocks=300, num_host_blocks=40, num_lease_blocks=100, num_file_blocks=2000, max_model_len=400, eos=())
SETUPS = {
    "decoder": SETUP,
    "windows": replace(SETUP, windows=(0, 6, 6), state_interval=48),
    "recurrent": replace(SETUP, states=StateSizes(num_slots=60, num_lease_slots=30, interval=24)),
}


@asynccontextmanager
async def vault(path: Path, setup: Setup = SETUP, warm: bool = True) -> AsyncIterator[AsyncEngine]:
    async with running(setup) as (engine, _):
        await engine.open_files(Shelf(path), 20.0, warm=warm)
        try:
            yield engine
            assert await engine.drain(20)
        finally:
            for record in engine.retention.leases.holders():
                engine.retention.leases.end(record)
    await until(lambda: _is_free(path))


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(10, 900) for _ in range(length)]


async def said(engine: AsyncEngine, asked: Request) -> int:
    """Tokens that were not computed."""
    answer: Answer = await ask(engine, asked)
    assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, asked.params.max_tokens)
    assert answer.usage is not None
    return answer.usage.cached_tokens


@pytest.mark.parametrize("name", SETUPS)
async def test_an_equal_beginning_is_read_behind_a_restart(tmp_path: Path, name: str) -> None:
    setup, begin = SETUPS[name], prompt(120)
    async with vault(tmp_path, setup) as engine:
        await said(engine, request(begin, params()))
        await until(lambda: not engine._vault._storing)  # type: ignore[union-attr]
        await said(engine, request(begin, params()))
    assert len(files(tmp_path)) == 1, "what is there is not written again"
    async with vault(tmp_path, setup) as engine:
        cached = await said(engine, request([*begin, 5, 6, 7], params()))
        assert cached >= 90, cached
        again = await said(engine, request([*begin, 5, 6, 8], params()))
        assert again >= cached - 4, "which others find in memory then"
        for apart in ({"tenant": "u"}, {"cache_salt": "s"}):
            assert await said(engine, request([*begin, 5], params(), **apart)) == 0


async def test_short_ones_are_computed(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        await said(engine, request(prompt(40), params()))
        await said(engine, request(prompt(120), params()))
    assert len(files(tmp_path)) == 1
    async with vault(tmp_path) as engine:
        assert await said(engine, request([*prompt(120)[:30], 9], params())) == 0


async def test_leases_come_first(tmp_path: Path) -> None:
    setup = replace(SETUP, num_file_blocks=120)
    async with vault(tmp_path, setup) as engine:
        for seed in range(6):
            await said(engine, request(prompt(100, seed), params()))
            await until(lambda: not engine._vault._storing)  # type: ignore[union-attr]
            assert engine.retention.books.used <= 120
        lease = request(prompt(300), params(), retain=Retain(600, durable=True))
        answer = await ask(engine, lease)
        assert answer.retained is not None and answer.retained.durable
        assert engine.retention.books.used <= 120
    async with vault(tmp_path, setup) as engine:
        assert await said(engine, request([*prompt(100, 5), 5], params())) >= 90, "the youngest is still there"
        assert await said(engine, request([*prompt(100, 0), 5], params())) == 0, "the oldest has made room"
        assert engine.record("t", lease.id).grade == "stored"


async def test_broken_bytes_are_computed_again(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        await said(engine, request(prompt(120), params()))
    [segment] = files(tmp_path, "blocks")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    async with vault(tmp_path) as engine:
        assert await said(engine, request([*prompt(120), 5], params())) == 0
        await until(lambda: len(files(tmp_path)) == 1)  # what was computed instead


async def test_a_server_without_them_clears_them(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        await said(engine, request(prompt(120), params()))
    async with vault(tmp_path, warm=False) as engine:
        await said(engine, request(prompt(120), params()))
        await until(lambda: not files(tmp_path) and not files(tmp_path, "blocks"))
        assert engine.retention.books.used == 0


async def test_a_crowd_in_a_small_cache(tmp_path: Path) -> None:
    setup = replace(SETUP, num_blocks=90, num_lease_blocks=20, num_file_blocks=300)
    beginnings = [prompt(90, seed) for seed in range(5)]
    for number in range(3):
        async with vault(tmp_path, setup) as engine:
            asked = [request([*begin, number, i], params(12)) for i in range(4) for begin in beginnings]
            for one, answer in zip(asked, await ask_all(engine, asked), strict=True):
                assert answer.token_ids[0] == expected_tokens(one.prompt_token_ids, 12)
