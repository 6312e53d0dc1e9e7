"""Leases in files on a GPU: blocks, cross blocks and recurrent states come back behind a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.runner import cuda_blocks
from bequest.engine.types.encoder import EncoderInput
from tests.engine.model_estates import check_estates_move
from tests.engine.model_vault import check_leases_last
from tests.engine.test_encoder_decoder_models import save_model
from tests.gpu.test_estates import config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama-head-64", "gemma3", "qwen3.5"])
async def test_leases_come_back(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    shape = {"num_blocks": 200, "estate_dir": str(tmp_path / "e"), "state_interval": 16}
    await check_leases_last(config(tiny_model(name), **shape))


async def test_more_blocks_than_buffers(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On their way to the device they pass through pinned ones, which are used again."""
    monkeypatch.setattr(cuda_blocks, "_BUFFER_BYTES", 1)
    monkeypatch.setattr(cuda_blocks, "_NUM_BUFFERS", 2)
    await check_leases_last(config(tiny_model("llama-head-64"), num_blocks=200, estate_dir=str(tmp_path / "e")))


async def test_of_encoder_inputs(tmp_path: Path) -> None:
    shape = {"max_model_len": 60, "max_encoder_len": 41, "num_blocks": 45, "estate_dir": str(tmp_path / "e")}
    await check_leases_last(config(save_model("t5", tmp_path), **shape), EncoderInput.of_tokens(range(20, 53)))


async def test_recurrent_states_travel(tiny_model: Callable[[str], Path]) -> None:
    await check_estates_move(config(tiny_model("qwen3.5"), num_blocks=60, state_interval=16), flood=False)
