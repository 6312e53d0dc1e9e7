"""Low-rank deltas against float64, and that a row's bits depend on its own adapter and its own values alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels.cpu_lora import LoraMatrices, LoraPart, LoraRows

pytestmark = pytest.mark.usefixtures("two_threads")

SITE, CANARY = 7, 123.0
PARTS = ((0, 40), (40, 17), (90, 300))  # first column, columns; what lies between them is not touched
WIDTH = 400


def adapter(seed: int, rank: int, width: int) -> list[LoraPart]:
    random = torch.Generator().manual_seed(seed)
    return [
        LoraPart(
            torch.randn(rank, width, generator=random), torch.randn(rank, count, generator=random), first, 0.5 + seed
        )
        for first, count in PARTS
    ]


def expected(parts: list[LoraPart], x: Tensor) -> Tensor:
    """[T, WIDTH] float64"""
    y = torch.zeros(len(x), WIDTH, dtype=torch.float64)
    for part in parts:
        columns = slice(part.first_column, part.first_column + part.b.shape[1])
        y[:, columns] = part.scale * (x.double() @ part.a.double().T) @ part.b.double()
    return y


def apply(groups: list[tuple[list[LoraPart], list[int]]], x: Tensor, y: Tensor) -> Tensor:
    rows = LoraRows([(LoraMatrices({SITE: parts}), own) for parts, own in groups])
    result = y.clone()
    rows.add(SITE, x, result)
    return result


@pytest.mark.parametrize("width", [1, 15, 16, 17, 576, 1100])
@pytest.mark.parametrize("rank", [1, 3, 4, 16, 70])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 33])
def test_the_sums_are_those_of_float64(width: int, rank: int, count: int) -> None:
    parts, x = adapter(1, rank, width), torch.randn(count, width, generator=torch.Generator().manual_seed(2))
    result = apply([(parts, list(range(count)))], x, torch.zeros(count, WIDTH))
    wanted = expected(parts, x)
    assert (result - wanted).abs().max() <= 2e-6 * wanted.abs().max() * max(1, (width * rank) ** 0.5 / 16)


def test_rows_do_not_see_each_other() -> None:
    """Three adapters and none among 23 rows: each row has the bits it has alone, the others stay."""
    random = torch.Generator().manual_seed(3)
    x, y = torch.randn(23, 100, generator=random), torch.randn(23, WIDTH, generator=random)
    adapters = [adapter(seed, rank, 100) for seed, rank in ((1, 16), (2, 8), (3, 5))]
    owner = [(i * 7) % 4 for i in range(23)]  # 3: none
    groups = [(parts, [i for i in range(23) if owner[i] == number]) for number, parts in enumerate(adapters)]
    crowd = apply(groups, x, y)
    for row in range(23):
        alone = y[row : row + 1]
        if owner[row] < 3:
            alone = apply([(adapters[owner[row]], [0])], x[row : row + 1].clone(), alone.clone())
        assert torch.equal(crowd[row], alone[0])


def test_what_no_part_covers_stays() -> None:
    parts = adapter(4, 8, 32)
    result = apply([(parts, [1])], torch.ones(3, 32), torch.full((3, WIDTH), CANARY))
    assert (result[[0, 2]] == CANARY).all() and (result[1, 57:90] == CANARY).all() and (result[1, 390:] == CANARY).all()
    assert not (result[1, :57] == CANARY).any() and not (result[1, 90:390] == CANARY).any()


def test_another_product_gets_nothing() -> None:
    rows = LoraRows([(LoraMatrices({SITE: adapter(5, 4, 8)}), [0])])
    y = torch.zeros(1, WIDTH)
    rows.add(SITE + 1, torch.ones(1, 8), y)
    assert not y.any() and rows.is_at(SITE) and not rows.is_at(SITE + 1)


def test_rows_that_are_kept_have_new_numbers() -> None:
    one, other = (LoraMatrices({SITE: adapter(seed, 4, 8)}) for seed in (6, 7))
    kept = LoraRows([(one, [0, 2, 4]), (other, [5])]).of([2, 3, 5])
    assert kept.rows_at(SITE) == [0, 2]
    assert LoraRows([(one, [0])]).of([1]).rows_at(SITE) == []


def test_rows_of_a_table() -> None:
    """A token's row gets a column of A times B, whatever other tokens are there; one outside of the table is found."""
    part = LoraPart(torch.randn(5, 11), torch.randn(5, 37), 0, 0.5)
    ids = torch.tensor([3, 10, 0, 3, 7, 3], dtype=torch.int32)
    rows, y = LoraRows([(LoraMatrices({SITE: [part]}), [0, 1, 3, 4, 5])]), torch.full((6, 37), CANARY)
    rows.add_rows(SITE, ids, None, y)
    wanted = CANARY + 0.5 * part.a.double()[:, ids.long()].T @ part.b.double()
    assert torch.allclose(y[[0, 1, 3, 4, 5]].double(), wanted[[0, 1, 3, 4, 5]]) and (y[2] == CANARY).all()
    assert torch.equal(y[0], y[3]) and torch.equal(y[0], y[5])
    with pytest.raises(RuntimeError, match="outside the table"):
        rows.add_rows(SITE, ids + 1, None, y)
