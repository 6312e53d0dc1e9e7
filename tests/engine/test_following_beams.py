"""Beams that go on before the result of the step before is here: the answers are those of searches that wait for it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bequest.engine import build
from bequest.engine.config import EngineConfig
from bequest.engine.errors import InternalError
from bequest.engine.types import ModelInfo, Retain, SamplingParams
from bequest.engine.types.recurrent import StateSizes
from bequest.engine.types.speculation import ON_GPU, ModelDrafts
from tests.engine.harness import EOS, Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import BEAM_VOCAB, expected_tokens
from tests.engine.test_beam_groups import beam_params, beams_of, check
from tests.engine.test_beams_against_transformers import check_searches
from tests.tiny_models import make_reference

BASE = Setup(num_blocks=600, block_size=16, max_num_seqs=32)


@pytest.mark.parametrize("width", [1, 2, 7, BEAM_VOCAB + 5])  # the last has too few candidates at first
@pytest.mark.parametrize("length", [5, 13, 15, 16, 31])
async def test_answers_are_the_oracles(length: int, width: int) -> None:
    async with running(BASE) as (engine, runner):
        for count in (1, 2, 3, 9):
            before = runner.num_followed
            await check(engine, beams_of(list(range(50, 50 + length)), beam_params(width, count)))
            steps = runner.num_followed - before
            assert (steps > 0) == (count > 1)
            # All but the first, where what is generated stays in the block that the prompt ended in.
            assert length % 16 + count > 16 or count == 9 or steps == count - 1


async def test_nobody_follows_where_the_device_cannot() -> None:
    for setup in (replace(BASE, follows_beams=False), replace(BASE, pipelined=False), replace(BASE, windows=(8, 0))):
        async with running(setup) as (engine, runner):
            await check(engine, beams_of(list(range(20)), beam_params(4, 6)))
            assert not runner.num_followed
    async with running(BASE) as (engine, runner):
        await check(engine, beams_of([4, 5], beam_params(4, 6, stop_token_ids=frozenset(range(10, 30)))))
        assert not runner.num_followed


@pytest.mark.parametrize("stopping", [True, False, "never"])
async def test_ends_come_while_the_next_step_runs(stopping: object) -> None:
    draw = random.Random(4)
    async with running(BASE) as (engine, runner):
        for min_tokens in (0, 3):
            for _ in range(12):
                stops = frozenset(draw.sample(range(BEAM_VOCAB), 12))
                fields = {"min_tokens": min_tokens, "stop_token_ids": stops, "early_stopping": stopping}
                prompt = [draw.randrange(900) for _ in range(draw.randint(1, 12))]
                await check(engine, beams_of(prompt, beam_params(5, 8, **fields)))
        assert runner.num_followed


@pytest.mark.parametrize(("num_blocks", "chunk"), [(32, 64), (40, 7), (40, 64), (600, 5), (600, 64)])
async def test_in_a_crowd_in_chunks_and_in_a_small_cache(num_blocks: int, chunk: int) -> None:
    draw = random.Random(num_blocks)
    setup = replace(BASE, num_blocks=num_blocks, chunk=chunk, max_model_len=60)
    async with running(setup) as (engine, runner):
        searches = [
            beams_of([draw.randrange(900) for _ in range(draw.randint(1, 20))], beam_params(draw.choice([1, 3, 5]), 9))
            for _ in range(12)
        ]
        plain = [request([draw.randrange(900) for _ in range(9)]) for _ in range(6)]
        answers, _ = await asyncio.gather(ask_all(engine, plain), asyncio.gather(*(check(engine, s) for s in searches)))
        for asked, answer in zip(plain, answers, strict=True):
            assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, 8, eos=EOS)
        assert runner.num_followed


async def test_leaving_at_any_step_loses_nothing() -> None:
    async with running(BASE) as (engine, runner):
        for steps in range(1, 9):
            runner.gate, runner.hold_from = threading.Event(), runner.num_steps + steps
            engine.submit(asked := beams_of(list(range(20)), beam_params(5, 9)), lambda _: None)
            await until(lambda: runner.num_steps >= runner.hold_from or engine.num_open == 0)
            engine.abort(asked.id)
            runner.gate.set()
            await until(lambda: engine.load().used_blocks == 0)


async def test_a_deadline_while_a_step_is_ahead() -> None:
    async with running(BASE) as (engine, runner):
        for steps in (2, 3, 4):
            runner.gate, runner.hold_from = threading.Event(), runner.num_steps + steps
            asked = beams_of([3, 4], beam_params(4, 12), deadline=engine._clock() + 0.1)
            answering = asyncio.ensure_future(ask(engine, asked))
            await asyncio.sleep(0.15)
            runner.gate.set()
            answer = await answering
            assert all(0 < len(tokens) < 12 for tokens in answer.token_ids.values())
            await until(lambda: engine.load().used_blocks == 0)


async def test_a_search_that_comes_is_waited_for() -> None:
    """Whoever runs goes on together with it, when the results of what is launched are here."""
    async with running(BASE) as (engine, runner):
        runner.gate = threading.Event()
        first = asyncio.ensure_future(check(engine, beams_of([1, 2], beam_params(3, 9))))
        await until(lambda: engine.num_open == 1)
        others = [asyncio.ensure_future(check(engine, beams_of([i, 7], beam_params(3, 9)))) for i in range(4)]
        await until(lambda: engine.num_open == 5)
        runner.gate.set()
        await asyncio.gather(first, *others)
        assert runner.num_followed > 20 and runner.num_steps <= 9 + 3


async def test_kept_beams_of_a_lease_are_continued() -> None:
    async with running(replace(BASE, num_lease_blocks=100, num_host_blocks=50)) as (engine, runner):
        for length in (5, 12, 16):
            asked = beams_of(list(range(60, 60 + length)), beam_params(6, 4), retain=Retain(60))
            answer = await check(engine, asked)
            assert runner.num_followed
            known = engine.parent("t", asked.id)
            for choice in range(3):
                tokens = known.choices[choice].token_ids
                assert list(tokens[length:]) == answer.token_ids[choice]
                child = request([*tokens, 9], SamplingParams(max_tokens=4, temperature=0))
                last = await ask(engine, child)
                assert last.token_ids[0] == expected_tokens(child.prompt_token_ids, 4, eos=EOS)
            engine.forget("t", asked.id)


async def test_nan_fails_the_search_alone() -> None:
    async with running(BASE) as (engine, runner):
        runner.bad_prompt_token = 777
        with pytest.raises(InternalError):
            await ask(engine, beams_of([3, 777], beam_params(4, 5)))
        await check(engine, beams_of([3, 4], beam_params(4, 5)))
        assert runner.num_followed


def test_who_follows() -> None:
    """A device that checks drafts has costs of that, whoever guesses."""
    info = ModelInfo("m", "m", 100, 100, (), "bfloat16", 0, drafts=ON_GPU)
    sizes, model = StateSizes(num_slots=4, num_lease_slots=4, interval=64), ModelDrafts(method="model", costs=ON_GPU)
    cases = [(object(), None, None, True), (None, None, None, False), (object(), sizes, None, False)]
    for weights, states, drafter, follows in [*cases, (object(), None, model, False)]:
        costs = replace(ON_GPU, model=drafter)
        prepared = SimpleNamespace(weights=weights, states=states, info=replace(info, drafts=costs))
        assert build._follows_beams(prepared) == follows  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_model_on_a_cpu_equals_hugging_face(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = build._limits
    monkeypatch.setattr(build, "_limits", lambda *given: replace(limits(*given), follows_beams=True))
    config = EngineConfig(
        model=str(tiny_model(name)), device="cpu", dtype="float32", max_model_len=96, num_blocks=900, max_num_seqs=64
    )
    check_searches(make_reference(name), config)
