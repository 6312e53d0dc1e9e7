"""What the operations of the cache core cost as the pool grows: flat, but for the processor's cache misses.

Every pool is half full of indexed blocks before anything is timed. Times include the call from Python, spread over the
blocks it handles; each is the median of several rounds.

    python -m benchmarks.cache_ops [--json FILE] [--pools 1000 10000 ...]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

from bequest.engine._C import BlockPool, BlockTable, TokenList, prepare_batch, try_swap_in, try_swap_out

BLOCK_SIZE = 16
BLOCKS = 100  # of a table under test
TOKENS = BLOCKS * BLOCK_SIZE
ROUNDS = 30
BATCH = 64  # sequences of a batch

Run = Callable[[], int]  # does the operation once and returns the nanoseconds it took


def timed(action: Callable[[], object]) -> int:
    begin = perf_counter_ns()
    action()
    return perf_counter_ns() - begin


class Bench:
    """A pool, half full, and the operations on it; each ends as it began."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.host = BlockPool(2 * BLOCKS, BLOCK_SIZE, prefix_index=False)
        self.tokens = TokenList(range(TOKENS))
        self.num_salts = 0
        self.num_matches = 0
        self.ballast = [self.committed() for _ in range(num_blocks // 2 // BLOCKS)]

    def new_salt(self) -> bytes:
        self.num_salts += 1
        return b"%d" % self.num_salts

    def written(self) -> BlockTable:
        table = BlockTable(self.pool, self.new_salt())
        assert table.try_prepare_write(0, TOKENS) is not None
        return table

    def committed(self) -> BlockTable:
        table = self.written()
        table.commit(self.tokens, TOKENS)
        return table

    # --- operations, each over BLOCKS blocks

    def allocate(self) -> int:
        table = BlockTable(self.pool)
        return timed(lambda: table.try_prepare_write(0, TOKENS))

    def free(self) -> int:
        return timed(self.written().free)

    def reuse_indexed(self) -> int:
        """Allocation that takes back blocks which are still findable."""
        tables = [self.committed() for _ in range(2)]
        hog = BlockTable(self.pool)
        assert hog.try_prepare_write(0, self.pool.num_free * BLOCK_SIZE) is not None
        tables.clear()
        table = BlockTable(self.pool)
        return timed(lambda: table.try_prepare_write(0, TOKENS))

    def fork(self) -> int:
        table = self.written()
        return timed(table.fork)

    def commit(self) -> int:
        table = self.written()
        return timed(lambda: table.commit(self.tokens, TOKENS))

    def match(self) -> int:
        self.num_matches += 1
        table = BlockTable(self.pool, b"%d" % (1 + self.num_matches % len(self.ballast)))
        nanoseconds = timed(lambda: table.match_prefix(self.tokens, TOKENS))
        assert len(table) == BLOCKS
        return nanoseconds

    def swap(self) -> int:
        tables = [self.written()]
        nanoseconds = timed(lambda: (try_swap_out(tables, self.host), try_swap_in(tables, self.pool)))
        assert tables[0].resident
        return nanoseconds

    # --- operations per call or per row

    def decode_write(self) -> int:
        """The next token of a sequence, BLOCKS times: mostly no block is taken."""
        table = self.written()

        def decode() -> None:
            for position in range(TOKENS, TOKENS + BLOCKS):
                table.try_prepare_write(position, position + 1)

        return timed(decode)

    def copy_on_write(self) -> int:
        table = self.written()
        forks = [table.fork() for _ in range(BLOCKS)]

        def write() -> None:
            for fork in forks:
                fork.try_prepare_write(TOKENS - 1, TOKENS)

        return timed(write)

    def decode_batch(self) -> int:
        tables = [self.ballast[i % len(self.ballast)] for i in range(BATCH)]
        chunks = [(table, self.tokens, TOKENS - 1, 1, TOKENS - 1) for table in tables]
        return timed(lambda: prepare_batch([], chunks))

    def prefill_batch(self) -> int:
        return timed(lambda: prepare_batch([], [(self.ballast[0], self.tokens, 0, TOKENS, -1)]))

    def operations(self) -> dict[str, tuple[Run, int]]:
        """Name → (run, how many of what the name says one run does)."""
        return {
            "allocate, per block": (self.allocate, BLOCKS),
            "allocate a findable block": (self.reuse_indexed, BLOCKS),
            "free, per block": (self.free, BLOCKS),
            "fork, per block": (self.fork, BLOCKS),
            "commit, per block": (self.commit, BLOCKS),
            "match, per block": (self.match, BLOCKS),
            "swap out and in, per block": (self.swap, BLOCKS),
            "prepare the write of a token": (self.decode_write, BLOCKS),
            "copy on write of a tail": (self.copy_on_write, BLOCKS),
            "batch, per decoding row": (self.decode_batch, BATCH),
            "batch, per prefill token": (self.prefill_batch, TOKENS),
        }


def measure(num_blocks: int) -> dict[str, float]:
    bench = Bench(num_blocks)
    results = {}
    for name, (run, count) in bench.operations().items():
        rounds = 5 if run == bench.reuse_indexed else ROUNDS  # it fills the whole pool each time
        results[name] = statistics.median(run() for _ in range(rounds)) / count
    bench.ballast.clear()
    bench.pool.check()
    assert bench.pool.num_used == 0
    return results


def print_table(pools: list[int], results: dict[int, dict[str, float]]) -> None:
    print(f"{'ns, and ratio to the smallest pool':<36}" + "".join(f"{f'{n:,} blocks':>20}" for n in pools))
    for name, base in results[pools[0]].items():
        cells = (f"{results[n][name]:>13.1f} {results[n][name] / base:>5.2f}x" for n in pools)
        print(f"{name:<36}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    pools: list[int] = sorted(options.pools)
    if pools[0] < 10 * BLOCKS:
        parser.error(f"a pool needs at least {10 * BLOCKS} blocks")
    results = {n: measure(n) for n in pools}
    print_table(pools, results)
    if options.json:
        report = {"machine": platform.machine(), "block_size": BLOCK_SIZE, "nanoseconds": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
