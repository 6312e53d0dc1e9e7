"""Scoring on the CPU backend: the numbers of 64 separate requests, bit for bit, in one step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from tests.engine.model_scores import scores_and_singles


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3.5", "qwen3-moe", "gemma4-shared"])
async def test_scores_equal_log_probabilities_of_whole_prompts(name: str, tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(
        model=str(tiny_model(name)), max_model_len=96, num_blocks=400, block_size=4, max_num_batched_tokens=512
    )
    scored, singles, num_steps = await scores_and_singles(config)
    assert num_steps == 1
    for choice, single in zip(scored, singles, strict=True):
        assert choice.logprobs is not None and choice.finish_reason == "length"
        assert [one.logprob for one in choice.logprobs] == single
        assert choice.cumulative_logprob == sum(single)
        assert all(
            len(one.top) == 2 and one.token_id == token
            for one, token in zip(choice.logprobs, choice.token_ids, strict=True)
        )
