"""References, the order of reuse, epochs, plans. BS = 4 throughout."""

from __future__ import annotations

import pytest

from bequest.engine._C import BlockPool, BlockTable, Error, TokenList


def write(table: BlockTable, begin: int, end: int) -> list[tuple[int, int]]:
    copies = table.try_prepare_write(begin, end)
    assert copies is not None
    return copies


def test_counts() -> None:
    pool = BlockPool(9, 4)
    assert (pool.num_blocks, pool.block_size, pool.num_free, pool.num_used, pool.usage) == (9, 4, 8, 0, 0.0)
    table = BlockTable(pool)
    write(table, 0, 8)
    assert (pool.num_free, pool.num_used, pool.usage) == (6, 2, 0.25)
    pool.check()


def test_pools_of_no_use_are_legal_and_worse_ones_are_not() -> None:
    empty = BlockPool(1, 4)
    assert (empty.num_free, empty.usage) == (0, 0.0)
    assert BlockTable(empty).try_prepare_write(0, 1) is None
    for blocks, size in ((0, 4), (2, 0)):
        with pytest.raises(Error):
            BlockPool(blocks, size)
    with pytest.raises(Error, match="hash_bits"):
        BlockPool(2, 1, hash_bits=33)


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5, 4)
    table = BlockTable(pool)
    write(table, 0, 16)
    assert sorted(table.blocks) == [1, 2, 3, 4]
    for call in (pool.ref_count, pool.epoch, pool.release):
        for block in (0, 5, -1):
            with pytest.raises(Error, match="no such block"):
                call(block)


def test_tails_are_reused_before_heads_and_old_tables_before_young_ones() -> None:
    pool = BlockPool(7, 4)
    old, young = BlockTable(pool), BlockTable(pool)
    write(old, 0, 12)
    write(young, 0, 12)
    assert (old.blocks, young.blocks) == ([1, 2, 3], [4, 5, 6])
    old.free()
    young.free()
    table = BlockTable(pool)
    write(table, 0, 24)
    assert table.blocks == [3, 2, 1, 6, 5, 4]


def test_a_revived_block_leaves_the_free_list() -> None:
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    write(table, 0, 12)
    (_, _), (second, epoch), (_, _) = table.epochs()
    table.free()
    assert pool.try_revive(second, epoch)
    assert (pool.num_free, pool.ref_count(second)) == (2, 1)
    assert pool.try_revive(second, epoch) and pool.ref_count(second) == 2
    other = BlockTable(pool)
    write(other, 0, 8)
    assert second not in other.blocks and other.try_prepare_write(8, 9) is None
    pool.release(second)
    pool.release(second)
    with pytest.raises(Error, match="nobody holds"):
        pool.release(second)
    write(other, 8, 9)
    assert other.blocks[2] == second
    assert not pool.try_revive(second, epoch)
    pool.check()


def test_epoch_counts_replaced_content() -> None:
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    write(table, 0, 2)
    (block, epoch) = table.epochs()[0]
    write(table, 2, 3)  # appends
    assert pool.epoch(block) == epoch
    write(table, 2, 3)  # replaces
    assert pool.epoch(block) == epoch + 1
    table.free()
    assert pool.epoch(block) == epoch + 1, "a freed block keeps its content"


def test_a_truncated_table_that_writes_again_breaks_the_records_of_its_block() -> None:
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    write(table, 0, 4)
    record = table.epochs()
    table.truncate(2)
    assert len(BlockTable.adopt(pool, b"", record)) == 1
    write(table, 2, 3)
    assert len(BlockTable.adopt(pool, b"", record)) == 0


def test_a_plan_does_not_hand_out_what_its_copies_read() -> None:
    pool = BlockPool(4, 4)
    parent = BlockTable(pool)
    write(parent, 0, 2)
    child = parent.fork()
    pool.begin_plan()
    copies = write(child, 2, 3)
    assert copies == [(1, 2)]
    parent.free()
    other = BlockTable(pool)
    write(other, 0, 4)
    assert other.blocks == [3] and pool.num_free == 0, "block 1 is read by the plan's copy"
    pool.check()
    pool.end_plan()
    assert pool.num_free == 1
    write(other, 4, 5)
    assert other.blocks == [3, 1]
    pool.check()


def test_a_plan_does_not_copy_what_its_forward_writes() -> None:
    pool = BlockPool(9, 4)
    parent = BlockTable(pool)
    pool.begin_plan()
    write(parent, 0, 2)
    child = parent.fork()
    with pytest.raises(Error, match="this plan writes"):
        child.try_prepare_write(2, 3)
    assert child.blocks == parent.blocks
    assert write(child, 0, 1) == [], "nothing of the shared block is kept, so nothing is copied"
    pool.end_plan()
    assert write(parent.fork(), 2, 3) == [(1, 3)]


def test_plans_do_not_nest() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(Error, match="no plan"):
        pool.end_plan()
    pool.begin_plan()
    with pytest.raises(Error, match="still open"):
        pool.begin_plan()


def test_a_collected_table_gives_its_blocks_back() -> None:
    pool = BlockPool(9, 4)
    table = BlockTable(pool)
    write(table, 0, 16)
    table.commit(TokenList(range(16)), 16)
    fork = table.fork()
    del table
    assert pool.num_free == 4
    del fork
    assert pool.num_free == 8
    pool.check()


def test_a_table_keeps_its_pool_alive() -> None:
    table = BlockTable(BlockPool(9, 4))
    write(table, 0, 16)
    assert len(table) == 4
    table.free()
