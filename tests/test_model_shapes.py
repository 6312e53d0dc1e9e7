"""The shapes that benchmarks measure are those of the published models, and so are the floors of their steps."""

from __future__ import annotations

import math

import pytest

from benchmarks.floors import DecodeStep
from benchmarks.model_shapes import SHAPES
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.families.decoders import expected_tensors
from bequest.engine.models.hf_config import parse_hf_config


def config_of(shape: str) -> DecoderConfig:
    return parse_hf_config(SHAPES[shape].config, shape)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [("llama-3.1-8b", 8_030_261_248), ("gpt-oss-20b", 20_914_757_184), ("mixtral-8x7b", 46_702_792_704)],
)
def test_as_many_parameters_as_were_published(shape: str, parameters: int) -> None:
    assert sum(math.prod(size) for size in expected_tensors(config_of(shape)).values()) == parameters


def test_a_step_reads_no_table_that_is_not_the_output() -> None:
    config = config_of("llama-3.1-8b")
    assert DecodeStep(2, 100).weight_bytes(config) == 2 * (8_030_261_248 - 128256 * 4096 + 2 * 4096)
    assert DecodeStep(2, 100).kv_bytes(config) == 2 * 100 * 32 * 2 * 1024 * 2


def test_a_step_reads_the_experts_that_it_takes() -> None:
    config = config_of("mixtral-8x7b")
    of_one = 32 * 3 * 4096 * 14336
    every, one = (DecodeStep(batch, 1).weight_bytes(config) - batch * 2 * 4096 for batch in (10_000, 1))
    assert every - one == 2 * 6 * of_one


def test_windows_and_states() -> None:
    sinks, hybrid = config_of("gpt-oss-20b"), config_of("qwen3.6-35b-a3b")
    per_token = 12 * 2 * 512 * 2
    assert DecodeStep(1, 32_768).kv_bytes(sinks) - DecodeStep(1, 4_096).kv_bytes(sinks) == (32_768 - 4_096) * per_token
    assert DecodeStep(1, 64).kv_bytes(sinks) == 2 * 64 * per_token
    assert DecodeStep(3, 1000).kv_bytes(hybrid) == 3 * 1000 * 10 * 2 * 512 * 2
    assert DecodeStep(3, 1000).state_bytes(hybrid) == 3 * 2 * 30 * (32 * 128 * 128 + 3 * 8192) * 4
    assert DecodeStep(3, 1000).state_bytes(sinks) == 0
