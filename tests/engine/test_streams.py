"""The loops of C++ over sequences, against the obvious way to do the same."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from bequest.engine._C import (
    BlockPool,
    BlockTable,
    Error,
    Outlet,
    Progress,
    TokenList,
    any_adapter,
    count_accounts,
    plan_streams,
    prepare_batch,
    ready_streams,
    rows_of,
    sample_streams,
    take_samples,
)
from bequest.engine.types import NO_ROW

BLOCK = 4
RUNNING, WAITING = object(), object()


@dataclass(slots=True, eq=False)
class Stream(Progress):
    """As the engine's Sequence: its fields are members of C++."""

    tokens: TokenList
    table: BlockTable
    status: object = RUNNING


def stream(pool: BlockPool, num_tokens: int = 5, num_in_flight: int = 0, **members: object) -> Stream:
    """One past its prompt of three tokens, which has computed all but its last token."""
    made = Stream(TokenList(range(num_tokens)), BlockTable(pool))
    made.num_prompt, made.num_in_flight, made.planned_len = 3, num_in_flight, num_tokens + num_in_flight
    made.num_computed = made.planned_len - 1
    made.num_output, made.most_len, made.row, made.plain = num_tokens - 3, 100, 7, True
    for name, value in members.items():
        setattr(made, name, value)
    assert made.table.try_prepare_write(0, made.num_computed) == []
    return made


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(2000, BLOCK)


def test_members_begin_with_nothing() -> None:
    made = Progress()
    assert (made.row, made.num_logprobs, made.num_computed, made.last_token_at) == (NO_ROW, -1, 0, 0.0)
    assert made.plain is False and made.outlet is None and made.ends is None and made.matcher is None
    with pytest.raises(AttributeError):
        _ = made.tokens


def test_members_are_the_fields_of_a_dataclass_and_are_given_back() -> None:
    status = object()
    before = sys.getrefcount(status)
    made = Stream(TokenList(), BlockTable(BlockPool(9, BLOCK)), status)
    assert made.status is status and Progress.__dict__["status"].__get__(made) is status
    assert "status" not in Stream.__dict__
    del made
    assert sys.getrefcount(status) == before


def test_who_is_ready(pool: BlockPool) -> None:
    rng = random.Random(3)
    running = {stream(pool, rng.randrange(4, 9), rng.randrange(3)): None for _ in range(200)}
    expected: tuple[list[Stream], list[Stream], list[Stream]] = ([], [], [])
    for one in running:
        one.plain = rng.random() < 0.8
        one.num_computed -= rng.choice([0, 0, 0, 3])
        one.num_computed += rng.choice([0, 0, 1])
        one.most_len = one.planned_len + rng.choice([-1, 0, 1])
        wants = one.planned_len < one.most_len or one.num_computed < one.num_prompt
        num = one.planned_len - one.num_computed if wants else 0
        if not one.plain:
            expected[2].append(one)
        elif num > 0:
            expected[0 if num == 1 else 1].append(one)
    assert all(expected) and ready_streams(running) == expected


def test_streams_are_planned_until_one_that_is_none(pool: BlockPool) -> None:
    streams = [stream(pool, 4 + i % 5, i % 2) for i in range(30)]
    streams[3].status, streams[12].row, streams[20].plain = WAITING, NO_ROW, False
    used = {streams[5]}
    lens = [one.num_computed for one in streams]

    planned, copies, number = plan_streams(streams, 2, 100, used, RUNNING)
    assert planned == [one for i, one in enumerate(streams[:12]) if i not in (0, 1, 3, 5)]
    assert number == 12 and copies == [] and used == {*planned, streams[5]}
    assert [one.num_computed - before for one, before in zip(streams, lens, strict=True)] == [
        one in planned for one in streams
    ]
    assert all(one.table.capacity >= one.num_computed for one in planned)
    assert plan_streams(streams, 13, 3, used, RUNNING) == (streams[13:16], [], 16)
    assert plan_streams(streams, 16, 100, used, RUNNING)[2] == 20
    assert plan_streams(streams, 30, 100, used, RUNNING) == ([], [], 30)


def test_a_stream_without_a_block_is_not_planned() -> None:
    pool = BlockPool(5, BLOCK)
    streams = [stream(pool, 1 + BLOCK) for _ in range(3)]  # one block each, and one is left
    planned, copies, number = plan_streams(streams, 0, 9, set(), RUNNING)
    assert (planned, copies, number) == (streams[:1], [], 1)
    assert streams[1].num_computed == BLOCK


def test_a_shared_block_is_copied(pool: BlockPool) -> None:
    one = stream(pool, 3)
    fork = one.table.fork()
    pool.begin_plan()
    planned, copies, _ = plan_streams([one], 0, 1, set(), RUNNING)
    pool.end_plan()
    assert planned == [one] and copies == [(fork.blocks[0], one.table.blocks[0])]


def test_a_batch_of_streams_is_that_of_their_last_tokens(pool: BlockPool) -> None:
    streams = [stream(pool, 4 + i % 7, i % 3, row=i) for i in range(25)]
    plan_streams(streams, 0, 100, set(), RUNNING)
    other = stream(pool)
    behind = [(other.table, other.tokens, 0, 4, NO_ROW)]
    chunks = [(one.table, one.tokens, one.num_computed - 1, 1, one.row) for one in streams]
    by_chunks, by_streams = prepare_batch([], chunks + behind), prepare_batch(streams, behind)
    for name in ("input_ids", "input_rows", "positions", "query_start", "seq_lens", "slot_mapping", "block_tables"):
        assert np.array_equal(getattr(by_streams, name), getattr(by_chunks, name)), name


def test_samples_are_noted(pool: BlockPool) -> None:
    streams = [stream(pool, 4 + i, i % 2, row=i, account="ab"[i % 2]) for i in range(5)]
    positions = [one.planned_len for one in streams]
    in_flight = [one.num_in_flight for one in streams]
    assert sample_streams(streams) == (positions, None, False)
    assert [one.planned_len - 1 for one in streams] == positions
    assert [one.num_in_flight - 1 for one in streams] == in_flight
    streams[1].num_logprobs, streams[2].num_logprobs, streams[3].matcher = 0, 5, object()
    assert sample_streams(streams)[1:] == (5, True)
    assert rows_of(streams).tolist() == [0, 1, 2, 3, 4]
    assert count_accounts(streams) == [("a", 3), ("b", 2)] and count_accounts([]) == []
    assert not any_adapter(streams)
    streams[4].adapter = 9
    assert any_adapter(streams)


def trial(pool: BlockPool, rng: random.Random) -> Stream:
    """One that has a token in flight, and mostly nothing that its work would have to look at."""

    def rarely(odd: object, usual: object) -> object:
        return odd if rng.random() < 0.1 else usual

    made = stream(pool, rng.randrange(4, 14), 1)
    made.status, made.last_token_at = rarely(WAITING, RUNNING), rng.choice([1.0, 2.0, 2.0, 0.0])
    made.outlet, made.ends = rarely(None, Outlet(b"", b"")), rarely(None, frozenset({50}))  # type: ignore[assignment]
    made.free_until = made.num_output + rng.choice([1, 2, 9, 9, 9])
    made.num_computed += rng.randrange(2)  # a step behind is launched, or not
    assert made.table.try_prepare_write(made.num_computed - 1, made.num_computed) is not None
    return made


@pytest.mark.parametrize("commits", [True, False])
def test_tokens_that_nobody_has_to_look_at_are_taken(pool: BlockPool, commits: bool) -> None:
    rng = random.Random(commits)
    streams = tuple(trial(pool, rng) for _ in range(300))
    tokens = np.asarray([rng.choice([50, 51, 52, 53]) for _ in streams], np.int32)
    bad = np.asarray([rng.random() < 0.05 for _ in streams])
    before = [(one.tokens.to_list(), one.num_output, one.last_token_at) for one in streams]
    free = [
        one.status is RUNNING
        and not bad[i]
        and one.last_token_at > 0
        and one.outlet is not None
        and one.ends is not None
        and tokens[i] not in one.ends
        and one.num_output + 1 < one.free_until
        for i, one in enumerate(streams)
    ]
    assert 30 < sum(free) < 270

    passed, taken, seconds, left = take_samples(streams, tokens, bad, 3.5, RUNNING, commits)

    assert passed == [one for one, is_free in zip(streams, free, strict=True) if is_free]
    assert left == [i for i, is_free in enumerate(free) if not is_free]
    assert taken == [int(tokens[i]) for i, is_free in enumerate(free) if is_free]
    assert seconds == [3.5 - was[2] for was, is_free in zip(before, free, strict=True) if is_free]
    full = set()
    for i, (one, (known, num_output, last)) in enumerate(zip(streams, before, strict=True)):
        assert one.num_in_flight == 0
        assert one.tokens.to_list() == ([*known, tokens[i]] if free[i] else known)
        assert one.num_output == num_output + free[i]
        assert one.last_token_at == (3.5 if free[i] else last)
        num_known = min(one.num_computed, len(one.tokens))
        if commits and free[i] and num_known % BLOCK == 0:
            full |= {tuple(one.tokens.to_list()[: n * BLOCK]) for n in range(1, num_known // BLOCK + 1)}
    assert pool.num_indexed == len(full) and bool(full) == commits


def test_misuse(pool: BlockPool) -> None:
    one = stream(pool)
    with pytest.raises(TypeError, match="not a sequence"):
        sample_streams([one, object()])
    with pytest.raises(Error, match="no sample"):
        take_samples((one,), np.zeros(0, np.int32), np.zeros(0, np.bool_), 1.0, RUNNING, True)
