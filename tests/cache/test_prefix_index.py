"""Commit and match: what is found, what never is, what leaves. BS = 4 throughout."""

from __future__ import annotations

import random

import pytest

from bequest.engine._C import BlockPool, BlockTable, Error, TokenList
from tests.cache.test_block_pool import write


def committed(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> BlockTable:
    """A table of its own that holds `tokens`, all written, its full blocks in the index."""
    table = BlockTable(pool, salt)
    write(table, 0, len(tokens))
    table.commit(TokenList(tokens), len(tokens))
    pool.check()
    return table


def matched(pool: BlockPool, tokens: list[int], limit: int | None = None, salt: bytes = b"") -> list[int]:
    """The blocks that a new table would find."""
    table = BlockTable(pool, salt)
    length = table.match_prefix(TokenList(tokens), len(tokens) if limit is None else limit)
    assert length == 4 * len(table)
    return table.blocks


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 7, 8, 9, 12])
def test_full_blocks_within_the_limit(length: int) -> None:
    pool = BlockPool(9, 4)
    table = committed(pool, list(range(length)))
    assert pool.num_indexed == length // 4
    for limit in range(14):
        assert matched(pool, list(range(13)), limit) == table.blocks[: min(limit, length) // 4]


def test_a_match_takes_references_and_needs_an_empty_table() -> None:
    pool = BlockPool(9, 4)
    table = committed(pool, list(range(8)))
    other = BlockTable(pool)
    assert other.match_prefix(TokenList(range(8)), 7) == 4
    assert pool.ref_count(1) == 2 and other.num_shared == 1 and table.num_shared == 1
    with pytest.raises(Error, match="empty table"):
        other.match_prefix(TokenList(range(8)), 8)


def test_a_freed_block_is_found_until_it_is_reused() -> None:
    pool = BlockPool(9, 4)
    tokens = list(range(16))
    committed(pool, tokens).free()
    assert pool.num_free == 8
    table = BlockTable(pool)
    assert table.match_prefix(TokenList(tokens), 16) == 16
    assert pool.num_free == 4
    table.free()
    hog = BlockTable(pool)
    write(hog, 0, 4 * 6)
    assert matched(pool, tokens) == [1, 2], "the tail was reused first"
    pool.check()


def test_history_counts_not_only_the_blocks_own_tokens() -> None:
    pool = BlockPool(9, 4)
    a = committed(pool, [1, 1, 1, 1, 7, 7, 7, 7])
    assert matched(pool, [2, 2, 2, 2, 7, 7, 7, 7]) == []
    assert matched(pool, [7, 7, 7, 7]) == []
    b = committed(pool, [2, 2, 2, 2, 7, 7, 7, 7])
    assert matched(pool, [1, 1, 1, 1, 7, 7, 7, 7]) == a.blocks
    assert matched(pool, [2, 2, 2, 2, 7, 7, 7, 7]) == b.blocks


def test_salts_divide_the_index_and_vanish_with_their_blocks() -> None:
    pool = BlockPool(9, 4)
    salts = [b"", b"a", b"b", b"a\0b", b"a\0"]
    tables = {salt: committed(pool, [1, 2, 3, 4], salt) for salt in salts}
    assert pool.num_roots == len(salts)
    for salt in salts:
        assert matched(pool, [1, 2, 3, 4], salt=salt) == tables[salt].blocks
    tables.clear()
    for i in range(50):
        committed(pool, [1, 2, 3, 4], b"tenant %d" % i).free()
    assert pool.num_roots == pool.num_indexed == 8
    pool.check()


@pytest.mark.parametrize("hash_bits", [0, 1, 3])
def test_a_collision_never_serves_a_wrong_block(hash_bits: int) -> None:
    """Every hash, or almost every one, is equal; what is found must be exactly what a perfect hash finds."""
    rng = random.Random(hash_bits)
    forced, perfect = BlockPool(64, 4, hash_bits=hash_bits), BlockPool(64, 4)
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(20))]
        salt = rng.choice([b"", b"x", b"y"])
        found = matched(forced, tokens, salt=salt)
        assert found == matched(perfect, tokens, salt=salt)
        for pool in (forced, perfect):
            committed(pool, tokens, salt).free()


def test_commit_is_incremental_and_idempotent() -> None:
    pool = BlockPool(9, 4)
    table = BlockTable(pool)
    tokens = TokenList()
    for position in range(14):
        tokens.append(position)
        write(table, position, position + 1)
        for _ in range(2):
            table.commit(tokens, position + 1)
        assert pool.num_indexed == (position + 1) // 4
    table.commit(tokens, 8)
    assert pool.num_indexed == 3
    pool.check()


def test_commit_goes_no_further_than_the_known_tokens() -> None:
    pool = BlockPool(9, 4)
    table = BlockTable(pool)
    write(table, 0, 8)
    table.commit(TokenList(range(7)), 8)
    assert pool.num_indexed == 1
    with pytest.raises(Error, match="room"):
        table.commit(TokenList(range(12)), 12)


def test_commit_refuses_a_block_that_is_not_written_to_its_end() -> None:
    pool = BlockPool(9, 4)
    table = BlockTable(pool)
    write(table, 0, 7)
    with pytest.raises(Error, match="not fully written"):
        table.commit(TokenList(range(8)), 8)
    pool.check()


def test_an_equal_block_keeps_the_first_in_the_index_and_the_chain_goes_on_below_it() -> None:
    pool = BlockPool(12, 4)
    first = committed(pool, [1, 2, 3, 4])
    second = committed(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert second.blocks == [2, 3] and pool.num_indexed == 2
    assert matched(pool, [1, 2, 3, 4, 5, 6, 7, 8]) == [first.blocks[0], second.blocks[1]]


def test_a_table_enters_its_own_blocks_once_those_it_hung_below_are_gone() -> None:
    pool = BlockPool(6, 4)
    tokens = list(range(12))
    first = committed(pool, tokens[:4])
    second = committed(pool, tokens[:8])
    assert matched(pool, tokens) == [first.blocks[0], second.blocks[1]]
    first.free()
    hog = BlockTable(pool)
    write(hog, 0, 12)  # reuses the only findable copy of tokens[:4], so tokens[4:8] is out of reach too
    assert pool.num_indexed == 0 and matched(pool, tokens) == []
    pool.check()
    hog.free()
    write(second, 8, 12)
    second.commit(TokenList(tokens), 12)
    assert matched(pool, tokens) == second.blocks
    pool.check()


def test_forks_commit_the_same_blocks_once() -> None:
    pool = BlockPool(9, 4)
    table = BlockTable(pool)
    write(table, 0, 8)
    fork = table.fork()
    for t in (table, fork, fork):
        t.commit(TokenList(range(8)), 8)
    assert pool.num_indexed == 2
    pool.check()


def test_an_indexed_block_is_replaced_instead_of_rewritten() -> None:
    pool = BlockPool(9, 4)
    table = committed(pool, list(range(8)))
    table.truncate(6)
    assert table.blocks_needed(6, 7) == 1
    assert write(table, 6, 7) == [(2, 3)], "one owner, but others may find it"
    assert matched(pool, list(range(8))) == [1, 2]
    assert write(table, 0, 8) == [], "from the first slot on nothing is kept"
    assert 1 not in table.blocks
    assert matched(pool, list(range(8))) == [1, 2]
    table.commit(TokenList([9] * 8), 8)
    assert matched(pool, [9] * 8) == table.blocks
    pool.check()


def test_uncommit_takes_the_tables_own_entries_out_and_lets_it_rewrite_them() -> None:
    pool = BlockPool(9, 4)
    tokens = TokenList(range(12))
    table = committed(pool, list(range(12)))
    below = BlockTable(pool)
    assert below.match_prefix(tokens, 12) == 12
    write(below, 12, 16)
    below.commit(TokenList(range(16)), 16)
    assert pool.num_indexed == 4
    table.uncommit(9)  # inside the third block
    assert pool.num_indexed == 2, "what hung below left too"
    assert matched(pool, list(range(16))) == [1, 2]
    below.free()
    assert write(table, 8, 12) == [] and table.blocks == [1, 2, 3], "in place: nobody can see it"
    table.commit(tokens, 12)
    assert matched(pool, list(range(16))) == [1, 2, 3]
    table.uncommit(12)
    assert pool.num_indexed == 3
    table.uncommit(0)
    assert pool.num_indexed == pool.num_roots == 0
    pool.check()


def test_uncommit_leaves_the_entries_of_others() -> None:
    pool = BlockPool(9, 4)
    first = committed(pool, list(range(8)))
    second = committed(pool, list(range(12)))
    second.uncommit(0)
    assert matched(pool, list(range(12))) == first.blocks


def test_a_chain_below_an_entry_that_came_back_with_other_tokens_is_not_continued() -> None:
    """`second` hung below block 1. Block 1 left the index and came back with other tokens, at the same place."""
    pool = BlockPool(9, 4)
    first = committed(pool, [1, 1, 1, 1])
    second = committed(pool, [1, 1, 1, 1])
    first.uncommit(0)
    write(first, 0, 4)
    first.commit(TokenList([2, 2, 2, 2]), 4)
    assert first.blocks == [1]
    write(second, 4, 8)
    second.commit(TokenList([1, 1, 1, 1, 3, 3, 3, 3]), 8)
    assert matched(pool, [2, 2, 2, 2, 3, 3, 3, 3]) == first.blocks
    assert matched(pool, [1, 1, 1, 1, 3, 3, 3, 3]) == second.blocks
    pool.check()


def test_a_block_known_under_another_salt_is_not_entered_twice() -> None:
    pool = BlockPool(9, 4)
    table = committed(pool, list(range(8)), b"a")
    other = BlockTable.adopt(pool, b"b", table.epochs())
    count = len(other)
    assert count == 2
    other.commit(TokenList(range(8)), 8)
    assert matched(pool, list(range(8)), salt=b"b") == []
    assert pool.num_roots == 1
    pool.check()


def test_clear_index() -> None:
    pool = BlockPool(9, 4)
    table = committed(pool, list(range(8)), b"a")
    committed(pool, list(range(8)), b"b").free()
    pool.clear_index()
    assert pool.num_indexed == pool.num_roots == 0 and matched(pool, list(range(8)), salt=b"b") == []
    pool.check()
    table.commit(TokenList(range(8)), 8)
    assert matched(pool, list(range(8)), salt=b"a") == table.blocks


# --- matches that end inside a block


def partial(pool: BlockPool, tokens: list[int], limit: int, salt: bytes = b"") -> tuple[BlockTable, int, int]:
    table = BlockTable(pool, salt)
    full = table.match_prefix(TokenList(tokens), limit)
    return table, full, table.match_partial(TokenList(tokens), limit)


def test_partial_match_copies_the_head_of_the_block() -> None:
    pool = BlockPool(9, 4)
    parent = committed(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    child, full, head = partial(pool, [1, 2, 3, 4, 5, 6, 9, 9], 8)
    assert (full, head, child.blocks) == (4, 2, [1, 2])
    assert child.blocks_needed(6, 8) == 1
    assert write(child, 6, 8) == [(2, 3)]
    child.commit(TokenList([1, 2, 3, 4, 5, 6, 9, 9]), 8)
    assert matched(pool, [1, 2, 3, 4, 5, 6, 9, 9]) == [1, 3]
    assert matched(pool, [1, 2, 3, 4, 5, 6, 7, 8]) == parent.blocks
    pool.check()


@pytest.mark.parametrize("free", [False, True])
def test_partial_match_at_the_root_and_of_freed_blocks(free: bool) -> None:
    pool = BlockPool(9, 4)
    parent = committed(pool, [1, 2, 3, 4])
    if free:
        parent.free()
    child, full, head = partial(pool, [1, 2, 3, 9], 4)
    assert (full, head, child.blocks) == (0, 3, [1])
    assert write(child, 3, 4) == [(1, 2)]
    assert partial(pool, [9], 1)[2] == 0
    assert partial(pool, [1, 2], 2, b"other")[2] == 0
    assert partial(pool, [1, 2], 0)[2] == 0


def test_partial_match_stops_before_the_limit_of_a_full_match() -> None:
    pool = BlockPool(100, 4)
    kept = [committed(pool, [1, 2, 3, 4, 5, 6, 7, 8])]
    assert partial(pool, [1, 2, 3, 4, 5, 6, 7, 8], 7)[1:] == (4, 3)
    # More children than the scan looks at: the equal one is found all the same, by its hash.
    kept += [committed(pool, [1, 2, 3, 4, 9, 9, 9, i]) for i in range(40)]
    kept += [committed(pool, [1, 2, 3, 4, 9, 9, i, i]) for i in range(8)]
    table, full, head = partial(pool, [1, 2, 3, 4, 5, 6, 7, 8], 7)
    assert (full, head, table.blocks) == (4, 3, [1, 2])


def test_partial_match_prefers_the_longest_head() -> None:
    pool = BlockPool(30, 4)
    kept = [committed(pool, [1, *rest]) for rest in ([9, 9, 9], [2, 9, 9], [2, 3, 9], [2, 9, 8], [9, 9, 8])]
    table, full, head = partial(pool, [1, 2, 3, 4], 4)
    assert (full, head, table.blocks) == (0, 3, kept[2].blocks)


def test_partial_match_passes_over_blocks_that_the_open_plan_writes() -> None:
    pool = BlockPool(9, 4)
    pool.begin_plan()
    parent = committed(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    child, full, head = partial(pool, [1, 2, 3, 4, 5, 6, 9, 9], 8)
    assert (full, head, child.blocks) == (4, 0, parent.blocks[:1]), "full blocks are shared, none is copied"
    pool.end_plan()
    assert partial(pool, [1, 2, 3, 4, 5, 6, 9, 9], 8)[2] == 2
