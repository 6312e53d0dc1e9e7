"""Sleep on a GPU: its memory is free for others meanwhile, weights wait on the host, and graphs are there again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.runner import kept_weights, prepare
from tests.engine.model_sleep import check_sleep
from tests.gpu.test_estates import config

pytestmark = pytest.mark.gpu

SHAPE = {"num_blocks": 100, "state_interval": 16, "kv_cache_dtype": "auto"}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Whenever weights are read from files."""
    found: list[Path] = []
    load = prepare._load_cuda

    def noted(config: object, path: Path, *rest: object) -> object:
        found.append(path)
        return load(config, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(prepare, "_load_cuda", noted)
    return found


@pytest.mark.parametrize("name", ["llama-head-64", "qwen3.5"])
@pytest.mark.parametrize("fields", [{}, {"enforce_eager": True}], ids=str)
async def test_leases_and_tokens_are_as_they_were(
    name: str, fields: dict[str, object], tiny_model: Callable[[str], Path], loads: list[Path]
) -> None:
    given_back = await check_sleep(config(tiny_model(name), **(SHAPE | fields)))
    assert given_back > 0
    assert len(loads) == 1, "the weights came from the host"


async def test_a_host_without_room(
    tiny_model: Callable[[str], Path], loads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_weights, "host_memory", lambda: 0)
    assert await check_sleep(config(tiny_model("llama-head-64"), **SHAPE)) > 0
    assert len(loads) == 4, "one start, three times awake again"
