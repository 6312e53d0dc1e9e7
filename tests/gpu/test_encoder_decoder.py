"""Encoder-decoder models on a GPU against transformers: encoder states and logits of a crowd of mixed lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.models.cuda_backend import CudaBackend
from engine.models.load import LoadedModel, load_model
from tests.models.paged_cross import CrossSequences
from tests.models.test_encoder_decoder import DECODER_LENS, make_inputs, make_tokens, run_reference
from tests.tiny_encoder_decoders import TINY_ENCODER_DECODERS, make_encoder_decoder, save_encoder_decoder

pytestmark = pytest.mark.gpu


def load(name: str, directory: Path, dtype: str) -> LoadedModel:
    return load_model(save_encoder_decoder(name, directory), dtype, backend=CudaBackend(torch.device("cuda", 0)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY_ENCODER_DECODERS)
def test_states_and_logits(name: str, dtype: str, tmp_path: Path) -> None:
    """In bfloat16 heads of 16 are padded to 64."""
    reference = make_encoder_decoder(name)
    loaded = load(name, tmp_path, dtype)
    inputs, tokens = make_inputs(loaded.model), make_tokens()  # type: ignore[arg-type]
    block_size = 4 if dtype == "float32" else 16
    sequences = CrossSequences(loaded, inputs, max(DECODER_LENS), block_size)
    first = sequences.step({s: part[:-1] for s, part in enumerate(tokens) if len(part) > 1})
    last = sequences.step({s: part[-1:] for s, part in enumerate(tokens)})
    states = sequences.states.split(sequences.cross_lens.tolist())
    tolerance = 1e-3 if dtype == "float32" else 0.05
    for s, item in enumerate(inputs):
        expected_states, expected = run_reference(reference, item, tokens[s])
        logits = torch.cat([first[s], last[s]]) if s in first else last[s]
        for ours, theirs in ((states[s], expected_states), (logits, expected)):
            assert not ours.isnan().any()
            assert (ours.float().cpu() - theirs).norm() < tolerance * theirs.norm()
