"""Leases in files with the real CPU runner: every kind of cache comes back behind a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bequest.engine.types.encoder import EncoderInput
from tests.engine.model_estates import check_estates_move
from tests.engine.model_vault import check_leases_last
from tests.engine.test_encoder_decoder_models import save_model
from tests.engine.test_estates_on_a_model import ENCODER, config


@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}], ids=str)
async def test_of_a_decoder(fields: dict[str, object], tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    await check_leases_last(config(tiny_model("llama"), estate_dir=str(tmp_path / "e"), **fields))


@pytest.mark.parametrize("name", ["gemma3", "gemma4-shared", "gpt-oss", "qwen3.5"])
async def test_of_windows_and_recurrent_layers(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    shape = {"num_blocks": 200, "estate_dir": str(tmp_path / "e"), "state_interval": 16}
    await check_leases_last(config(tiny_model(name), **shape))


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
async def test_of_encoder_inputs(name: str, tmp_path: Path) -> None:
    encoder = EncoderInput.of_tokens(range(20, 53))
    if name == "whisper":
        features = np.random.default_rng(1).normal(size=(10, 82)).astype(np.float32)
        encoder = EncoderInput.of_audio(features, 2)
    await check_leases_last(config(save_model(name, tmp_path), **ENCODER, estate_dir=str(tmp_path / "e")), encoder)


async def test_recurrent_states_travel(tiny_model: Callable[[str], Path]) -> None:
    await check_estates_move(config(tiny_model("qwen3.5"), num_blocks=60, state_interval=16), flood=False)
