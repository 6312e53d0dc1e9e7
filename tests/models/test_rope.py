"""Rotary tables against those of the transformers library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bequest.engine.models.config import RopeConfig, extended_max_position
from bequest.engine.models.fields import Fields
from bequest.engine.models.hf_rope import parse_hf_ropes
from bequest.engine.models.registry import HF_ARCHITECTURES
from bequest.engine.models.rope import cos_sin_table, inverse_frequencies

HEAD_DIM = 64
MAX_POSITION = 512
LLAMA = HF_ARCHITECTURES["LlamaForCausalLM"]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "other theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3, other factors": LLAMA3 | {"factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 8.0},
    "yarn": YARN,
    "yarn, short training": YARN | {"original_max_position_embeddings": 8},
    "yarn, betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, attention factor": YARN | {"attention_factor": 1.7},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, factor 1": YARN | {"factor": 1.0},
}


@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES.keys())
def test_tables_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10000.0} | parameters
    config = LlamaConfig(
        hidden_size=HEAD_DIM, num_attention_heads=1, max_position_embeddings=MAX_POSITION, rope_parameters=parameters
    )
    reference = LlamaRotaryEmbedding(config)
    cos, sin = reference(torch.zeros(1), torch.arange(MAX_POSITION)[None])
    half = HEAD_DIM // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)

    rope, _ = parse_hf_ropes(Fields({"rope_parameters": parameters}, "config.json"), MAX_POSITION, LLAMA)
    torch.testing.assert_close(inverse_frequencies(rope, HEAD_DIM), reference.inv_freq, rtol=1e-6, atol=0)
    # An angle of 500 radians is rounded to 3e-5 in float32, so that much the last bit of a frequency may show.
    torch.testing.assert_close(cos_sin_table(rope, HEAD_DIM, MAX_POSITION), expected, rtol=0, atol=1e-4)


def test_old_spelling_gives_the_same() -> None:
    old = Fields({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, "config.json")
    new = Fields({"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}, "config.json")
    ropes = (RopeConfig(500.0, "linear", factor=2.0), None)
    assert parse_hf_ropes(old, 64, LLAMA) == parse_hf_ropes(new, 64, LLAMA) == ropes


def test_partial_rotation_and_divisors() -> None:
    rope = RopeConfig(theta=100.0, partial_factor=0.5, frequency_divisors=(1.0, 2.0))
    torch.testing.assert_close(inverse_frequencies(rope, 4), torch.tensor([1.0, 0.05]))
    assert cos_sin_table(rope, 4, num_positions=3).shape == (3, 4)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (RopeConfig(), 100),
        (RopeConfig(kind="linear", factor=4.0), 400),
        (RopeConfig(kind="dynamic", factor=4.0), 100),
        (RopeConfig(kind="llama3", factor=8.0, original_max_position=10), 100),
        (RopeConfig(kind="yarn", factor=4.0, original_max_position=100), 400),
        (RopeConfig(kind="yarn", factor=4.0, original_max_position=25), 100),
    ],
)
def test_context_length_counts_the_scaling(rope: RopeConfig, expected: int) -> None:
    assert extended_max_position(100, rope) == expected
