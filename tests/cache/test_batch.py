"""prepare_batch against a worked example, a slow reference, and its contracts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bequest.engine._C import Batch, BlockPool, BlockTable, Error, TokenList, prepare_batch
from bequest.engine.types import NO_ROW, NO_SLOT


def table_for(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool)
    assert table.try_prepare_write(0, num_tokens) == []
    return table


def chunks(*parts: Sequence[Any]) -> list[Any]:
    """By what they have in common: tables, tokens, computed, scheduled, last rows."""
    return list(zip(*parts, strict=True))


def test_worked_example() -> None:
    pool = BlockPool(100, 16)
    computed, scheduled = [54, 145, 0, 0, 0], [1, 1, 93, 75, 30]
    lengths = [c + s for c, s in zip(computed, scheduled, strict=True)]
    tables = [table_for(pool, n) for n in lengths]
    tokens = [TokenList(range(1000 * i, 1000 * i + n)) for i, n in enumerate(lengths)]

    batch = prepare_batch([], chunks(tables, tokens, computed, scheduled, [-1] * 5), room=(0, 0, 15))

    assert batch.query_start.tolist() == [0, 1, 2, 95, 170, 200]
    assert batch.positions.tolist() == [54, 145, *range(93), *range(75), *range(30)]
    assert batch.seq_lens.tolist() == [55, 146, 93, 75, 30]
    assert batch.slot_mapping[0].tolist() == [70, 225, *range(240, 333), *range(336, 411), *range(416, 446)]
    assert batch.input_ids.tolist() == [54, 1145, *range(2000, 2093), *range(3000, 3075), *range(4000, 4030)]
    assert batch.block_tables.shape == (1, 5, 15)
    assert batch.block_tables[0, 0].tolist() == [1, 2, 3, 4, *[0] * 11]
    assert batch.block_tables[0, 4].tolist() == [26, 27, *[0] * 13]


def test_dtypes_are_those_of_a_plan() -> None:
    batch = prepare_batch([], [(table_for(BlockPool(9, 4), 5), TokenList(range(5)), 0, 5, -1)])
    for name in ("input_ids", "input_rows", "positions", "query_start", "seq_lens", "block_tables"):
        assert getattr(batch, name).dtype == np.int32
    assert batch.slot_mapping.dtype == np.int64


def reference(
    tables: Sequence[BlockTable],
    tokens: Sequence[TokenList],
    computed: Sequence[int],
    scheduled: Sequence[int],
    last_rows: Sequence[int],
    block_size: int,
) -> dict[str, list[int]]:
    expected: dict[str, list[int]] = {"input_ids": [], "input_rows": [], "positions": [], "slot_mapping": []}
    expected["query_start"] = [0]
    for table, ids, start, count, row in zip(tables, tokens, computed, scheduled, last_rows, strict=True):
        for p in range(start, start + count):
            expected["input_ids"].append(ids[p] if p < len(ids) else 0)
            expected["input_rows"].append(NO_ROW if p < len(ids) else row)
            expected["positions"].append(p)
            expected["slot_mapping"].append(table.blocks[p // block_size] * block_size + p % block_size)
        expected["query_start"].append(len(expected["positions"]))
    return expected


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_random_batches_equal_the_reference(block_size: int) -> None:
    rng = random.Random(block_size)
    edges = [1, max(1, block_size - 1), block_size, block_size + 1, 5 * block_size + 2]
    for _ in range(30):
        pool = BlockPool(400, block_size)
        rows = range(rng.randrange(6))
        scheduled = [rng.choice([0, *edges]) for _ in rows]
        computed = [rng.choice([0, *edges]) for _ in rows]
        missing = [rng.randrange(2) if s else 0 for s in scheduled]
        tables = [table_for(pool, c + s + rng.randrange(9)) for c, s in zip(computed, scheduled, strict=True)]
        tokens = [
            TokenList(rng.randrange(99) for _ in range(c + s - m))
            for c, s, m in zip(computed, scheduled, missing, strict=True)
        ]
        last_rows = [rng.randrange(50) if m else -1 for m in missing]

        batch = prepare_batch([], chunks(tables, tokens, computed, scheduled, last_rows))

        for name, values in reference(tables, tokens, computed, scheduled, last_rows, block_size).items():
            assert getattr(batch, name).ravel().tolist() == values, name
        used = [-(-(c + s) // block_size) for c, s in zip(computed, scheduled, strict=True)]
        assert batch.seq_lens.tolist() == [c + s for c, s in zip(computed, scheduled, strict=True)]
        assert batch.block_tables.shape == (1, len(rows), max(used, default=0))
        for i, count in enumerate(used):
            assert batch.block_tables[0, i].tolist() == tables[i].blocks[:count] + [0] * (max(used) - count)


def one_row(
    computed: int, scheduled: int, known: int, last_row: int = -1, room: tuple[int, int, int] = (0, 0, 0)
) -> Batch:
    table = table_for(BlockPool(9, 4), 12)
    return prepare_batch([], [(table, TokenList(range(known)), computed, scheduled, last_row)], room)


def test_token_on_the_device() -> None:
    first = one_row(5, 1, known=5, last_row=0)
    assert first.input_ids.tolist() == [0] and first.input_rows.tolist() == [0]
    mixed = one_row(3, 3, known=5, last_row=7)
    assert mixed.input_ids.tolist() == [3, 4, 0] and mixed.input_rows.tolist() == [NO_ROW, NO_ROW, 7]
    # Two steps ahead: the token before the scheduled one is unknown too, but not wanted.
    ahead = one_row(6, 1, known=5, last_row=7)
    assert ahead.input_ids.tolist() == [0] and ahead.input_rows.tolist() == [7]


def test_padding() -> None:
    batch = one_row(3, 2, known=5, room=(4, 3, 4))
    assert batch.input_ids.tolist() == [3, 4, 0, 0]
    assert batch.input_rows.tolist() == [NO_ROW] * 4
    assert batch.positions.tolist() == [3, 4, 0, 0]
    assert batch.slot_mapping[0].tolist() == [7, 8, NO_SLOT, NO_SLOT]
    assert batch.query_start.tolist() == [0, 2, 2, 2]
    assert batch.seq_lens.tolist() == [5, 0, 0]
    assert batch.block_tables[0].tolist() == [[1, 2, 0, 0], [0] * 4, [0] * 4]


def test_broken_contracts() -> None:
    with pytest.raises(Error, match="no sampler row"):
        one_row(5, 1, known=5)
    with pytest.raises(Error, match="more than one"):
        one_row(4, 2, known=4, last_row=3)
    with pytest.raises(Error, match="no block"):
        one_row(0, 13, known=13)
    with pytest.raises(Error, match="columns"):
        one_row(8, 1, known=9, room=(0, 0, 2))
    with pytest.raises(Error, match="too few tokens"):
        one_row(0, 5, known=5, room=(4, 0, 0))
    with pytest.raises(Error, match="counts"):
        one_row(-1, 1, known=5)
    with pytest.raises(TypeError, match="not a sequence"):
        prepare_batch([BlockTable(BlockPool(9, 4))], [])  # type: ignore[list-item]
