"""Models that transformers computes, on a GPU: what transformers gives in float32, and nearly so in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from tests.engine.direct import LLM
from tests.engine.model_leases import check_leases_survive
from tests.engine.model_states import Trial, check_states, reference_of
from tests.engine.test_against_transformers import PARAMS, Judge, check, prompts
from tests.engine.test_beams_against_transformers import check_searches
from tests.gpu.test_engine import BF16_GAP
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_others import TINY_OTHERS, make_other

pytestmark = pytest.mark.gpu


def config(directory: Path, **fields: object) -> EngineConfig:
    shape = {
        "block_size": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 96,
        "num_blocks": 400,
        "max_num_seqs": 32,
    }
    return EngineConfig(model=str(directory), device="cuda", **(shape | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TINY_OTHERS)
@pytest.mark.parametrize("chunk", [7, 256])
def test_float32_equals_transformers(name: str, chunk: int, tiny_other: Callable[[str], Path]) -> None:
    asked = prompts()
    judge = Judge(make_other(name), asked)
    for fields in ({}, {"num_blocks": 20}, {"pipelined": False}):
        settings = {"dtype": "float32", "max_num_batched_tokens": chunk}
        with LLM(config(tiny_other(name), **(settings | fields))) as llm:
            for _ in range(2):  # the second round finds its prompts in the prefix cache
                answers = llm.generate(asked, PARAMS, progress=False)
                for answer, one in zip(answers, judge(answers), strict=True):
                    check(answer, one)


# Heads of 16 and 24 are padded to those of tensor cores.
@pytest.mark.parametrize("name", TINY_OTHERS)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_bfloat16_differs_only_where_two_logits_are_near(
    name: str, cache: str, tiny_other: Callable[[str], Path]
) -> None:
    asked = prompts()
    judge = Judge(make_other(name), asked)
    gap = BF16_GAP if cache == "auto" else 4 * BF16_GAP
    with LLM(config(tiny_other(name), dtype="bfloat16", kv_cache_dtype=cache)) as llm:
        answers = llm.generate(asked, PARAMS, progress=False)
    for answer, one in zip(answers, judge(answers), strict=True):
        tokens = list(answer.choices[0].token_ids)
        first = next((i for i, (a, b) in enumerate(zip(tokens, one.tokens, strict=True)) if a != b), None)
        if first is not None:
            best, ours = one.logprobs[first].max(), one.logprobs[first][tokens[first]]
            assert best - ours < gap, f"token {first}: {tokens[first]} lies {best - ours:.3f} under the best"


@pytest.mark.parametrize("fields", [{}, {"num_blocks": 20, "host_cache_gb": 0.1}, {"max_num_batched_tokens": 7}])
async def test_states_equal_transformers(fields: dict[str, object], tiny_other: Callable[[str], Path]) -> None:
    trial = Trial(reference_of(make_other("exaone4")), 1e-4, VOCAB_SIZE)
    await check_states(config(tiny_other("exaone4"), dtype="float32", **fields), trial, (1, 2, 8, 9, 17, 30, 41))


def test_beams_equal_hugging_face(tiny_other: Callable[[str], Path]) -> None:
    settings = {"dtype": "float32", "num_blocks": 900, "max_num_seqs": 64}
    check_searches(make_other("starcoder2"), config(tiny_other("starcoder2"), **settings))


async def test_leases_go_to_the_host_and_come_back(tiny_other: Callable[[str], Path]) -> None:
    await check_leases_survive(config(tiny_other("phi"), dtype="float32", num_blocks=40, host_cache_gb=0.1))
