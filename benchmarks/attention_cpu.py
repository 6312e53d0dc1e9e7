"""Attention and sampling on the CPU, as ratios taken in one run.

    python benchmarks/attention_cpu.py [--threads N] [--json FILE]

Prefill and encoders: time of torch's scaled_dot_product_attention on contiguous tensors of the same shape over ours on
the paged cache (1.0: equal, above: ours is faster), and how fast ours multiplies; in bfloat16 both may multiply in it.
They take turns, and the medians are compared. Decode: bytes of keys and values read per second over what a plain sum
over as many bytes, in memory as cold, reads per second. Sampling: microseconds per row, one thread.
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

from bequest.engine.kernels import cpu as kernels
from bequest.engine.scheduling.sampler_rows import row_spec
from bequest.engine.types import SamplingParams

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Line:
    name: str
    milliseconds: float
    ratio: float | None
    gflops: float | None = None  # per second


@dataclass(frozen=True)
class Heads:
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_q_heads}/{self.num_kv_heads}x{self.head_dim}"


def seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """The best of a few runs: the others are somebody else's."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def in_turns(first: Callable[[], object], second: Callable[[], object], repeats: int = 9) -> tuple[float, float]:
    """The medians of both, in seconds: what else runs on the machine slows both alike."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for run, result in zip((first, second), times, strict=True):
            begin = time.perf_counter()
            run()
            if turn:
                result.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def paged(
    lens: list[tuple[int, int]], heads: Heads, dtype: torch.dtype, causal: bool = True
) -> tuple[torch.Tensor, kernels.AttentionPlan]:
    """A random cache [NB, 1, 2, NKV, BS, D] with shuffled blocks, and a plan of (query_len, seq_len) pairs."""
    blocks_of = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lens]
    num_blocks = sum(blocks_of) + 1
    cache = torch.randn(num_blocks, 1, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim).to(dtype)
    shuffled = (torch.randperm(num_blocks - 1) + 1).to(torch.int32).numpy()
    tables = np.zeros((len(lens), max(blocks_of)), np.int32)
    for s, count in enumerate(blocks_of):
        tables[s, :count], shuffled = shuffled[:count], shuffled[count:]
    plan = kernels.AttentionPlan(
        np.cumsum([0, *(q for q, _ in lens)], dtype=np.int32),
        np.array([n for _, n in lens], np.int32),
        tables,
        num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        causal=causal,
        bfloat16=dtype == torch.bfloat16,
    )
    return cache, plan


def many_queries(name: str, length: int, heads: Heads, dtype: torch.dtype, reach: int = 0, causal: bool = True) -> Line:
    """With a reach, a bias by distance, which torch is given as a mask."""
    cache, plan = paged([(length, length)], heads, dtype, causal)
    q = torch.randn(length, heads.num_q_heads, heads.head_dim)
    bias = torch.randn(heads.num_q_heads, 2 * reach + 1) if reach else None
    group = heads.num_q_heads // heads.num_kv_heads
    tq = q.transpose(0, 1)[None].contiguous().to(dtype)
    tk, tv = torch.randn(2, 1, heads.num_kv_heads, length, heads.head_dim).repeat_interleave(group, 2).to(dtype)
    mask = torch.randn(1, heads.num_q_heads, length, length).to(dtype) if reach else None
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours, theirs = in_turns(
        lambda: kernels.paged_attention(q, cache, 0, plan, heads.head_dim**-0.5, bias=bias),
        lambda: sdpa(tq, tk, tv, attn_mask=mask, is_causal=causal),
    )
    flops = 4 * length**2 * heads.num_q_heads * heads.head_dim / (2 if causal else 1)
    return Line(f"{name} {length} {heads} {str(dtype)[6:]}, vs torch", ours * 1e3, theirs / ours, flops / ours / 1e9)


def read_bandwidth(num_bytes: int) -> float:
    data = torch.ones(num_bytes // 4)
    return num_bytes / seconds(lambda: data.sum())


def decode(num: int, length: int, heads: Heads, dtype: torch.dtype) -> Line:
    cache, plan = paged([(1, length)] * num, heads, dtype)
    q = torch.randn(num, heads.num_q_heads, heads.head_dim)
    ours = seconds(lambda: kernels.paged_attention(q, cache, 0, plan, heads.head_dim**-0.5))
    rate = cache.nbytes / ours
    name = f"decode {num} x {length} {heads} {str(dtype)[6:]}, vs bandwidth"
    return Line(name, ours * 1e3, rate / read_bandwidth(cache.nbytes))


def sampling(name: str, spread: float, vocab: int = 49152, **fields: float) -> Line:
    logits = torch.randn(1, vocab) * spread
    sampler = kernels.Sampler(1, vocab)
    params = SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]
    sampler.open_row(row_spec(0, params, seed=1, prompt=(1,)))
    row = np.zeros(1, np.int32)
    return Line(f"sample {name}, spread {spread:g}", seconds(lambda: sampler.sample(logits, row, row), 50) * 1e3, None)


def logprobs(top: int, vocab: int = 49152) -> Line:
    logits = torch.randn(1, vocab) * 3
    chosen = np.zeros(1, np.int32)
    ours = seconds(lambda: kernels.logprobs(logits, chosen, top), 50)
    theirs = seconds(lambda: torch.log_softmax(logits, -1).topk(top), 50)
    return Line(f"logprobs top {top}, vs torch", ours * 1e3, theirs / ours)


def lines(threads: int) -> list[Line]:
    small, large = Heads(9, 3, 64), Heads(32, 8, 128)
    whisper, t5 = Heads(6, 6, 64), Heads(8, 8, 64)
    kernels.set_num_threads(threads)
    torch.set_num_threads(threads)
    result = []
    for dtype in (torch.float32, torch.bfloat16):
        result += [many_queries("prefill", n, small, dtype) for n in (512, 2048)]
        result += [many_queries("prefill", n, large, dtype) for n in (1024, 2048)]
        result += [many_queries("encoder", 1500, whisper, dtype, causal=False)]
        result += [many_queries("encoder with bias", 512, t5, dtype, reach=128, causal=False)]
        result += [decode(8, 1500, whisper, dtype), decode(16, 512, t5, dtype)]
        result += [decode(16, 512, small, dtype), decode(64, 2048, small, dtype), decode(1, 16384, large, dtype)]
    kernels.set_num_threads(1)
    torch.set_num_threads(1)
    for spread in (1.0, 4.0):
        result += [
            sampling("greedy", spread, temperature=0.0),
            sampling("temperature", spread),
            sampling("top_k 50 top_p 0.9", spread, top_k=50, top_p=0.9),
            sampling("top_p 0.9", spread, top_p=0.9),
            sampling("min_p 0.05", spread, min_p=0.05),
            sampling("penalties", spread, temperature=0.0, presence_penalty=1.0),
        ]
    return [*result, logprobs(0), logprobs(20)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = lines(arguments.threads)
    print(f"{kernels.isa()}, {arguments.threads} threads")
    for line in result:
        rate = f"  {line.gflops:6.0f} GFLOP/s" if line.gflops else ""
        print(f"{line.name:58} {line.milliseconds:10.3f} ms" + (f"  {line.ratio:6.2f}" if line.ratio else "") + rate)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in result], indent=1))


if __name__ == "__main__":
    main()
