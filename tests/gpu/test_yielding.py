"""Extractions that generations pass between two layers, on a GPU: the same states and the same tokens."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.runner import extracting, prepare
from bequest.engine.runner.cuda import CudaRunner
from bequest.engine.runner.cuda_pieces import Pieces
from bequest.engine.runner.cuda_results import PendingResults
from bequest.engine.types import SamplingParams, StepPlan
from bequest.engine.types.hidden import HiddenStatesParams
from tests.engine.harness import ask, request, until
from tests.engine.model_states import Trial, check_states, reference_of
from tests.tiny_models import VOCAB_SIZE, make_reference

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
MOST_TOKENS = 512


class Seen:
    def __init__(self) -> None:
        self.yielding = False
        self.passed = self.others = self.yielded = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """All steps of extractions yield, behind each layer; what they see is counted."""
    monkeypatch.setattr(extracting, "_CUDA_WORK", 0.0)
    monkeypatch.setattr(extracting, "_CUDA_LEAST_YIELDING", 1)
    monkeypatch.setattr(prepare, "tokens_of_piece", lambda loaded: 1)
    counts, launch, launch_yielding = Seen(), CudaRunner.launch, CudaRunner.launch_yielding

    def counted(runner: CudaRunner, plan: StepPlan) -> PendingResults:
        counts.passed += counts.yielding
        counts.others += not counts.yielding
        return launch(runner, plan)

    def counted_yielding(runner: CudaRunner, plan: StepPlan, between: Callable[[], None]) -> PendingResults:
        counts.yielding, counts.yielded = True, counts.yielded + 1
        try:
            return launch_yielding(runner, plan, between)
        finally:
            counts.yielding = False

    monkeypatch.setattr(CudaRunner, "launch", counted)
    monkeypatch.setattr(CudaRunner, "launch_yielding", counted_yielding)
    return counts


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model would be done before anybody comes."""
    call = Pieces.__call__

    def slowly(pieces: Pieces) -> None:
        time.sleep(0.02)
        call(pieces)

    monkeypatch.setattr(Pieces, "__call__", slowly)


def config(directory: Path, **fields: object) -> EngineConfig:
    shape = {"block_size": 16, "max_num_batched_tokens": MOST_TOKENS, "max_model_len": 256, "num_blocks": 400}
    return EngineConfig(model=str(directory), device="cuda", max_num_seqs=8, **(shape | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
async def test_float32_equals_transformers(
    name: str, eager: bool, tiny_model: Callable[[str], Path], seen: Seen
) -> None:
    trial = Trial(reference_of(make_reference(name)), 1e-4, VOCAB_SIZE)
    asked = config(tiny_model(name), dtype="float32", max_model_len=96, enforce_eager=eager)
    await check_states(asked, trial, (1, 2, 15, 16, 17, 41))
    assert seen.yielded > 0


async def states_of(engine: AsyncEngine, prompt: list[int], params: SamplingParams, salt: str) -> np.ndarray:
    """Of all tokens that the engine is asked for: of a prompt, or sampled."""
    wanted = HiddenStatesParams((0, 1, engine.info.num_layers), "all")
    answer = await ask(engine, request(prompt, params, hidden_states=wanted, cache_salt=salt))
    assert answer.states is not None
    states = answer.states.choices[0].assemble().copy()
    answer.states.release()
    return states


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("blocks", [400, 60])
async def test_streams_pass_extractions(blocks: int, tiny_model: Callable[[str], Path], seen: Seen) -> None:
    """The same as one after the other; with few blocks some extractions are preempted, and blocks are used again."""
    draw = random.Random(blocks)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(10, VOCAB_SIZE) for _ in range(length)]

    extracted = [prompt(draw.randint(100, 250)) for _ in range(16)]
    # Some begin like an extraction, and find what it has computed or computes.
    generated = [prompt(draw.randint(1, 200)) for _ in range(16)] + [texts[:100] for texts in extracted[:4]]
    draw.shuffle(generated)
    built = await build_engine(config(tiny_model("qwen3"), dtype="float32", num_blocks=blocks))
    engine = built.engine

    async def generate(tokens: list[int], salt: str, delay: float = 0.0) -> list[int]:
        await asyncio.sleep(delay)
        return (await ask(engine, request(tokens, GREEDY, cache_salt=salt))).token_ids[0]

    async def extract(tokens: list[int], salt: str, delay: float = 0.0) -> np.ndarray:
        await asyncio.sleep(delay)
        return await states_of(engine, tokens, SamplingParams(max_tokens=0), salt)

    async def generate_with_states(tokens: list[int], salt: str, delay: float = 0.0) -> np.ndarray:
        await asyncio.sleep(delay)
        return await states_of(engine, tokens, GREEDY, salt)

    try:
        alone = [await generate(tokens, f"alone {i}") for i, tokens in enumerate(generated)]
        states = [await extract(tokens, f"alone {i}") for i, tokens in enumerate(extracted)]
        states += [await generate_with_states(tokens, f"with {i}") for i, tokens in enumerate(generated[:4])]
        for turn in range(2):
            tasks = [extract(tokens, f"{turn}", draw.random() / 4) for tokens in extracted]
            tasks += [generate_with_states(tokens, f"with {turn}", draw.random() / 2) for tokens in generated[:4]]
            given = asyncio.gather(*tasks)
            await until(lambda: seen.yielding)
            answers = [generate(tokens, f"{turn}", draw.random() / 2 if i else 0) for i, tokens in enumerate(generated)]
            assert await asyncio.gather(*answers) == alone
            for found, expected in zip(await given, states, strict=True):
                assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    finally:
        await engine.stop()
    assert seen.passed >= 2 and seen.yielded >= 10, vars(seen)
