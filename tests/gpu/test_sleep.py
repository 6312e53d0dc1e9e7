"""Sleep on a GPU: its memory is free for others meanwhile, weights wait on the host, and graphs are there again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.runner import kept_weights, prepare, prepare_draft
from tests.engine.model_sleep import cheap_drafts as cheap_drafts
from tests.engine.model_sleep import check_drafts, check_sleep
from tests.engine.test_eagle3 import save_head
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


@pytest.fixture
def draft_loads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whenever who drafts is read from files."""
    found: list[object] = []
    load = prepare_draft._load

    def noted(*rest: object) -> object:
        found.append(rest)
        return load(*rest)  # type: ignore[arg-type]

    monkeypatch.setattr(prepare_draft, "_load", noted)
    return found


@pytest.mark.parametrize("method", ["draft", "eagle3"])
async def test_beside_who_drafts(
    method: str,
    cheap_drafts: None,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    loads: list[Path],
    draft_loads: list[object],
) -> None:
    beside = tiny_model("llama") if method == "draft" else save_head(tmp_path / "head")
    settings = config(tiny_model("llama"), **SHAPE, dtype="float32", draft_model=str(beside), speculative=method)
    if method == "draft":
        await check_drafts(settings, least_right=0.9)
        assert len(loads) == len(draft_loads) == 1, "both came from the host"
    assert await check_sleep(settings) > 0
