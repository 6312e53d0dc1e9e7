"""Groups of beams over the paged fake: the beams of an oracle without any cache, whatever runs beside them."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.errors import DeadlineExceeded, InvalidRequest
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.types import MAX_BEAM_WIDTH, BeamParams, Lineage, OutputMode, Request, Retain, SamplingParams
from tests.engine.beam_oracle import expected_beams
from tests.engine.harness import EOS, Answer, Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import expected_tokens

BASE = Setup(num_blocks=400, block_size=4)


def beam_params(width: int, count: int = 5, n: int | None = None, **fields: object) -> SamplingParams:
    beams = BeamParams(width, float(fields.pop("length_penalty", 1.0)), fields.pop("early_stopping", False))  # type: ignore[arg-type]
    return SamplingParams(max_tokens=count, n=n or min(width, 3), beams=beams, **fields)  # type: ignore[arg-type]


async def check(engine: object, asked: Request) -> Answer:
    answer = await ask(engine, asked)  # type: ignore[arg-type]
    wanted = expected_beams(asked)
    assert [answer.token_ids[i] for i in range(len(wanted))] == [tokens for tokens, _ in wanted]
    assert [answer.beam_scores[i] for i in range(len(wanted))] == pytest.approx([score for _, score in wanted])
    assert answer.usage is not None
    num_encoder = 0 if asked.encoder is None else asked.encoder.length
    assert answer.usage.prompt_tokens == num_encoder + len(asked.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(tokens) for tokens, _ in wanted)
    return answer


def beams_of(prompt: list[int], params: SamplingParams, **fields: object) -> Request:
    return request(prompt, params, output=OutputMode.FINAL, **fields)


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("width", [1, 2, 7, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 30])
async def test_beams_equal_the_oracle(length: int, width: int, pipelined: bool) -> None:
    async with running(Setup(num_blocks=400, block_size=4, pipelined=pipelined)) as (engine, _):
        for count in (1, 2, 6, 9):
            await check(engine, beams_of(list(range(50, 50 + length)), beam_params(width, count)))


async def test_a_crowd_of_widths_and_of_ordinary_requests() -> None:
    draw = random.Random(3)
    async with running(Setup(num_blocks=600, block_size=4, max_num_seqs=24, chunk=16)) as (engine, _):
        searches = [
            beams_of([draw.randrange(900) for _ in range(draw.randint(1, 20))], beam_params(draw.choice([1, 3, 8, 20])))
            for _ in range(12)
        ]
        plain = [request([draw.randrange(900) for _ in range(9)]) for _ in range(12)]
        answers, _ = await asyncio.gather(ask_all(engine, plain), asyncio.gather(*(check(engine, s) for s in searches)))
        for asked, answer in zip(plain, answers, strict=True):
            assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, 8, eos=EOS)


@pytest.mark.parametrize("num_blocks", [90, 130])
@pytest.mark.parametrize("pipelined", [True, False])
async def test_groups_give_way_as_a_whole(num_blocks: int, pipelined: bool) -> None:
    setup = Setup(num_blocks=num_blocks, block_size=4, max_num_seqs=32, pipelined=pipelined, max_model_len=60)
    async with running(setup) as (engine, _):
        draw = random.Random(num_blocks)
        searches = [beams_of([draw.randrange(900) for _ in range(14)], beam_params(6, 9)) for _ in range(9)]
        plain = [request([draw.randrange(900) for _ in range(20)], SamplingParams(max_tokens=30)) for _ in range(6)]
        await asyncio.gather(ask_all(engine, plain), asyncio.gather(*(check(engine, s) for s in searches)))


async def test_a_group_takes_its_prefix_once_and_a_tail_for_each_beam() -> None:
    async with running(Setup(num_blocks=400, block_size=4)) as (engine, runner):
        width, prompt = 16, list(range(100, 161))
        most = 0
        runner.gate = threading.Event()
        asking = asyncio.ensure_future(check(engine, beams_of(prompt, beam_params(width, 8))))
        runner.gate.set()
        while not asking.done():
            most = max(most, engine.load().used_blocks)
            await asyncio.sleep(0)
        await asking
        # Running and ended beams each have at most the blocks of eight tokens and a shared beginning of one.
        assert most <= len(prompt) // 4 + 2 * width * 3 + width


async def test_wider_than_all_slots() -> None:
    async with running(Setup(num_blocks=900, block_size=4, max_num_seqs=8, chunk=16)) as (engine, _):
        wide = beams_of([7, 8, 9], beam_params(40, 4))
        beside = request([5, 6, 7], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        _, answer = await asyncio.gather(check(engine, wide), ask(engine, beside))
        assert answer.token_ids[0] == expected_tokens([5, 6, 7], 20)


async def test_beams_continue_a_parent_and_are_continued() -> None:
    setup = Setup(num_blocks=400, block_size=4, num_lease_blocks=100, num_host_blocks=50)
    async with running(setup) as (engine, _):
        first = await ask(engine, request(range(60, 77), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)))
        whole = [*range(60, 77), *first.token_ids[0], 8]
        child = beams_of(whole, beam_params(6, 4), lineage=Lineage(first.id, 0, 23), retain=Retain(60))
        answer = await check(engine, child)
        assert answer.inheritance is not None and answer.inheritance.computed_tokens == 2
        assert answer.retained is not None
        known = engine.parent("t", child.id)
        assert [list(c.token_ids[len(whole) :]) for c in known.choices] == [answer.token_ids[i] for i in range(3)]
        for choice in range(3):
            tokens = known.choices[choice].token_ids
            asked = request(
                [*tokens, 9],
                SamplingParams(max_tokens=4, temperature=0),
                lineage=Lineage(child.id, choice, len(tokens)),
            )
            last = await ask(engine, asked)
            assert last.token_ids[0] == expected_tokens(asked.prompt_token_ids, 4, eos=EOS)
            assert last.inheritance is not None and last.inheritance.computed_tokens == 2
        engine.forget("t", child.id)


async def test_leaving_in_the_middle_loses_nothing() -> None:
    async with running(BASE) as (engine, runner):
        for steps in range(1, 7):
            runner.gate, runner.hold_from = threading.Event(), runner.num_steps + steps
            engine.submit(asked := beams_of(list(range(20)), beam_params(5, 9)), lambda _: None)
            await until(lambda: runner.num_steps >= runner.hold_from or engine.num_open == 0)
            engine.abort(asked.id)
            runner.gate.set()
            await until(lambda: engine.load().used_blocks == 0)


async def test_min_tokens_and_stop_tokens() -> None:
    async with running(BASE) as (engine, _):
        for min_tokens in (0, 3, 6):
            params = beam_params(6, 6, min_tokens=min_tokens, stop_token_ids=frozenset({11, 12}))
            answer = await check(engine, beams_of([4, 5, 6], params))
            assert all(len(tokens) >= min_tokens for tokens in answer.token_ids.values())


async def test_a_deadline_gives_what_there_is() -> None:
    async with running(Setup(num_blocks=400)) as (engine, runner):
        runner.gate, runner.hold_from = threading.Event(), 4
        asked = beams_of([3, 4], beam_params(4, 50), deadline=engine._clock() + 0.1)
        answer = await ask(engine, asked)
        assert set(answer.finish.values()) <= {("length", "deadline"), ("stop", None)}
        assert ("length", "deadline") in answer.finish.values()
        late = beams_of([3, 4], beam_params(4, 50), deadline=engine._clock() + 0.05)
        with pytest.raises(DeadlineExceeded):
            await ask(engine, late)
        runner.gate.set()


async def test_a_group_that_can_never_fit_is_refused() -> None:
    async with running(Setup(num_blocks=40, block_size=4)) as (engine, _):
        with pytest.raises(InvalidRequest, match="cache blocks"):
            await ask(engine, beams_of([1, 2, 3], beam_params(16, 20)))


def test_a_step_ranks_no_more_beams_than_the_widest_group_has() -> None:
    """Groups whose first token is computed count too: their rows have a place in the runner's arrays."""
    scheduler = make_scheduler(
        SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=4096, prefix_caching=True), CacheSizes(16, 4000), ()
    )
    for number in range(MAX_BEAM_WIDTH + 10):
        asked = beams_of([number], beam_params(1, 2))
        group = scheduler.new_group(asked, lambda _: None, seed=0, arrival_number=number, now=0.0)
        scheduler.add(group, ChoiceOutput(asked, 0, None))
    launches = [scheduler.plan(0.0), scheduler.plan(0.0, behind=True)]
    assert [0 if launch is None else len(launch.plan.beams) for launch in launches] == [MAX_BEAM_WIDTH, 10]
