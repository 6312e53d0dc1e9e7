"""Which products are measured, and what comes of it; the measuring itself needs a GPU (tests/gpu/test_products.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cublas_lt, cuda_products
from bequest.engine.kernels.cuda_products import Choices

ROWS, SIZE = 32, 64  # the smallest product that these tests measure


class _Way:
    """A way to multiply that can be told from torch's."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.full((len(x), len(weight)), 7.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of x that were measured. Another way is the faster one of those with a bias."""
    found: list[tuple[int, ...]] = []

    def choose(x: Tensor, weight: Tensor, bias: Tensor | None) -> _Way | None:
        found.append(tuple(x.shape))
        return None if bias is None else _Way()

    monkeypatch.setattr(cuda_products, "choose", choose)
    monkeypatch.setattr(cuda_products, "_FEWEST_ROWS", ROWS)
    monkeypatch.setattr(cuda_products, "_FEWEST_ELEMENTS", SIZE * SIZE)
    monkeypatch.setattr(cublas_lt, "library", object)
    return found


def product(choices: Choices, rows: int = ROWS, *, has_bias: bool = True) -> bool:
    """Whether it is multiplied the other way."""
    x, weight = torch.zeros(rows, SIZE, dtype=torch.bfloat16), torch.zeros(SIZE, SIZE, dtype=torch.bfloat16)
    made = choices.linear(x, weight, torch.zeros(SIZE, dtype=torch.bfloat16) if has_bias else None)
    assert made.shape == (rows, SIZE)
    return bool((made == 7).all())


def test_a_shape_is_measured_once_and_keeps_what_was_found(asked: list[tuple[int, ...]]) -> None:
    choices = Choices()
    assert not product(choices) and asked == []
    with choices.measuring():
        assert product(choices) and not product(choices, has_bias=False)
        assert product(choices) and not product(choices, has_bias=False)
    assert asked == [(ROWS, SIZE)] * 2
    assert product(choices) and not product(choices, has_bias=False)
    assert not product(choices, 2 * ROWS)


def test_small_products_are_torchs(asked: list[tuple[int, ...]]) -> None:
    choices = Choices()
    with choices.measuring():
        assert not product(choices, ROWS - 1)
        assert torch.equal(
            choices.linear(torch.ones(ROWS, 8).bfloat16(), torch.ones(8, 8).bfloat16(), None),
            torch.full((ROWS, 8), 8.0).bfloat16(),
        )
    assert asked == []


def test_what_is_not_dense_or_not_in_bfloat16_is_torchs(asked: list[tuple[int, ...]]) -> None:
    choices = Choices()
    weight, bias = torch.zeros(SIZE, SIZE).bfloat16(), torch.zeros(SIZE).bfloat16()
    wide = torch.zeros(ROWS, 2 * SIZE).bfloat16()[:, :SIZE]
    odd = torch.zeros(ROWS * SIZE + 1).bfloat16()[1:].view(ROWS, SIZE)  # at an address that is
    with choices.measuring():
        for x in (wide, odd):
            assert (choices.linear(x, weight, bias) == 0).all()
        assert (choices.linear(torch.zeros(ROWS, SIZE), weight.float(), bias.float()) == 0).all()
        assert asked == []
        assert product(choices)
    for x in (wide, odd):
        assert (choices.linear(x, weight, bias) == 0).all()


def test_measuring_has_an_end(asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_products, "_MOST_SECONDS", 0.0)
    choices = Choices()
    with choices.measuring():
        assert product(choices)  # the time is up behind it
        assert not product(choices, 2 * ROWS)
    assert asked == [(ROWS, SIZE)]


def test_without_a_library_all_are_torchs(asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_lt, "library", lambda: None)
    with (choices := Choices()).measuring():
        assert not product(choices)
    assert asked == []
