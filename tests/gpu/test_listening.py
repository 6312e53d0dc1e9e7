"""When tokens were spoken, on a GPU: as transformers says in float32; in bfloat16 the way is near."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bequest.engine.build import build_engine
from tests.engine.test_encoder_decoder_models import inputs, save_model
from tests.engine.test_listening import ALIGNMENT, actual_times, expected_times
from tests.gpu.test_encoder_decoder_engine import config
from tests.tiny_encoder_decoders import make_encoder_decoder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype, most", [("float32", 0.0), ("bfloat16", 0.2)])
async def test_times_are_those_of_transformers(dtype: str, most: float, tmp_path: Path) -> None:
    """`most`: how far apart a time may be, in seconds, on average: bfloat16 may take another way between two alike."""
    reference = make_encoder_decoder("whisper")
    reference.set_attn_implementation("eager")
    item = max((one for one in inputs(reference) if isinstance(one, torch.Tensor)), key=lambda one: one.shape[1])
    built = await build_engine(config(save_model("whisper", tmp_path), dtype))
    try:
        for num_frames in (item.shape[1], 31):
            expected = expected_times(reference, item, num_frames)
            actual = await actual_times(built.engine, item, num_frames // 2, ALIGNMENT)
            assert np.abs(np.subtract(actual, expected)).mean() <= most + 1e-6, num_frames
    finally:
        await built.engine.stop()
