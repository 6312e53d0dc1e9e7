"""The embedded model in a crowd: tokens and log-probabilities are those of transformers, however the work is cut."""

from __future__ import annotations

import random
from typing import Literal

import pytest
import torch

from bequest.engine.config import EngineConfig
from bequest.engine.types import SamplingParams
from tests.engine.direct import LLM
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
def expected() -> list[tuple[list[int], list[float]]]:
    model = embedded_reference()
    answers = []
    with torch.no_grad():
        for prompt in prompts():
            given, past = prompt, None  # only what is new: the same numbers in half of the time
            tokens: list[int] = []
            logprobs: list[float] = []
            for _ in range(NUM_TOKENS):
                told = model(torch.tensor([given]), past_key_values=past, use_cache=True, logits_to_keep=1)
                row = told.logits[0, -1].double().log_softmax(-1)
                given, past = [int(row.argmax())], told.past_key_values
                tokens += given
                logprobs.append(float(row.max()))
            answers.append((tokens, logprobs))
    return answers


@pytest.mark.parametrize(("matmul", "tolerance"), [("exact", 1e-4), ("fast", 5e-3)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_equals_transformers(
    scenario: str, matmul: Literal["exact", "fast"], tolerance: float, expected: list[tuple[list[int], list[float]]]
) -> None:
    step_tokens, num_blocks = SCENARIOS[scenario]
    config = EngineConfig(
        block_size=4,
        max_num_batched_tokens=step_tokens,
        max_model_len=64,
        num_blocks=num_blocks,
        host_cache_gb=0,
        cpu_matmul=matmul,
    )
    with LLM(config) as llm:
        for _ in range(2 if scenario == "chunk-64" else 1):  # the second round finds its prompts in the prefix cache
            answers = llm.generate(prompts(), PARAMS, progress=False)
            for answer, (tokens, logprobs) in zip(answers, expected, strict=True):
                [choice] = answer.choices
                assert list(choice.token_ids) == tokens and choice.logprobs is not None
                assert [one.logprob for one in choice.logprobs] == pytest.approx(logprobs, rel=1e-3, abs=tolerance)
        if scenario == "chunk-64":
            assert sum(answer.usage.cached_tokens for answer in answers) > 0
