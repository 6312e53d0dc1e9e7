"""Chains of layers in float8 and in bfloat16, side by side: µs of a layer without its attention, in a graph.

python -m benchmarks.gpu_quantised [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from bequest.engine.kernels import cuda_chain
from bequest.engine.kernels.cuda_chain import Head, Product, Tail
from bequest.engine.kernels.cuda_linear import RowNorm
from bequest.engine.kernels.kv_format import FP8

SHAPES = {"8B": (4096, 4096, 14336, 6144), "0.6B": (2048, 1024, 3072, 4096)}
NUM_LAYERS, REPEATS = 32, 20
DEVICE = torch.device("cuda")


def product(outputs: int, depth: int, *, in_codes: bool) -> Product:
    if not in_codes:
        return Product(torch.randn(outputs, depth, device=DEVICE).mul_(depth**-0.5).bfloat16())
    codes = torch.randint(0, 120, (outputs, depth), dtype=torch.uint8, device=DEVICE).view(FP8)
    return Product(codes, None, torch.full((outputs,), 1e-4, device=DEVICE))


def layer(shape: tuple[int, int, int, int], *, in_codes: bool) -> tuple[Tail, Head]:
    attended, hidden, inner, outputs = shape
    norm = RowNorm(torch.ones(hidden, dtype=torch.bfloat16, device=DEVICE), 1e-5)
    made = {"in_codes": in_codes}
    tail = Tail(
        product(hidden, attended, **made),
        norm,
        product(2 * inner, hidden, **made),
        "silu",
        product(hidden, inner, **made),
    )
    return tail, Head(norm, product(outputs, hidden, **made))


def microseconds(shape: tuple[int, int, int, int], num_tokens: int, *, in_codes: bool) -> float:
    layers = [layer(shape, in_codes=in_codes) for _ in range(NUM_LAYERS)]
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
    print(f"{'shape':6} {'rows':>4} {'bfloat16, µs':>13} {'float8, µs':>11} {'ratio':>6} {'float8, TB/s':>13}")
    for name, shape in SHAPES.items():
        attended, hidden, inner, outputs = shape
        num_codes = hidden * attended + 3 * inner * hidden + outputs * hidden
        for num_tokens in (1, 4):
            plain = microseconds(shape, num_tokens, in_codes=False)
            codes = microseconds(shape, num_tokens, in_codes=True)
            speed = num_codes / codes / 1e6
            print(f"{name:6} {num_tokens:4} {plain:13.2f} {codes:11.2f} {plain / codes:6.2f} {speed:13.2f}")
            rows.append({"shape": name, "rows": num_tokens, "bfloat16_us": plain, "float8_us": codes})
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
