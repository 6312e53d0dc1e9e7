"""Whole engine, real kernels: the states of every layer of both stacks are transformers', however they were come by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.model_encoder_states import Trial, make_cases
from tests.engine.test_encoder_decoder_models import encoder_decoder as encoder_decoder
from tests.engine.test_encoder_decoder_models import engine_config
from tests.tiny_encoder_decoders import TINY_ENCODER_DECODERS


@pytest.mark.parametrize("name", TINY_ENCODER_DECODERS)
async def test_states_equal_transformers(name: str, encoder_decoder: Callable[[str], Path]) -> None:
    trial, config = Trial(make_cases(name), 1e-4), engine_config(encoder_decoder(name))
    await trial.run(config)
    await trial.run(replace(config, max_num_batched_tokens=3, max_num_encoder_tokens=1, pipelined=False))
    await trial.run(replace(config, num_blocks=28, host_cache_gb=0.1))
