"""The matrix kernel against the machine and against torch, on shapes of 135M and 1B models.

    python -m benchmarks.dense_ops [--threads 2] [--tokens 1,4,16,64,512] [--json results/dense_ops.json]

Two situations, best times of each:
  hot    one weight again and again, so that it sits in some cache: the share of the peak of multiply-adds
  cold   many copies in turn, 1 GiB together, as a model's layers come: the share of what memory and arithmetic allow,
         min(peak, bandwidth × operations per byte)
The peak is that of float32 vectors. Where matrix units multiply bfloat16 it is none: a share is that of the bandwidth
alone, and only of cold weights. The last column is torch's time (F.linear in the same dtype, the same situation) over
ours; our x and results are float32 in any case, its own are of that dtype.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import torch

from benchmarks.roofline import Roofline
from bequest.engine.kernels import cpu as kernels

SHAPES = {
    "135M qkv": (960, 576),
    "135M gate+up": (3072, 576),
    "135M down": (576, 1536),
    "135M output": (49152, 576),
    "1B qkv": (3072, 2048),
    "1B down": (2048, 8192),
}
COLD_BYTES = 1 << 30


@dataclass(frozen=True)
class Row:
    shape: str
    dtype: str
    tokens: int
    situation: str
    micros: float
    gflops: float
    gbps: float
    share: float | None  # of the peak (hot) or of the roofline (cold)
    torch_ratio: float


def best_time(run: Callable[[], object], budget: float) -> float:
    """Seconds of the fastest call within the budget; on a shared machine only the best is about the code."""
    run()
    best, end = float("inf"), time.perf_counter() + budget
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def best_pass(runs: list[Callable[[], object]], budget: float) -> float:
    """Seconds per call of the fastest eighth of a pass over `runs`, all different."""
    size = max(1, len(runs) // 8)
    groups = [runs[i : i + size] for i in range(0, len(runs), size)]
    best, end = float("inf"), time.perf_counter() + budget
    for n, group in enumerate(cycle(groups)):
        start = time.perf_counter()
        for run in group:
            run()
        best = min(best, (time.perf_counter() - start) / len(group))
        if n >= 2 * len(groups) and time.perf_counter() > end:
            return best
    raise AssertionError("there is at least one group")


class Bench:
    def __init__(self, threads: int) -> None:
        kernels.set_num_threads(threads)
        torch.set_num_threads(threads)
        self._roofline = Roofline(threads)
        self.peak = self._roofline.gflops()
        self.bandwidth = self._roofline.gbps()

    def rows(self, shape: str, dtype: torch.dtype, tokens: int) -> list[Row]:
        n, k = SHAPES[shape]
        weight = torch.randn(n, k)
        x, out = torch.randn(tokens, k), torch.empty(tokens, n)
        packed = kernels.pack_weight(weight, dtype)
        self.peak = max(self.peak, self._roofline.gflops())
        hot = best_time(lambda: kernels.linear(x, packed, out=out), 0.2)
        weight, their_x = weight.to(dtype), x.to(dtype)
        hot_torch = best_time(lambda: torch.nn.functional.linear(their_x, weight), 0.2)
        rows = [self._row(shape, packed, tokens, "hot", hot, hot_torch)]
        if tokens <= 64:
            copies = COLD_BYTES // packed.nbytes
            ours = [kernels.pack_weight(weight, dtype) for _ in range(copies)]
            cold = best_pass([lambda w=w: kernels.linear(x, w, out=out) for w in ours], 0.3)
            del ours
            theirs = [weight.clone() for _ in range(COLD_BYTES // weight.nbytes)]
            cold_torch = best_pass([lambda w=w: torch.nn.functional.linear(their_x, w) for w in theirs], 0.3)
            rows.append(self._row(shape, packed, tokens, "cold", cold, cold_torch))
        return rows

    def _row(
        self, shape: str, packed: kernels.PackedWeight, tokens: int, situation: str, seconds: float, other: float
    ) -> Row:
        operations = 2 * tokens * packed.out_features * packed.in_features
        gflops = operations / seconds * 1e-9
        limit = float("inf") if packed.tiles else self.peak
        if situation == "cold":
            limit = min(limit, self.bandwidth * operations / packed.nbytes)
        share = None if limit == float("inf") else gflops / limit
        dtype = str(packed.dtype).removeprefix("torch.")
        gbps = packed.nbytes / seconds * 1e-9
        return Row(shape, dtype, tokens, situation, seconds * 1e6, gflops, gbps, share, torch_ratio=other / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", default="1,4,8,16,64,512")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench(options.threads)
    print(f"{kernels.isa()}, {options.threads} threads: {bench.peak:.0f} GFLOP/s, {bench.bandwidth:.1f} GB/s")
    print(f"{'shape':13} {'dtype':9} {'T':>5} {'':5} {'µs':>10} {'GFLOP/s':>8} {'GB/s':>6} {'share':>6} {'torch':>6}")
    rows: list[Row] = []
    for shape in options.shapes.split(","):
        for dtype in (torch.float32, torch.bfloat16):
            for tokens in map(int, options.tokens.split(",")):
                for row in bench.rows(shape, dtype, tokens):
                    rows.append(row)
                    share = "" if row.share is None else f"{row.share:.0%}"
                    print(
                        f"{row.shape:13} {row.dtype:9} {row.tokens:5} {row.situation:5} {row.micros:10.1f} "
                        f"{row.gflops:8.1f} {row.gbps:6.1f} {share:>6} {row.torch_ratio:6.2f}",
                        flush=True,
                    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps(
                {"peak_gflops": bench.peak, "read_gbps": bench.bandwidth, "rows": [asdict(r) for r in rows]}, indent=1
            )
        )


if __name__ == "__main__":
    main()
