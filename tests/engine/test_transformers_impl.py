"""The whole engine over models that transformers computes: its tokens, log-probabilities, hidden states and beams.

Alone and in a crowd, in chunks, from the prefix cache, preempted, swapped and continued. All in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.constraints.grammar import GrammarSource
from bequest.engine.types import SamplingParams
from tests.engine.direct import LLM
from tests.engine.model_leases import check_leases_survive
from tests.engine.model_states import Trial, check_states, reference_of
from tests.engine.test_against_transformers import PARAMS, Judge, check, prompts
from tests.engine.test_beams_against_transformers import check_searches
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_others import make_other

SCENARIOS = {
    "whole": EngineConfig(block_size=4, max_num_batched_tokens=4096, num_blocks=1000),
    "chunk-7": EngineConfig(block_size=16, max_num_batched_tokens=7, num_blocks=1000),
    "plain": EngineConfig(block_size=8, max_num_batched_tokens=64, num_blocks=1000, pipelined=False),
    "preempting": EngineConfig(block_size=4, max_num_batched_tokens=64, num_blocks=30, host_cache_gb=0),
    "swapping": EngineConfig(block_size=4, max_num_batched_tokens=64, num_blocks=30, host_cache_gb=0.01),
}


def config(directory: Path, base: EngineConfig | None = None, **fields: object) -> EngineConfig:
    fixed = {"model": str(directory), "dtype": "float32", "device": "cpu", "max_model_len": 96}
    return replace(base or EngineConfig(), **(fixed | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["starcoder2", "gpt-neox", "exaone4"])
def test_tokens_and_logprobs_equal_transformers(name: str, tiny_other: Callable[[str], Path]) -> None:
    asked = prompts()[1::2]
    judge = Judge(make_other(name), asked, rows=len(asked))
    for scenario, base in SCENARIOS.items():
        with LLM(config(tiny_other(name), base)) as llm:
            (alone,) = llm.generate([asked[-1]], PARAMS, progress=False)
            for round_number in range(2):  # the second round finds its prompts in the prefix cache
                answers = llm.generate(asked, PARAMS, progress=False)
                for answer, one in zip(answers, judge(answers), strict=True):
                    check(answer, one)
                hits = sum(answer.usage.cached_tokens for answer in answers)
                assert hits > 0 or round_number == 0 or scenario in ("preempting", "swapping")
            assert alone.choices[0].token_ids == answers[-1].choices[0].token_ids


@pytest.mark.parametrize("scenario", ["whole", "chunk-7", "preempting", "swapping"])
@pytest.mark.parametrize("name", ["gpt-neox", "exaone4"])
async def test_states_equal_transformers(name: str, scenario: str, tiny_other: Callable[[str], Path]) -> None:
    trial = Trial(reference_of(make_other(name)), 1e-4, VOCAB_SIZE)
    base = replace(SCENARIOS[scenario], num_blocks=41 if scenario in ("preempting", "swapping") else 400)
    num_preempted = await check_states(config(tiny_other(name), base), trial, (1, 2, 8, 9, 17, 30, 41))
    assert (num_preempted > 0) == (scenario in ("preempting", "swapping"))


def test_beams_equal_hugging_face(tiny_other: Callable[[str], Path]) -> None:
    check_searches(make_other("starcoder2"), config(tiny_other("starcoder2"), num_blocks=900, max_num_seqs=64))


async def test_leases_go_to_the_host_and_come_back(tiny_other: Callable[[str], Path]) -> None:
    await check_leases_survive(config(tiny_other("phi"), num_blocks=40, host_cache_gb=0.1))


def test_grammars_choices_and_text(tiny_other: Callable[[str], Path]) -> None:
    with LLM(config(tiny_other("stablelm"), num_blocks=200)) as llm:
        three = llm.grammar(GrammarSource("regex", "[0-9]{3}"))
        held = SamplingParams(max_tokens=8, temperature=1, seed=1, grammar=three)
        (answer,) = llm.generate(["a number:"], held, progress=False)
        assert answer.choices[0].text.isdigit() and len(answer.choices[0].text) == 3
        drawn = SamplingParams(max_tokens=6, n=3, temperature=1, seed=2, ignore_eos=True)
        (forked,) = llm.generate([prompts()[5]], drawn, progress=False)
        assert len({choice.token_ids for choice in forked.choices}) == 3
