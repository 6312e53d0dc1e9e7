"""Whole engine, real kernels: every layer's state of every position is that of transformers, however it was come by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from tests.engine.model_states import Reference, Trial, check_states, reference_of
from tests.tiny_models import VOCAB_SIZE, make_reference

LENGTHS = (1, 7, 8, 9, 17, 30, 41)

SCENARIOS = {
    "whole": EngineConfig(block_size=4, max_num_batched_tokens=4096, num_blocks=400),
    "chunk-7": EngineConfig(block_size=8, max_num_batched_tokens=7, num_blocks=200),
    "plain": EngineConfig(block_size=4, max_num_batched_tokens=64, num_blocks=400, pipelined=False),
    "no-index": EngineConfig(block_size=4, max_num_batched_tokens=64, num_blocks=400, enable_prefix_caching=False),
    "preempting": EngineConfig(block_size=4, max_num_batched_tokens=64, num_blocks=41, host_cache_gb=0),
    "swapping": EngineConfig(block_size=4, max_num_batched_tokens=64, num_blocks=41, host_cache_gb=0.01),
}


@cache
def reference(name: str) -> Reference:
    """Scenarios ask for the same states: they are computed once."""
    return reference_of(make_reference(name))


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "smollm3", "glm4", "granite", "olmo2", "qwen3.5", "qwen2-moe"),
        *("gemma4-keys", "gemma4-shared", "gemma4-experts"),
    ],
)
async def test_states_equal_transformers(name: str, scenario: str, tiny_model: Callable[[str], Path]) -> None:
    config = replace(SCENARIOS[scenario], model=str(tiny_model(name)), dtype="float32", device="cpu", max_model_len=96)
    trial = Trial(reference(name), 1e-4, VOCAB_SIZE, recurrent=name.startswith("qwen3.5"))
    num_preempted = await check_states(config, trial, LENGTHS)
    assert (num_preempted > 0) == (scenario in ("preempting", "swapping"))
