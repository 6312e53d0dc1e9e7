"""An estate as bytes: whatever happened to them, it is whole or it is none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from bequest.engine.errors import EngineError, InvalidEstate
from bequest.engine.formats import estate_file
from bequest.engine.formats.estate_file import from_bytes, to_bytes
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.estate import Deed, Estate
from tests.engine.harness import running
from tests.engine.test_estates import ENCODING, SETUP, an_estate


async def test_cut_anywhere_it_is_no_estate() -> None:
    async with running(ENCODING) as (engine, _):
        parent, estate = await an_estate(engine, encoder=EncoderInput.of_tokens([8, 9]))
        data = to_bytes(estate)
        assert from_bytes(data).deed == estate.deed
        for end in range(len(data)):
            with pytest.raises(InvalidEstate):
                from_bytes(data[:end])
        with pytest.raises(InvalidEstate):
            from_bytes(data + b"\0")
        engine.forget("t", parent)


async def test_changed_anywhere_it_is_no_estate() -> None:
    async with running(SETUP) as (engine, _):
        parent, estate = await an_estate(engine)
        data = to_bytes(estate)
        draw = random.Random(1)
        for i in range(len(data)):
            changed = bytearray(data)
            changed[i] ^= 1 << draw.randrange(8)
            with pytest.raises(InvalidEstate):
                from_bytes(bytes(changed))
        for _ in range(200):
            with pytest.raises(InvalidEstate):
                from_bytes(draw.randbytes(draw.randrange(300)))
        engine.forget("t", parent)


async def test_whoever_forges_a_digest_gets_an_error_or_a_whole_estate() -> None:
    """Its deed may say anything."""
    async with running(ENCODING) as (engine, _):
        parent, estate = await an_estate(engine, encoder=EncoderInput.of_tokens([8, 9]))
        engine.forget("t", parent)
        draw, whole = random.Random(2), 0
        deed, content = msgspec.json.encode(estate.deed), estate.content
        for _ in range(2000):
            said = bytearray(deed)
            for _ in range(draw.choice([1, 1, 2, 5])):
                said[draw.randrange(len(said))] = draw.choice(b'0123456789-"[]{},.eE\\x ')
            layout = estate.deed.identity.cache
            try:
                head = estate_file._header(bytes(said), layout, len(content), estate_file._digest(bytes(said), content))
                forged = from_bytes(head + content.tobytes())
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


async def test_it_is_a_safetensors_file_for_anybody() -> None:
    async with running(SETUP) as (engine, _):
        parent, estate = await an_estate(engine, name="mine")
        tensors = safetensors.numpy.load(to_bytes(estate))
        assert tensors["blocks"].view(np.uint8).reshape(len(estate.content), -1).tolist() == estate.content.tolist()
        engine.forget("t", parent)


async def test_what_is_wrong_is_said() -> None:
    async with running(SETUP) as (engine, _):
        parent, estate = await an_estate(engine)
        data = to_bytes(estate)
        flipped = bytearray(data)
        flipped[-1] ^= 1
        others = safetensors.numpy.save({"blocks": np.zeros(4, np.float32)}, {"format": "pt"})
        for wrong, said in {
            data[:-1]: "cut short",
            data[:20]: "cut short",
            data[:4]: "too short",
            bytes(flipped): "have changed",
            others: "no estate of the format",
            b"GGUF" + bytes(100): "no estate",
        }.items():
            with pytest.raises(InvalidEstate, match=said):
                from_bytes(wrong)
        engine.forget("t", parent)
