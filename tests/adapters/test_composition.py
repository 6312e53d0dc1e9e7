"""Adapters with all that a request may ask for beside: each in a crowd is what it is alone, or what PEFT says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.adapter_soak import soak
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import ParentNotFound
from bequest.engine.recording import AdapterRegistered, AdapterReleased
from bequest.engine.types import Lineage, OutputMode, Request, Retain, SamplingParams, Terms
from bequest.engine.types.speculation import Speculation
from tests.adapters.tiny_adapters import make_adapter, make_adapters, save_adapter
from tests.engine.harness import Answer, ask, ask_all, request
from tests.engine.model_scores import last_delta
from tests.engine.recorded_runs import Requests, check_replay, kinds_of, record, records_of
from tests.tiny_models import VOCAB_SIZE, make_reference

NAMES = ("a0", "a1", "a2")
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = torch.randint(3, VOCAB_SIZE, (21,), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    made = make_adapters(lambda: make_reference("llama"), dict.fromkeys(NAMES, 4))
    return {name: save_adapter(adapted, folder / name) for name, adapted in made}


@pytest.fixture
def config(tiny_model: Callable[[str], Path], adapters: dict[str, Path]) -> Callable[..., EngineConfig]:
    def make(names: tuple[str, ...] = NAMES, **options: object) -> EngineConfig:
        given = {"block_size": 4, "max_model_len": 96, "host_cache_gb": 0.01, "threads": 1, "num_blocks": 500}
        lora = [f"{name}={adapters[name]}" for name in names]
        model = str(tiny_model("llama"))
        return EngineConfig(model=model, device="cpu", lora=lora, **(given | options))  # type: ignore[arg-type]

    return make


def with_adapter(asked: Request, engine: AsyncEngine, name: str, salt: str = "") -> Request:
    fresh = request(asked.prompt_token_ids, asked.params)
    return replace(asked, id=fresh.id, adapter=engine.adapters.find(name), cache_salt=salt, terms=Terms())


def told(answer: Answer) -> object:
    states = None if answer.states is None else str(answer.states.choices[0].assemble())
    return answer.token_ids, answer.beam_scores, answer.logprobs, states


async def test_requests_of_every_kind_in_a_crowd(config: Callable[..., EngineConfig]) -> None:
    """Grammars, catalogues, beams of them, penalties, choices, scores of prompts, hidden states."""
    built = await build_engine(config())
    draw, kinds, engine = random.Random(11), Requests(), built.engine
    try:
        drawn = [kinds(draw, built) for _ in range(40)]
        for one in {r.params.grammar is not None for r in drawn}, {r.params.catalogue is not None for r in drawn}:
            assert one == {True, False}
        names = [draw.choice([*NAMES, ""]) for _ in drawn]
        pairs = list(zip(drawn, names, strict=True))
        crowd = await ask_all(engine, [with_adapter(one, engine, name, "crowd") for one, name in pairs])
        alone = [await ask(engine, with_adapter(one, engine, name, str(i))) for i, (one, name) in enumerate(pairs)]
        assert [told(answer) for answer in crowd] == [told(answer) for answer in alone]
        for answer in (*crowd, *alone):
            if answer.states is not None:
                answer.states.release()
    finally:
        await engine.stop()
        engine.scheduler.check_idle()


async def test_drafts_change_no_token(config: Callable[..., EngineConfig]) -> None:
    engine = (await build_engine(config())).engine
    try:
        for name in (*NAMES, ""):
            adapter = engine.adapters.find(name)
            plain = await ask(engine, request(PROMPT, GREEDY, adapter=adapter, cache_salt="plain"))
            expected = plain.token_ids[0]
            for guess in (tuple(expected), (*expected[:3], 5, 5, 5)):
                foretold = Speculation(prediction=guess)
                drafted = request(PROMPT, GREEDY, adapter=adapter, cache_salt=str(guess), speculation=foretold)
                steps = engine.num_steps
                assert (await ask(engine, drafted)).token_ids[0] == expected
                assert engine.num_steps - steps < len(expected), "something was drafted, and taken"
    finally:
        await engine.stop()


async def test_scores_of_suffixes_are_those_of_peft(config: Callable[..., EngineConfig]) -> None:
    engine = (await build_engine(config())).engine
    suffixes = ((5, 6, 7), (8,), (9, 10))
    try:
        for name in NAMES:
            asked = Request(
                f"s-{name}",
                "t",
                tuple(PROMPT),
                SamplingParams(max_tokens=0, logprobs=0),
                output=OutputMode.FINAL,
                adapter=engine.adapters.find(name),
                suffixes=suffixes,
            )
            choices = (await last_delta(engine, asked)).choices
            peft = make_adapter(make_reference("llama"), name)
            for suffix, choice in zip(suffixes, sorted(choices, key=lambda one: one.index), strict=True):
                with torch.no_grad():
                    rows = peft(torch.tensor([[*PROMPT, *suffix]])).logits[0].log_softmax(-1)
                expected = [float(rows[len(PROMPT) - 1 + i, token]) for i, token in enumerate(suffix)]
                assert [one.logprob for one in choice.logprobs or ()] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    finally:
        await engine.stop()


async def test_a_durable_lease_comes_back_where_its_adapter_is(
    config: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    """It is found again under the next load of the same files, and computed no second time."""
    kept = {"estate_dir": str(tmp_path / "estates")}
    engine = (await build_engine(config(("a1",), **kept))).engine
    asked = request(PROMPT, GREEDY, adapter=engine.adapters.find("a1"), retain=Retain(600, durable=True))
    parent = await ask(engine, asked)
    tokens = (*PROMPT, *parent.token_ids[0])
    lineage = Lineage(parent.id, 0, len(tokens))
    whole = await ask(engine, request((*tokens, 7), GREEDY, adapter=engine.adapters.find("a1"), cache_salt="whole"))
    await engine.stop()
    engine = (await build_engine(config(("a0", "a1"), **kept))).engine  # another handle
    try:
        adapter = engine.adapters.find("a1")
        assert engine.parent("t", parent.id).adapter == adapter
        child = await ask(engine, request((*tokens, 7), GREEDY, adapter=adapter, lineage=lineage))
        assert child.token_ids == whole.token_ids
        assert child.inheritance is not None and child.inheritance.computed_tokens == 2
    finally:
        await engine.stop()
    engine = (await build_engine(config(("a0",), **kept))).engine
    try:
        await engine.seek("t", parent.id)
        with pytest.raises(ParentNotFound, match="of the adapter 'a1', which is not loaded"):
            engine.parent("t", parent.id)
        with pytest.raises(ParentNotFound, match="There is no request"):
            engine.parent("another", parent.id)
        assert engine.retention.books.used > 0, "it waits for its adapter, and takes room"
        path = next(Path(entry.partition("=")[2]) for entry in config(("a1",)).lora)
        await engine.adapters.load("a1", path)
        await engine.seek("t", parent.id)
        adapter, used = engine.adapters.find("a1"), engine.retention.books.used
        child = await ask(engine, request((*tokens, 7), GREEDY, adapter=adapter, lineage=lineage))
        assert child.token_ids == whole.token_ids
        assert child.inheritance is not None and child.inheritance.source == "file"
        engine.forget("t", parent.id)
        assert used > 0 == engine.retention.books.used
        engine.adapters.unload("a1")
        with pytest.raises(ParentNotFound, match="There is no request"):
            engine.parent("t", parent.id)
    finally:
        await engine.stop()


async def test_an_engine_that_slept_has_its_adapters(config: Callable[..., EngineConfig]) -> None:
    engine = (await build_engine(config())).engine
    try:

        async def say(salt: str) -> list[object]:
            asked = [(name, engine.adapters.find(name)) for name in (*NAMES, "")]
            given = [request(PROMPT, GREEDY, adapter=adapter, cache_salt=salt) for _, adapter in asked]
            return [answer.token_ids for answer in await ask_all(engine, given)]

        before = await say("before")
        await engine.sleep(wakes_itself=True)
        assert await say("after") == before and len({str(one) for one in before}) == len(before)
    finally:
        await engine.stop()


async def test_a_recording_is_run_again(config: Callable[..., EngineConfig], tmp_path: Path) -> None:
    path, kinds = tmp_path / "recording", Requests()

    def draw_request(draw: random.Random, built: object) -> Request:
        asked = kinds(draw, built)  # type: ignore[arg-type]
        return with_adapter(asked, built.engine, draw.choice([*NAMES, ""]))  # type: ignore[attr-defined]

    await record(config(record=str(path), num_blocks=120), draw_request, 60, seed=2)
    seen = kinds_of(path)
    assert seen[AdapterRegistered.__name__] == len(NAMES) and not seen[AdapterReleased.__name__]
    assert any(getattr(one, "plan", None) and one.plan.batch.adapters is not None for one in records_of(path))  # type: ignore[union-attr]
    check_replay(path, 60)


def test_random_loads_unloads_and_requests() -> None:
    done, _ = soak(150, seed=1)
    assert done["load"] > 10 and done["unload"] > 5 and done["request"] > 40
