"""Leases with the real CPU runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from tests.engine.model_leases import check_leases_survive


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
