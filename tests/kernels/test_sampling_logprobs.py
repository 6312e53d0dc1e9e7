"""Log-probabilities against float64 log-softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bequest.engine import _C
from bequest.engine.kernels import cpu as kernels


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("vocab", [1, 5, 16, 63, 64, 65, 1000, 49152])
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_against_log_softmax(vocab: int, top: int) -> None:
    top = min(top, vocab)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    chosen = int32(0, vocab - 1, int(logits[2].argmax()))
    values, rank, top_ids, top_values = kernels.logprobs(logits, chosen, top)
    expected = torch.log_softmax(logits.double(), -1).numpy()
    np.testing.assert_allclose(values, expected[np.arange(3), chosen], rtol=1e-6, atol=2e-6)
    assert rank.tolist() == [1 + int((logits[i] > logits[i, c]).sum()) for i, c in enumerate(chosen)]
    assert top_ids.shape == top_values.shape == (3, top)
    order = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :top]
    assert (top_ids == order).all()
    np.testing.assert_allclose(top_values, np.take_along_axis(expected, order, -1), rtol=1e-6, atol=2e-6)


def test_equal_logits_are_listed_by_id() -> None:
    logits = torch.zeros(1, 3000)
    logits[0, [2999, 1500]] = 1.0
    _, rank, top_ids, _ = kernels.logprobs(logits, int32(2998), 5)
    assert top_ids.tolist() == [[1500, 2999, 0, 1, 2]] and rank.tolist() == [3]


def test_masked_logits() -> None:
    logits = torch.full((1, 100), float("-inf"))
    logits[0, 40] = 2.0
    values, rank, top_ids, top_values = kernels.logprobs(logits, int32(3), 2)
    assert values[0] == -np.inf and rank[0] == 2
    assert top_ids.tolist() == [[40, 0]] and top_values.tolist() == [[0.0, -np.inf]]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_broken_row_gives_nan_and_touches_nobody_else(poison: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    clean = kernels.logprobs(logits, int32(1, 2, 3), 4)
    logits[1, 7] = poison
    broken = kernels.logprobs(logits, int32(1, 2, 3), 4)
    assert np.isnan(broken[0][1]) and np.isnan(broken[3][1]).all()
    for a, b in zip(clean, broken, strict=True):
        assert (a[[0, 2]] == b[[0, 2]]).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_batch_and_threads_do_not_matter(threads: int) -> None:
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(0))
    chosen = np.arange(40, dtype=np.int32)
    _C.set_num_threads(threads)
    try:
        together = kernels.logprobs(logits, chosen, 7)
        for i in range(40):
            alone = kernels.logprobs(logits[i : i + 1], chosen[i : i + 1], 7)
            for a, b in zip(alone, together, strict=True):
                assert (a[0] == b[i]).all()
    finally:
        _C.set_num_threads(1)


def test_misuse_is_an_error() -> None:
    logits = torch.zeros(1, 10)
    with pytest.raises(_C.Error, match="alternatives"):
        kernels.logprobs(logits, int32(0), 11)
    for chosen in (-1, 10):
        with pytest.raises(_C.Error, match="vocabulary"):
            kernels.logprobs(logits, int32(chosen), 1)


def test_no_rows() -> None:
    assert [a.shape for a in kernels.logprobs(torch.empty(0, 9), int32(), 3)] == [(0,), (0,), (0, 3), (0, 3)]
