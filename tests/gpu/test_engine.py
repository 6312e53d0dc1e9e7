"""The whole engine on a GPU: the tokens of transformers in float32, and in bfloat16 as far as its gaps allow; graphs
against eager steps, pipelined against plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bequest.engine.config import EngineConfig
from bequest.engine.types import BeamParams, SamplingParams
from tests.engine.direct import LLM, Completion
from tests.engine.model_leases import check_leases_survive, check_states_survive
from tests.engine.test_against_transformers import PARAMS, Judge, check, prompts
from tests.engine.test_beams_against_transformers import check_searches
from tests.engine.test_experts_read import check_experts_read
from tests.engine.test_nan import check_nan_fails_its_request_alone, poisoned_model
from tests.tiny_models import make_reference

pytestmark = pytest.mark.gpu

# Two logits this near may change places in bfloat16, where a value of 8 is known to 1/32.
BF16_GAP = 0.25
OTHERS = [
    "granite",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "gpt-oss",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-keys",
    "gemma4-shared",
    "gemma4-experts",
    "cohere",
    "cohere-plus",
    "cohere2",
    "qwen3.5",
    "qwen3.5-wide",
    "qwen3-next",
    "qwen3.5-moe",
]


def config(directory: Path, **fields: object) -> EngineConfig:
    shape = {
        "block_size": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 96,
        "num_blocks": 400,
        "max_num_seqs": 32,
    }
    return EngineConfig(model=str(directory), device="cuda", **(shape | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "phi3", "glm", "glm4", *OTHERS]
)
@pytest.mark.parametrize("chunk", [7, 256])
def test_float32_equals_transformers(name: str, chunk: int, tiny_model: Callable[[str], Path]) -> None:
    asked = prompts()
    judge = Judge(make_reference(name), asked)
    settings = {"dtype": "float32", "max_num_batched_tokens": chunk}
    for fields in ({}, {"num_blocks": 20}, {"enforce_eager": True}, {"pipelined": False}):
        with LLM(config(tiny_model(name), **(settings | fields))) as llm:
            for _ in range(2):  # the second round finds its prompts in the prefix cache
                answers = llm.generate(asked, PARAMS, progress=False)
                for answer, one in zip(answers, judge(answers), strict=True):
                    check(answer, one)


# The third and the fourth are padded.
@pytest.mark.parametrize(
    "name",
    [
        "llama-head-64",
        "qwen3-head-128",
        "qwen3-stacked",
        "llama-odd-head",
        "qwen3",
        "qwen2-wide",
        "smollm3",
        "olmo3",
        "gemma3",
        "gemma4-64",
        "gemma4-256",
        "cohere2",
        "qwen3.5-wide",
    ],
)
def test_bfloat16_differs_only_where_two_logits_are_near(name: str, tiny_model: Callable[[str], Path]) -> None:
    asked = prompts()
    judge = Judge(make_reference(name), asked)
    with LLM(config(tiny_model(name), dtype="bfloat16")) as llm:
        answers = llm.generate(asked, PARAMS, progress=False)
    equal = 0
    for answer, one in zip(answers, judge(answers), strict=True):
        tokens = list(answer.choices[0].token_ids)
        first = next((i for i, (a, b) in enumerate(zip(tokens, one.tokens, strict=True)) if a != b), None)
        if first is None:
            equal += 1
            continue
        best, ours = one.logprobs[first].max(), one.logprobs[first][tokens[first]]
        assert best - ours < BF16_GAP, f"token {first}: {tokens[first]} lies {best - ours:.3f} under the best"
    assert equal >= len(asked) // 2


@pytest.mark.parametrize(
    "name", ["llama-head-64", "qwen3-head-128", "qwen3-stacked", "qwen2-wide", "qwen3-moe-wide", "qwen3.5-moe-wide"]
)
def test_graphs_and_eager_steps_sample_alike(name: str, tiny_model: Callable[[str], Path]) -> None:
    """A step that fits its graph exactly runs the same kernels on the same shapes: equal to the bit."""
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, top_k=40, seed=3, ignore_eos=True, logprobs=2)

    def run(**fields: object) -> list[Completion]:
        with LLM(config(tiny_model(name), max_num_seqs=16, **fields)) as llm:
            return [llm.generate([prompt], params, progress=False)[0] for prompt in prompts()[:4]]

    graph, eager, plain = run(), run(enforce_eager=True), run(pipelined=False)
    for a, b, c in zip(graph, eager, plain, strict=True):
        assert a.choices[0].token_ids == b.choices[0].token_ids == c.choices[0].token_ids


def test_the_crowd_shares_a_prompt_and_forks(tiny_model: Callable[[str], Path]) -> None:
    params = SamplingParams(max_tokens=12, n=8, temperature=1.0, seed=5, ignore_eos=True)
    with LLM(config(tiny_model("llama-head-64"), dtype="float32")) as llm:
        (forked,) = llm.generate([prompts()[10]], params, progress=False)
        again = llm.generate([prompts()[10], *prompts()[:3]], params, progress=False)[0]
        assert len({c.token_ids for c in forked.choices}) == 8
        assert [c.token_ids for c in forked.choices] == [c.token_ids for c in again.choices]


def test_penalties_masks_and_bias_reach_the_device(tiny_model: Callable[[str], Path]) -> None:
    def tokens(**fields: object) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, **fields)  # type: ignore[arg-type]
        return llm.generate([prompts()[5]], params, progress=False)[0].choices[0].token_ids

    with LLM(config(tiny_model("llama-head-64"), dtype="float32")) as llm:
        free = tokens()
        assert set(tokens(allowed_token_ids=(7, 8, 9))) <= {7, 8, 9}
        assert set(tokens(logit_bias=((11, 100.0),))) == {11}
        assert free[0] not in tokens(bad_words=((free[0],),))
        penalised = tokens(repetition_penalty=5.0, frequency_penalty=2.0)
        assert len(set(penalised)) > len(set(free)) or len(set(free)) == len(free)


def test_prompt_logprobs(tiny_model: Callable[[str], Path]) -> None:
    reference, prompt = make_reference("qwen3"), prompts()[-1]
    with torch.no_grad():
        rows = reference(torch.tensor([prompt])).logits[0].double().log_softmax(-1)  # [P, V]
    with LLM(config(tiny_model("qwen3"), dtype="float32", max_num_batched_tokens=16)) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
        told = llm.generate([prompt], params, progress=False)[0].prompt_logprobs
    assert told is not None and told[0] is None
    for position, one in enumerate(told[1:]):
        assert one is not None and one.logprob == pytest.approx(float(rows[position][prompt[position + 1]]), abs=1e-3)


def test_nan_fails_its_request_alone(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    check_nan_fails_its_request_alone(config(poisoned_model(tiny_model("llama-head-64"), tmp_path), dtype="bfloat16"))


@pytest.mark.parametrize("pipelined", [True, False])
async def test_leases_go_to_the_host_and_come_back(pipelined: bool, tiny_model: Callable[[str], Path]) -> None:
    fields = {"dtype": "float32", "num_blocks": 40, "host_cache_gb": 0.1, "pipelined": pipelined}
    await check_leases_survive(config(tiny_model("llama-head-64"), **fields))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_beams_equal_hugging_face(name: str, tiny_model: Callable[[str], Path]) -> None:
    check_searches(make_reference(name), config(tiny_model(name), dtype="float32", num_blocks=900, max_num_seqs=64))


def test_a_group_wider_than_all_graphs(tiny_model: Callable[[str], Path]) -> None:
    params = SamplingParams(max_tokens=3, n=2, temperature=0, beams=BeamParams(300))
    settings = {"dtype": "float32", "num_blocks": 3000, "max_num_seqs": 16}
    with LLM(config(tiny_model("llama-head-64"), **settings)) as llm:
        (wide,) = llm.generate([prompts()[3]], params, progress=False)
        assert [len(choice.token_ids) for choice in wide.choices] == [3, 3]
        scores = [choice.beam_score for choice in wide.choices]
        assert scores[0] is not None and scores[1] is not None and scores[0] >= scores[1]


# Kernel by kernel, and in the chain of a single stream.
@pytest.mark.parametrize(("name", "dtype"), [("qwen3-moe", "float32"), ("qwen3-moe-wide", "bfloat16")])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_experts_read(name: str, dtype: str, enforce_eager: bool, tiny_model: Callable[[str], Path]) -> None:
    fields = {"device": "cuda", "dtype": dtype, "enforce_eager": enforce_eager}
    check_experts_read(name, tiny_model(name), is_exact=dtype == "float32", **fields)


async def test_states_go_to_the_host_and_come_back(tiny_model: Callable[[str], Path]) -> None:
    fields = {"dtype": "float32", "num_blocks": 40, "max_num_seqs": 2, "state_interval": 64, "host_cache_gb": 0.05}
    await check_states_survive(config(tiny_model("qwen3.5"), **fields))
