"""Chains of layers in bfloat16, float8 and int4, side by side: µs of a layer without its attention, in a graph.

python -m benchmarks.gpu_quantised [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from bequest.engine.kernels import cuda_chain, cuda_int4
from bequest.engine.kernels.cuda_chain import Head, Product, Tail
from bequest.engine.kernels.cuda_coded import GROUP
from bequest.engine.kernels.cuda_linear import RowNorm
from bequest.engine.kernels.kv_format import FP8

SHAPES = {"8B": (4096, 4096, 14336, 6144), "0.6B": (2048, 1024, 3072, 4096)}
NUM_LAYERS, REPEATS = 32, 20
DEVICE = torch.device("cuda")


def product(outputs: int, depth: int, bits: int) -> Product:
    if bits == 16:
        return Product(torch.randn(outputs, depth, device=DEVICE).mul_(depth**-0.5).bfloat16())
    if bits == 8:
        codes = torch.randint(0, 120, (outputs, depth), dtype=torch.uint8, device=DEVICE).view(FP8)
        return Product(codes, None, torch.full((outputs,), 1e-4, device=DEVICE))
    codes = torch.randint(0, 16, (outputs, depth), dtype=torch.uint8, device=DEVICE)
    scales = torch.full((outputs, depth // GROUP), 0.2 * depth**-0.5, device=DEVICE)
    return cuda_int4.product(cuda_int4.pack(codes, scales, torch.full_like(scales, 8)))


def layer(shape: tuple[int, int, int, int], bits: int) -> tuple[Tail, Head]:
    attended, hidden, inner, outputs = shape
    norm = RowNorm(torch.ones(hidden, dtype=torch.bfloat16, device=DEVICE), 1e-5)
    tail = Tail(
        product(hidden, attended, bits),
        norm,
        product(2 * inner, hidden, bits),
        "silu",
        product(hidden, inner, bits),
    )
    return tail, Head(norm, product(outputs, hidden, bits))


def microseconds(shape: tuple[int, int, int, int], num_tokens: int, bits: int) -> float:
    layers = [layer(shape, bits) for _ in range(NUM_LAYERS)]
    scratch = cuda_chain.make_scratch(DEVICE)
    attended = torch.randn(num_tokens, shape[0], device=DEVICE).bfloat16()
    residual = torch.randn(num_tokens, shape[1], device=DEVICE).bfloat16()

    def run() -> None:
        for tail, head in layers:
            cuda_chain.run(attended, residual, tail, head, scratch)

    return timed(run) / NUM_LAYERS


def timed(run: Callable[[], None]) -> float:
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1000 / REPEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{'shape':6} {'rows':>4} {'bits':>4} {'µs':>8} {'TB/s':>6} {'of bfloat16':>12}")
    for name, shape in SHAPES.items():
        attended, hidden, inner, outputs = shape
        values = hidden * attended + 3 * inner * hidden + outputs * hidden
        for num_tokens in (1, 4):
            times = {bits: microseconds(shape, num_tokens, bits) for bits in (16, 8, 4)}
            for bits, taken in times.items():
                read = values * (bits / 8 + (4 / GROUP if bits == 4 else 0))
                ratio = times[16] / taken
                print(f"{name:6} {num_tokens:4} {bits:4} {taken:8.2f} {read / taken / 1e6:6.2f} {ratio:12.2f}")
                rows.append({"shape": name, "rows": num_tokens, "bits": bits, "us": taken})
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
