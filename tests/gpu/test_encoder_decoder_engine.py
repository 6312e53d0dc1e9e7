"""Encoder-decoder models through the whole engine on a GPU: tokens and beams of transformers in float32, with graphs
and eagerly, swapped out and in; in bfloat16 as far as its gaps allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from tests.engine.direct import LLM
from tests.engine.test_encoder_decoder_models import GREEDY, check_engine, make_cases, save_model

pytestmark = pytest.mark.gpu

NAMES = ["bart", "mbart", "t5", "t5-gated-untied", "whisper"]
BF16_GAP = 0.25  # of two logits that may change places


def config(directory: Path, dtype: str) -> EngineConfig:
    return EngineConfig(
        model=str(directory),
        device="cuda",
        dtype=dtype,  # type: ignore[arg-type]
        block_size=16,
        num_blocks=300,
        max_model_len=40,
        max_encoder_len=41,
        max_num_encoder_tokens=60,
        max_num_seqs=16,
        max_num_batched_tokens=64,
    )


@pytest.mark.parametrize("name", NAMES)
def test_float32_equals_transformers(name: str, tmp_path: Path) -> None:
    cases, graphs = make_cases(name), config(save_model(name, tmp_path), "float32")
    check_engine(cases, graphs, swaps=False)
    eager = replace(graphs, enforce_eager=True, pipelined=False, block_size=4, num_blocks=28, host_cache_gb=0.1)
    check_engine(cases, eager, swaps=True)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_differs_only_where_two_logits_are_near(name: str, tmp_path: Path) -> None:
    cases = make_cases(name)
    with LLM(config(save_model(name, tmp_path), "bfloat16")) as llm:
        answers = llm.generate(cases.asked, GREEDY, progress=False)
    equal = 0
    for answer, prompt, one in zip(answers, cases.prompts, cases.greedy, strict=True):
        tokens, wanted = list(answer.choices[0].token_ids), one.sequences[0].tolist()[len(prompt) :]
        first = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), None)
        if first is None:
            equal += 1
            continue
        scores = one.scores[first][0]
        gap = float(scores.max() - scores[tokens[first]])
        assert gap < BF16_GAP * max(1.0, float(scores[scores.isfinite()].std())), f"token {first} lies {gap:.3f} under"
    assert equal >= len(answers) // 2
