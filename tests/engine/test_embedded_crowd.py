"""The embedded model in a crowd: tokens and log-probabilities are those of transformers, however the work is cut."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.types import SamplingParams
from tests.engine.direct import LLM
from tests.engine.test_against_transformers import Judge
from tests.models.embedded_reference import embedded_reference

NUM_TOKENS = 3
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=0, ignore_eos=True)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 33, 40)
# tokens of a step, blocks of 4 tokens: the last cache is so small that it preempts
SCENARIOS = {"chunk-1": (1, 400), "chunk-7": (7, 400), "chunk-64": (64, 400), "preempting": (64, 24)}


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    common = [draw.randrange(1000, 40_000) for _ in range(40)]
    return [common[: n // 2] + [draw.randrange(1000, 40_000) for _ in range(n - n // 2)] for n in LENGTHS]


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(embedded_reference(), prompts(), NUM_TOKENS, rows=4)  # of about the same length


@pytest.mark.parametrize(("matmul", "tolerance"), [("exact", 1e-4), ("fast", 5e-3)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_equals_transformers(scenario: str, matmul: Literal["exact", "fast"], tolerance: float, judge: Judge) -> None:
    step_tokens, num_blocks = SCENARIOS[scenario]
    config = EngineConfig(
        block_size=4,
        max_num_batched_tokens=step_tokens,
        max_model_len=64,
        num_blocks=num_blocks,
        host_cache_gb=0,
        cpu_matmul=matmul,
    )
    every = 4 if scenario == "chunk-1" else 1  # a step passes every length anyway
    with LLM(config) as llm:
        for _ in range(2 if scenario == "chunk-64" else 1):  # the second round finds its prompts in the prefix cache
            answers = llm.generate(prompts()[::every], PARAMS, progress=False)
            for answer, expected in zip(answers, judge(answers, every), strict=True):
                [choice] = answer.choices
                assert list(choice.token_ids) == expected.tokens and choice.logprobs is not None
                best = expected.logprobs.max(-1).values.tolist()
                assert [one.logprob for one in choice.logprobs] == pytest.approx(best, rel=1e-3, abs=tolerance)
        if scenario == "chunk-64":
            assert sum(answer.usage.cached_tokens for answer in answers) > 0
