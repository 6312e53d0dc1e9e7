"""Estates on a GPU: bytes of blocks leave through pinned memory and come back, between steps, swapped out or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.types.encoder import EncoderInput
from tests.engine.model_estates import check_estates_move
from tests.engine.test_encoder_decoder_models import save_model

pytestmark = pytest.mark.gpu


def config(model: Path, **fields: object) -> EngineConfig:
    shape: dict[str, object] = {
        "block_size": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 96,
        "max_num_seqs": 32,
        "num_blocks": 40,
        "host_cache_gb": 0.1,
        "dtype": "float32",
    }
    return EngineConfig(model=str(model), device="cuda", **(shape | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{}, {"enforce_eager": True, "pipelined": False}], ids=str)
async def test_estates_move_between_engines(fields: dict[str, object], tiny_model: Callable[[str], Path]) -> None:
    await check_estates_move(config(tiny_model("llama-head-64"), **fields))


async def test_estates_of_an_encoder_decoder_model(tmp_path: Path) -> None:
    model = config(save_model("t5", tmp_path), max_model_len=60, max_encoder_len=41, num_blocks=45)
    await check_estates_move(model, EncoderInput.of_tokens(range(20, 53)))
