"""Adapters through the whole engine against PEFT: tokens alone and in crowds, caches, leases, loads and unloads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import (
    AdapterInUse,
    AdapterNotFound,
    ContinuationMismatch,
    EstateMismatch,
    InvalidAdapter,
    ModelError,
    ParentExpired,
)
from bequest.engine.types import BeamParams, Lineage, OutputMode, Request, Retain, SamplingParams
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.hidden import HiddenStatesParams
from bequest.engine.watching.observation import AdapterLoad
from tests.adapters.tiny_adapters import make_adapters, save_adapter
from tests.engine.harness import Answer, ask, ask_all, request, until
from tests.tiny_models import VOCAB_SIZE, make_reference

NUM_ADAPTERS = 16
RANKS = {f"a{i}": (1, 2, 4, 8)[i % 4] for i in range(NUM_ADAPTERS)}
LENGTH = 8  # of answers
SCENARIOS = {
    "ample": {"num_blocks": 600, "max_num_batched_tokens": 64},
    "chunked": {"num_blocks": 600, "max_num_batched_tokens": 5, "speculative": "off"},
    "preempted": {"num_blocks": 40, "max_num_batched_tokens": 64},  # of 18 sequences of up to 8 blocks
    "plain": {"num_blocks": 600, "max_num_batched_tokens": 64, "pipelined": False, "enable_prefix_caching": False},
}
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True, logprobs=0)
PROMPT = torch.randint(3, VOCAB_SIZE, (19,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    made = make_adapters(lambda: make_reference("llama"), RANKS)
    return {name: save_adapter(adapted, folder / name) for name, adapted in made}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """What PEFT's models say greedily behind the prompt, and the model itself."""

    def greedy(model: torch.nn.Module) -> list[int]:
        tokens = list(PROMPT)
        with torch.no_grad():
            for _ in range(LENGTH):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(PROMPT) :]

    made = make_adapters(lambda: make_reference("llama"), RANKS)
    return {"": greedy(make_reference("llama"))} | {name: greedy(adapted) for name, adapted in made}


Opener = Callable[..., "asyncio.Future[AsyncEngine]"]


@pytest.fixture
def config(tiny_model: Callable[[str], Path], adapters: dict[str, Path]) -> Iterator[Callable[..., EngineConfig]]:
    def make(names: list[str] | None = None, **options: object) -> EngineConfig:
        given = {
            "block_size": 4,
            "max_model_len": 64,
            "host_cache_gb": 0.01,
            "threads": 1,
            "num_blocks": 300,
            **options,
        }
        chosen = list(adapters) if names is None else names
        lora = [f"{name}={adapters[name]}" for name in chosen]
        return EngineConfig(model=str(tiny_model("llama")), device="cpu", lora=lora, **given)  # type: ignore[arg-type]

    yield make


def asked(engine: AsyncEngine, name: str, params: SamplingParams = GREEDY, **fields: object) -> Request:
    return request(fields.pop("prompt", PROMPT), params, adapter=engine.adapters.find(name), **fields)  # type: ignore[arg-type]


async def closed(engine: AsyncEngine) -> None:
    await engine.stop()
    engine.scheduler.check_idle()


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_crowd_says_what_peft_says(
    scenario: str, config: Callable[..., EngineConfig], expected: dict[str, list[int]]
) -> None:
    """The same prompt under sixteen adapters and none at once, twice: the second time from the cache."""
    engine = (await build_engine(config(**SCENARIOS[scenario]))).engine
    try:
        names = [*expected, ""]
        for _ in range(2):
            answers = await ask_all(engine, [asked(engine, name) for name in names])
            assert [answer.token_ids[0] for answer in answers] == [expected[name] for name in names]
        alone = await ask(engine, asked(engine, "a3", cache_salt="alone"))
        assert alone.logprobs == answers[names.index("a3")].logprobs
    finally:
        await closed(engine)


async def test_a_prefix_belongs_to_its_adapter(config: Callable[..., EngineConfig]) -> None:
    engine = (await build_engine(config(["a1", "a2"]))).engine
    try:
        first, again = [await ask(engine, asked(engine, "a1")) for _ in range(2)]
        other, none = await ask(engine, asked(engine, "a2")), await ask(engine, asked(engine, ""))
        assert first.usage is not None and again.usage is not None and other.usage is not None and none.usage
        assert again.usage.cached_tokens == 18
        assert first.usage.cached_tokens == other.usage.cached_tokens == none.usage.cached_tokens == 0
    finally:
        await closed(engine)


async def test_children_have_the_adapter_of_their_parent(
    config: Callable[..., EngineConfig], expected: dict[str, list[int]]
) -> None:
    engine = (await build_engine(config(["a1", "a2"]))).engine
    try:
        short = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        parent = await ask(engine, asked(engine, "a1", short, retain=Retain(60)))
        known = engine.parent("t", parent.id)
        assert known.adapter == engine.adapters.find("a1")
        tokens, lineage = known.choices[0].token_ids, Lineage(parent.id, 0, len(PROMPT) + 3)
        rest = SamplingParams(max_tokens=LENGTH - 3, temperature=0, ignore_eos=True)
        child = await ask(engine, asked(engine, "a1", rest, prompt=tokens, lineage=lineage))
        assert child.token_ids[0] == expected["a1"][3:]
        assert child.inheritance is not None and child.inheritance.computed_tokens == 1
        for name in ("a2", ""):
            with pytest.raises(ContinuationMismatch):
                await ask(engine, asked(engine, name, rest, prompt=tokens, lineage=lineage))
        engine.retention.expire_record(engine.retention.find("t", parent.id))
        with pytest.raises(ParentExpired) as told:
            engine.parent("t", parent.id)
        assert told.value.facts["adapter"] == "a1", "whoever falls back asks for the same one"
    finally:
        await closed(engine)


async def test_an_adapter_that_is_needed_stays(config: Callable[..., EngineConfig], adapters: dict[str, Path]) -> None:
    engine = (await build_engine(config(["a1"]))).engine
    try:
        parent = await ask(engine, asked(engine, "a1", retain=Retain(60)))
        with pytest.raises(AdapterInUse) as caught:
            engine.adapters.unload("a1")
        assert caught.value.details["leases"] == [parent.id]
        engine.set_ttl("t", parent.id, None)
        running = asyncio.ensure_future(ask(engine, asked(engine, "a1")))
        await asyncio.sleep(0)
        with pytest.raises(AdapterInUse) as caught:
            engine.adapters.unload("a1")
        assert caught.value.details["num_requests"] == 1
        await running
        old = asked(engine, "a1")
        engine.adapters.unload("a1")
        with pytest.raises(ParentExpired):
            engine.parent("t", parent.id)
        with pytest.raises(AdapterNotFound):
            await ask(engine, old)
        with pytest.raises(AdapterNotFound):
            engine.adapters.unload("a1")
        await engine.adapters.load("a1", adapters["a1"])
        with pytest.raises(AdapterNotFound):  # it is another load, whatever its name
            await ask(engine, old)
    finally:
        await closed(engine)


async def test_another_adapter_of_the_same_name_never_answers_for_the_old_one(
    config: Callable[..., EngineConfig], adapters: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    engine = (await build_engine(config([]))).engine
    try:
        for name in ("a1", "a2", "a1"):
            await engine.adapters.load("same", adapters[name])
            answer = await ask(engine, asked(engine, "same"))
            assert answer.token_ids[0] == expected[name]
            assert answer.usage is not None and answer.usage.cached_tokens == 0
            engine.adapters.unload("same")
    finally:
        await closed(engine)


async def test_an_adapter_is_replaced_while_nobody_needs_it(
    config: Callable[..., EngineConfig], adapters: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    engine = (await build_engine(config([], max_loras=1))).engine
    try:
        for name in ("a1", "a2"):
            await engine.adapters.load("same", adapters[name], replaces=True)
            answer = await ask(engine, asked(engine, "same"))
            assert answer.token_ids[0] == expected[name]
            assert answer.usage is not None and answer.usage.cached_tokens == 0
        with pytest.raises(InvalidAdapter):
            await engine.adapters.load("same", tmp_path / "nowhere", replaces=True)
        parent = await ask(engine, asked(engine, "same", retain=Retain(60)))
        with pytest.raises(AdapterInUse):
            await engine.adapters.load("same", adapters["a1"], replaces=True)
        assert parent.token_ids[0] == (await ask(engine, asked(engine, "same"))).token_ids[0] == expected["a2"]
    finally:
        await closed(engine)


async def test_loads_come_and_go_beside_running_requests(
    config: Callable[..., EngineConfig], adapters: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    engine = (await build_engine(config([], max_loras=3))).engine

    async def one(name: str) -> None:
        for _ in range(4):
            try:
                await engine.adapters.load(name, adapters[name])
            except InvalidAdapter:  # three others are there
                await asyncio.sleep(0.01)
                continue
            answers = await ask_all(engine, [asked(engine, name), asked(engine, ""), asked(engine, name)])
            assert [answer.token_ids[0] for answer in answers] == [expected[name], expected[""], expected[name]]
            engine.adapters.unload(name)

    try:
        await asyncio.gather(*(one(f"a{i}") for i in range(6)))
        assert len(engine.adapters) == 0
        probe = asyncio.ensure_future(engine.probe())
        await probe
    finally:
        await closed(engine)


async def test_whoever_watches_sees_which_ones_are_needed(
    config: Callable[..., EngineConfig], adapters: dict[str, Path]
) -> None:
    """One sequence runs at a time."""
    before = time.time()
    engine = (await build_engine(config(["a1", "a2"], max_loras=3, max_num_seqs=1))).engine
    try:
        long = replace(GREEDY, max_tokens=40)
        asks = [asyncio.ensure_future(ask(engine, asked(engine, name, long))) for name in ("a1", "", "a2")]
        await until(lambda: engine.load().adapters.running)
        seen = engine.load().adapters
        assert (seen.loaded, seen.at_once, seen.running, seen.waiting) == (2, 3, ("a1",), ("a2",))
        await asyncio.gather(*asks)
        assert engine.load().adapters == AdapterLoad(2, 3, (), ())
        assert before <= _ref(engine, "a1").loaded_at <= _ref(engine, "a2").loaded_at <= time.time()
        engine.adapters.unload("a1")
        later = await engine.adapters.load("a1", adapters["a1"])
        assert later.loaded_at > _ref(engine, "a2").loaded_at
    finally:
        await closed(engine)


async def test_what_cannot_be_loaded_changes_nothing(
    config: Callable[..., EngineConfig], adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = (await build_engine(config(["a1"], max_loras=2, max_lora_rank=4))).engine
    try:
        for name, path in (("b", tmp_path), ("b", adapters["a3"]), ("a1", adapters["a1"]), ("x y", adapters["a1"])):
            with pytest.raises(InvalidAdapter):
                await engine.adapters.load(name, path)
        await engine.adapters.load("b", adapters["a2"])
        with pytest.raises(InvalidAdapter, match="2 may be"):
            await engine.adapters.load("c", adapters["a1"])
        assert [ref.name for ref in engine.adapters.refs] == ["a1", "b"]
    finally:
        await closed(engine)


async def test_an_adapter_that_cannot_be_loaded_ends_the_start(
    config: Callable[..., EngineConfig], adapters: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"lora=a3=.*2 is the largest"):
        await build_engine(config(["a3"], max_lora_rank=2))


async def test_beams_choices_and_states_with_adapters(config: Callable[..., EngineConfig]) -> None:
    """In a crowd of all of them and of none, each is what it is alone."""
    beams = SamplingParams(max_tokens=5, temperature=0, n=2, beams=BeamParams(3, 1.0, early_stopping=False))
    sampled = SamplingParams(max_tokens=6, temperature=1, seed=5, n=3, ignore_eos=True)
    nothing = SamplingParams(max_tokens=0)
    states = HiddenStatesParams((0, 1, 2), "all", "none", "float32")
    kinds: list[tuple[SamplingParams, dict[str, object]]] = [
        (beams, {"output": OutputMode.FINAL}),
        (sampled, {}),
        (nothing, {"hidden_states": states}),
    ]
    engine = (await build_engine(config(["a1", "a2"]))).engine

    def all_of(answer: Answer) -> object:
        made = None if answer.states is None else str(answer.states.choices[0].assemble())
        return answer.token_ids, answer.beam_scores, made

    try:
        wanted = [(name, *kind) for kind in kinds for name in ("a1", "", "a2")]
        crowd = await ask_all(engine, [asked(engine, n, p, cache_salt="crowd", **f) for n, p, f in wanted])
        alone = [await ask(engine, asked(engine, n, p, cache_salt=f"{i}", **f)) for i, (n, p, f) in enumerate(wanted)]
        assert list(map(all_of, crowd)) == list(map(all_of, alone))
        assert len({str(all_of(answer)) for answer in alone}) == len(wanted)
    finally:
        await closed(engine)


async def test_an_estate_moves_to_where_its_adapter_is(
    config: Callable[..., EngineConfig], adapters: dict[str, Path]
) -> None:
    here, there = [(await build_engine(config(["a1"]))).engine for _ in range(2)]
    try:
        parent = await ask(here, asked(here, "a1", retain=Retain(60)))
        estate = await here.export_estate("t", parent.id)
        assert estate.deed.identity.adapter == f"a1={_ref(here, 'a1').digest}"
        there.adapters.unload("a1")
        with pytest.raises(EstateMismatch) as caught:
            await there.import_estate("t", estate, 60)
        assert caught.value.details["differs"] == ["adapter"]
        await there.adapters.load("a1", adapters["a2"])
        with pytest.raises(EstateMismatch):
            await there.import_estate("t", estate, 60)
        there.adapters.unload("a1")
        await there.adapters.load("a1", adapters["a1"])
        await there.import_estate("t", estate, 60)
        assert there.parent("t", parent.id).adapter == there.adapters.find("a1")
        tokens = there.parent("t", parent.id).choices[0].token_ids
        lineage = Lineage(parent.id, 0, len(tokens))
        children = [await ask(e, asked(e, "a1", prompt=tokens, lineage=lineage)) for e in (here, there)]
        assert children[0].token_ids == children[1].token_ids
        assert children[1].inheritance is not None and children[1].inheritance.computed_tokens == 1
        assert there.record("t", parent.id).adapter == "a1"
    finally:
        await closed(here)
        await closed(there)


def _ref(engine: AsyncEngine, name: str) -> AdapterRef:
    ref = engine.adapters.find(name)
    assert ref is not None
    return ref
