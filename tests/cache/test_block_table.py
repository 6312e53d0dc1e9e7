"""Writing, copy on write, forks, slices, records. BS = 4 throughout."""

from __future__ import annotations

import pytest

from bequest.engine._C import BlockPool, BlockTable, Error, TokenList, count_distinct_blocks
from tests.cache.test_block_pool import write


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(17, 4)


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_growth(pool: BlockPool, length: int, blocks: int) -> None:
    table = BlockTable(pool)
    assert table.blocks_needed(0, length) == blocks
    assert write(table, 0, length) == []
    assert (len(table), table.capacity, table.blocks) == (blocks, 4 * blocks, list(range(1, blocks + 1)))
    assert table.blocks_needed(length, 4 * blocks) == 0
    assert table.blocks_needed(length, 4 * blocks + 1) == 1


def test_writes_must_join_what_is_there(pool: BlockPool) -> None:
    table = BlockTable(pool)
    write(table, 0, 4)
    for begin, end in ((5, 6), (3, 2), (-1, 2)):
        with pytest.raises(Error):
            table.try_prepare_write(begin, end)
        with pytest.raises(Error):
            table.blocks_needed(begin, end)


def test_nothing_changes_where_the_pool_has_too_few_blocks(pool: BlockPool) -> None:
    parent = BlockTable(pool)
    write(parent, 0, 6)
    child = parent.fork()
    hog = BlockTable(pool)
    write(hog, 0, 4 * 13)
    assert pool.num_free == 1
    assert child.blocks_needed(6, 9) == 2, "one to grow, one for the copy of the tail"
    assert child.try_prepare_write(6, 9) is None
    assert child.blocks == parent.blocks and pool.num_free == 1
    assert child.try_prepare_write(6, 8) == [(2, 16)]
    pool.check()


def test_copy_on_write_of_the_tail_alone(pool: BlockPool) -> None:
    parent = BlockTable(pool)
    write(parent, 0, 10)
    child = parent.fork()
    assert (child.num_shared, parent.num_shared, pool.num_used) == (3, 3, 3)
    assert write(child, 10, 11) == [(3, 4)]
    assert child.blocks == [1, 2, 4] and child.num_shared == 2
    assert write(parent, 10, 11) == [], "the tail has one owner again"
    assert parent.blocks == [1, 2, 3]


def test_a_block_that_is_overwritten_from_its_first_slot_is_replaced_without_a_copy(pool: BlockPool) -> None:
    parent = BlockTable(pool)
    write(parent, 0, 12)
    child = parent.fork()
    assert child.blocks_needed(2, 10) == 3
    assert write(child, 2, 10) == [(1, 4)]
    assert child.blocks == [4, 5, 6]
    assert parent.blocks == [1, 2, 3] and parent.num_shared == 0
    pool.check()


def test_a_copied_block_was_written_up_to_the_copy(pool: BlockPool) -> None:
    """The copy's filled slots follow the write, so that appending to it starts no new epoch."""
    parent = BlockTable(pool)
    write(parent, 0, 2)
    child = parent.fork()
    write(child, 2, 3)
    epochs = child.epochs()
    write(child, 3, 4)
    assert child.epochs() == epochs


def test_slice_shares_the_blocks_that_cover_it(pool: BlockPool) -> None:
    table = BlockTable(pool)
    write(table, 0, 12)
    for length, count in ((0, 0), (1, 1), (4, 1), (5, 2), (12, 3)):
        part = table.slice_to(length)
        assert part.blocks == table.blocks[:count]
    del part
    assert table.num_shared == 0
    with pytest.raises(Error, match="shorter"):
        table.slice_to(13)
    with pytest.raises(Error, match="negative"):
        table.slice_to(-1)


def test_a_branch_inside_a_block_copies_it(pool: BlockPool) -> None:
    parent = BlockTable(pool)
    write(parent, 0, 12)
    child = parent.slice_to(6)
    assert write(child, 6, 7) == [(2, 4)]
    assert (child.blocks, parent.blocks) == ([1, 4], [1, 2, 3])


def test_truncate(pool: BlockPool) -> None:
    table = BlockTable(pool)
    write(table, 0, 12)
    table.truncate(5)
    assert table.blocks == [1, 2] and pool.num_used == 2
    table.truncate(5)
    with pytest.raises(Error, match="truncated"):
        table.truncate(9)
    assert write(table, 5, 9) == []
    assert len(table) == 3


def test_free_is_idempotent_and_the_table_can_be_used_again(pool: BlockPool) -> None:
    table = BlockTable(pool)
    write(table, 0, 12)
    table.free()
    table.free()
    assert (table.blocks, pool.num_used) == ([], 0)
    write(table, 0, 1)
    assert pool.num_used == 1


def test_adopt_revives_the_unbroken_beginning(pool: BlockPool) -> None:
    table = BlockTable(pool)
    write(table, 0, 16)
    record = table.epochs()
    table.free()
    hog = BlockTable(pool)
    write(hog, 0, 4 * 14)  # 12 blocks that were never used, then two of the record's four, its tail first
    hog.free()
    child = BlockTable.adopt(pool, b"", record)
    count = len(child)
    assert (child.blocks, count) == ([1, 2], 2)
    assert len(BlockTable.adopt(pool, b"", list(record)[2:])) == 0
    assert len(BlockTable.adopt(pool, b"", [])) == 0
    pool.check()


def test_adopting_a_live_table_shares(pool: BlockPool) -> None:
    table = BlockTable(pool)
    write(table, 0, 6)
    child = BlockTable.adopt(pool, b"", table.epochs())
    count = len(child)
    assert count == 2 and child.num_shared == 2
    assert write(child, 6, 7) == [(2, 3)]


def test_count_distinct_blocks(pool: BlockPool) -> None:
    cross, first = BlockTable(pool), BlockTable(pool)
    write(cross, 0, 9)
    write(first, 0, 6)
    assert count_distinct_blocks([]) == 0
    assert count_distinct_blocks([cross, first]) == 5
    second = first.fork()
    assert count_distinct_blocks([cross, first, second]) == 5
    write(second, 6, 7)
    assert count_distinct_blocks([cross, first, second]) == 6 == pool.num_used


def test_beams_reorder_by_forks(pool: BlockPool) -> None:
    """Four beams of one prompt; after each step all continue the best one. Only tails are ever copied."""
    root = BlockTable(pool)
    write(root, 0, 9)
    beams = [root.fork() for _ in range(4)]
    root.free()
    for position in range(9, 16):
        copies = [pair for beam in beams for pair in write(beam, position, position + 1)]
        assert len(copies) == (3 if position % 4 else 0)
        assert {b for beam in beams for b in beam.blocks[:2]} == {1, 2}
        pool.check()
        beams = [beams[1].fork() for _ in range(4)]
    beams.clear()
    assert pool.num_used == 0


def test_without_an_index_nothing_is_found() -> None:
    pool = BlockPool(9, 4, prefix_index=False)
    tokens = TokenList(range(8))
    table = BlockTable(pool)
    write(table, 0, 8)
    table.commit(tokens, 8)
    table.uncommit(0)
    pool.clear_index()
    assert (BlockTable(pool).match_prefix(tokens, 8), BlockTable(pool).match_partial(tokens, 8)) == (0, 0)
    assert pool.num_indexed == pool.num_roots == 0


def test_a_copy_of_a_plan_reads_only_what_the_plan_leaves_alone(pool: BlockPool) -> None:
    parent = BlockTable(pool)
    write(parent, 0, 6)
    assert pool.settled_slots(2) == 4, "without a plan nothing is pending"
    pool.begin_plan()
    write(parent, 6, 7)  # slot 2 of block 2
    assert (pool.settled_slots(1), pool.settled_slots(2)) == (4, 2)
    early, late = parent.slice_to(6), parent.slice_to(7)
    assert write(early, 6, 8) == [(2, 3)], "slots 0 and 1 are there already"
    with pytest.raises(Error, match="copied before"):
        late.try_prepare_write(7, 8)
    assert pool.settled_slots(3) == 0, "a copy of this plan fills it: another would read what was there before"
    second = early.slice_to(5)
    with pytest.raises(Error, match="copied before"):
        second.try_prepare_write(5, 6)
    whole = parent.slice_to(4)
    assert write(whole, 4, 5) == [], "full blocks are shared, whoever writes them"
    pool.end_plan()
    pool.begin_plan()
    assert pool.settled_slots(2) == pool.settled_slots(3) == 4, "a plan later all of it is there"
    pool.end_plan()
    pool.check()
