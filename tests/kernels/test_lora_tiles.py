"""What the host makes for the kernels of adapters on a GPU: tiles of rows, packed matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bequest.engine.kernels.cuda_lora import (
    TILE_ROWS,
    PackedExperts,
    PackedPart,
    PackedTable,
    SiteShape,
    most_tiles,
    write_tiles,
)


def test_tiles_hold_every_row_once() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        num_slots, num_rows = int(draw.integers(1, 70)), int(draw.integers(1, 300))
        slots = draw.integers(-1, num_slots, num_rows).astype(np.int32)
        num_tiles = most_tiles(num_rows, num_slots)
        rows, tiles = np.zeros(num_rows, np.int32), np.full((1 + num_tiles, 3), -7, np.int32)
        write_tiles(slots, rows, tiles)
        assert tiles[0, 0] <= num_tiles
        told = tiles[1 : 1 + tiles[0, 0]].tolist()
        found = {int(row): slot for first, count, slot in told for row in rows[first : first + count]}
        assert found == dict(enumerate(slots.tolist()))
        assert (slots[rows[: np.count_nonzero(slots >= 0)]] >= 0).all(), "those without are the last"
        assert all(count <= TILE_ROWS for _, count, _ in told)


@pytest.mark.parametrize("columns", [0, 8])
@pytest.mark.parametrize("rank", [0, 1, 16, 23])
def test_matrices_are_packed_by_sixteen_ranks(rank: int, columns: int) -> None:
    a, b = torch.randn(rank, 32).bfloat16().float(), torch.randn(rank, columns).bfloat16().float()
    packed = PackedPart.of(a, b, 0.5)
    whole = -(-rank // 16) * 16
    assert packed.a.shape == (whole, 32) and packed.b.shape == (whole // 16, columns, 16) and packed.rank == rank
    assert torch.equal(packed.a[:rank].float(), a) and not packed.a[rank:].any()
    ranks = packed.b.permute(0, 2, 1).reshape(whole, columns)
    assert torch.equal(ranks[:rank].float(), b) and not ranks[rank:].any()


def test_experts_that_an_adapter_leaves_alone_are_zeros() -> None:
    shape = SiteShape((8, 24), 32, num_experts=3)
    parts = {
        (0, 1): PackedPart.of(torch.ones(20, 32), torch.ones(20, 16), 2.0),
        (2, 0): PackedPart.of(torch.ones(4, 32), torch.ones(4, 8), 3.0),
    }
    packed = PackedExperts.of(shape, parts)
    assert packed.a.shape == (3, 2, 32, 32) and packed.b.shape == (3, 2, 24, 16)
    assert packed.ranks == [0, 20, 0, 0, 4, 0] and packed.scales == [0, 2.0, 0, 0, 3.0, 0]
    assert packed.a[0, 1, :20].all() and packed.a[2, 0, :4].all() and packed.a.sum() == 24 * 32
    assert packed.b.sum() == 20 * 16 + 4 * 8 and not packed.b[1].any() and packed.b[2, 0, :8, :4].all()


def test_a_table_is_packed_by_token() -> None:
    a, b = torch.randn(3, 50), torch.randn(3, 8)
    packed = PackedTable.of(a, b, 0.5, torch.float32)
    assert packed.columns.shape == (50, 16) and torch.equal(packed.columns[:, :3], a.T)
    assert not packed.columns[:, 3:].any() and torch.equal(packed.part.b[0, :, :3], b.T)
