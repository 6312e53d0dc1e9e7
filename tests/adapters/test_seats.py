"""More adapters are loaded than steps can read at once: who waits, who leaves, and that no answer changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import InvalidAdapter
from bequest.engine.types import BeamParams, Request, SamplingParams
from bequest.engine.types.adapter import AdapterSource, AdapterWeights, LoadAdapter
from tests.adapters.tiny_adapters import make_adapters, save_adapter
from tests.engine.harness import ask, ask_all, request
from tests.tiny_models import VOCAB_SIZE, make_reference

NAMES = [f"a{i}" for i in range(6)]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPT = torch.randint(3, VOCAB_SIZE, (11,), generator=torch.Generator().manual_seed(8)).tolist()


class Places:
    """Stands for a device whose steps read few adapters at once."""

    def __init__(self) -> None:
        self.placed: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.failures = 0

    def __call__(self, weights: AdapterWeights) -> AdapterWeights:
        assert self.may_go_on.wait(20)
        if self.failures:
            self.failures -= 1
            raise InvalidAdapter("no place became free")
        self.placed.append(Path(weights.directory).name)
        return weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    made = make_adapters(lambda: make_reference("llama"), dict.fromkeys(NAMES, 4))
    return {name: save_adapter(adapted, folder / name) for name, adapted in made}


@pytest.fixture
def places() -> Places:
    return Places()


@pytest.fixture
def opened(
    tiny_model: Callable[[str], Path], folders: dict[str, Path], places: Places, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., EngineConfig]:
    def make(seats: int | None, **options: object) -> EngineConfig:
        def source(load: LoadAdapter, most: int) -> AdapterSource:
            return AdapterSource(load, most, seats=seats, place=places)

        monkeypatch.setattr("bequest.engine.runner.prepare.AdapterSource", source)
        given = {"block_size": 4, "max_model_len": 64, "threads": 1, "num_blocks": 400, "seed": 1, **options}
        lora = [f"{name}={folder}" for name, folder in folders.items()]
        return EngineConfig(model=str(tiny_model("llama")), device="cpu", lora=lora, **given)  # type: ignore[arg-type]

    return make


def asked(engine: AsyncEngine, name: str, params: SamplingParams = GREEDY, salt: str = "") -> Request:
    return request(PROMPT, params, adapter=engine.adapters.find(name), cache_salt=salt)


async def closed(engine: AsyncEngine) -> None:
    await engine.stop()
    engine.scheduler.check_idle()


@pytest.mark.parametrize("options", [{}, {"num_blocks": 24, "host_cache_gb": 0.01}, {"pipelined": False}])
@pytest.mark.parametrize("seats", [1, 2, 5])
async def test_a_crowd_says_the_same_with_few_seats(
    seats: int, options: dict[str, object], opened: Callable[..., EngineConfig]
) -> None:
    kinds = [GREEDY, SamplingParams(max_tokens=4, temperature=0, n=2, beams=BeamParams(2))]
    told = []
    for number in (None, seats):
        engine = (await build_engine(opened(number, **options))).engine
        try:
            crowd = [asked(engine, name, params, str(i)) for i in range(2) for name in [*NAMES, ""] for params in kinds]
            told.append([answer.token_ids for answer in await ask_all(engine, crowd)])
        finally:
            await closed(engine)
    assert told[0] == told[1]
    assert len({str(tokens) for tokens in told[0]}) > len(NAMES), "adapters say different things"


async def test_the_one_that_was_used_longest_ago_leaves(opened: Callable[..., EngineConfig], places: Places) -> None:
    engine = (await build_engine(opened(2))).engine
    try:
        assert places.placed == ["a0", "a1"], "free seats are taken when adapters are loaded"
        for name in ("a0", "a1", "a0", "a2", "a0", "a1"):
            await ask(engine, asked(engine, name))
        assert places.placed[2:] == ["a2", "a1"]
    finally:
        await closed(engine)


async def test_others_pass_whoever_waits_for_an_adapter(opened: Callable[..., EngineConfig], places: Places) -> None:
    engine = (await build_engine(opened(2))).engine
    try:
        places.may_go_on.clear()
        waiting = asyncio.create_task(ask(engine, asked(engine, "a3")))
        await ask_all(engine, [asked(engine, ""), asked(engine, "a1")])
        assert not waiting.done()
        places.may_go_on.set()
        await waiting
    finally:
        await closed(engine)


async def test_requests_that_never_end_to_come_do_not_keep_others_out(opened: Callable[..., EngineConfig]) -> None:
    """At every moment some of them run, since they end one after the other."""
    engine = (await build_engine(opened(1))).engine
    stop = False

    async def again_and_again(number: int) -> None:
        params = SamplingParams(max_tokens=9 + 4 * number, temperature=0, ignore_eos=True)
        while not stop:
            await ask(engine, asked(engine, "a0", params, salt=str(number)))

    crowd = [asyncio.create_task(again_and_again(i)) for i in range(6)]
    try:
        await asyncio.sleep(0.3)
        await asyncio.wait_for(ask(engine, asked(engine, "a1")), 10)
    finally:
        stop = True
        await asyncio.gather(*crowd)
        await closed(engine)


async def test_an_adapter_that_did_not_come_is_brought_again(
    opened: Callable[..., EngineConfig], places: Places
) -> None:
    engine = (await build_engine(opened(1))).engine
    try:
        places.failures = 2
        await asyncio.wait_for(ask(engine, asked(engine, "a2")), 20)
        assert places.placed == ["a0", "a2"]
    finally:
        await closed(engine)


async def test_one_may_be_unloaded_on_its_way(opened: Callable[..., EngineConfig], places: Places) -> None:
    engine = (await build_engine(opened(1))).engine
    try:
        places.may_go_on.clear()
        waiting = asyncio.create_task(ask(engine, asked(engine, "a2")))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        engine.adapters.unload("a2")
        engine.adapters.unload("a0")
        other = asyncio.create_task(ask(engine, asked(engine, "a3")))
        places.may_go_on.set()
        await asyncio.wait_for(other, 20)
    finally:
        await closed(engine)
