"""Moving tables between the device pool and the host pool. BS = 4 throughout."""

from __future__ import annotations

import pytest

from bequest.engine._C import (
    BlockPool,
    BlockTable,
    Error,
    TokenList,
    count_distinct_blocks,
    prepare_batch,
    swap_out_some,
    try_swap_in,
    try_swap_out,
)
from tests.cache.test_block_pool import write


@pytest.fixture
def device() -> BlockPool:
    return BlockPool(17, 4)


@pytest.fixture
def host() -> BlockPool:
    return BlockPool(9, 4, prefix_index=False)


def filled(pool: BlockPool, length: int) -> BlockTable:
    table = BlockTable(pool)
    write(table, 0, length)
    return table


def test_out_and_in(device: BlockPool, host: BlockPool) -> None:
    table = filled(device, 10)
    assert try_swap_out([table], host) == [(1, 1), (2, 2), (3, 3)]
    assert (table.blocks, table.resident) == ([-1, -2, -3], False)
    assert (device.num_used, host.num_used) == (0, 3)
    assert try_swap_in([table], device) == [(1, 4), (2, 5), (3, 6)]
    assert (table.blocks, table.resident) == ([4, 5, 6], True)
    assert (device.num_used, host.num_used) == (3, 0)
    assert write(table, 10, 11) == []


def test_a_request_moves_as_one(device: BlockPool, host: BlockPool) -> None:
    cross, first = filled(device, 9), filled(device, 6)
    beams = [first, first.fork(), first.fork()]
    write(beams[1], 6, 7)
    tables = [cross, *beams]
    assert count_distinct_blocks(tables) == device.num_used == 6
    out = try_swap_out(tables, host)
    assert out is not None and len(out) == 6
    assert (device.num_used, host.num_used, count_distinct_blocks(tables)) == (0, 6, 6)
    assert beams[0].blocks == beams[2].blocks and beams[0].blocks[0] == beams[1].blocks[0]
    assert beams[1].num_shared == 1
    back = try_swap_in(tables, device)
    assert back is not None and len(back) == 6
    assert beams[0].blocks == beams[2].blocks and beams[0].blocks[0] == beams[1].blocks[0]
    assert (device.num_used, host.num_used) == (6, 0)
    for pool in (device, host):
        pool.check()


def test_a_block_that_others_hold_stays(device: BlockPool, host: BlockPool) -> None:
    parent = filled(device, 8)
    child = parent.fork()
    write(child, 8, 12)
    assert try_swap_out([child], host) == [(3, 1)]
    assert child.blocks == [1, 2, -1] and parent.blocks == [1, 2]
    parent.free()
    assert device.num_used == 2
    assert try_swap_out([child], host) == [(1, 2), (2, 3)], "now nobody else does"
    assert child.blocks == [-2, -3, -1]
    child.free()
    assert device.num_used == host.num_used == 0


def test_a_host_block_that_others_hold_stays_for_them(device: BlockPool, host: BlockPool) -> None:
    table = filled(device, 8)
    try_swap_out([table], host)
    fork = table.fork()
    assert fork.num_shared == 2 and host.ref_count(1) == 2
    assert try_swap_in([fork], device) == [(1, 3), (2, 4)]
    assert (table.blocks, fork.blocks) == ([-1, -2], [3, 4])
    assert host.ref_count(1) == 1 and fork.num_shared == 0


def test_all_or_nothing(device: BlockPool, host: BlockPool) -> None:
    table, big = filled(device, 8), filled(device, 4 * 9)
    blocks = big.blocks
    assert try_swap_out([table, big], host) is None
    assert try_swap_out([big], host) is None
    assert big.blocks == blocks and table.blocks == [1, 2] and host.num_used == 0
    assert try_swap_out([table], host) is not None
    hog = filled(device, 4 * 6)
    assert try_swap_in([table], device) is None
    assert table.blocks == [-1, -2] and device.num_free == 1
    hog.free()
    assert try_swap_in([table], device) is not None


def test_nothing_to_move(device: BlockPool, host: BlockPool) -> None:
    assert try_swap_out([], host) == try_swap_in([], device) == []
    table = filled(device, 8)
    assert try_swap_in([table, BlockTable(device)], device) == []
    shared = table.fork()
    assert try_swap_out([shared], host) == [] and shared.resident


def test_forks_slices_and_cuts_of_a_table_in_both_pools(device: BlockPool, host: BlockPool) -> None:
    parent = filled(device, 4)
    table = parent.fork()
    write(table, 4, 12)
    try_swap_out([table], host)
    assert table.blocks == [1, -1, -2]
    slices = [table.slice_to(n) for n in (4, 8, 12)]
    assert [s.resident for s in slices] == [True, False, False]
    table.truncate(5)
    assert table.blocks == [1, -1] and host.num_used == 2
    table.truncate(4)
    assert table.resident
    assert [b for b, _ in slices[2].epochs()] == [1]
    slices.clear()
    assert host.num_used == 0
    for pool in (device, host):
        pool.check()


def test_what_was_swapped_out_is_still_found_and_its_chain_goes_on(device: BlockPool, host: BlockPool) -> None:
    tokens = TokenList(range(16))
    table = filled(device, 8)
    table.commit(tokens, 8)
    try_swap_out([table], host)
    finder = BlockTable(device)
    assert finder.match_prefix(tokens, 16) == 8 and finder.blocks == [1, 2]
    try_swap_in([table], device)
    write(table, 8, 12)
    table.commit(tokens, 12)
    again = BlockTable(device)
    assert again.match_prefix(tokens, 16) == 12 and again.blocks == [1, 2, table.blocks[2]]
    device.check()


def test_a_table_that_is_out_cannot_be_used(device: BlockPool, host: BlockPool) -> None:
    tokens = TokenList(range(8))
    table = filled(device, 8)
    try_swap_out([table], host)
    for use in (
        lambda: table.try_prepare_write(8, 9),
        lambda: table.commit(tokens, 8),
        lambda: prepare_batch([], [(table, tokens, 7, 1, -1)]),
    ):
        with pytest.raises(Error, match="swapped out"):
            use()


def test_misuse(device: BlockPool, host: BlockPool) -> None:
    table, stranger = filled(device, 8), filled(BlockPool(4, 4), 4)
    with pytest.raises(Error, match="twice"):
        try_swap_out([table, table], host)
    with pytest.raises(Error, match="one pool"):
        try_swap_out([table, stranger], host)
    with pytest.raises(Error, match="not the device"):
        try_swap_out([table], device)
    with pytest.raises(Error, match="block size"):
        try_swap_out([table], BlockPool(9, 8))
    try_swap_out([table], host)
    with pytest.raises(Error, match="another host"):
        try_swap_out([table], BlockPool(9, 4))
    with pytest.raises(Error, match="its own pool"):
        try_swap_in([table], host)
    assert table.blocks == [-1, -2]


def test_a_plan_neither_swaps_out_what_it_writes_nor_reuses_what_it_swaps_in(
    device: BlockPool, host: BlockPool
) -> None:
    inward, outward, running = filled(device, 8), filled(device, 4), BlockTable(device)
    try_swap_out([inward], host)
    for pool in (device, host):
        pool.begin_plan()
    write(running, 0, 1)
    with pytest.raises(Error, match="this plan writes"):
        try_swap_out([running], host)
    assert try_swap_in([inward], device) is not None
    assert try_swap_out([outward], host) == [(3, 3)], "host blocks 1 and 2 are still to be read"
    for pool in (device, host):
        pool.end_plan()
        pool.check()
    assert host.num_used == 1


def test_some_go_tails_first_and_as_many_as_asked_for_and_as_fit(device: BlockPool, host: BlockPool) -> None:
    first, second = filled(device, 12), filled(device, 8)
    assert swap_out_some([], host, 5) == swap_out_some([first], host, 0) == swap_out_some([first], host, -1) == []
    assert swap_out_some([first], host, 1) == [(3, 1)]
    assert (first.blocks, first.num_on_host, first.resident) == ([1, 2, -1], 1, False)
    assert swap_out_some([first, second], host, 3) == [(2, 2), (4, 3), (5, 4)]
    assert (first.num_on_host, second.num_on_host, device.num_used, host.num_used) == (2, 2, 1, 4)
    big = filled(device, 4 * 6)
    assert len(swap_out_some([first, big], host, 100)) == 4, "the host has no more"
    assert (first.num_on_host, big.num_on_host, host.num_free) == (2, 4, 0)
    assert first.blocks[0] == 1, "the last ones of the tables went first"
    assert try_swap_in([first, second], device) is not None
    assert first.num_on_host == second.num_on_host == 0
    for pool in (device, host):
        pool.check()


def test_some_leaves_what_others_hold_and_moves_what_is_shared_inside_once(device: BlockPool, host: BlockPool) -> None:
    parent = filled(device, 8)
    child, stranger = parent.fork(), parent.slice_to(4)
    write(child, 8, 12)
    assert swap_out_some([child], host, 9) == [(3, 1)], "the parent holds the others"
    assert swap_out_some([parent, child], host, 9) == [(2, 2)], "and a stranger the first"
    assert parent.blocks == [1, -2] and child.blocks == [1, -2, -1] and host.ref_count(2) == 2
    stranger.free()
    assert swap_out_some([parent, child], host, 9) == [(1, 3)]
    assert (parent.num_on_host, child.num_on_host) == (2, 3)


def test_num_on_host_follows_forks_cuts_and_ends(device: BlockPool, host: BlockPool) -> None:
    table = filled(device, 16)
    swap_out_some([table], host, 2)
    assert table.num_on_host == 2 and table.blocks[:2] == [1, 2]
    assert [table.slice_to(n).num_on_host for n in (8, 9, 16)] == [0, 1, 2]
    assert table.fork().num_on_host == 2
    table.truncate(12)
    assert table.num_on_host == 1
    table.free()
    assert table.num_on_host == 0 and host.num_used == 0


def test_what_a_plan_brings_in_it_does_not_take_out_again(device: BlockPool, host: BlockPool) -> None:
    """Swaps out run first: they would take what was there before."""
    lease = filled(device, 12)
    try_swap_out([lease], host)
    child = lease.slice_to(4)
    for pool in (device, host):
        pool.begin_plan()
    assert try_swap_in([child, lease], device) is not None
    assert swap_out_some([lease], host, 9) == []
    for pool in (device, host):
        pool.end_plan()
    assert len(swap_out_some([lease], host, 9)) == 2
    assert lease.num_on_host == 2 and child.num_on_host == 0


def test_a_front_that_holds_the_same_becomes_the_others(device: BlockPool, host: BlockPool) -> None:
    lease, child = filled(device, 12), filled(device, 14)
    swap_out_some([lease], host, 1)
    assert (lease.blocks, child.blocks) == ([1, 2, -1], [4, 5, 6, 7])
    child.share_front(lease, 3)
    assert child.blocks == [1, 2, -1, 7] and child.num_on_host == 1 and host.ref_count(1) == 2
    child.share_front(lease, 3)
    assert host.ref_count(1) == 2, "twice is once"
    lease.free()
    assert (device.num_used, host.num_used) == (3, 1)
    own = filled(device, 8)
    child.share_front(own, 0)
    with pytest.raises(Error, match="shorter"):
        child.share_front(own, 3)
    child.truncate(8)
    own.share_front(child, 2)
    assert own.blocks == [1, 2] and own.resident and child.num_on_host == 0
    for pool in (device, host):
        pool.check()
