"""The embedded model against transformers, which reads the same GGUF file by other code."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.models.embedded import embedded_model_path
from engine.models.load import LoadedModel, load_model
from tests.models.paged import PagedSequences

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
NUM_GREEDY = 20


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(embedded_model_path())


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    path = embedded_model_path()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def test_facts(loaded: LoadedModel) -> None:
    assert loaded.num_parameters == 134_515_008
    assert loaded.weight_bytes == 4 * 134_479_872  # the matrices
    assert loaded.dtype == torch.float32
    assert loaded.max_model_len == 8192
    assert loaded.generation.eos_token_ids == (2,)


def test_greedy_tokens_and_their_logits(loaded: LoadedModel, reference: PreTrainedModel) -> None:
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
