"""Encoder inputs over the paged fake: whatever is shared, swapped or computed again, the tokens are the oracle's."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

import pytest

from bequest.engine._C import BlockPool, BlockTable
from bequest.engine.cache.cross import CrossTables
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import ContextLengthExceeded, InvalidRequest
from bequest.engine.types import BeamParams, Lineage, OutputMode, Request, Retain, SamplingParams
from bequest.engine.types.encoder import EncoderInput, TokenRules
from tests.engine.harness import EOS, Answer, Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import VOCAB, PagedFakeRunner, expected_tokens
from tests.engine.test_beam_groups import check as check_beams
from tests.engine.test_differential import crowd_size

BASE = Setup(num_blocks=400, block_size=4, max_model_len=160, encoder_len=64)
GREEDY = SamplingParams(max_tokens=8, temperature=0)
START = 1


def encoder_of(length: int, seed: int = 0) -> EncoderInput:
    draw = random.Random(1000 * seed + length)
    return EncoderInput.of_tokens(draw.randrange(10, VOCAB) for _ in range(length))


def check(asked: Request, answer: Answer) -> None:
    params, encoder = asked.params, asked.encoder
    assert encoder is not None
    assert sorted(answer.token_ids) == list(range(params.n))
    for choice, tokens in answer.token_ids.items():
        assert tokens == expected_tokens(
            asked.prompt_token_ids,
            params.max_tokens,
            seed=params.seed or 0,
            choice=choice,
            greedy=params.greedy,
            eos=EOS,
            encoder=encoder.token_ids,
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == encoder.length + len(asked.prompt_token_ids)


async def asked_for(engine: AsyncEngine, asked: Request) -> Answer:
    answer = await ask(engine, asked)
    check(asked, answer)
    return answer


def crowd(seed: int, count: int) -> list[Request]:
    """Encoder inputs of lengths around the block boundaries, some of them equal; decoder prompts long and short."""
    draw = random.Random(seed)
    requests = []
    for i in range(count):
        greedy = draw.random() < 0.5
        params = SamplingParams(
            max_tokens=draw.choice([1, 2, 4, 9, 30]),
            n=draw.choice([1, 1, 1, 2, 5]),
            temperature=0 if greedy else 1,
            seed=None if greedy else i,
        )
        prompt = [START, *(draw.randrange(10, VOCAB) for _ in range(draw.choice([0, 0, 0, 2, 3, 40])))]
        encoder = encoder_of(draw.choice([1, 3, 4, 5, 16, 63, 64]), draw.choice([0, 0, i]))
        requests.append(request(prompt, params, encoder=encoder, tenant=draw.choice("aab")))
    return requests


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("num_blocks", [400, 58], ids=["ample", "tiny"])
@pytest.mark.parametrize("chunk", [1, 7, 100_000])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix", "no-prefix"])
async def test_tokens_equal_the_oracle_alone_and_in_a_crowd(
    prefix_caching: bool, chunk: int, num_blocks: int, pipelined: bool
) -> None:
    setup = replace(
        BASE, num_blocks=num_blocks, chunk=chunk, prefix_caching=prefix_caching, pipelined=pipelined, encoder_tokens=100
    )
    requests = crowd(seed=chunk, count=crowd_size(chunk))
    async with running(setup) as (engine, runner):
        for asked in requests[:4]:
            await asked_for(engine, asked)
        again = [replace(asked, id=f"again-{asked.id}") for asked in requests]
        for asked, answer in zip(again, await ask_all(engine, again), strict=True):
            check(asked, answer)
        assert runner.most_encoded <= 100


async def test_a_tiny_cache_swaps_cross_tables_and_nobody_notices() -> None:
    setup = replace(BASE, num_blocks=60, num_host_blocks=100)
    async with running(setup) as (engine, runner):
        params = SamplingParams(max_tokens=80, temperature=0)
        requests = [request([START], params, encoder=encoder_of(30 + i, i % 4)) for i in range(12)]
        for asked, answer in zip(requests, await ask_all(engine, requests), strict=True):
            check(asked, answer)
        assert runner.num_swapped_out > 0
        assert runner.num_encoded == sum(asked.encoder.length for asked in requests if asked.encoder), (
            "what was swapped out is not encoded again"
        )


async def test_a_shared_cross_table_is_swapped_once_and_stays_shared() -> None:
    """Two requests with equal inputs give way to an earlier one that grows, and come back one after the other."""
    setup = replace(BASE, num_blocks=45, num_host_blocks=60)
    async with running(setup) as (engine, runner):
        first = request([START], SamplingParams(max_tokens=95, temperature=0), encoder=encoder_of(64))
        twins = [
            request([START, 20 + i], SamplingParams(max_tokens=60, temperature=0), encoder=encoder_of(40))
            for i in range(2)
        ]
        for asked, answer in zip([first, *twins], await ask_all(engine, [first, *twins]), strict=True):
            check(asked, answer)
        assert runner.num_encoded == 64 + 40
        assert runner.num_swapped_out > 10, "their cross table too"
        assert runner.num_swapped_in == runner.num_swapped_out, "what both have came back for both"


def test_only_equal_blocks_move_together() -> None:
    """Two copies of an input are two tables, though both may serve a third request."""

    @dataclass
    class Waiting:
        runs: bool = False

    pool = BlockPool(20, 4)
    cross = CrossTables(pool)
    tables = [BlockTable(pool) for _ in range(2)]
    for table in tables:
        assert table.try_prepare_write(0, 10) == []
    one, copy = (cross.hold(b"salt", table, Waiting()) for table in tables)
    twin = cross.hold(b"salt", one.table.fork(), Waiting())
    running_twin = cross.hold(b"salt", one.table.fork(), Waiting(runs=True))
    lease = cross.hold(b"salt", one.table.fork(), None)
    assert cross.idle(one) == [one.table, twin.table] and cross.idle(copy) == [copy.table]
    for held in (one, copy, twin, running_twin, lease):
        cross.let_go(held)
    assert pool.num_used == 0 and cross.num_held() == 0
    found = cross.find(b"salt")
    assert found is not None and len(found) == 3 and cross.find(b"other") is None


async def test_without_room_on_the_host_the_encoder_runs_again() -> None:
    setup = replace(BASE, num_blocks=45)
    async with running(setup) as (engine, runner):
        params = SamplingParams(max_tokens=80, temperature=0)
        requests = [request([START], params, encoder=encoder_of(40, i)) for i in range(4)]
        for asked, answer in zip(requests, await ask_all(engine, requests), strict=True):
            check(asked, answer)
        assert runner.num_encoded > 4 * 40 and runner.num_swapped_out == 0


async def test_equal_inputs_of_a_tenant_are_encoded_once() -> None:
    async with running(BASE) as (engine, runner):
        one = encoder_of(33)
        twin = EncoderInput.of_tokens(one.token_ids)
        requests = [request([START, 20 + i], GREEDY, encoder=[one, twin][i % 2]) for i in range(6)]
        for asked, answer in zip(requests, await ask_all(engine, requests), strict=True):
            check(asked, answer)
        assert runner.num_encoded == 33
        await asked_for(engine, request([START], GREEDY, encoder=twin))
        assert runner.num_encoded == 33, "its blocks were free, but nobody had taken them"
        await asked_for(engine, request([START], GREEDY, encoder=one, tenant="other"))
        assert runner.num_encoded == 66, "tenants share nothing"
        await asked_for(engine, request([START], GREEDY, encoder=one, cache_salt="apart"))
        assert runner.num_encoded == 99


async def test_equal_decoder_prompts_share_blocks_only_under_equal_inputs() -> None:
    async with running(BASE) as (engine, _):
        prompt = [START, *range(50, 90)]
        await asked_for(engine, request(prompt, GREEDY, encoder=encoder_of(8, 1)))
        other = await asked_for(engine, request(prompt, GREEDY, encoder=encoder_of(8, 2)))
        same = await asked_for(engine, request(prompt, GREEDY, encoder=encoder_of(8, 1)))
        assert other.usage is not None and other.usage.cached_tokens == 0
        assert same.usage is not None and same.usage.cached_tokens == 40


async def test_choices_and_beams_share_the_cross_table() -> None:
    async with running(BASE) as (engine, runner):
        most = 0
        plan = engine.scheduler.plan

        def watching(now: float, *ahead: int):  # type: ignore[no-untyped-def]
            nonlocal most
            launch = plan(now, *ahead)
            most = max(most, engine.scheduler.pool.num_used)
            return launch

        engine.scheduler.plan = watching  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=3, n=6, temperature=1, seed=3)
        await asked_for(engine, request([START], params, encoder=encoder_of(64)))
        assert most <= 16 + 2 * 6 and runner.num_encoded == 64
        beams = SamplingParams(max_tokens=3, n=2, beams=BeamParams(4))
        answer = await ask(engine, request([START], beams, encoder=encoder_of(64, 1), output=OutputMode.FINAL))
        assert len(answer.token_ids) == 2 and runner.num_encoded == 128
        assert most <= 16 + 4 * 4


@pytest.mark.parametrize("num_blocks", [400, 70], ids=["ample", "tiny"])
async def test_beams_equal_the_oracle_in_a_crowd(num_blocks: int) -> None:
    """In the tiny cache groups start again, with their encoder."""
    setup = replace(BASE, num_blocks=num_blocks, num_host_blocks=20, max_num_seqs=12)
    async with running(setup) as (engine, _):
        asked = [
            request(
                [START, *range(30, 30 + length)],
                SamplingParams(max_tokens=6, n=2, beams=BeamParams(4)),
                encoder=encoder_of(encoder, seed),
                output=OutputMode.FINAL,
            )
            for length, encoder, seed in [(0, 64, 0), (3, 64, 0), (4, 5, 1), (9, 33, 2), (0, 1, 3), (0, 64, 4)]
        ]
        streams = [
            request([START], SamplingParams(max_tokens=40, temperature=0), encoder=encoder_of(20, i)) for i in range(5)
        ]
        answers = asyncio.gather(*(ask(engine, one) for one in streams))
        await asyncio.gather(*(check_beams(engine, one) for one in asked))
        for one, answer in zip(streams, await answers, strict=True):
            check(one, answer)


# --- the model's rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("count", [1, 2, 9])
async def test_a_forced_first_token_and_a_forced_last_one(count: int, pipelined: bool) -> None:
    """A first one is an output like any other, computed with the prompt; the last one stands for what was sampled."""
    encoder = encoder_of(10)
    async with running(replace(BASE, pipelined=pipelined)) as (engine, _):
        params = SamplingParams(
            max_tokens=count, n=2, temperature=1, seed=4, logprobs=0, rules=TokenRules(first=99, last=98)
        )
        answer = await ask(engine, request([START], params, encoder=encoder))
        for choice, tokens in answer.token_ids.items():
            options = {"seed": 4, "choice": choice, "greedy": False, "encoder": encoder.token_ids}
            free = expected_tokens([START, 99], count, **options)  # type: ignore[arg-type]
            wanted = [98] if count == 1 else [99, *free[: count - 2], 98]
            assert tokens == wanted and answer.finish[choice] == ("length", None)
        assert answer.usage is not None and answer.usage.completion_tokens == 2 * count
        assert len(answer.logprobs) == count and answer.logprobs[0] == 0.0


@pytest.mark.parametrize("count", [1, 2, 6])
async def test_beams_with_forced_tokens(count: int) -> None:
    async with running(BASE) as (engine, _):
        rules = TokenRules(never=(7, 8), not_first=(9, 10), first=11, last=EOS)
        params = SamplingParams(max_tokens=count, n=3, beams=BeamParams(4), rules=rules)
        asked = request([START], params, encoder=encoder_of(10), output=OutputMode.FINAL)
        answer = await check_beams(engine, asked)
        for tokens in answer.token_ids.values():
            assert tokens == [EOS] if count == 1 else tokens[0] == 11 and tokens[-1] == EOS


# --- continuation ------------------------------------------------------------------------------------------------


def child_of(parent: Answer, asked: Request, suffix: list[int], **fields: object) -> Request:
    tokens = [*asked.prompt_token_ids, *parent.token_ids[0]]
    lineage = Lineage(asked.id, 0, len(tokens))
    return request([*tokens, *suffix], GREEDY, lineage=lineage, encoder=asked.encoder, **fields)


async def test_a_lease_keeps_its_cross_table() -> None:
    setup = replace(BASE, num_blocks=80, num_lease_blocks=30, num_host_blocks=60)
    async with running(setup) as (engine, runner):
        asked = request([START], GREEDY, encoder=encoder_of(30), retain=Retain(300.0))
        parent = await asked_for(engine, asked)
        assert parent.retained is not None
        assert parent.retained.blocks == 8 + 2, "30 positions, and the 8 tokens that were computed"
        # Others take every block that is free, and push the lease to the host.
        params = SamplingParams(max_tokens=90, temperature=0)
        others = [request([START], params, encoder=encoder_of(60, i)) for i in range(9)]
        for other, answer in zip(others, await ask_all(engine, others), strict=True):
            check(other, answer)
        encoded = runner.num_encoded
        child = await asked_for(engine, child_of(parent, asked, [77, 78]))
        assert child.inheritance is not None
        assert (child.inheritance.inherited_tokens, child.inheritance.computed_tokens) == (8, 3)
        assert child.inheritance.source in ("blocks", "host")
        assert runner.num_encoded == encoded, "what is leased is not encoded again"
        engine.forget("t", asked.id)


async def test_a_warm_record_remembers_its_cross_blocks_and_a_child_encodes_again_without_them() -> None:
    setup = replace(BASE, num_blocks=60)
    async with running(setup) as (engine, runner):
        asked = request([START], GREEDY, encoder=encoder_of(30))
        parent = await asked_for(engine, asked)
        assert engine.parent("t", asked.id).encoder == asked.encoder
        child = await asked_for(engine, child_of(parent, asked, [77]))
        assert child.inheritance is not None and child.inheritance.source == "blocks" and runner.num_encoded == 30
        params = SamplingParams(max_tokens=100, temperature=0)
        await asked_for(engine, request([START], params, encoder=encoder_of(64)))
        await asked_for(engine, request([START], params, encoder=encoder_of(63)))
        encoded = runner.num_encoded
        late = await asked_for(engine, child_of(parent, asked, [78]))
        assert late.inheritance is not None and late.inheritance.source == "recompute"
        assert runner.num_encoded == encoded + 30


async def test_a_child_with_another_input_inherits_nothing() -> None:
    async with running(BASE) as (engine, _):
        asked = request([START, *range(30, 60)], GREEDY, encoder=encoder_of(30))
        parent = await asked_for(engine, asked)
        child = replace(child_of(parent, asked, [77]), encoder=encoder_of(30, 1))
        answer = await asked_for(engine, child)
        assert answer.inheritance is not None
        assert (answer.inheritance.inherited_tokens, answer.inheritance.source) == (0, "recompute")


async def test_an_ended_record_is_leased_with_its_cross_table() -> None:
    setup = replace(BASE, num_blocks=80, num_lease_blocks=30)
    async with running(setup) as (engine, _):
        asked = request([START], GREEDY, encoder=encoder_of(30))
        await asked_for(engine, asked)
        assert engine.scheduler.pool.num_used == 0
        engine.set_ttl("t", asked.id, 100.0)
        assert engine.scheduler.pool.num_used == 8 + 2
        engine.set_ttl("t", asked.id, None)
        assert engine.scheduler.pool.num_used == 0


# --- ends --------------------------------------------------------------------------------------------------------


async def test_an_abort_gives_the_cross_table_back() -> None:
    async with running(BASE) as (engine, runner):
        params = SamplingParams(max_tokens=100, temperature=0)
        asked = request([START], params, encoder=encoder_of(30))
        engine.submit(asked, lambda _: None)
        await until(lambda: runner.num_encoded == 30)
        assert engine.scheduler.pool.num_used >= 8
        engine.abort(asked.id)
        assert engine.scheduler.pool.num_used == 0


async def test_nan_is_not_shared() -> None:
    async with running(BASE) as (engine, runner):
        runner.bad_prompt_token = 666
        with pytest.raises(Exception, match="NaN"):
            await ask(engine, request([START, 666], GREEDY, encoder=encoder_of(30)))
        await asked_for(engine, request([START], GREEDY, encoder=encoder_of(30)))
        assert runner.num_encoded == 60, "nobody trusts what the first one wrote"


# --- what is refused ---------------------------------------------------------------------------------------------


async def test_an_input_must_fit_the_model_and_may_be_longer_than_the_budget() -> None:
    setup = replace(BASE, encoder_tokens=20)
    async with running(setup) as (engine, runner):
        requests = [request([START], GREEDY, encoder=encoder_of(n)) for n in (64, 15, 10, 50, 5)]
        for asked, answer in zip(requests, await ask_all(engine, requests), strict=True):
            check(asked, answer)
        assert runner.most_encoded == 64
        with pytest.raises(ContextLengthExceeded, match="takes 64 tokens at most, not "):
            await ask(engine, request([START], GREEDY, encoder=encoder_of(65)))


async def test_a_request_brings_what_its_model_reads() -> None:
    async with running(BASE) as (engine, _):
        with pytest.raises(InvalidRequest, match="has no tokens to read"):
            await ask(engine, request([START], GREEDY))
    async with running(Setup()) as (engine, _):
        with pytest.raises(InvalidRequest, match="no encoder"):
            await ask(engine, request([START], GREEDY, encoder=encoder_of(3)))


def test_keys_are_exact() -> None:
    assert EncoderInput.of_tokens([1, 2]) == EncoderInput.of_tokens((1, 2))
    assert EncoderInput.of_tokens([1, 2]) != EncoderInput.of_tokens([2, 1])
    assert EncoderInput.of_tokens([1]).key != EncoderInput.of_tokens([1, 0]).key


def test_fake_reads_the_cross_table() -> None:
    """The oracle and the fake must care about every token of the input."""
    runner = PagedFakeRunner(4, 4)
    assert runner.num_encoded == 0
    wanted = expected_tokens([START], 8, encoder=(10, 11, 12))
    assert wanted != expected_tokens([START], 8, encoder=(10, 12, 11)) != expected_tokens([START], 8)


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
async def test_choices_part_behind_a_forced_first_token(chunk: int) -> None:
    """The token that the model forces is known before its prompt is computed, and may be alone in the last chunk."""
    prompt, params = [11, 12], SamplingParams(max_tokens=6, n=3, temperature=1, seed=3, rules=TokenRules(first=77))
    async with running(Setup(chunk=chunk, eos=())) as (engine, _):
        answer = await ask(engine, request(prompt, params))
        for choice in range(3):
            expected = expected_tokens([*prompt, 77], 5, seed=3, choice=choice, greedy=False)
            assert answer.token_ids[choice] == [77, *expected]
