"""Encoder-decoder models on a GPU against transformers: encoder states and logits of a crowd of mixed lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bequest.engine.backends.cuda.backend import CudaBackend
from bequest.engine.models.load import LoadedModel, load_model
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
    logits = [torch.cat([first[s], last[s]]) if s in first else last[s] for s in range(len(inputs))]
    exact = [run_reference(reference, item, part) for item, part in zip(inputs, tokens, strict=True)]
    for s, (expected_states, expected_logits) in enumerate(exact):
        assert not states[s].isnan().any() and not logits[s].isnan().any()
        if dtype == "float32":
            assert error(states[s], expected_states) < 1e-4
            assert error(logits[s], expected_logits) < 1e-4
    if dtype == "bfloat16":
        # Scores that nobody scales make some of these models sensitive: transformers in bfloat16 is the measure.
        rough = reference.bfloat16()
        halved = [item.bfloat16() if isinstance(item, torch.Tensor) else item for item in inputs]
        theirs = [run_reference(rough, item, part)[1] for item, part in zip(halved, tokens, strict=True)]
        ours_off = sum(error(ours, one[1]) for ours, one in zip(logits, exact, strict=True))
        theirs_off = sum(error(their, one[1]) for their, one in zip(theirs, exact, strict=True))
        assert ours_off < 1.25 * theirs_off


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float().cpu() - expected).norm() / expected.norm())
