"""Sleep with the real CPU runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.types.encoder import EncoderInput
from tests.engine.model_sleep import check_sleep
from tests.engine.test_encoder_decoder_models import save_model
from tests.engine.test_estates_on_a_model import ENCODER, config


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
async def test_leases_and_tokens_are_as_they_were(name: str, tiny_model: Callable[[str], Path]) -> None:
    await check_sleep(config(tiny_model(name), num_blocks=100, state_interval=16))


async def test_of_an_encoder_decoder_model(tmp_path: Path) -> None:
    await check_sleep(config(save_model("t5", tmp_path), **ENCODER), EncoderInput.of_tokens(range(20, 53)))


async def test_a_real_model_gives_its_memory_back() -> None:
    """Weights of more than a hundred megabytes, and as much of the cache."""
    given_back = await check_sleep(EngineConfig(device="cpu", dtype="float32", num_blocks=200, max_model_len=512))
    assert given_back > 150e6
