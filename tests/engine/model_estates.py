"""A trial of estates with real runners, on whichever device: KV of one engine serves a child in another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import EstateMismatch, InvalidEstate
from bequest.engine.formats.estate_file import from_bytes, to_bytes
from bequest.engine.types import BeamParams, Lineage, OutputMode, Request, Retain, SamplingParams
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.estate import Estate
from tests.engine.harness import Answer, ask, ask_all, request

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)
SAMPLED = SamplingParams(max_tokens=7, temperature=1, seed=7, n=3, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=6, temperature=0, n=2, beams=BeamParams(3, 1.0, early_stopping=False))
FLOOD = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def _child(engine: AsyncEngine, parent: str, choice: int) -> Request:
    known = engine.parent("t", parent)
    before = known.choices[choice].token_ids
    lineage = Lineage(parent, choice, len(before))
    return request([*before, 11, 12, 13], GREEDY, lineage=lineage, encoder=known.encoder)


async def _check_child(here: AsyncEngine, there: AsyncEngine, parent: str, choice: int) -> str:
    one: Answer = await ask(here, _child(here, parent, choice))
    other = await ask(there, _child(there, parent, choice))
    assert other.inheritance is not None and other.inheritance.computed_tokens == 4
    assert other.token_ids == one.token_ids
    assert max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)) < 1e-3
    return other.inheritance.source


async def _check_truncated(there: AsyncEngine, data: bytes) -> None:
    load = there.load()
    for end in [*range(0, len(data), max(1, len(data) // 50)), len(data) - 1]:
        with pytest.raises(InvalidEstate):
            await there.import_estate("t", from_bytes(data[:end]), 600)
    there.scheduler.pool.check()
    assert there.load() == load


async def check_estates_move(config: EngineConfig, encoder: EncoderInput | None = None, *, flood: bool = True) -> None:
    """REQUIRES: a cache of about 40 blocks of 16 tokens and a host pool, so that a flood moves the leases there."""
    here = (await build_engine(config)).engine
    there = (await build_engine(replace(config, seed=5))).engine
    try:
        for engine in (here, there):
            engine._estates.piece_bytes = 3 * engine._device.block_layout.num_bytes
        prompts = [[1, *[5 + (7 * i + j) % 80 for j in range(19 + 3 * i)]] for i in range(3)]
        kinds = zip(prompts, (GREEDY, SAMPLED, BEAMS), strict=True)
        outputs = (OutputMode.DELTA, OutputMode.DELTA, OutputMode.FINAL)
        parents = [
            request(prompt, params, retain=Retain(600), encoder=encoder, output=output)
            for (prompt, params), output in zip(kinds, outputs, strict=True)
        ]
        await ask_all(here, parents)
        sources = set()
        for round_number in range(2):
            if round_number and flood:  # the leases have to go to the host, here and there
                for engine in (here, there):
                    asked = [request([6 + i, *range(9, 49)], FLOOD, encoder=encoder) for i in range(14)]
                    await ask_all(engine, asked)
            for parent in parents:
                estate = await here.export_estate("t", parent.id)
                data = to_bytes(estate)
                if round_number == 0:
                    await _check_truncated(there, data)
                    foreign = replace(estate.deed, identity=replace(estate.deed.identity, weights="others"))
                    with pytest.raises(EstateMismatch):
                        await there.import_estate("t", Estate(foreign, estate.content), 600)
                    assert await there.import_estate("t", from_bytes(data), 600) == parent.id
                for choice in range(parent.params.n):
                    sources.add(await _check_child(here, there, parent.id, choice))
        assert "blocks" in sources and sources <= {"blocks", "host"}
        for parent in parents:
            here.forget("t", parent.id)
            there.forget("t", parent.id)
        assert await here.drain(10) and await there.drain(10)
    finally:
        await here.stop()
        await there.stop()
    for engine in (here, there):
        engine.scheduler.check_idle()
