"""Hidden states of encoders on a GPU, and of their decoders: transformers' in float32, and near it in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.model_encoder_states import Trial, make_cases
from tests.engine.test_encoder_decoder_models import save_model
from tests.gpu.test_encoder_decoder_engine import NAMES, config

pytestmark = pytest.mark.gpu

BF16_TOLERANCE = 0.1  # T5's scores are not scaled: it is the most sensitive


@pytest.mark.parametrize("name", NAMES)
async def test_states_equal_transformers(name: str, tmp_path: Path) -> None:
    cases, graphs = make_cases(name), config(save_model(name, tmp_path), "float32")
    await Trial(cases, 1e-4).run(graphs)
    await Trial(cases, 1e-4).run(replace(graphs, enforce_eager=True, pipelined=False, max_num_encoder_tokens=1))
    await Trial(cases, BF16_TOLERANCE).run(config(tmp_path, "bfloat16"))
