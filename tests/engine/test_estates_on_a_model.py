"""Estates with the real CPU runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.fingerprint import Fingerprint
from bequest.engine.replay import replay_file
from bequest.engine.types.encoder import EncoderInput
from tests.engine.model_estates import check_estates_move
from tests.engine.test_encoder_decoder_models import save_model

ENCODER: dict[str, object] = {"max_model_len": 60, "max_encoder_len": 41, "num_blocks": 45}


def config(model: Path, **fields: object) -> EngineConfig:
    shape: dict[str, object] = {"max_model_len": 96, "num_blocks": 40, "host_cache_gb": 0.1, "dtype": "float32"}
    return EngineConfig(model=str(model), device="cpu", **(shape | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{}, {"pipelined": False}, {"kv_cache_dtype": "fp8"}], ids=str)
async def test_estates_move_between_engines(fields: dict[str, object], tiny_model: Callable[[str], Path]) -> None:
    await check_estates_move(config(tiny_model("llama"), **fields))


@pytest.mark.parametrize("name", ["t5", "bart"])
async def test_estates_of_an_encoder_decoder_model(name: str, tmp_path: Path) -> None:
    encoder = EncoderInput.of_tokens(range(20, 53))
    await check_estates_move(config(save_model(name, tmp_path), **ENCODER), encoder)


async def test_a_recording_holds_what_came_from_elsewhere(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "recording"
    await check_estates_move(config(tiny_model("llama"), record=str(path)))
    for part in (path, tmp_path / "recording.1"):  # of the two engines
        replayed, whole = replay_file(part)
        assert whole and replayed.difference is None and replayed.num_compared > 20


async def test_estates_of_audio(tmp_path: Path) -> None:
    model = save_model("whisper", tmp_path)
    features = np.random.default_rng(1).normal(size=(10, 82)).astype(np.float32)
    encoder = EncoderInput.of_audio(features, 2)
    await check_estates_move(config(model, **ENCODER), encoder)


def test_a_fingerprint_is_the_files(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    first, again, other = (Fingerprint(tiny_model(name))() for name in ("llama", "llama", "qwen3"))
    assert Fingerprint(tiny_model("llama"), "fp8")() != first
    assert first == again != other


def test_a_large_file_is_sampled_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bequest.engine.fingerprint._SMALL", 0)
    file = tmp_path / "model.gguf"
    content = bytearray(300_000)
    file.write_bytes(content)
    before = Fingerprint(file)()
    for first in (0, 65_536, 131_072, 196_608, 299_990):
        content[first] ^= 1
        file.write_bytes(content)
        assert Fingerprint(file)() != before
        before = Fingerprint(file)()


def test_files_that_were_replaced_have_no_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    fingerprint = Fingerprint(file)
    file.write_bytes(b"other")
    with pytest.raises(Exception, match="have changed"):
        fingerprint()
