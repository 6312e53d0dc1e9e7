"""A request whose logits turn NaN fails; those beside it, before it and after it do not notice."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.errors import InternalError
from bequest.engine.types import SamplingParams
from tests.engine.harness import ask, request

POISON = 200  # this token's embedding is NaN
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, allowed_token_ids=tuple(range(3, 100)))


def poisoned_model(directory: Path, into: Path) -> Path:
    poisoned = into / "poisoned"
    shutil.copytree(directory, poisoned)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, poisoned / "model.safetensors", {"format": "pt"})
    return poisoned


def check_nan_fails_its_request_alone(config: EngineConfig) -> None:
    async def run() -> None:
        engine = (await build_engine(config)).engine
        try:
            alone = await ask(engine, request([5, 6, 7, 8], PARAMS))
            good, bad, again = await asyncio.gather(
                ask(engine, request([5, 6, 7, 8], PARAMS)),
                ask(engine, request([5, POISON, 7, 8], PARAMS)),
                ask(engine, request([9, 10, 11], PARAMS)),
                return_exceptions=True,
            )
            assert isinstance(bad, InternalError)
            assert not isinstance(good, BaseException) and good.token_ids == alone.token_ids
            assert not isinstance(again, BaseException) and len(again.token_ids[0]) == 6
            assert (await ask(engine, request([5, 6, 7, 8], PARAMS))).token_ids == alone.token_ids
        finally:
            await engine.stop()
        engine.scheduler.check_idle()

    asyncio.run(run())


def test_nan_fails_its_request_alone(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    directory = poisoned_model(tiny_model("llama"), tmp_path)
    check_nan_fails_its_request_alone(
        EngineConfig(model=str(directory), device="cpu", dtype="float32", max_model_len=64, num_blocks=50)
    )
