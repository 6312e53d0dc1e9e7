"""Sleep with the real CPU runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.types.encoder import EncoderInput
from tests.engine.model_sleep import cheap_drafts as cheap_drafts
from tests.engine.model_sleep import check_drafts, check_sleep
from tests.engine.mtp_reference import save_with_head
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
    # A cache on the host of a given size: otherwise it is a share of what others leave, which may be less later.
    sizes = {"num_blocks": 200, "max_model_len": 512, "host_cache_gb": 0.5}
    given_back = await check_sleep(EngineConfig(device="cpu", dtype="float32", **sizes))  # type: ignore[arg-type]
    assert given_back > 150e6


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
    await check_drafts(drafting("draft", tiny_model, tmp_path))
