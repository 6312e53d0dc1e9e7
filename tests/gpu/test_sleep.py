"""Sleep on a GPU: its memory is free for others meanwhile, and graphs are there again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.model_sleep import check_sleep
from tests.gpu.test_estates import config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama-head-64", "qwen3.5"])
@pytest.mark.parametrize("fields", [{}, {"enforce_eager": True}], ids=str)
async def test_leases_and_tokens_are_as_they_were(
    name: str, fields: dict[str, object], tiny_model: Callable[[str], Path]
) -> None:
    shape = {"num_blocks": 100, "state_interval": 16, "kv_cache_dtype": "auto"}
    given_back = await check_sleep(config(tiny_model(name), **(shape | fields)))
    assert given_back > 0
