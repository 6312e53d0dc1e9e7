"""Hidden states on a GPU: those of transformers in float32, near them in bfloat16; with graphs and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bequest.engine.config import EngineConfig
from tests.engine.model_states import Trial, check_states, reference_of
from tests.tiny_models import VOCAB_SIZE, make_reference

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 15, 16, 17, 41)
# Relative to the largest value of a layer. Transformers' own states in bfloat16 lie up to 0.04 from those in float32.
BF16_TOLERANCE = 0.06

SCENARIOS: dict[str, dict[str, object]] = {
    "graphs": {},
    "chunk-7": {"max_num_batched_tokens": 7},
    "preempting": {"num_blocks": 20},
    "eager": {"enforce_eager": True},
    "plain": {"pipelined": False, "enforce_eager": True},
}


def config(directory: Path, **fields: object) -> EngineConfig:
    shape = {"block_size": 16, "max_num_batched_tokens": 256, "max_model_len": 96, "num_blocks": 200, "max_num_seqs": 8}
    return EngineConfig(model=str(directory), device="cuda", **(shape | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
async def test_float32_equals_transformers(name: str, scenario: str, tiny_model: Callable[[str], Path]) -> None:
    trial = Trial(reference_of(make_reference(name)), 1e-4, VOCAB_SIZE)
    await check_states(config(tiny_model(name), dtype="float32", **SCENARIOS[scenario]), trial, LENGTHS)


@pytest.mark.parametrize(
    "name", ["llama-head-64", "qwen3-head-128", "qwen3-stacked", "qwen2-wide", "qwen3", "olmo2"]
)  # the last two padded
async def test_bfloat16_is_near(name: str, tiny_model: Callable[[str], Path]) -> None:
    reference = make_reference(name).to(torch.bfloat16).float()
    trial = Trial(reference_of(reference), BF16_TOLERANCE, VOCAB_SIZE)
    await check_states(config(tiny_model(name), dtype="bfloat16"), trial, LENGTHS)
