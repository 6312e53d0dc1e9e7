"""An estate as bytes: whatever happened to them, it is whole or it is none."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bequest.engine.errors import EngineError, InvalidEstate
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.estate import Deed, Estate
from tests.engine.harness import running
from tests.engine.test_estates import ENCODING, SETUP, an_estate


async def test_cut_anywhere_it_is_no_estate() -> None:
    async with running(ENCODING) as (engine, _):
        parent, estate = await an_estate(engine, encoder=EncoderInput.of_tokens([8, 9]))
        data = estate.to_bytes()
        assert Estate.from_bytes(data).deed == estate.deed
        for end in range(len(data)):
            with pytest.raises(InvalidEstate):
                Estate.from_bytes(data[:end])
        with pytest.raises(InvalidEstate):
            Estate.from_bytes(data + b"\0")
        engine.forget("t", parent)


async def test_changed_anywhere_it_is_no_estate() -> None:
    async with running(SETUP) as (engine, _):
        parent, estate = await an_estate(engine)
        data = estate.to_bytes()
        draw = random.Random(1)
        for i in range(len(data)):
            changed = bytearray(data)
            changed[i] ^= 1 << draw.randrange(8)
            with pytest.raises(InvalidEstate):
                Estate.from_bytes(bytes(changed))
        for _ in range(200):
            with pytest.raises(InvalidEstate):
                Estate.from_bytes(draw.randbytes(draw.randrange(300)))
        engine.forget("t", parent)


async def test_whoever_forges_a_digest_gets_an_error_or_a_whole_estate() -> None:
    """Its deed may say anything."""
    async with running(ENCODING) as (engine, _):
        parent, estate = await an_estate(engine, encoder=EncoderInput.of_tokens([8, 9]))
        engine.forget("t", parent)
        data, draw, whole = estate.to_bytes(), random.Random(2), 0
        num_deed = len(msgspec.msgpack.encode(estate.deed))
        for _ in range(2000):
            body = bytearray(data[:-32])
            for _ in range(draw.choice([1, 1, 2, 5])):
                body[draw.randrange(12, 32 + num_deed)] = draw.choice([draw.randrange(256), 0, 0xC0, 0xCF, 0x90])
            try:
                forged = Estate.from_bytes(bytes(body) + hashlib.blake2b(body, digest_size=32).digest())
            except InvalidEstate:
                continue
            whole += 1
            try:
                engine.forget("t", await engine.import_estate("t", forged, 600))
            except EngineError:
                engine.scheduler.check_idle()
        assert 0 < whole < 2000


BROKEN: dict[str, Callable[[Deed], Deed]] = {
    "no choices": lambda deed: replace(deed, choices=()),
    "twice": lambda deed: replace(deed, choices=deed.choices * 2),
    "a number too high": lambda deed: replace(deed, choices=(replace(deed.choices[0], index=1),)),
    "no prompt": lambda deed: replace(deed, choices=(replace(deed.choices[0], num_prompt=0),)),
    "less shown": lambda deed: replace(deed, choices=(replace(deed.choices[0], shown_len=1),)),
    "more shown": lambda deed: replace(deed, choices=(replace(deed.choices[0], shown_len=100),)),
    "more computed": lambda deed: replace(deed, choices=(replace(deed.choices[0], computed=100),)),
    "nothing computed": lambda deed: replace(deed, choices=(replace(deed.choices[0], computed=0, rows=()),)),
    "fewer tokens": lambda deed: replace(deed, choices=(replace(deed.choices[0], token_ids=(3,)),)),
    "no token": lambda deed: replace(deed, choices=(replace(deed.choices[0], token_ids=(-1,) * 15),)),
    "a block less": lambda deed: replace(deed, choices=(replace(deed.choices[0], rows=(0, 1, 2)),)),
    "a block twice": lambda deed: replace(deed, choices=(replace(deed.choices[0], rows=(0, 1, 2, 2)),)),
    "a block too high": lambda deed: replace(deed, choices=(replace(deed.choices[0], rows=(0, 1, 2, 4)),)),
    "a block below": lambda deed: replace(deed, choices=(replace(deed.choices[0], rows=(0, 1, 2, -1)),)),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_estate_does_not_contradict_itself(name: str) -> None:
    async with running(SETUP) as (engine, _):
        parent, estate = await an_estate(engine)
        assert estate.deed.choices[0].rows == (0, 1, 2, 3) and estate.deed.choices[0].computed == 14
        with pytest.raises(InvalidEstate):
            Estate(BROKEN[name](estate.deed), estate.content)
        with pytest.raises(InvalidEstate):
            Estate(estate.deed, estate.content[:-1])
        with pytest.raises(InvalidEstate):
            Estate(estate.deed, np.concatenate([estate.content, estate.content[:1]]))
        engine.forget("t", parent)
