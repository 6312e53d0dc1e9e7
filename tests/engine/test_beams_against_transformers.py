"""Beam search of tiny random models: tokens and scores of Hugging Face's generate(num_beams), alone and in a crowd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bequest.engine.config import EngineConfig
from bequest.engine.types import BeamParams, SamplingParams
from tests.engine.direct import LLM, Completion
from tests.engine.test_against_transformers import prompts
from tests.tiny_models import make_reference

MOST = 12
PAD = 1  # Hugging Face takes 0 for none
# Width, length penalty, early stopping: every value of each beside others.
SEARCHES = [
    (2, 1.0, False),
    (2, 0.0, "never"),
    (4, 2.0, True),
    (4, 0.0, False),
    (4, 1.0, "never"),
    (32, 1.0, True),
    (32, 2.0, False),
    (32, 0.0, "never"),
]


@dataclass(frozen=True)
class Found:
    """The answers to a prompt, best first, with what pads them, and their scores."""

    tokens: list[list[int]]
    scores: list[float]


def expect(
    reference: Any, asked: Sequence[Sequence[int]], width: int, penalty: float, stopping: Any, eos: list[int]
) -> list[Found]:
    """Of all prompts at once, with padding before them: several take the library as long as one."""
    longest, count = max(map(len, asked)), min(width, 4)
    with torch.no_grad():
        found = reference.generate(
            torch.tensor([[PAD] * (longest - len(prompt)) + list(prompt) for prompt in asked]),
            attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in asked]),
            num_beams=width,
            num_return_sequences=count,
            max_new_tokens=MOST,
            length_penalty=penalty,
            early_stopping=stopping,
            eos_token_id=eos,
            pad_token_id=PAD,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    tokens, scores = found.sequences[:, longest:].tolist(), found.sequences_scores.tolist()
    of_prompts = [slice(first, first + count) for first in range(0, len(tokens), count)]
    return [Found(tokens[rows], scores[rows]) for rows in of_prompts]


def check(answer: Completion, expected: Found) -> None:
    assert len(answer.choices) == len(expected.scores)
    for choice, row, score in zip(answer.choices, expected.tokens, expected.scores, strict=True):
        tokens = list(choice.token_ids)
        assert tokens == row[: len(tokens)]
        assert all(token == PAD for token in row[len(tokens) :])
        assert choice.beam_score == pytest.approx(score, abs=1e-4)


def search(width: int, penalty: float, stopping: Any, eos: list[int]) -> SamplingParams:
    """Ends are told as stop tokens: the tiny models' own end token hardly ever comes."""
    return SamplingParams(
        max_tokens=MOST,
        n=min(width, 4),
        temperature=0,
        stop_token_ids=frozenset(eos),
        ignore_eos=True,
        beams=BeamParams(width, penalty, stopping),
    )


def check_searches(reference: Any, config: EngineConfig, *, is_exact: bool = True) -> None:
    """`is_exact`: the reference rounds nothing. One that rounds its cache gives other scores beside padding."""
    asked = prompts()[:3]
    eos = likely_ends(reference, asked)
    with LLM(config) as llm:
        crowd, expected = [], list[Found]()
        for width, penalty, stopping in SEARCHES:
            for part in [asked] if is_exact else [[prompt] for prompt in asked]:
                expected += expect(reference, part, width, penalty, stopping, eos)
            crowd += [(prompt, search(width, penalty, stopping, eos)) for prompt in asked]
        for (prompt, params), one in list(zip(crowd, expected, strict=True))[::5]:
            check(llm.generate([prompt], params, progress=False)[0], one)
        together = llm.generate([p for p, _ in crowd], [params for _, params in crowd], progress=False)
        for answer, one in zip(together, expected, strict=True):
            check(answer, one)
        ends = sum(c.finish_reason == "stop" for answer in together for c in answer.choices)
        assert ends > len(together) // 4, "the ends must be tried too"


def likely_ends(reference: Any, asked: Sequence[Sequence[int]]) -> list[int]:
    """Two tokens that beams of these prompts come by."""
    [seen] = expect(reference, asked[:1], 4, 1.0, False, [10**6])
    return sorted({seen.tokens[0][4], seen.tokens[1][6]})


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4", "qwen3.5", "mixtral", "gemma4-shared"])
def test_equals_hugging_face(name: str, tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(
        model=str(tiny_model(name)), device="cpu", dtype="float32", max_model_len=96, num_blocks=900, max_num_seqs=64
    )
    check_searches(make_reference(name), config)


def test_beams_and_samples_of_a_step_keep_to_their_own_logits(tiny_model: Callable[[str], Path]) -> None:
    """Searches stand before sampled requests in a step, behind them and between them."""
    asked = [prompt for prompt in prompts()[:3] for _ in range(2)]
    kinds = [search(4, 1.0, False, [5]), SamplingParams(max_tokens=MOST, temperature=0, ignore_eos=True)]
    with LLM(EngineConfig(model=str(tiny_model("llama")), num_blocks=256, max_num_seqs=32)) as llm:
        alone = [llm.generate([p], k, progress=False)[0] for p, k in zip(asked, kinds * 3, strict=True)]
        together = llm.generate(asked, kinds * 3, progress=False)
    for one, other in zip(alone, together, strict=True):
        assert [choice.token_ids for choice in one.choices] == [choice.token_ids for choice in other.choices]
