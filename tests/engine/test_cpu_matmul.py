"""Codes multiplied as integers, through the whole engine: a request gets the same bits however its work is cut and
whatever runs beside it, and what it gets is near what the float32 values give."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from bequest.engine import _C
from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.models.load import load_model
from bequest.engine.types import BeamParams, Lineage, OutputMode, Request, Retain, SamplingParams
from bequest.engine.types.hidden import HiddenStatesParams
from tests.adapters.tiny_adapters import make_adapter, save_adapter
from tests.engine.harness import Answer, ask, ask_all, request
from tests.models import tiny_quantised as tiny
from tests.models.paged import PagedSequences
from tests.tiny_models import VOCAB_SIZE

Model = tuple[Path, PreTrainedModel]
LENGTH = 8
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True, logprobs=0)
PROMPTS = [[(7 * i + 3 * n) % (VOCAB_SIZE - 3) + 3 for i in range(n)] for n in (1, 5, 8, 17, 23, 31)]
CUTS: dict[str, dict[str, Any]] = {
    "one by one": {"max_num_batched_tokens": 1, "speculative": "off"},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "preempted": {"max_num_batched_tokens": 64, "num_blocks": 24},
    "drafted": {"max_num_batched_tokens": 64, "speculative": "ngram:4"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """In codes of 4 bits, and what transformers makes of their values."""
    folder = tmp_path_factory.mktemp("gptq")
    return folder, tiny.write("llama", folder, tiny.gptq(4, 32, symmetric=True))


@asynccontextmanager
async def serving(path: Path, **options: Any) -> AsyncIterator[AsyncEngine]:
    given = {"block_size": 4, "max_model_len": 64, "num_blocks": 300, "threads": 2, "cpu_matmul": "fast", **options}
    engine = (await build_engine(EngineConfig(model=str(path), device="cpu", **given))).engine
    try:
        yield engine
    finally:
        await engine.stop()
        engine.scheduler.check_idle()


def bits(answer: Answer) -> tuple[object, ...]:
    return answer.token_ids, answer.logprobs, answer.beam_scores


@pytest.mark.parametrize("cut", CUTS)
async def test_a_request_has_the_same_bits_however_its_work_is_cut(cut: str, model: Model) -> None:
    async with serving(model[0]) as engine:
        alone = [bits(await ask(engine, request(prompt, GREEDY))) for prompt in PROMPTS]
    async with serving(model[0], **CUTS[cut]) as engine:
        crowd = await ask_all(engine, [request(prompt, GREEDY) for prompt in PROMPTS])
    assert [bits(answer) for answer in crowd] == alone


async def test_a_continuation_has_the_bits_of_the_whole(model: Model) -> None:
    prompt = PROMPTS[-1]
    async with serving(model[0]) as engine:
        whole = await ask(engine, request(prompt, GREEDY, cache_salt="whole"))
        first = await ask(engine, request(prompt[:9], SamplingParams(max_tokens=0), retain=Retain(60)))
        rest = request(prompt, GREEDY, lineage=Lineage(first.id, 0, 9))
        child = await ask(engine, rest)
        assert child.inheritance is not None and child.inheritance.computed_tokens < len(prompt)
    assert bits(child) == bits(whole)


async def test_beams_and_states_in_a_crowd_are_those_alone(model: Model) -> None:
    beams = SamplingParams(max_tokens=5, temperature=0, n=2, beams=BeamParams(3, 1.0, early_stopping=False))
    states = HiddenStatesParams((0, 1, 2), "all", "none", "float32")

    def asks() -> list[Request]:
        return [
            request(PROMPTS[3], beams, output=OutputMode.FINAL),
            request(PROMPTS[4], SamplingParams(max_tokens=0), hidden_states=states),
            *(request(prompt, GREEDY) for prompt in PROMPTS),
        ]

    async with serving(model[0], enable_prefix_caching=False) as engine:
        alone = [await ask(engine, one) for one in asks()]
        crowd = await ask_all(engine, asks())
    assert [bits(answer) for answer in crowd] == [bits(answer) for answer in alone]
    found, expected = (_values(answers[1]) for answers in (crowd, alone))
    assert np.array_equal(found, expected)
    with torch.no_grad():
        theirs = model[1](torch.tensor([PROMPTS[4]]), output_hidden_states=True).hidden_states
    true = torch.stack(theirs)[: len(found), 0].numpy()
    assert np.abs(found[:2] - true[:2]).max() < 1e-3 * np.abs(true).max()  # the last one is normed there


def _values(answer: Answer) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert answer.states is not None
    return answer.states.choices[0].assemble()


async def test_adapters_add_to_codes(model: Model, tmp_path: Path) -> None:
    """In one crowd with rows of the model itself; tokens are PEFT's over the values of the codes."""
    plain = await _answers(model[0], [], [""])
    adapted = make_adapter(model[1], "a", r=4)
    folder = save_adapter(adapted, tmp_path / "a")
    mixed = await _answers(model[0], [f"a={folder}"], ["a", ""])
    with torch.no_grad():
        for prompt, answer in zip(PROMPTS, mixed["a"], strict=True):
            tokens = prompt + answer.token_ids[0]
            logits = adapted(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
            expected = logits.gather(1, torch.tensor(answer.token_ids[0])[:, None])[:, 0]
            assert answer.logprobs == pytest.approx(expected.tolist(), abs=2e-3)
            assert (logits.max(-1).values - expected).max() < 2e-3
    assert [bits(answer) for answer in mixed[""]] == [bits(answer) for answer in plain[""]]


async def _answers(path: Path, lora: list[str], names: list[str]) -> dict[str, list[Answer]]:
    async with serving(path, lora=lora) as engine:
        asks = [request(p, GREEDY, adapter=engine.adapters.find(name)) for name in names for p in PROMPTS]
        answers = await ask_all(engine, asks)
    count = len(PROMPTS)
    return {name: answers[i * count : (i + 1) * count] for i, name in enumerate(names)}


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_logits_are_near_those_of_the_values(name: str, tmp_path: Path) -> None:
    reference = tiny.write(name, tmp_path, tiny.gptq(4, 32, symmetric=True))
    tokens = PROMPTS[-1]
    fast = load_model(tmp_path, backend=CpuBackend(fast=True))
    found = PagedSequences(fast.model, 1, len(tokens)).run(0, tokens, chunk=7)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    exact = PagedSequences(load_model(tmp_path).model, 1, len(tokens)).run(0, tokens, chunk=7)
    assert not torch.equal(found, exact)  # or nothing was multiplied as integers


@pytest.mark.parametrize("matmul", ["fast", "exact", "auto"])
async def test_says_which_runs(matmul: str, model: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    expected = matmul if matmul != "auto" else "fast" if _C.dot_is_fused() else "exact"
    async with serving(model[0], cpu_matmul=matmul) as engine:
        assert engine.info.numbers.cpu_matmul == expected
    said = "products of codes in integers" if expected == "fast" else "products in float32"
    assert said in caplog.text


async def test_numbers_have_no_such_choice(tiny_model: Callable[[str], Path]) -> None:
    async with serving(tiny_model("llama"), cpu_matmul="fast") as engine:
        assert engine.info.numbers.cpu_matmul is None and engine.info.arithmetic == "float32"
