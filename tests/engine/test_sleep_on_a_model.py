"""Sleep with the real CPU runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.runner.prepare_draft import LoadedDrafts
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.speculation import DraftCosts, ModelDrafts
from tests.engine.harness import ask, request
from tests.engine.model_sleep import GREEDY, check_sleep
from tests.engine.mtp_reference import save_with_head
from tests.engine.test_draft_model import Watcher
from tests.engine.test_eagle3 import save_head
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


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever drafts counts as small, however large it is."""

    def drafts(self: LoadedDrafts, costs: DraftCosts, one_pass: float | None = None) -> ModelDrafts:
        return ModelDrafts(method=self.method, costs=costs)

    monkeypatch.setattr(LoadedDrafts, "drafts", drafts)


def drafting(method: str, tiny_model: Callable[[str], Path], folder: Path) -> EngineConfig:
    """With a model that drafts for itself, or with a head."""
    if method == "mtp":
        model = save_with_head("qwen3.5", folder / "model")
        return config(model, num_blocks=100, state_interval=16, speculative=method)
    beside = tiny_model("llama") if method == "draft" else save_head(folder / "head")
    return config(tiny_model("llama"), num_blocks=100, draft_model=str(beside), speculative=method)


@pytest.mark.parametrize("method", ["draft", "eagle3", "mtp"])
async def test_beside_who_drafts(
    method: str, cheap_drafts: None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    await check_sleep(drafting(method, tiny_model, tmp_path))


async def test_drafts_are_as_right_as_they_were(
    cheap_drafts: None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    watcher = Watcher()
    engine = (await build_engine(drafting("draft", tiny_model, tmp_path), watcher)).engine
    try:
        for number in range(3):
            before = watcher.drafted
            await ask(engine, request([1 + number, *range(5, 45)], GREEDY))
            assert watcher.accepted == watcher.drafted > before
            await engine.sleep(wakes_itself=True)
    finally:
        await engine.stop()
