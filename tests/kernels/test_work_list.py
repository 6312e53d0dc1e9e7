"""The work list of GPU attention: every visible key of every query once, within the announced sizes, balanced."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from bequest.engine import _C

F32, BF16 = 0, 1
CANARY = -7
BLOCK_SIZE = 16
FAR = 1 << 28  # a position behind every key; from there on, the counters of wide tiles


@dataclass(frozen=True)
class Shape:
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: int = BF16
    causal: bool = True
    window: int = 0
    multiprocessors: int = 132
    prefill_blocks: int = 1  # at once on each

    def work(self, max_sequences: int, max_tokens: int) -> _C.AttentionWork:
        return _C.AttentionWork(
            (self.num_q_heads, self.num_kv_heads, self.head_dim),
            (self.causal, self.window),
            self.dtype,
            max_sequences,
            max_tokens,
            (self.multiprocessors, self.prefill_blocks, True),
        )


@dataclass(frozen=True)
class Item:
    sequence: int
    first_token: int
    num_tokens: int
    first_position: int
    kv_begin: int
    kv_end: int
    state_row: int
    next: int


@dataclass(frozen=True)
class Join:
    state_row: int
    num_states: int
    stride: int
    counter: int
    num_readers: int
    tail_row: int
    token: int


@dataclass(frozen=True)
class WorkList:
    workers: list[list[Item]]  # of the decode section
    prefill: list[Item]
    merges: list[tuple[int, ...]]
    joins: dict[int, Join]  # by the token of the tail
    num_wide_workers: int
    mail_rows: int  # 0: no states are mailed
    keys_are_old: bool

    @property
    def decode(self) -> list[Item]:
        return list(itertools.chain.from_iterable(self.workers))


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def build(shape: Shape, lens: list[tuple[int, int]], tables: np.ndarray | None = None) -> WorkList:
    """Builds the list of (query_len, seq_len) in a buffer with a canary behind it, and reads it as the kernels do."""
    query_start = np.cumsum([0, *(query_len for query_len, _ in lens)], dtype=np.int32)
    seq_lens = np.array([seq_len for _, seq_len in lens], dtype=np.int32)
    work = shape.work(len(lens), int(query_start[-1]))
    buffer = np.full(work.size + 64, CANARY, dtype=np.int32)
    known = (0, 0) if tables is None else (address(tables), tables.shape[1])
    rows = (address(query_start), address(seq_lens), known[0], len(lens), known[1])
    counts = work.write(rows, BLOCK_SIZE, address(buffer))
    assert (buffer[work.size :] == CANARY).all()
    merges_at, decode_at, prefill_at = work.sections
    assert tuple(buffer[:3]) == (counts[2], counts[0], counts[1])
    merges = [tuple(map(int, row)) for row in buffer[merges_at : merges_at + 8 * counts[2]].reshape(-1, 8)]
    assert merges_at + 8 * counts[2] <= decode_at and buffer[3] <= work.state_rows
    decode = items_of(buffer[decode_at:prefill_at], counts[0])
    prefill = items_of(buffer[prefill_at : work.size], counts[1])
    assert len(merges) <= sum(work.max_merges)
    workers = [decode] if shape.dtype == F32 else [chain(decode, w) for w in range(work.workers if decode else 0)]
    entries = buffer[merges_at:decode_at].reshape(-1, 8)
    mails = buffer[7] < 0
    if buffer[5] and mails:
        deal_narrow(workers, decode, len(entries), *map(int, buffer[4:7]))
    elif buffer[5]:
        deal_joining(workers, decode, int(buffer[4]), int(buffer[5]), int(buffer[7]))
    tails = [item for worker in workers for item in worker if item.state_row < -1]
    assert len({item.state_row for item in tails}) == len(tails) <= len(entries) - len(merges)
    joins = {item.first_token: Join(*map(int, entries[-2 - item.state_row, :7])) for item in tails}
    mail_rows = work.mail_ints // shape.num_kv_heads // (shape.head_dim // 2 + 2) if buffer[5] and mails else 0
    return WorkList(workers, prefill, merges, joins, int(buffer[6]), mail_rows, bool(buffer[8]))


def items_of(section: np.ndarray, count: int) -> list[Item]:
    rows = section[: 8 * count].reshape(count, 8)
    return [Item(*map(int, row)) for row in rows]


def chain(items: list[Item], worker: int) -> list[Item]:
    """A worker's items: the one of its number, unless that is empty, and those linked to it."""
    found, index = [], worker
    while index >= 0:
        found.append(items[index])
        index = items[index].next
    return found if found[0].num_tokens else []


def deal_narrow(
    workers: list[list[Item]], items: list[Item], num_entries: int, first: int, count: int, first_worker: int
) -> None:
    """Narrow items, dealt to the workers from first_worker on, a warp of four at a time: tails that join states.

    Their entries are the last of the section, from its end on.
    """
    assert not any(workers[first_worker:]) and 0 < first_worker < len(workers) and first + count == len(items)
    for place, item in enumerate(items[first:]):
        assert item.next == -1 and item.kv_begin % 64 == 0 and item.kv_end - item.kv_begin <= 128
        assert -2 - item.state_row == num_entries - 1 - place
        workers[first_worker + place // 4 % (len(workers) - first_worker)].append(item)


def deal_joining(workers: list[list[Item]], items: list[Item], first: int, count: int, first_worker: int) -> None:
    """Tails that join states of prefill tiles, in turns to the warps of the workers from first_worker on, linked."""
    assert not any(workers[first_worker:]) and first_worker < len(workers) and first + count == len(items)
    warps = 4 * (len(workers) - first_worker)
    for place, item in enumerate(items[first:]):
        following = place + warps
        assert item.next == (first + following if following < count else -1)
        assert item.state_row < -1 and item.num_tokens == 1
        assert item.kv_begin % 64 == 0 and 0 < item.kv_end - item.kv_begin <= 128
        workers[first_worker + place % warps // 4].append(item)


def check_states(shape: Shape, found: WorkList) -> None:
    """Each row of each state is left by one item and merged once, into the same row of the output."""
    group = shape.num_q_heads // shape.num_kv_heads
    left: dict[int, int] = {}  # row of a state → row of the output
    mailed: dict[int, int] = {}  # the same in the mailbox
    for item in found.decode + found.prefill:
        rows_left = mailed if found.mail_rows and item in found.decode else left
        for row in range(item.num_tokens * group if item.state_row >= 0 else 0):
            assert item.state_row + row not in rows_left
            rows_left[item.state_row + row] = item.first_token * group + row
    for token, join in found.joins.items() if found.mail_rows else []:
        assert join.token == token
        for row in range(group):
            assert join.tail_row + row not in mailed
            mailed[join.tail_row + row] = token * group + row
    assert max(mailed, default=-1) < max(found.mail_rows, 1)
    merged: dict[int, int] = {}
    taken: dict[int, int] = {}
    for first_token, num_tokens, state_row, num_states, shared_row, num_shared, stride, _ in found.merges:
        assert num_states + num_shared > 1
        rows = num_tokens * group
        firsts = [state_row + i * rows for i in range(num_states)]
        firsts += [shared_row + i * stride for i in range(num_shared)]
        for first, row in itertools.product(firsts, range(rows)):
            assert first + row not in merged
            merged[first + row] = first_token * group + row
    for token, join in found.joins.items():
        firsts = [join.state_row + i * join.stride for i in range(join.num_states)]
        firsts += [join.tail_row] if found.mail_rows else []
        rows_taken = taken if found.mail_rows else merged
        for first, row in itertools.product(firsts, range(group)):
            assert first + row not in rows_taken
            rows_taken[first + row] = token * group + row
    assert merged == left and taken == mailed
    check_counters(shape, found)


def check_counters(shape: Shape, found: WorkList) -> None:
    """A counter counts the pieces of one tile, whose states the tails that wait for it are told of; nobody else does.

    Tails that wait for no counter join states of prefill tiles, or those that are mailed.
    """
    group = shape.num_q_heads // shape.num_kv_heads
    pieces: dict[int, list[Item]] = {}
    for item in found.decode if shape.causal else []:
        if item.first_position >= FAR:
            pieces.setdefault(item.first_position - FAR, []).append(item)
    readers: dict[int, int] = {}
    for token, join in found.joins.items():
        if join.counter >= 0:
            readers[join.counter] = readers.get(join.counter, 0) + 1
            tile = pieces[join.counter]
            assert all(item.first_token <= token < item.first_token + item.num_tokens for item in tile)
        else:
            tiles = [item for item in found.decode if item.state_row >= 0] if found.mail_rows else found.prefill
            tile = [item for item in tiles if item.first_token <= token < item.first_token + item.num_tokens]
        assert len(tile) == join.num_states > 0
        firsts = {item.state_row + (token - item.first_token) * group for item in tile}
        assert firsts == {join.state_row + i * join.stride for i in range(join.num_states)}
    assert set(pieces) == set(readers) and max(readers, default=-1) < len(found.workers)
    assert all(join.num_readers == readers[join.counter] for join in found.joins.values() if join.counter >= 0)


def check_wide(shape: Shape, found: WorkList) -> None:
    """Wide tiles are single units, and all that the first workers have; the others' have the rows of decode tiles."""
    group = shape.num_q_heads // shape.num_kv_heads
    for worker in found.workers[: found.num_wide_workers]:
        assert 1 <= len(worker) <= 2
        for item in worker:
            assert item.kv_begin % 64 == 0 and item.kv_end == item.kv_begin + 64 <= item.first_position
            assert item.num_tokens * group <= (128 if shape.head_dim < 256 else 64) and item.state_row >= 0
    for worker in found.workers[found.num_wide_workers :] if shape.dtype == BF16 else []:
        assert all(item.num_tokens * group <= 16 for item in worker)


def check_cover(shape: Shape, lens: list[tuple[int, int]], found: WorkList, tables: np.ndarray | None = None) -> None:
    """Each query token's visible keys are covered once, in its own sequence's blocks."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    owner = np.repeat(np.arange(len(lens)), [query_len for query_len, _ in lens])
    for item in found.decode + found.prefill:
        assert item.kv_begin < item.kv_end
        for token in range(item.first_token, item.first_token + item.num_tokens):
            ranges.setdefault(token, []).append((item.kv_begin, item.kv_end))
            if item.sequence != owner[token]:
                assert tables is not None and item.first_position >= item.kv_end
                blocks = slice(item.kv_begin // BLOCK_SIZE, -(-item.kv_end // BLOCK_SIZE))
                assert (tables[item.sequence, blocks] == tables[owner[token], blocks]).all()
    check_states(shape, found)
    check_wide(shape, found)
    token = 0
    for sequence, (query_len, seq_len) in enumerate(lens):
        for i in range(query_len):
            pieces = sorted(ranges.pop(token + i, []))
            if seq_len == 0:
                assert not pieces
                continue
            position = seq_len - query_len + i if shape.causal else seq_len - 1
            begin = max(0, position - shape.window + 1) if shape.window else 0
            assert pieces[0][0] <= begin and pieces[-1][1] > position, (sequence, i, pieces)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        token += query_len
    assert not ranges


SHAPES = [
    Shape(),
    Shape(window=100),
    Shape(causal=False),
    Shape(dtype=F32),
    Shape(num_q_heads=28, num_kv_heads=4),
    Shape(num_q_heads=64, num_kv_heads=1),  # a single token has more rows than a decode tile
    Shape(num_q_heads=8, num_kv_heads=8, head_dim=256),
    Shape(num_q_heads=400, num_kv_heads=400, multiprocessors=3),
]
BATCHES: list[list[tuple[int, int]]] = [
    [],
    [(0, 0), (0, 5), (1, 0), (3, 0)],
    [(1, 1)],
    [(1, 63), (1, 64), (1, 65), (4, 4), (5, 5), (0, 9)],
    [(1, 65536)] + [(1, 16)] * 40,
    [(1, n) for n in (1, 1000, 65536, 3, 70, 4096)],
    [(300, 300), (1, 2000), (128, 4000), (2, 2), (33, 64)],
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lens", BATCHES, ids=lambda lens: str(len(lens)))
def test_every_visible_key_once(shape: Shape, lens: list[tuple[int, int]]) -> None:
    check_cover(shape, lens, build(shape, lens))


@pytest.mark.parametrize("seed", range(30))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lens = []
    for _ in range(rng.integers(1, 40)):
        query_len = int(rng.choice([0, 1, 1, 1, 4, 5, int(rng.integers(1, 200))]))
        lens.append((query_len, query_len + int(rng.choice([0, 1, 63, 64, int(rng.integers(1, 3000))]))))
    shape = SHAPES[seed % len(SHAPES)]
    check_cover(shape, lens, build(shape, lens))


@pytest.mark.parametrize(
    ("lens", "prefill"),
    [
        ([(8, 65536)], False),  # a graph of so few tokens has no kernel for it
        ([(5, 16384), (1, 100), (1, 100), (1, 100)], False),
        ([(5, 16384)] * 2, False),
        ([(5, 16384)] * 4, True),
        ([(4, 16384)] * 4, False),  # one tile each
        ([(8, 2000)] * 4, False),
        ([(9, 10)], True),
    ],
)
def test_a_few_queries_have_prefill_tiles_where_there_are_many_keys(lens: list[tuple[int, int]], prefill: bool) -> None:
    built = build(Shape(), lens)
    check_cover(Shape(), lens, built)
    assert bool(built.prefill) == prefill


def test_a_window_bounds_the_keys_of_a_few_queries() -> None:
    lens = [(5, 16384)] * 4
    assert not build(Shape(window=1024), lens).prefill


def shared_tables(rng: np.random.Generator, lens: list[tuple[int, int]], common: list[int]) -> np.ndarray:
    """Block tables in which sequence s has its first common[s] keys in common with the one before it."""
    width = max(-(-seq_len // BLOCK_SIZE) for _, seq_len in lens)
    tables = rng.permutation(len(lens) * width).astype(np.int32).reshape(len(lens), width) + 1
    for s in range(1, len(lens)):
        blocks = common[s] // BLOCK_SIZE
        tables[s, :blocks] = tables[s - 1, :blocks]
    return tables


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("count", "keys"), [(2, 128), (3, 704), (32, 704), (32, 2048), (40, 16384), (130, 3000)])
def test_a_shared_prefix_is_read_once_per_tile(shape: Shape, count: int, keys: int) -> None:
    rng = np.random.default_rng(count)
    lens = [(1, 300), *((1, keys + int(rng.integers(2, 200))) for _ in range(count)), (3, keys + 9), (1, 40)]
    tables = shared_tables(rng, lens, [0, 0, *([keys] * (count - 1)), keys, 32])
    found = build(shape, lens, tables)
    check_cover(shape, lens, found, tables)
    whole_units = keys // 64 * 64
    far = FAR if shape.causal else 2 * FAR
    shared = [
        item for item in found.decode + found.prefill if item.first_position in (whole_units, *range(far, far + 9))
    ]
    group = shape.num_q_heads // shape.num_kv_heads
    workers = max(1, shape.multiprocessors * (1 if shape.head_dim > 128 else 2) // shape.num_kv_heads)
    units = sum(seq_len for query_len, seq_len in lens if query_len <= 16 // group) // 64
    wide = [item for item in shared if item.num_tokens * group > 16 and item in found.decode]
    if shape.dtype == F32 or not shape.causal or shape.window or group > 16 or units < (2 if wide else 4) * workers:
        assert not shared
        return
    assert not wide or wide == shared
    tile = (128 if shape.head_dim < 256 else 64) if wide or shared[0] in found.prefill else 16
    if wide and max(item.num_tokens for item in wide) * group <= 64:
        tile = 64
    assert sum(item.kv_end - item.kv_begin for item in shared) == whole_units * -(-count // (tile // group))


@pytest.mark.parametrize(
    ("count", "keys", "rows", "narrow"),
    [
        (8, 704, 32, False),
        (32, 704, 64, True),
        (64, 320, 128, True),
        (64, 704, 128, True),
        (128, 320, 128, True),
        (32, 1024, 128, True),
        (32, 2048, 128, True),
    ],
)
def test_wide_tiles_are_small_while_there_are_workers(count: int, keys: int, rows: int, narrow: bool) -> None:
    """33 workers, of which 22 may have wide tiles. Tails are narrow if they outnumber workers and states are few."""
    lens = [(1, keys + 40)] * count
    tables = shared_tables(np.random.default_rng(0), lens, [keys] * count)
    found = build(Shape(), lens, tables)
    check_cover(Shape(), lens, found, tables)
    assert bool(found.mail_rows) == narrow
    wide = [worker for worker in found.workers if any(item.num_tokens > 1 for item in worker)]
    assert max(item.num_tokens * 4 for worker in wide for item in worker) == rows
    others = found.workers[len(wide) :]
    assert sum(map(len, others)) == count
    assert ([item.first_token for item in others[0][:4]] == [0, 1, 2, 3]) == narrow


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_narrow_tails(seed: int) -> None:
    """Several prefixes, and nothing but short tails behind them; beside a prompt where `seed` is odd."""
    rng = np.random.default_rng(seed)
    shape = [Shape(), Shape(num_q_heads=64), Shape(num_q_heads=16), Shape(num_q_heads=14, num_kv_heads=2)][seed % 4]
    lens, common = [], []
    for _ in range(rng.integers(1, 4)):
        keys, count = 64 * int(rng.integers(2, 9)), int(rng.integers(12, 30))
        lens += [(1, keys + int(n)) for n in rng.integers(1, 129, count)]
        common += [0, *[keys] * (count - 1)]
    if seed % 2:
        lens, common = [*lens, (200, 200)], [*common, 0]
    tables = shared_tables(rng, lens, common)
    check_cover(shape, lens, build(shape, lens, tables), tables)


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("beside", [[], [(6, 710)] * 8, [(1, 5000), (1, 200)], [(300, 300), (1, 1)]], ids=str)
@pytest.mark.parametrize("count", [200, 256, 1024])
def test_many_tails_behind_prefill_tiles_are_for_warps(count: int, beside: list[tuple[int, int]], heads: int) -> None:
    """They join states, and nothing of them is left to merge. What is beside them is for thread blocks."""
    shape = Shape(num_q_heads=heads)
    rng = np.random.default_rng(count)
    lens = [(1, 704 + int(n)) for n in rng.integers(1, 129, count)] + beside
    tables = shared_tables(rng, lens, [704] * count + [0] * len(beside))
    found = build(shape, lens, tables)
    check_cover(shape, lens, found, tables)
    assert len(found.joins) == count and all(token >= count for token, *_ in found.merges)
    tails = [[item for item in worker if item.first_token < count] for worker in found.workers]
    first = next(w for w, items in enumerate(tails) if items)
    assert all(len(worker) == len(mine) for worker, mine in zip(found.workers[first:], tails[first:], strict=True))
    assert max(map(len, tails)) - min(map(len, tails[first:])) <= 4


def test_long_tails_behind_prefill_tiles_are_for_thread_blocks() -> None:
    lens = [(1, 704 + (900 if i % 2 else 20)) for i in range(512)]
    tables = shared_tables(np.random.default_rng(0), lens, [704] * 512)
    found = build(Shape(), lens, tables)
    check_cover(Shape(), lens, found, tables)
    assert len(found.joins) == 256 and sum(tokens for _, tokens, *_ in found.merges) == 256


@pytest.mark.parametrize(("blocks", "pieces"), [(1, 16), (2, 32)])
def test_a_long_prefix_has_as_many_pieces_as_are_attended_at_once(blocks: int, pieces: int) -> None:
    lens = [(1, 16424)] * 32
    found = build(Shape(prefill_blocks=blocks), lens, shared_tables(np.random.default_rng(0), lens, [16384] * 32))
    assert len(found.prefill) == pieces and not found.merges
    assert all(join.num_states == pieces and join.counter == -1 for join in found.joins.values())


def test_runs_spare_as_many_keys_as_they_can() -> None:
    """Two groups under one system prompt, and a stranger between: each group by itself, its whole prefix."""
    rng = np.random.default_rng(0)
    common = [0, 1024, 1024, 1024, 256, 1024, 1024, 0, 320, 320, 320]
    lens = [(1, 1100)] * len(common)
    tables = shared_tables(rng, lens, common)
    shape = Shape(multiprocessors=66)
    found = build(shape, lens, tables)
    check_cover(shape, lens, found, tables)
    shared = {}
    for item in found.decode:
        if item.first_position != 1099:
            shared[item.first_token] = max(item.kv_end, shared.get(item.first_token, 0))
    assert shared == {0: 1024, 4: 1024, 7: 320}


def most_spared(common: tuple[int, ...]) -> int:
    """Keys that the best cut of neighbours into runs spares; common[i] of sequences i and i + 1."""
    best = [0]
    for end in range(1, len(common) + 2):
        runs = (best[first] + min(common[first : end - 1]) * (end - 1 - first) for first in range(end - 1))
        best.append(max(best[end - 1], *runs, 0))
    return best[-1]


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_into_runs_spares_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    common = [128 * int(rng.integers(0, 9)) for _ in range(rng.integers(1, 12))]
    lens = [(1, 1200)] * (len(common) + 1)
    shape = Shape(num_q_heads=8, num_kv_heads=8, multiprocessors=4)  # tiles hold all of a run
    tables = shared_tables(rng, lens, [0, *common])
    found = build(shape, lens, tables)
    check_cover(shape, lens, found, tables)
    read = sum(item.kv_end - item.kv_begin for item in found.decode)
    assert 1200 * len(lens) - read == most_spared(tuple(common))


@pytest.mark.parametrize("seed", range(40))
def test_random_sharing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lens = []
    for _ in range(rng.integers(2, 60)):
        query_len = int(rng.choice([0, 1, 1, 1, 1, 1, 4, 70]))
        lens.append((query_len, query_len + int(rng.choice([0, 1, 100, 127, 128, 129, int(rng.integers(1, 9000))]))))
    lens = [(query_len, 0 if rng.random() < 0.05 else seq_len) for query_len, seq_len in lens]
    tables = shared_tables(rng, lens, [int(rng.choice([0, 64, 128, 1000, 5000, 9000])) for _ in lens])
    shape = SHAPES[seed % len(SHAPES)]
    check_cover(shape, lens, build(shape, lens, tables), tables)


def test_decode_workers_have_equal_shares() -> None:
    lens = [(1, n) for n in (65536, 1, 17, 4096, 900, 1, 1, 12000, 64, 3000)]
    loads = [sum(item.kv_end - item.kv_begin for item in worker) for worker in build(Shape(), lens).workers]
    assert max(loads) <= 1.1 * sum(loads) / len(loads)


@pytest.mark.parametrize("lens", [[(1000, 1000)] * 3 + [(64, 65536)], [(2000, 2000)], [(40, 20000)]], ids=str)
def test_prefill_items_leave_no_tail(lens: list[tuple[int, int]]) -> None:
    """Each worker takes the next item when it is free and needs a tick per key."""
    done = [0] * 33
    for item in build(Shape(), lens).prefill:
        done[done.index(min(done))] += item.kv_end - item.kv_begin
    assert max(done) <= 1.15 * sum(done) / len(done)


def test_prefill_items_of_like_length_stand_with_their_sequence() -> None:
    """So that the L2 serves their keys; what is much longer comes before, and what begins last is short."""
    found = build(Shape(), [(1024, 1024)] * 16 + [(64, 30000)]).prefill
    lengths = [item.kv_end - item.kv_begin for item in found]
    order = [sequence for sequence, _ in itertools.groupby(item.sequence for item in found)]
    assert order == [16, *range(16)]
    for _, items in itertools.groupby(found, lambda item: item.sequence):
        own = [item.kv_end - item.kv_begin for item in items]
        assert own == sorted(own, reverse=True)
    assert lengths[-1] == min(lengths)


def planned_tables(rng: np.random.Generator, lens: list[tuple[int, int]]) -> np.ndarray:
    """Sequences share their first blocks with one before them: some that it has filled, maybe in this step, and none
    that they write to."""
    tables = np.zeros((len(lens), 1 + max(seq_len for _, seq_len in lens) // BLOCK_SIZE), np.int32)
    tables[:] = rng.permutation(np.arange(1, tables.size + 1)).reshape(tables.shape)
    for s, (query_len, seq_len) in enumerate(lens):
        if s == 0 or rng.integers(3) == 0:
            continue
        other = int(rng.integers(s))
        most = min(lens[other][1], seq_len - query_len) // BLOCK_SIZE
        shared = most if rng.integers(2) else int(rng.integers(most + 1))
        tables[s, :shared] = tables[other, :shared]
    return tables


def give_back(rng: np.random.Generator, tables: np.ndarray, lens: list[tuple[int, int]]) -> None:
    """Behind a window, each sequence for itself: none that it writes to, and some keep all."""
    for s, (query_len, seq_len) in enumerate(lens):
        tables[s, : int(rng.integers((seq_len - query_len) // BLOCK_SIZE + 1))] = 0


@pytest.mark.parametrize("seed", range(120))
def test_it_says_whether_keys_are_old(seed: int) -> None:
    """They are not where a sequence sees what another one writes in the step."""
    rng = np.random.default_rng(seed)
    lens = []
    for _ in range(int(rng.integers(1, 12))):
        seq_len = int(rng.choice([16, 32, 33, 48, 64, int(rng.integers(1, 100))]))
        lens.append((min(seq_len, int(rng.integers(1, 9))) if seed % 3 == 0 else 1, seq_len))
    tables = planned_tables(rng, lens)
    if seed % 2:
        give_back(rng, tables, lens)
    slots = [[(int(tables[s, p // BLOCK_SIZE]), p % BLOCK_SIZE) for p in range(n)] for s, (_, n) in enumerate(lens)]
    old = {slot for found, (query_len, n) in zip(slots, lens, strict=True) for slot in found[: n - query_len]}
    written = {slot for found, (query_len, n) in zip(slots, lens, strict=True) for slot in found[n - query_len :]}
    assert build(Shape(), lens, tables).keys_are_old == old.isdisjoint(written)


def test_nobody_looks_for_old_keys_without_tables_or_beside_prompts() -> None:
    lens = [(1, 40), (1, 70)]
    tables = planned_tables(np.random.default_rng(1), [(1, 40), (1, 300)])
    assert build(Shape(), lens, tables).keys_are_old
    assert not build(Shape(), lens).keys_are_old
    assert not build(Shape(causal=False), lens, tables).keys_are_old
    assert not build(Shape(), [(1, 40), (200, 300)], tables).keys_are_old


def test_padding_fills_no_block() -> None:
    lens = [(1, 40), (40, 0), (1, 70)]
    assert build(Shape(), lens, planned_tables(np.random.default_rng(2), [(1, 80)] * 3)).keys_are_old


def test_float32_tiles_stay_whole() -> None:
    found = build(Shape(dtype=F32), [(1, 60000), (9, 500), (1, 3)])
    assert not found.merges and all(item.state_row == -1 for item in found.decode)


def test_inconsistent_lengths_are_errors() -> None:
    with pytest.raises(_C.Error, match="more queries than tokens"):
        build(Shape(), [(5, 4)])
    work = Shape().work(1, 1)
    array = np.array([0, 1, 2], dtype=np.int32)
    with pytest.raises(_C.Error, match="more sequences"):
        work.write((address(array), address(array), 0, 2, 0), BLOCK_SIZE, address(np.zeros(work.size, dtype=np.int32)))
    with pytest.raises(_C.Error, match="too many query heads"):
        Shape(num_q_heads=129, num_kv_heads=1).work(1, 1)
