"""Leases with the real CPU runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from tests.engine.model_leases import check_leases_survive, check_states_survive


@pytest.mark.parametrize("pipelined", [True, False])
async def test_leases_go_to_the_host_and_come_back(pipelined: bool, tiny_model: Callable[[str], Path]) -> None:
    await check_leases_survive(
        EngineConfig(
            model=str(tiny_model("llama")),
            device="cpu",
            dtype="float32",
            max_model_len=96,
            num_blocks=40,
            host_cache_gb=0.1,
            pipelined=pipelined,
        )
    )


async def test_states_go_to_the_host_and_come_back(tiny_model: Callable[[str], Path]) -> None:
    await check_states_survive(
        EngineConfig(
            model=str(tiny_model("qwen3.5")),
            device="cpu",
            dtype="float32",
            block_size=16,
            num_blocks=40,
            max_num_seqs=2,
            max_model_len=96,
            state_interval=64,
            host_cache_gb=0.01,
        )
    )
