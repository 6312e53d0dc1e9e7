"""A recorded run on a GPU gives the same tokens from its recording alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bequest.engine.config import EngineConfig
from tests.engine.recorded_runs import check_recorded_encoder_run, check_recorded_run
from tests.engine.test_encoder_decoder_models import save_model

pytestmark = pytest.mark.gpu


def config(directory: Path, record: Path, **fields: Any) -> EngineConfig:
    shape: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "step_timeout": 0.0}
    return EngineConfig(model=str(directory), device="cuda", record=str(record), **(shape | fields))


@pytest.mark.parametrize("fields", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"enforce_eager": True}])
async def test_random_steps(fields: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    fields = {"max_model_len": 96, "num_blocks": 70, "host_cache_gb": 0.1} | fields
    await check_recorded_run(config(tiny_model("llama-head-64"), tmp_path / "recording", **fields), 1000)


async def test_random_steps_of_an_encoder_decoder_model(tmp_path: Path) -> None:
    (tmp_path / "bart").mkdir()
    directory = save_model("bart", tmp_path / "bart")
    fields = {"dtype": "float32", "max_model_len": 40, "max_encoder_len": 41, "num_blocks": 300}
    await check_recorded_encoder_run(config(directory, tmp_path / "recording", **fields), 300)
