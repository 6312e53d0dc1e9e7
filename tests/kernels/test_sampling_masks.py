"""Masks of a step in the CPU's sampler: what they leave out is never sampled, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bequest.engine.kernels import cpu as kernels
from bequest.engine.scheduling.sampler_rows import row_spec
from bequest.engine.types import SamplingParams, mask_words


def packed(allowed: np.ndarray) -> np.ndarray:
    """Masks int32 [N, words] of bool [N, V], with rubbish in the bits behind the vocabulary."""
    num, vocab = allowed.shape
    bits = np.ones((num, mask_words(vocab) * 32), np.bool_)
    bits[:, :vocab] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def sampler_of(num: int, vocab: int, **fields: object) -> kernels.Sampler:
    sampler = kernels.Sampler(num, vocab)
    for row in range(num):
        params = SamplingParams(**{"max_tokens": 9, **fields})  # type: ignore[arg-type]
        sampler.open_row(row_spec(row, params, seed=row, prompt=(0, 0)))
    return sampler


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5, "presence_penalty": 1.0}])
def test_a_mask_is_the_same_as_logits_of_minus_infinity(vocab: int, fields: dict[str, object]) -> None:
    num = 7
    generator = np.random.default_rng(vocab)
    rows, sampled = np.arange(num, dtype=np.int32), set()
    masked, plain = sampler_of(num, vocab, **fields), sampler_of(num, vocab, **fields)
    for position in range(20):
        logits = torch.from_numpy(generator.normal(size=(num, vocab)).astype(np.float32)) * 3
        allowed = generator.random((num, vocab)) < [0.02, 0.5, 0.98][position % 3]
        allowed[np.arange(num), generator.integers(0, vocab, num)] = True
        positions = np.full(num, position, np.int32)
        tokens, bad = masked.sample(logits, rows, positions, packed(allowed))
        cut = logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)
        expected, expected_bad = plain.sample(cut, rows, positions)
        assert tokens.tolist() == expected.tolist() and not bad.any() and not expected_bad.any()
        assert allowed[rows, tokens].all()
        sampled.update(tokens.tolist())
    assert len(sampled) > 1 or vocab == 1


def test_an_empty_mask_leaves_nothing_to_sample() -> None:
    sampler = sampler_of(2, 40)
    masks = packed(np.stack([np.zeros(40, np.bool_), np.ones(40, np.bool_)]))
    masks[0, 1] &= 0xFF  # the bits behind the vocabulary too
    _, bad = sampler.sample(torch.zeros(2, 40), np.array([0, 1], np.int32), np.zeros(2, np.int32), masks)
    assert bad.tolist() == [True, False]


def test_a_nan_is_found_outside_of_the_mask() -> None:
    logits = torch.zeros(1, 40)
    logits[0, 3] = torch.nan
    allowed = np.ones((1, 40), np.bool_)
    allowed[0, 3] = False
    _, bad = sampler_of(1, 40).sample(logits, np.zeros(1, np.int32), np.zeros(1, np.int32), packed(allowed))
    assert bad.all()


def test_no_rows() -> None:
    empty = np.empty(0, np.int32)
    masks = np.empty((0, mask_words(40)), np.int32)
    tokens, bad = sampler_of(1, 40).sample(torch.empty(0, 40), empty, empty, masks)
    assert tokens.shape == bad.shape == (0,)
