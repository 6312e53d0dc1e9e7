"""Paged attention on a GPU beside torch's SDPA on contiguous tensors and the measured read bandwidth, in one run.

    python -m benchmarks.gpu_attention [--json FILE] [--only decode|prefill|shared|fp8|prefill-fp8]

32 query and 8 KV heads of 128, bf16, blocks of 16 in shuffled order. Each layer of the cache is other memory, and a
timed graph walks all layers, so that the L2 does not serve what a model would read from memory.

Shared prefix: sequences that have a prefix in the same blocks and 40 keys of their own, read once for all of them, and
beside it as decode reads them when it does not know that they share: the L2 then serves most of them.

fp8: the same decode and prefill over a cache in e4m3, beside the one in bf16; prefill of heads of 64 and behind cached
tokens, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bequest.engine.kernels import cuda_attention as cuda
from bequest.engine.kernels.kv_format import FP8

NQ, NKV, D, BS = 32, 8, 128, 16
SCALE = D**-0.5
DECODE = [(1, 1), (1, 16), (8, 4), (32, 1), (32, 4), (128, 1), (128, 4), (32, 16), (8, 64)]  # batch, KV in 1024
PREFILL = [(16, 1), (4, 4), (1, 16)]
PREFILL_FP8 = [(16, 1, 1), (4, 4, 4), (1, 16, 16), (1, 0.5, 16)]  # batch, queries in 1024, KV in 1024
SHARED = [(2, 704), (8, 704), (32, 704), (32, 2048), (32, 4096), (32, 16384), (256, 704), (1024, 704)]  # batch, prefix
TAIL = 40
BYTES_PER_TOKEN = 2 * NKV * D * 2
ROTATION_BYTES = 1 << 30  # of distinct KV per graph, far more than the L2
LIBRARY = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Row:
    """One line of the table: microseconds of ours and of each library backend (None: it refused), and our rate."""

    shape: str
    ours_us: float
    rate: float  # TB/s (decode) or TFLOP/s (prefill)
    library_us: dict[str, float | None]


def microseconds(run: Callable[[], object], calls: int, repeats: int = 7) -> float:
    """Median time of one of the `calls` that a graph of `run` makes."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def read_bandwidth() -> float:
    """TB/s of summing 4 GiB."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return data.nbytes / microseconds(lambda: torch.sum(data), 1) / 1e6


@dataclass(frozen=True)
class Fp8Row:
    """Microseconds over either cache, and their rates: TB/s (decode) or TFLOP/s (prefill)."""

    shape: str
    bf16_us: float
    fp8_us: float
    bf16_rate: float
    rate: float


@dataclass(frozen=True)
class SharedRow:
    batch: int
    prefix: int
    shared_us: float
    plain_us: float


def paged_step(
    lens: list[tuple[int, int]],
    prefix: int = 0,
    shares: bool = False,
    kv_dtype: torch.dtype = torch.bfloat16,
    head_dim: int = D,
) -> tuple[Tensor, Tensor, cuda.CudaAttentionPlan, int]:
    """(q [T, NQ, D], kv_cache, plan, layers) of a step with (query_len, seq_len) per sequence.

    All have `prefix` keys in the same blocks, which attention makes use of if it `shares`.
    """
    total = prefix + sum(seq_len - prefix for _, seq_len in lens)
    layers = max(2, min(64, ROTATION_BYTES // (total * 2 * NKV * head_dim * kv_dtype.itemsize)))
    blocks_of = [-(-seq_len // BS) for _, seq_len in lens]
    num_blocks = sum(blocks_of) + 1
    shape = (num_blocks, layers, 2, NKV, BS, head_dim)
    cache = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().to(kv_dtype)
    tables = np.zeros((len(lens), max(blocks_of)), np.int32)
    shuffled = np.random.default_rng(0).permutation(num_blocks - 1).astype(np.int32) + 1
    starts = np.cumsum([0, *blocks_of])
    for s, count in enumerate(blocks_of):
        tables[s, :count] = shuffled[starts[s] : starts[s] + count]
    tables[1:, : prefix // BS] = tables[0, : prefix // BS]
    num_tokens = sum(query_len for query_len, _ in lens)
    workspace = cuda.CudaAttentionWorkspace(
        num_q_heads=NQ,
        num_kv_heads=NKV,
        head_dim=head_dim,
        max_sequences=len(lens),
        max_tokens=num_tokens,
        kv_dtype=kv_dtype,
        block_size=BS if shares else None,
    )
    query_start = np.cumsum([0, *(query_len for query_len, _ in lens)], dtype=np.int32)
    seq_lens = np.array([seq_len for _, seq_len in lens], np.int32)
    decode = max(query_len for query_len, _ in lens) == 1
    plan = workspace.plan(query_start, seq_lens, tables)
    if decode and not shares:  # as a decode graph has it: the grids of any step
        plan = workspace.bind(plan.work_list, plan.block_tables, max_query_len=1)
    q = torch.randn(num_tokens, NQ, head_dim, device="cuda").bfloat16()
    return q, cache, plan, layers


def ours(
    lens: list[tuple[int, int]],
    prefix: int = 0,
    shares: bool = False,
    kv_dtype: torch.dtype = torch.bfloat16,
    head_dim: int = D,
) -> float:
    q, cache, plan, layers = paged_step(lens, prefix, shares, kv_dtype, head_dim)
    out = torch.empty_like(q)

    def run() -> None:
        for layer in range(layers):
            cuda.paged_attention(q, cache, layer, plan, head_dim**-0.5, out=out)

    return microseconds(run, layers)


def library(backend: SDPBackend, batch: int, query_len: int, seq_len: int) -> float | None:
    """SDPA on contiguous [B, heads, tokens, D], None where the backend refuses."""
    copies = max(1, min(64, ROTATION_BYTES // (batch * seq_len * BYTES_PER_TOKEN)))
    q = torch.randn(batch, NQ, query_len, D, device="cuda").bfloat16()
    kv = torch.empty(copies, 2, batch, NKV, seq_len, D, dtype=torch.bfloat16, device="cuda").normal_()

    def run() -> None:
        for k, v in kv:
            scaled_dot_product_attention(q, k, v, is_causal=query_len > 1, scale=SCALE, enable_gqa=True)

    try:
        with sdpa_kernel(backend):
            return microseconds(run, copies)
    except RuntimeError:
        torch.cuda.synchronize()
        return None


def measure(batch: int, kilo: int, query_len: int) -> Row:
    seq_len = kilo * 1024
    own = ours([(query_len, seq_len)] * batch)
    others = {name: library(backend, batch, query_len, seq_len) for name, backend in LIBRARY.items()}
    torch.cuda.empty_cache()
    return Row(f"{batch} x {kilo}k", own, rate_of(batch, seq_len, query_len, own), others)


def rate_of(batch: int, seq_len: int, query_len: int, microseconds: float, head_dim: int = D) -> float:
    """TB/s of a bf16 cache (decode) or TFLOP/s (prefill)."""
    if query_len == 1:
        return batch * seq_len * BYTES_PER_TOKEN / microseconds / 1e6
    pairs = batch * query_len * (2 * seq_len - query_len + 1) / 2
    return 4 * NQ * head_dim * pairs / microseconds / 1e6


def measure_fp8(batch: int, seq_len: int, query_len: int, head_dim: int = D) -> Fp8Row:
    lens = [(query_len, seq_len)] * batch
    bf16, fp8 = (ours(lens, kv_dtype=dtype, head_dim=head_dim) for dtype in (torch.bfloat16, FP8))
    torch.cuda.empty_cache()
    bf16_rate, rate = (rate_of(batch, seq_len, query_len, us, head_dim) for us in (bf16, fp8))
    name = f"{batch} x {seq_len // 1024}k" + (f" last {query_len}" if 1 < query_len < seq_len else "")
    if head_dim != D:
        name += f", head {head_dim}"
    return Fp8Row(name, bf16, fp8, bf16_rate, rate / 2 if query_len == 1 else rate)


def measure_prefill_fp8() -> list[Fp8Row]:
    shapes = [(batch, int(kilo * 1024), int(queries * 1024)) for batch, queries, kilo in PREFILL_FP8]
    return [measure_fp8(*shape, head_dim) for head_dim in (D, 64) for shape in shapes]


def print_fp8(title: str, unit: str, rows: list[Fp8Row]) -> None:
    print(f"\n{title:<26}{'bf16 us':>10}{unit:>10}{'fp8 us':>10}{unit:>10}{'ratio':>8}")
    for row in rows:
        line = f"{row.shape:<26}{row.bf16_us:>10.1f}{row.bf16_rate:>10.2f}{row.fp8_us:>10.1f}{row.rate:>10.2f}"
        print(f"{line}{row.bf16_us / row.fp8_us:>8.2f}")


def measure_shared(batch: int, prefix: int) -> SharedRow:
    lens = [(1, prefix + TAIL)] * batch
    row = SharedRow(batch, prefix, ours(lens, prefix, shares=True), ours(lens, prefix))
    torch.cuda.empty_cache()
    return row


def list_microseconds() -> float:
    """Host time to write the list of 256 sequences, lengths 1 to 64k."""
    workspace = cuda.CudaAttentionWorkspace(
        num_q_heads=NQ, num_kv_heads=NKV, head_dim=D, max_sequences=256, max_tokens=256, block_size=BS
    )
    tables = np.zeros((256, 65536 // BS), np.int32)
    tables[:, 0] = range(256)
    seq_lens = np.random.default_rng(0).integers(1, 65536, 256, dtype=np.int32)
    query_start = np.arange(257, dtype=np.int32)
    buffer = torch.empty(workspace.list_len, dtype=torch.int32, pin_memory=True)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        workspace.write_list(query_start, seq_lens, tables, buffer)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def print_table(title: str, unit: str, rows: list[Row]) -> None:
    print(f"\n{title:<18}{'ours us':>10}{unit:>10}" + "".join(f"{name + ' us':>12}{unit:>9}" for name in LIBRARY))
    for row in rows:
        line = f"{row.shape:<18}{row.ours_us:>10.1f}{row.rate:>10.2f}"
        for name in LIBRARY:
            us = row.library_us[name]
            line += f"{'-':>12}{'-':>9}" if us is None else f"{us:>12.1f}{row.rate * row.ours_us / us:>9.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=["decode", "prefill", "shared", "fp8", "prefill-fp8"])
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    host = list_microseconds()
    print(f"{torch.cuda.get_device_name()}: reads {bandwidth:.2f} TB/s; work list of 256 sequences: {host:.1f} us")
    wanted = [args.only] if args.only else ["decode", "prefill", "shared", "fp8", "prefill-fp8"]
    decode = [measure(batch, kilo, 1) for batch, kilo in DECODE] if "decode" in wanted else []
    print_table("decode", "TB/s", decode)
    prefill = [measure(batch, kilo, kilo * 1024) for batch, kilo in PREFILL] if "prefill" in wanted else []
    print_table("causal prefill", "TFLOP/s", prefill)
    shared = [measure_shared(batch, prefix) for batch, prefix in SHARED] if "shared" in wanted else []
    print(f"\n{'shared prefix':<18}{'once us':>10}{'each us':>10}{'ratio':>8}")
    for row in shared:
        name = f"{row.batch} x {row.prefix}"
        print(f"{name:<18}{row.shared_us:>10.1f}{row.plain_us:>10.1f}{row.plain_us / row.shared_us:>8.1f}")
    fp8 = [measure_fp8(batch, kilo * 1024, 1) for batch, kilo in DECODE] if "fp8" in wanted else []
    print_fp8("decode, fp8", "TB/s", fp8)
    fp8_prefill = measure_prefill_fp8() if {"fp8", "prefill-fp8"} & {*wanted} else []
    print_fp8("prefill, fp8", "TFLOP/s", fp8_prefill)
    if args.json:
        report = {"read_tb_s": bandwidth, "list_us": host}
        tables = {
            name: [asdict(row) for row in rows]
            for name, rows in (
                ("decode", decode),
                ("prefill", prefill),
                ("shared", shared),
                ("fp8", fp8),
                ("fp8_prefill", fp8_prefill),
            )
        }
        args.json.write_text(json.dumps(report | tables, indent=1))


if __name__ == "__main__":
    main()
