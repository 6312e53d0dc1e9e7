"""How the rows of a step are divided into tiles for a GPU: on the host."""

from __future__ import annotations

import numpy as np

from bequest.engine.kernels.cuda_lora import TILE_ROWS, most_tiles, write_tiles


def test_tiles_hold_every_row_once() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        num_slots, num_rows = int(draw.integers(1, 70)), int(draw.integers(1, 300))
        slots = draw.integers(-1, num_slots, num_rows).astype(np.int32)
        num_tiles = most_tiles(num_rows, num_slots)
        rows, tiles = np.zeros(num_rows, np.int32), np.zeros((num_tiles, 3), np.int32)
        write_tiles(slots, rows, tiles, num_tiles)
        found = {int(row): slot for first, count, slot in tiles.tolist() for row in rows[first : first + count]}
        assert found == {i: slot for i, slot in enumerate(slots.tolist()) if slot >= 0}
        assert all(count <= TILE_ROWS for _, count, _ in tiles.tolist())
