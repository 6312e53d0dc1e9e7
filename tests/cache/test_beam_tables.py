"""The tables of a group of beams: what one call does for all of them, against tables forked one by one. BS = 4."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bequest.engine._C import BeamTables, BlockPool, BlockTable, Error, TokenList, prepare_batch
from bequest.engine.beams.search import NO_PLACE
from tests.cache.test_block_pool import write


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def blocks_of(beams: BeamTables) -> list[list[int]]:
    return [beams.blocks(beam) for beam in range(len(beams))]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(60, 4)


def start(pool: BlockPool, length: int) -> BeamTables:
    first = BlockTable(pool)
    write(first, 0, length)
    beams = BeamTables(first)
    assert not first.blocks and len(beams) == 1
    return beams


def test_heirs_share_and_the_last_one_takes_over(pool: BlockPool) -> None:
    beams = start(pool, 6)
    (whole, tail) = beams.blocks(0)
    beams.reorder(ints(0, 0, 0), ints(7, 8, 9))
    assert blocks_of(beams) == [[whole, tail]] * 3 and beams.front_blocks() == [whole]
    assert (pool.ref_count(whole), pool.ref_count(tail)) == (1, 3)
    assert beams.blocks_needed(6) == 3
    pool.begin_plan()
    copies = beams.try_prepare_write(6)
    pool.end_plan()
    assert copies is not None and copies[:, 0].tolist() == [tail] * 3  # a source of this plan is not written
    assert len({blocks[1] for blocks in blocks_of(beams)}) == 3
    assert all(blocks[0] == whole for blocks in blocks_of(beams))
    kept = beams.blocks(1)
    beams.reorder(ints(1, 1), ints(1, 2))
    assert blocks_of(beams) == [kept, kept] and pool.num_used == 2
    beams.free()
    assert len(beams) == 0 and pool.num_used == 0
    pool.check()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_no_beam_writes_what_another_sees(pool: BlockPool, length: int) -> None:
    beams = start(pool, length)
    draw = random.Random(length)
    for position in range(length, length + 9):
        width = draw.randint(1, 6)
        parents = [draw.randrange(len(beams)) for _ in range(width)]
        before = blocks_of(beams)
        beams.reorder(ints(*parents), ints(*range(width)))
        assert blocks_of(beams) == [before[parent] for parent in parents]
        needed, free = beams.blocks_needed(position), pool.num_free
        pool.begin_plan()
        copies = beams.try_prepare_write(position)
        pool.end_plan()
        assert copies is not None and free - pool.num_free <= needed
        written = [blocks[position // 4] for blocks in blocks_of(beams)]
        assert len(set(written)) == width and all(pool.ref_count(block) == 1 for block in written)
        pool.check()
    shared = length // 4
    assert pool.num_used <= shared + 6 * 4
    beams.free()
    assert pool.num_used == 0


def test_nothing_changes_where_the_pool_has_too_few_blocks() -> None:
    pool = BlockPool(4, 4)
    beams = start(pool, 6)
    beams.reorder(ints(0, 0, 0), ints(1, 2, 3))
    before = blocks_of(beams)
    assert beams.try_prepare_write(6) is None
    assert blocks_of(beams) == before and pool.num_free == 1


def test_a_batch_has_a_row_for_each_beam(pool: BlockPool) -> None:
    beams = start(pool, 4)
    beams.reorder(ints(0, 0), ints(70, 80))
    pool.begin_plan()
    beams.try_prepare_write(4)
    pool.end_plan()
    other = BlockTable(pool)
    write(other, 0, 3)
    batch = prepare_batch([], [(beams, TokenList(), 4, 1, -1), (other, TokenList([5, 6, 7]), 0, 3, -1)])
    assert batch.input_ids.tolist() == [70, 80, 5, 6, 7]
    assert batch.positions.tolist() == [4, 4, 0, 1, 2]
    assert batch.query_start.tolist() == [0, 1, 2, 5] and batch.seq_lens.tolist() == [5, 5, 3]
    assert batch.block_tables[0].tolist() == [beams.blocks(0), beams.blocks(1), [*other.blocks, 0]]
    assert batch.slot_mapping[0, :2].tolist() == [4 * beams.blocks(0)[1], 4 * beams.blocks(1)[1]]


def test_wrong_parents_and_tokens(pool: BlockPool) -> None:
    beams = start(pool, 4)
    for parents, tokens in ((ints(1), ints(0)), (ints(-1), ints(0)), (ints(0), ints(-1)), (ints(0, 0), ints(1))):
        with pytest.raises(Error):
            beams.reorder(parents, tokens)
    assert len(beams) == 1


def test_ended_beams_keep_their_blocks_until_they_are_taken(pool: BlockPool) -> None:
    beams = start(pool, 6)
    beams.reorder(ints(0, 0), ints(7, 8))
    pool.begin_plan()
    assert beams.try_prepare_write(6) is not None
    pool.end_plan()
    first, second = blocks_of(beams)
    assert beams.end(ints(1, 0)) == 0 and beams.end(ints(1)) == 2
    beams.reorder(ints(0), ints(9))  # nobody runs on from the second
    assert beams.ended_blocks() == [second, first, second]
    assert pool.ref_count(second[1]) == 2 and pool.ref_count(first[0]) == 4  # three that ended, and the front
    taken = beams.take_ended(2)
    assert taken.blocks == second and beams.ended_blocks()[2] == []
    with pytest.raises(Error, match="taken once"):
        beams.take_ended(2)
    with pytest.raises(Error, match="were taken"):
        beams.epochs(places=ints(2), rows=ints(0), num_tokens=ints(7))
    taken.free()
    with pytest.raises(Error, match="not among the beams"):
        beams.end(ints(1))
    beams.free()
    assert pool.num_used == 0
    pool.check()


def ahead_of(
    pool: BlockPool, beams: BeamTables, width: int, position: int
) -> tuple[BeamTables, list[list[int]]] | None:
    pool.begin_plan()
    found = beams.try_ahead(width, position)
    pool.end_plan()
    return None if found is None else (found[0], found[1].tolist())


@pytest.mark.parametrize("length", [4, 5, 6, 7])
def test_beams_ahead_differ_in_one_block_and_take_the_place_of_those_before(pool: BlockPool, length: int) -> None:
    beams = start(pool, length)
    before = beams.blocks(0)
    found = ahead_of(pool, beams, 5, length)
    assert found is not None
    ahead, copies = found
    own = [blocks[-1] for blocks in blocks_of(ahead)]
    assert copies == ([[before[-1], block] for block in own] if length % 4 else [])
    assert len(set(own)) == 5 and all(blocks[:-1] == before[: length // 4] for blocks in blocks_of(ahead))
    assert beams.blocks(0) == before  # which a step may be writing
    ahead.succeed(beams, ints(7, 8, 9))
    assert [blocks[-1] for blocks in blocks_of(ahead)] == own[:3] and len(beams) == 0
    ended = ahead.end(ints(2, 0))
    if length % 4 < 3:
        found = ahead_of(pool, ahead, 5, length + 1)
        assert found is not None
        later, copies = found
        assert copies == [[own[i % 3], blocks[-1]] for i, blocks in enumerate(blocks_of(later))]
        later.succeed(ahead, ints(1))
        assert later.take_ended(ended).blocks == [*before[: length // 4], own[2]] and len(later) == 1
        later.free()
    ahead.free()
    assert pool.num_used == 0
    pool.check()


def test_beams_that_differ_in_whole_blocks_and_those_without_room_do_not_go_ahead(pool: BlockPool) -> None:
    beams = start(pool, 7)
    found = ahead_of(pool, beams, 3, 7)
    assert found is not None
    found[0].succeed(beams, ints(1, 2, 3))
    beams, used = found[0], pool.num_used
    assert ahead_of(pool, beams, 3, 8) is None  # the last block of each is full
    beams.reorder(ints(0, 0, 1), ints(1, 2, 3))
    pool.begin_plan()
    assert beams.try_prepare_write(8) is not None
    pool.end_plan()
    assert ahead_of(pool, beams, 3, 9) is None
    beams.free()
    beams = start(pool, 5)
    used = pool.num_used
    assert ahead_of(pool, beams, 59, 5) is None and pool.num_used == used
    found = ahead_of(pool, beams, 2, 5)
    assert found is not None
    with pytest.raises(Error, match="than a step has computed"):
        found[0].succeed(beams, ints(1, 2, 3))
    with pytest.raises(Error, match="not negative"):
        found[0].succeed(beams, ints(-1))
    found[0].free()
    beams.free()
    pool.check()


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8])
def test_epochs_of_ended_beams_are_those_of_their_tables(pool: BlockPool, length: int) -> None:
    beams = start(pool, 8)
    beams.end(ints(0, 0))
    epochs = beams.epochs(places=ints(1, 0, NO_PLACE), rows=ints(0, 0, 0), num_tokens=ints(length, 8, length))
    tables = [beams.take_ended(1), beams.take_ended(0), beams.fork(0)]
    tables[0].truncate(length)
    tables[2].truncate(length)
    assert len(epochs) == 3 and [epochs[i] for i in range(3)] == [table.epochs() for table in tables]
    with pytest.raises(IndexError):
        epochs[3]
    assert epochs.num_left(pool) == sum(map(len, tables))
    beams.free()
    for table in tables:
        table.free()
    other = BlockTable(pool)
    write(other, 0, pool.num_free * 4)  # takes every block
    assert epochs.num_left(pool) == 0


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_beam_that_is_taken_out_can_still_leave_the_index(pool: BlockPool, length: int) -> None:
    tokens, first = TokenList(range(length)), BlockTable(pool)
    write(first, 0, length)
    first.commit(tokens, length)
    beams = BeamTables(first)
    beams.reorder(ints(0, 0), ints(1, 2))
    pool.begin_plan()
    assert beams.try_prepare_write(length) is not None
    pool.end_plan()
    best = beams.fork(0)
    assert best.blocks == beams.blocks(0)
    found = BlockTable(pool)
    assert found.match_prefix(tokens, length) == length // 4 * 4
    found.free()
    best.uncommit(0)
    assert found.match_prefix(tokens, length) == 0
    best.free()
    beams.free()
    assert pool.num_used == 0
    pool.check()
