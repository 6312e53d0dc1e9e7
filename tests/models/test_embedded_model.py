"""The embedded model against transformers, on the same dequantised weights."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from transformers import LlamaForCausalLM

from bequest.engine.config import EngineConfig
from bequest.engine.models.embedded import embedded_model_path
from bequest.engine.models.load import LoadedModel, load_model
from tests.engine.model_states import Reference, Trial, check_states, reference_of
from tests.models.embedded_reference import embedded_reference
from tests.models.paged import PagedSequences

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
NUM_GREEDY = 20


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(embedded_model_path())


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return embedded_reference()


@pytest.fixture(scope="module")
def states(reference: LlamaForCausalLM) -> Reference:
    """One for all, which has most tokens of the second test from the first."""
    return reference_of(reference)


def test_facts(loaded: LoadedModel) -> None:
    assert loaded.num_parameters == 134_515_008
    embedding = 49152 * 576
    # The matrices in codes of the file: 4 or 8 bits, and a scale and an offset of 16 bits for 32 of them.
    assert loaded.formats == ("codes of 4 bits", "codes of 8 bits")
    assert loaded.weight_bytes * 8 == 5 * (134_479_872 - embedding) + 9 * embedding
    assert loaded.dtype == torch.float32
    assert loaded.max_model_len == 8192
    assert loaded.generation.eos_token_ids == (2,)


def test_greedy_tokens_and_their_logits(loaded: LoadedModel, reference: LlamaForCausalLM) -> None:
    sequences = PagedSequences(loaded.model, 1, len(PROMPT) + NUM_GREEDY)
    logits = [sequences.run(0, PROMPT, chunk=len(PROMPT))]  # each [tokens, V]
    greedy: list[int] = []
    for _ in range(NUM_GREEDY):
        greedy.append(int(logits[-1][-1].argmax()))
        logits.append(sequences.run(0, greedy[-1:], chunk=1))

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT + greedy])).logits[0]
    error = (torch.cat(logits) - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"relative error {error:.2e}"
    assert greedy == expected[len(PROMPT) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(("matmul", "tolerance"), [("exact", 1e-4), ("fast", 1e-3)])
async def test_hidden_states_of_every_layer_and_position(
    states: Reference, matmul: Literal["exact", "fast"], tolerance: float
) -> None:
    config = EngineConfig(device="cpu", max_model_len=256, num_blocks=64, max_num_batched_tokens=32, cpu_matmul=matmul)
    await check_states(config, Trial(states, tolerance, 49152), (5, 17))
