"""Products of 8 to 512 rows in bfloat16, float8 and int4: µs of a layer without its attention and norms, in a graph.

    python -m benchmarks.gpu_tiles [--without] [--json FILE]
    python -m benchmarks.gpu_tiles --sweep

The four products of a layer follow one another as a decode step calls them, through the weights of a backend, each
layer with weights of its own; bytes are those of the weights. --without: as chips without tiles multiply them. --sweep:
µs of each product in tiles, as it is divided and as would be best (rows of W of a thread block, parts of k).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_quantised import SHAPES, timed
from bequest.engine import _C
from bequest.engine.backends.cuda.coded import Int4Weight
from bequest.engine.backends.cuda.ops import CudaOps
from bequest.engine.backends.cuda.weights import DenseWeight
from bequest.engine.kernels import cuda_chain, cuda_int4, cuda_linear, cuda_tiles
from bequest.engine.kernels.cuda_coded import GROUP
from bequest.engine.kernels.cuda_tiles import TileFormat
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.kernels.streams import current_stream
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight

ROWS = (8, 16, 32, 64, 128, 256, 512)
NUM_LAYERS = 8
DEVICE = torch.device("cuda")
Shape = tuple[int, int, int, int]
SWEPT = {
    TileFormat.BFLOAT16: (8, 16, 32, 64),
    TileFormat.FLOAT8: (8, 16, 32),
    TileFormat.FLOAT8_ROWS: (32, 64),
    TileFormat.INT4: (16, 32, 64, 128, 256, 384),
}


def weight(outputs: int, depth: int, bits: int, scratch: Tensor) -> DenseWeight | Int4Weight:
    if bits == 16:
        return DenseWeight(torch.randn(outputs, depth, device=DEVICE).mul_(depth**-0.5).bfloat16(), None, CudaOps())
    if bits == 8:
        codes = torch.randint(0, 120, (outputs, depth), dtype=torch.uint8, device=DEVICE).view(FP8)
        return DenseWeight(codes, None, CudaOps(), torch.full((outputs,), 1e-4, device=DEVICE))
    codes = torch.randint(0, 16, (outputs, depth), dtype=torch.uint8, device=DEVICE)
    scales = torch.full((outputs, depth // GROUP), 0.2 * depth**-0.5, device=DEVICE)
    return Int4Weight(cuda_int4.pack(codes, scales, torch.full_like(scales, 8)), None, CudaOps(), scratch)


def sizes(shape: Shape) -> tuple[tuple[int, int], ...]:
    """[N, K] of qkv, output, gate and up, down"""
    attended, hidden, inner, outputs = shape
    return (outputs, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)


def layer(shape: Shape, bits: int) -> list[DenseWeight | Int4Weight]:
    scratch = cuda_chain.make_scratch(DEVICE)
    return [weight(*size, bits, scratch) for size in sizes(shape)]


def step(layers: list[list[DenseWeight | Int4Weight]], shape: Shape, num_tokens: int) -> Callable[[], None]:
    attended, states = (torch.randn(num_tokens, size, device=DEVICE).bfloat16() for size in shape[:2])
    ops = CudaOps()

    def run() -> None:
        for qkv, output, gate_up, down in layers:
            qkv(states)
            output.add_to(Stream(ops, states), attended)
            down.add_to(Stream(ops, states), gate_up.gated(states, "silu"))

    return run


def of_layers(bits: int, name: str, shape: Shape) -> list[dict[str, float | str]]:
    layers = [layer(shape, bits) for _ in range(NUM_LAYERS if name == "8B" else 4 * NUM_LAYERS)]
    parts: list[Weight] = [*layers[0]]
    bytes_read = sum(part.nbytes for part in parts)
    results: list[dict[str, float | str]] = []
    for rows in ROWS:
        micros = timed(step(layers, shape, rows)) / len(layers)
        rate = bytes_read / micros / 1e6
        results.append({"shape": name, "bits": bits, "rows": rows, "us": micros, "terabytes_per_second": rate})
        print(f"{name:5} {bits:2} bits {rows:4} rows {micros:8.1f} us {rate:5.2f} TB/s", flush=True)
    return results


def tiles(x: Tensor, weights: list[DenseWeight | Int4Weight], plan: tuple[int, int]) -> Callable[[], None]:
    """One product after the other; x in float8 is rounded before."""
    num_tokens, depth = x.shape
    out = torch.empty(num_tokens, weights[0].out_features, dtype=torch.bfloat16, device=DEVICE)
    rows, scales = x, None
    if x.dtype is not torch.bfloat16:
        rounded = cuda_linear.float8_rows(x.bfloat16())
        rows, scales = rounded.codes, rounded.scales

    def run() -> None:
        matrix = (rows.data_ptr(), num_tokens, depth, 1 if scales is None else 2)
        for each in weights:
            if isinstance(each, Int4Weight):
                operand = each.packed._product(None)
            else:
                codes = 0 if each.scales is None else each.scales.data_ptr()
                operand = (each.matrix.data_ptr(), 0, each.out_features, depth, codes, 0)
            x_scales = 0 if scales is None else scales.data_ptr()
            _C.cuda_planned_tile_linear(matrix, x_scales, operand, out.data_ptr(), plan, current_stream())

    return run


def plans(format: TileFormat) -> list[tuple[int, int]]:
    if format is TileFormat.FLOAT8_ROWS:
        return list(product((64, 96, 128, 144, 192, 224), range(1, 5)))
    return list(product((64, 128, 256), range(1, 9)))


def sweep(format: TileFormat, name: str, shape: Shape) -> None:
    bits = {TileFormat.BFLOAT16: 16, TileFormat.INT4: 4}.get(format, 8)
    totals = {rows: [0.0, 0.0] for rows in SWEPT[format]}
    for outputs, depth in sizes(shape):
        count = max(2, int(2e8 / (outputs * depth * bits / 8)))  # more than the L2 keeps
        weights = [weight(outputs, depth, bits, cuda_chain.make_scratch(DEVICE)) for _ in range(count)]
        line = []
        for rows in SWEPT[format]:
            x = torch.randn(rows, depth, device=DEVICE)
            x = x if format is TileFormat.FLOAT8_ROWS else x.bfloat16()
            planned = timed(tiles(x, weights, _C.cuda_tile_plan(rows, outputs, depth, format))) / count
            found = []
            for plan in plans(format):
                ctas = -(-outputs // plan[0]) * plan[1]
                if plan[1] > max(1, depth // 512) or (plan[1] > 1 and not 60 <= ctas <= 280):
                    continue
                if rows > 64 and plan == (256, 7):  # sums of 128 tokens leave no room for a ring
                    continue
                found.append((timed(tiles(x, weights, plan)) / count, plan))
            best, plan = min(found)
            totals[rows][0] += planned
            totals[rows][1] += min(best, planned)
            line.append(f"{rows}: {planned:.1f}/{best:.1f} by {plan[0]},{plan[1]}")
        print(f"{name} {format.name} {outputs} x {depth}  " + "  ".join(line), flush=True)
        del weights
    print(f"{name} {format.name} layer  " + "  ".join(f"{rows}: {a:.1f}/{b:.1f}" for rows, (a, b) in totals.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    if options.without:
        cuda_tiles.is_tile_product = lambda *_, **__: False
    results = []
    for name, shape in SHAPES.items():
        if options.sweep:
            for format in TileFormat:
                sweep(format, name, shape)
            continue
        for bits in (16, 8, 4):
            results += of_layers(bits, name, shape)
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
