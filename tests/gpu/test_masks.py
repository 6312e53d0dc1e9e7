"""Masks on a GPU: the tokens of the CPU's sampler, and answers of a whole engine that follow their grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bequest.engine.build import build_engine
from bequest.engine.constraints.grammar import Grammar, GrammarSource, Vocabulary
from bequest.engine.errors import EngineDraining
from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels import cuda
from bequest.engine.kernels.cuda_sampler import CudaSampler
from bequest.engine.scheduling.sampler_rows import row_spec
from bequest.engine.types import Request, SamplingParams
from tests.engine.direct import LLM
from tests.engine.grammar_world import check_answers_follow_their_grammars
from tests.gpu.test_engine import config
from tests.kernels.test_sampling_masks import packed

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("vocab", [1, 31, 33, 1000, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9, "min_p": 0.01}, {"presence_penalty": 1.0, "min_tokens": 2}],
)
def test_masks_as_on_the_cpu(vocab: int, dtype: torch.dtype, fields: dict[str, object]) -> None:
    num = 5
    device, host = CudaSampler(num, vocab, DEVICE), kernels.Sampler(num, vocab)
    for row in range(num):
        params = SamplingParams(**{"max_tokens": 9, **fields})  # type: ignore[arg-type]
        spec = row_spec(row, params, seed=row)
        device.open_row(spec)
        host.open_row(spec)
    device.flush()
    generator = np.random.default_rng(vocab)
    rows = torch.arange(num, dtype=torch.int32)
    differing = 0
    for position in range(6):
        logits = torch.from_numpy(generator.normal(size=(num, vocab)).astype(np.float32) * 3).to(dtype)
        allowed = generator.random((num, vocab)) < [0.02, 0.5, 0.98][position % 3]
        allowed[np.arange(num), generator.integers(0, vocab, num)] = True
        allowed[num - 1] = position != 4  # nothing at all, once
        masks = packed(allowed)
        if position == 4:
            masks[num - 1] = 0
        positions = torch.full_like(rows, position)
        expected, expected_bad = host.sample(logits.float(), rows, positions, masks)
        tokens, bad = device.sample(
            logits.to(DEVICE), rows.to(DEVICE), positions.to(DEVICE), masks=torch.from_numpy(masks).to(DEVICE)
        )
        assert bad.tolist() == expected_bad.tolist() and bad[num - 1].item() == (position == 4)
        good = ~expected_bad
        assert allowed[np.arange(num)[good], tokens.cpu().numpy()[good]].all()
        differing += int((tokens.cpu().numpy() != expected).sum())
        if differing:
            return  # by a tie of floats: the histories are others from here on
    assert differing == 0


def test_rows_that_are_skipped_or_closed() -> None:
    device = CudaSampler(2, 40, DEVICE)
    device.open_row(row_spec(0, SamplingParams(max_tokens=9, temperature=0), seed=0))
    device.flush()
    rows = torch.tensor([-1, 1, 0], dtype=torch.int32, device=DEVICE)
    masks = torch.full((3, 2), 4, dtype=torch.int32, device=DEVICE)  # token 2 or 34
    tokens, bad = device.sample(torch.zeros(3, 40, device=DEVICE), rows, torch.zeros_like(rows), masks=masks)
    assert tokens.tolist() == [0, 0, 2] and bad.tolist() == [False, True, False]


@pytest.mark.parametrize("fields", [{}, {"enforce_eager": True}, {"pipelined": False}, {"num_blocks": 14}])
def test_answers_follow_their_grammars(fields: dict[str, object], tiny_model: Callable[[str], Path]) -> None:
    """Constrained and free rows in the same steps, of a model with random weights."""
    shape = {"dtype": "bfloat16", "max_model_len": 160}
    with LLM(config(tiny_model("llama-head-64"), **(shape | fields))) as llm:
        check_answers_follow_their_grammars(llm)


def test_graphs_and_the_plain_loop_give_the_same_tokens(tiny_model: Callable[[str], Path]) -> None:
    told = []
    for fields in ({}, {"pipelined": False}):
        with LLM(config(tiny_model("llama-head-64"), dtype="float32", max_model_len=160, **fields)) as llm:
            grammar = llm.grammar(GrammarSource("regex", "([a-z]{2,6} ){8}"))
            params = SamplingParams(max_tokens=50, temperature=0.0, grammar=grammar)
            answers = [llm.generate([[5 + i, 6, 7]], params, progress=False)[0] for i in range(4)]
            told.append([answer.choices[0].token_ids for answer in answers])
    assert told[0] == told[1]


def test_a_copy_waits_on_the_device_for_what_the_host_has_yet_to_write() -> None:
    source = torch.zeros(40, dtype=torch.int32, pin_memory=True)
    destination = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    copy = cuda.LateCopy(source, destination)
    copy.flag(7)()
    copy.queue(40, 7)  # loads the kernel
    torch.cuda.synchronize()
    seen = []
    for value in (8, 9, 10):
        copy.queue(40, value)
        seen.append(destination.clone())
        queued = torch.cuda.Event()
        queued.record()
        assert not queued.query()
        source[:] = torch.arange(value, value + 40)
        copy.flag(value)()
        queued.synchronize()
    assert [told.tolist() for told in seen] == [list(range(value, value + 40)) for value in (8, 9, 10)]


def test_another_stream_waits_for_a_copy_that_is_late() -> None:
    """Two copies that take turns, each behind what reads the place of the other."""
    pinned = [torch.zeros(40, dtype=torch.int32, pin_memory=True) for _ in range(2)]
    places = [torch.zeros(40, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    copies = [cuda.LateCopy(*pair) for pair in zip(pinned, places, strict=True)]
    beside = torch.cuda.Stream()
    torch.cuda.synchronize()
    seen = []
    for value in (1, 2, 3, 4, 5):
        turn = value % 2
        if value == 1:
            copies[turn].flag(value)()  # the first time loads the kernel
        copies[turn].queue_beside(copies[1 - turn], 40, value, beside.cuda_stream)
        seen.append(places[turn].clone())
        queued = torch.cuda.Event()
        queued.record()
        if value > 1:
            assert not queued.query()
            pinned[turn][:] = torch.arange(value, value + 40)
            copies[turn].flag(value)()
        if value % 2:
            queued.synchronize()
    torch.cuda.synchronize()
    assert [told.tolist() for told in seen] == [[0] * 40, *(list(range(value, value + 40)) for value in (2, 3, 4, 5))]


def test_who_queues_a_copy_waits_for_the_one_before() -> None:
    """The source is written as soon as the call is back."""
    source = torch.zeros(1 << 24, dtype=torch.int32, pin_memory=True)
    destination = torch.zeros(1 << 24, dtype=torch.int32, device=DEVICE)
    copy = cuda.LateCopy(source, destination)
    copy.flag(1)()
    copy.queue(1 << 24, 1)
    seen = []
    for value in (2, 3):
        source[-1] = value
        copy.flag(value)()
        copy.queue(1 << 24, value)
        seen.append(destination[-1].clone())
        copy.queue(0, value)  # waits for it
        source[-1] = 0
    assert [int(told) for told in seen] == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_step_is_sampled_where_it_is(dtype: torch.dtype) -> None:
    """As the same rows alone, and nothing of the others is written."""
    num, vocab, part = 6, 1000, slice(2, 5)
    generator = np.random.default_rng(3)
    logits = torch.from_numpy(generator.normal(size=(num, vocab)).astype(np.float32) * 3).to(dtype).to(DEVICE)
    masks = torch.from_numpy(packed(generator.random((3, vocab)) < 0.1)).to(DEVICE)
    rows = torch.arange(3, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(10, 10 + num, dtype=torch.int32, device=DEVICE)
    told = []
    for whole in (True, False):
        sampler = CudaSampler(3, vocab, DEVICE)
        for row in range(3):
            sampler.open_row(row_spec(row, SamplingParams(max_tokens=9), seed=row))
        sampler.flush()
        tokens = torch.full((num,), -7, dtype=torch.int32, device=DEVICE)
        bad = torch.ones(num, dtype=torch.bool, device=DEVICE)
        if whole:
            sampler.sample_part(logits, part, rows, positions, tokens, bad, masks)
        else:
            sampler.sample(logits[part], rows, positions[part], tokens[part], bad[part], masks)
        told.append((tokens.tolist(), bad.tolist(), sampler.last_tokens.tolist()))
    assert told[0] == told[1]
    chosen_of_all, refused_of_all, _ = told[0]
    assert chosen_of_all[:2] == [-7, -7] and chosen_of_all[5:] == [-7]
    assert refused_of_all == [True, True, False, False, False, True]


async def test_an_engine_that_stops_does_not_leave_the_device_waiting(tiny_model: Callable[[str], Path]) -> None:
    shape = {"dtype": "bfloat16", "max_model_len": 160}
    built = await build_engine(config(tiny_model("llama-head-64"), **shape))
    info = built.engine.info
    vocabulary = Vocabulary(built.text.tokenizer, info.vocab_size, info.eos_token_ids)
    rule = Grammar(GrammarSource("regex", "[a-f]{500}"), vocabulary)

    async def one(number: int) -> None:
        params = SamplingParams(max_tokens=100, seed=number, grammar=rule)
        async for _ in built.engine.generate(Request(f"r{number}", "t", (5, 6, 7), params)):
            pass

    tasks = [asyncio.ensure_future(one(number)) for number in range(4)]
    await asyncio.sleep(0.1)
    async with asyncio.timeout(20):
        await built.engine.stop()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, EngineDraining) for result in results)
    torch.cuda.synchronize()
