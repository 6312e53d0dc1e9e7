"""Whole engine, real kernels: greedy tokens and log-probabilities are those of transformers, however the work is cut.

Scenarios: alone, a crowd of 16 with mixed lengths, chunks of 1 (of a fourth of the crowd: it takes a step for every
token), 7 and 64, a second round of prefix hits, and a cache so small that it preempts, on one thread and on two. All in
float32, where our own results must not differ between scenarios by one bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bequest.engine.config import EngineConfig
from bequest.engine.types import SamplingParams
from tests.engine.direct import LLM, Completion
from tests.tiny_models import VOCAB_SIZE, make_reference

NUM_TOKENS = 12
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=3, ignore_eos=True)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 30, 31, 33, 60, 64)

SCENARIOS = {
    "whole": EngineConfig(block_size=4, max_num_batched_tokens=4096, max_model_len=96, num_blocks=1000, threads=2),
    "chunk-1": EngineConfig(block_size=4, max_num_batched_tokens=1, max_model_len=96, num_blocks=1000),
    "chunk-7": EngineConfig(block_size=16, max_num_batched_tokens=7, max_model_len=96, num_blocks=1000),
    "chunk-64-plain": EngineConfig(
        block_size=8, max_num_batched_tokens=64, max_model_len=96, num_blocks=1000, pipelined=False
    ),
    "preempting": EngineConfig(block_size=4, max_num_batched_tokens=64, max_model_len=96, num_blocks=30),
}


@dataclass(frozen=True)
class Expected:
    """What transformers says behind each prefix of an answer: the best token, and the log-probabilities of all."""

    tokens: list[int]
    logprobs: torch.Tensor  # [tokens, V]


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    common = [draw.randrange(3, VOCAB_SIZE) for _ in range(64)]
    return [common[: n // 2] + [draw.randrange(3, VOCAB_SIZE) for _ in range(n - n // 2)] for n in LENGTHS]


@torch.no_grad()
def expect(model: torch.nn.Module, prompt: list[int]) -> Expected:
    """What the model generates, token by token: slow, for those who have no answer to judge."""
    tokens = list(prompt)
    rows = []
    for _ in range(NUM_TOKENS):
        logits = model(torch.tensor([tokens])).logits[0, -1].double()
        rows.append(logits.log_softmax(-1))
        tokens.append(int(logits.argmax()))
    return Expected(tokens[len(prompt) :], torch.stack(rows))


class Judge:
    """What a model of transformers says of answers to the prompts, in passes of `rows` over those that it has not seen.

    If each token of an answer is the best one behind those before, then it is what the model generates. Rows of a pass
    are filled up behind their ends, where nobody looks."""

    def __init__(
        self, model: torch.nn.Module, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, rows: int = 1
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._num_tokens = num_tokens
        self._rows = rows
        self._seen: dict[tuple[int, ...], Expected] = {}

    def __call__(self, answers: Sequence[Completion], every: int = 1) -> list[Expected]:
        """Answers to all prompts, or to `every` fourth of them, say."""
        wholes: list[tuple[int, ...]] = []
        for prompt, answer in zip(self._prompts[::every], answers, strict=True):
            assert len(answer.choices[0].token_ids) == self._num_tokens
            wholes.append((*prompt, *answer.choices[0].token_ids))
        unseen = [whole for whole in dict.fromkeys(wholes) if whole not in self._seen]
        for begin in range(0, len(unseen), self._rows):
            self._look(unseen[begin : begin + self._rows])
        return [self._seen[whole] for whole in wholes]

    @torch.no_grad()
    def _look(self, wholes: Sequence[tuple[int, ...]]) -> None:
        longest = max(map(len, wholes))
        filled = torch.tensor([whole + whole[-1:] * (longest - len(whole)) for whole in wholes])
        for whole, row in zip(wholes, self._model(filled).logits, strict=True):
            logits = row[len(whole) - self._num_tokens - 1 : len(whole) - 1].double()
            self._seen[whole] = Expected(logits.argmax(-1).tolist(), logits.log_softmax(-1))


def check(completion: Completion, expected: Expected) -> None:
    (choice,) = completion.choices
    assert list(choice.token_ids) == expected.tokens
    told = choice.logprobs
    assert told is not None and len(told) == len(expected.logprobs)
    best = expected.logprobs.topk(3)
    check_close([one.logprob for one in told], best.values[:, 0])  # its tokens are the best ones
    check_close([[value for _, value in one.top] for one in told], best.values)
    assert [[token for token, _ in one.top] for one in told] == best.indices.tolist()
    assert all(one.rank == 1 for one in told)


def check_close(told: Sequence[object], expected: torch.Tensor) -> None:
    """All at once: pytest.approx takes longer over its numbers than the engine to compute them."""
    errors = (torch.tensor(told, dtype=torch.float64) - expected).abs()
    most = (1e-3 * expected.abs()).clamp(min=1e-5)
    assert (errors <= most).all(), f"off by up to {float((errors / most).max()):.3g} of what is allowed"


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "phi3", "glm4", "granite"),
        *("olmo3", "gemma3", "cohere2", "qwen3.5", "qwen3-next"),
        *("mixtral", "qwen2-moe", "glm4-moe", "olmoe", "gpt-oss"),
        *("gemma4", "gemma4-keys", "gemma4-shared", "gemma4-experts"),
    ],
)
def test_tokens_and_logprobs_equal_transformers(name: str, tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model(name)
    judge = Judge(make_reference(name), prompts(), rows=len(LENGTHS))
    seen: dict[tuple[int, ...], object] = {}
    for scenario, config in SCENARIOS.items():
        every = 4 if scenario == "chunk-1" else 1
        asked = prompts()[::every]
        config = EngineConfig(
            model=str(directory),
            dtype="float32",
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            pipelined=config.pipelined,
            threads=config.threads,
        )
        with LLM(config) as llm:
            (alone,) = llm.generate([asked[-1]], PARAMS, progress=False)
            for round_number in range(2):  # the second round finds its prompts in the prefix cache
                answers = llm.generate(asked, PARAMS, progress=False)
                for answer, one in zip(answers, judge(answers, every), strict=True):
                    check(answer, one)
                hits = sum(answer.usage.cached_tokens for answer in answers)
                assert hits > 0 or round_number == 0 or scenario == "preempting"
            assert alone.choices[0].token_ids == answers[-1].choices[0].token_ids
        for answer in (alone, *answers):
            told = answer.choices[0].logprobs
            same = seen.setdefault(answer.prompt_token_ids, told) == told
            assert same, "the same request, cut another way, must give the same bits"


def test_prompt_logprobs_equal_transformers(tiny_model: Callable[[str], Path]) -> None:
    reference = make_reference("qwen3")
    config = EngineConfig(
        model=str(tiny_model("qwen3")), dtype="float32", block_size=4, max_num_batched_tokens=7, max_model_len=96,
        num_blocks=100,
    )  # fmt: skip
    prompt = prompts()[-1]
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    with torch.no_grad():
        rows = reference(torch.tensor([prompt])).logits[0].double().log_softmax(-1)  # [P, V]
    with LLM(config) as llm:
        (answer,) = llm.generate([prompt], params, progress=False)
    told = answer.prompt_logprobs
    assert told is not None and told[0] is None and len(told) == len(prompt)
    for position, one in enumerate(told[1:]):
        assert one is not None and one.token_id == prompt[position + 1]
        row = rows[position]
        assert one.logprob == pytest.approx(float(row[one.token_id]), rel=1e-3, abs=1e-5)
        assert one.rank == int((row > row[one.token_id]).sum()) + 1
        assert [token for token, _ in one.top] == row.topk(2).indices.tolist()


def test_n_choices_are_those_of_n_requests(tiny_model: Callable[[str], Path]) -> None:
    """A choice's random numbers depend on (seed, choice, position): forking changes nothing, nor does the crowd."""
    config = EngineConfig(
        model=str(tiny_model("llama")), dtype="float32", block_size=4, max_model_len=96, num_blocks=400
    )
    prompt = prompts()[9]
    with LLM(config) as llm:
        params = SamplingParams(max_tokens=10, n=4, temperature=1, top_p=0.95, seed=11, ignore_eos=True)
        (forked,) = llm.generate([prompt], params, progress=False)
        crowd = llm.generate([prompt, *prompts()], params, progress=False)[0]
        assert [c.token_ids for c in forked.choices] == [c.token_ids for c in crowd.choices]
        assert len({c.token_ids for c in forked.choices}) == 4
        one = SamplingParams(max_tokens=10, n=1, temperature=1, top_p=0.95, seed=11, ignore_eos=True)
        (single,) = llm.generate([prompt], one, progress=False)
        assert single.choices[0].token_ids == forked.choices[0].token_ids


@pytest.mark.parametrize("text", ["The capital of France is", "Once upon a time"])
def test_stop_strings_never_leak(text: str, tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(tiny_model("llama")), dtype="float32", max_model_len=200, num_blocks=100)
    with LLM(config) as llm:
        free = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        whole = llm.generate([text], free, progress=False)[0].choices[0].text
        stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, stop=(stop,))
        (answer,) = llm.generate([text], params, progress=False)
        assert answer.choices[0].text == whole[: whole.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].stop_reason == stop
