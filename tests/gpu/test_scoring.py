"""Scoring of suffixes on a GPU: one step, and the numbers of separate requests as near as products of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.engine.model_scores import scores_and_singles
from tests.gpu.test_engine import config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
async def test_scores_equal_log_probabilities_of_whole_prompts(
    dtype: str, tolerance: float, tiny_model: Callable[[str], Path]
) -> None:
    scored, singles, num_steps = await scores_and_singles(config(tiny_model("llama-head-64"), dtype=dtype))
    assert num_steps == 1
    for choice, single in zip(scored, singles, strict=True):
        assert choice.logprobs is not None
        np.testing.assert_allclose([one.logprob for one in choice.logprobs], single, atol=tolerance)
