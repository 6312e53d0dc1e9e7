"""The decoder against transformers on tiny random weights: logits in every way of cutting the work into steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bequest.engine.models.load import LoadedModel, load_model
from tests.models.paged import PagedSequences
from tests.tiny_models import TINY_MODELS, VOCAB_SIZE, make_reference

LENGTH = 41  # longer than every window, not a multiple of the block size


@pytest.fixture(scope="module", params=TINY_MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str, tiny_model: Callable[[str], Path]) -> LoadedModel:
    return load_model(tiny_model(name))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def reference(name: str) -> PreTrainedModel:
    return make_reference(name)


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[LENGTH, V]"""
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module")
def whole(loaded: LoadedModel, tokens: list[int]) -> Tensor:
    """[LENGTH, V], ours in one step"""
    return PagedSequences(loaded.model, 1, LENGTH).run(0, tokens, chunk=LENGTH)


def assert_near(actual: Tensor, expected: Tensor, relative: float = 2e-5) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < relative, f"relative error {error:.2e}"


def test_whole_prompt_in_one_step(whole: Tensor, expected: Tensor) -> None:
    assert_near(whole, expected)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_change_nothing(loaded: LoadedModel, tokens: list[int], whole: Tensor, chunk: int) -> None:
    chunked = PagedSequences(loaded.model, 1, LENGTH).run(0, tokens, chunk=chunk)
    assert torch.equal(chunked, whole)


def test_rows_of_a_mixed_batch_do_not_see_each_other(loaded: LoadedModel, tokens: list[int]) -> None:
    """A prompt, a chunk of another and two decodes in one step: the same bits as alone."""
    prompts = [tokens, tokens[::-1], tokens[5:] + tokens[:5], tokens[:20]]
    done = [0, 13, LENGTH - 1, 19]
    until = [LENGTH, 30, LENGTH, 20]
    crowd = PagedSequences(loaded.model, 4, LENGTH)
    crowd.step({s: prompts[s][: done[s]] for s in (1, 2, 3)})
    mixed = crowd.step({s: prompts[s][done[s] : until[s]] for s in (2, 0, 3, 1)})
    for sequence, prompt in enumerate(prompts):
        alone = PagedSequences(loaded.model, 1, LENGTH).run(0, prompt[: until[sequence]], chunk=LENGTH)
        assert torch.equal(mixed[sequence], alone[done[sequence] :])


def test_rows_that_nobody_reads_change_nothing(loaded: LoadedModel, tokens: list[int]) -> None:
    prompts = {0: tokens[:13], 1: tokens[:1], 2: tokens[5:25], 3: tokens[:7]}
    read = {0: 1, 1: 1, 2: 0, 3: 7}
    whole, partial = (PagedSequences(loaded.model, 4, LENGTH) for _ in range(2))
    expected, result = whole.step(prompts), partial.step(prompts, read)
    for sequence, count in read.items():
        assert torch.equal(result[sequence], expected[sequence][len(prompts[sequence]) - count :])
    # What comes later reads the same cache.
    later = dict.fromkeys(prompts, tokens[30:33])
    expected, result = whole.step(later), partial.step(later)
    assert all(torch.equal(result[sequence], expected[sequence]) for sequence in prompts)


def test_a_step_of_which_nothing_is_read(loaded: LoadedModel, tokens: list[int], expected: Tensor) -> None:
    sequences = PagedSequences(loaded.model, 1, LENGTH)
    assert sequences.step({0: tokens[:17]}, {0: 0})[0].shape == (0, VOCAB_SIZE)
    torch.testing.assert_close(sequences.step({0: tokens[17:]})[0], expected[17:], rtol=1e-3, atol=1e-3)


def test_a_step_without_tokens(loaded: LoadedModel, tokens: list[int], expected: Tensor) -> None:
    """Gives no rows, and leaves the cache alone."""
    sequences = PagedSequences(loaded.model, 1, LENGTH)
    assert sequences.step({0: []})[0].shape == (0, VOCAB_SIZE)
    assert_near(sequences.run(0, tokens, chunk=LENGTH), expected)


def test_bfloat16_weights_and_cache(
    name: str, tiny_model: Callable[[str], Path], tokens: list[int], expected: Tensor
) -> None:
    loaded = load_model(tiny_model(name), dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    sequences = PagedSequences(loaded.model, 1, LENGTH, dtype=torch.bfloat16)
    actual = sequences.run(0, tokens, chunk=7)
    whole = PagedSequences(loaded.model, 1, LENGTH, dtype=torch.bfloat16).run(0, tokens, chunk=LENGTH)
    assert torch.equal(actual, whole)  # rounded or not, a token does not depend on how its prompt was cut
    # bfloat16 has 8 bits: each weight is off by up to 2^-9, and errors of layers add up.
    if loaded.config.experts is None:
        assert_near(actual, expected, relative=0.05 / 3 * loaded.config.num_layers)
    else:  # where two experts score nearly alike, a rounding chooses the other one
        near = (actual - expected).abs().amax(1) < 0.05 * expected.abs().max()
        # Recurrent layers remember that in all tokens behind it.
        assert near.float().mean() > (0.8 if loaded.config.recurrent is None else 0.3)


def test_facts(reference: PreTrainedModel, loaded: LoadedModel) -> None:
    stored = ("correction_bias", "layer_scalar")
    buffers = sum(b.numel() for n, b in reference.named_buffers() if n.endswith(stored))
    assert loaded.num_parameters == buffers + sum(parameter.numel() for parameter in reference.parameters())
    idle = 0
    if (experts := loaded.config.experts) is not None:
        unused = 1 - experts.top_k / experts.num_experts
        idle = sum(round(p.numel() * unused) for n, p in reference.named_parameters() if ".experts." in n)
    assert loaded.num_active_parameters == loaded.num_parameters - idle
    matrices = (p for n, p in reference.named_parameters() if p.dim() == 2 and "_norm." not in n)
    assert loaded.weight_bytes >= 4 * sum(p.numel() for p in matrices)
    assert loaded.generation.eos_token_ids == (0, 2)
    assert loaded.max_model_len == loaded.config.max_position
