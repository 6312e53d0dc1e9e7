"""Times the CUDA ops in graphs, against the copy bandwidth measured in the same run.

    python -m benchmarks.gpu_ops [--only ops products] [--json FILE]

Each graph runs an op over rotating sets of tensors that together exceed the L2 cache (where the op moves enough for
that to matter). `bytes` counts each input read and each output written once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks import gpu_products
from benchmarks.model_shapes import GPU_SHAPES
from bequest.engine.kernels import cuda as ops
from bequest.engine.kernels.cuda_sampler import CudaSampler
from bequest.engine.scheduling.sampler_rows import row_spec
from bequest.engine.types import SamplingParams

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
CACHE_BYTES = 200 << 20  # several times the L2
CALLS = 32
VOCAB = 151936


@dataclass(frozen=True)
class Row:
    op: str
    shape: str
    microseconds: float
    gigabytes_per_second: float
    share_of_copy: float


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=BF16)


def time_graph(calls: list[Callable[[], object]]) -> float:
    """Median seconds per call of a graph of CALLS calls, taken in turn from `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return sorted(times[2:])[len(times[2:]) // 2]


def time_copies(source: Tensor, target: Tensor) -> float:
    """Median seconds of a copy, not in a graph: large copies need none, and are slower as its nodes."""
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times[2:])[len(times[2:]) // 2]


class Table:
    def __init__(self) -> None:
        source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        self.copy_rate = 2 * source.nbytes / time_copies(source, target)
        self.rows: list[Row] = []
        print(f"copy: {self.copy_rate / 1e12:.2f} TB/s\n{'op':30}{'shape':20}{'us':>9}{'GB/s':>9}{'of copy':>9}")

    def add(self, op: str, shape: str, num_bytes: int, make: Callable[[], Callable[[], object]]) -> None:
        num_sets = max(1, min(CALLS, CACHE_BYTES // num_bytes))
        seconds = time_graph([make() for _ in range(num_sets)])
        rate = num_bytes / seconds
        row = Row(op, shape, seconds * 1e6, rate / 1e9, rate / self.copy_rate)
        self.rows.append(row)
        print(f"{op:30}{shape:20}{row.microseconds:9.2f}{row.gigabytes_per_second:9.0f}{row.share_of_copy:9.2f}")


def layers(table: Table, num_tokens: int, hidden: int) -> None:
    shape = f"T={num_tokens} H={hidden}"
    size = num_tokens * hidden * 2

    def norm() -> Callable[[], object]:
        x, residual, weight, out = (randn(num_tokens, hidden) for _ in range(4))
        return lambda: ops.rms_norm(x, weight[0], 1e-5, residual, out)

    def gated() -> Callable[[], object]:
        gate_up, out = randn(num_tokens, 6 * hidden), randn(num_tokens, 3 * hidden)
        return lambda: ops.silu_mul(gate_up, out)

    def embed() -> Callable[[], object]:
        weight, out = randn(max(num_tokens, 8), hidden), randn(num_tokens, hidden)
        ids = torch.randperm(num_tokens, device=DEVICE).int()
        return lambda: ops.embedding(ids, weight, None, out)

    heads, kv_heads, head_dim = (32, 8, 128) if hidden == 4096 else (16, 8, 128)

    def qkv() -> Callable[[], object]:
        rows = randn(num_tokens, (heads + 2 * kv_heads) * head_dim)
        cache = randn(num_tokens // 16 + 1, 1, 2, kv_heads, 16, head_dim)
        slots = torch.randperm(num_tokens, device=DEVICE)
        positions = torch.arange(num_tokens, device=DEVICE).int()
        cos_sin = torch.randn(4096, head_dim, device=DEVICE)
        norm = ops.QkNorm(randn(head_dim), randn(head_dim), 1e-6)
        return lambda: ops.prepare_qkv(rows, heads, cache, 0, slots, positions, cos_sin, norm)

    table.add("rms_norm + residual", shape, 4 * size, norm)
    table.add("silu_mul (I = 3 H)", shape, 9 * size, gated)
    table.add("embedding", shape, 2 * size, embed)
    qkv_bytes = num_tokens * ((heads + 2 * kv_heads) * head_dim * 4 + head_dim * 4)
    table.add("prepare_qkv", shape, qkv_bytes, qkv)


def blocks(table: Table) -> None:
    cache = randn(1024, 32, 2, 8, 16, 128)
    host = torch.empty(64, *cache.shape[1:], dtype=BF16, pin_memory=True)
    block = cache[0].nbytes
    for count in (1, 8, 64):
        pairs = torch.arange(2 * count, device=DEVICE).int().view(2, count).t().contiguous()
        table.add(
            "copy_blocks",
            f"{count} x {block >> 20} MiB",
            2 * count * block,
            lambda p=pairs: lambda: ops.copy_blocks(cache, p),
        )
    host_pairs = torch.arange(64).int()[:, None].repeat(1, 2).flip(0).contiguous().numpy()
    for name, source, target in (("swap out", cache, host), ("swap in", host, cache)):
        table.add(
            name,
            f"64 x {block >> 20} MiB",
            64 * block,
            lambda s=source, t=target: lambda: ops.swap_blocks(s, t, host_pairs),
        )


KINDS: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "penalties, greedy": {"temperature": 0.0, "presence_penalty": 0.5},
}


def sampling(table: Table, num: int) -> None:
    rows = torch.arange(num, dtype=torch.int32, device=DEVICE)
    for name, fields in KINDS.items():
        sampler = CudaSampler(num, VOCAB, DEVICE)
        for row in range(num):
            params = SamplingParams(max_tokens=100_000, **fields)  # type: ignore[arg-type]
            sampler.open_row(row_spec(row, params, seed=row, prompt=tuple(range(500))))
        sampler.flush()

        def make(sampler: CudaSampler = sampler) -> Callable[[], object]:
            logits = randn(num, VOCAB) * 3
            return lambda: sampler.sample(logits, rows, rows)

        table.add(f"sample: {name}", f"N={num} V={VOCAB}", num * VOCAB * 2, make)
    for top in (0, 20):

        def make_logprobs(top: int = top) -> Callable[[], object]:
            logits = randn(num, VOCAB) * 3
            return lambda: ops.logprobs(logits, rows, top)

        table.add(f"logprobs top {top}", f"N={num} V={VOCAB}", num * VOCAB * 2, make_logprobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the table to this file")
    parser.add_argument("--only", nargs="+", default=["ops", "products"], choices=["ops", "products"])
    args = parser.parse_args()
    figures: dict[str, object] = {}
    if "ops" in args.only:
        table = all_ops()
        figures |= {"copy_bytes_per_second": table.copy_rate, "rows": [asdict(row) for row in table.rows]}
        torch.cuda.empty_cache()
    if "products" in args.only:
        figures["products"] = [asdict(row) for row in gpu_products.measure(GPU_SHAPES)]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file)


def all_ops() -> Table:
    table = Table()
    for hidden in (1024, 4096):
        for num_tokens in (1, 256, 2048):
            layers(table, num_tokens, hidden)
    blocks(table)
    for num in (1, 32, 256):
        sampling(table, num)
    return table


if __name__ == "__main__":
    main()
