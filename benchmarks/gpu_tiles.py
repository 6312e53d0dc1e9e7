"""Products of 8 to 512 rows in bfloat16, float8 and int4: µs of a layer without its attention and norms, in a graph.

python -m benchmarks.gpu_tiles [--without] [--json FILE]

The four products of a layer follow one another as a decode step calls them, through the weights of a backend, each
layer with weights of its own; bytes are those of the weights. --without: as chips without tiles multiply them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu_quantised import SHAPES, timed
from bequest.engine.backends.cuda.coded import Int4Weight
from bequest.engine.backends.cuda.ops import CudaOps
from bequest.engine.backends.cuda.weights import DenseWeight
from bequest.engine.kernels import cuda_chain, cuda_int4, cuda_tiles
from bequest.engine.kernels.cuda_coded import GROUP
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight

ROWS = (8, 16, 32, 64, 128, 256, 512)
NUM_LAYERS = 8
DEVICE = torch.device("cuda")


def weight(outputs: int, depth: int, bits: int, scratch: torch.Tensor) -> Weight:
    if bits == 16:
        return DenseWeight(torch.randn(outputs, depth, device=DEVICE).mul_(depth**-0.5).bfloat16(), None, CudaOps())
    if bits == 8:
        codes = torch.randint(0, 120, (outputs, depth), dtype=torch.uint8, device=DEVICE).view(FP8)
        return DenseWeight(codes, None, CudaOps(), torch.full((outputs,), 1e-4, device=DEVICE))
    codes = torch.randint(0, 16, (outputs, depth), dtype=torch.uint8, device=DEVICE)
    scales = torch.full((outputs, depth // GROUP), 0.2 * depth**-0.5, device=DEVICE)
    return Int4Weight(cuda_int4.pack(codes, scales, torch.full_like(scales, 8)), None, CudaOps(), scratch)


def layer(shape: tuple[int, int, int, int], bits: int) -> list[Weight]:
    """qkv, output, gate and up, down"""
    attended, hidden, inner, outputs = shape
    scratch = cuda_chain.make_scratch(DEVICE)
    sizes = ((outputs, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner))
    return [weight(*size, bits, scratch) for size in sizes]


def step(layers: list[list[Weight]], shape: tuple[int, int, int, int], num_tokens: int) -> Callable[[], None]:
    attended, states = (torch.randn(num_tokens, size, device=DEVICE).bfloat16() for size in shape[:2])
    ops = CudaOps()

    def run() -> None:
        for qkv, output, gate_up, down in layers:
            qkv(states)
            output.add_to(Stream(ops, states), attended)
            down.add_to(Stream(ops, states), gate_up.gated(states, "silu"))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--without", action="store_true")
    options = parser.parse_args()
    if options.without:
        cuda_tiles.is_tile_product = lambda *_, **__: False
    results = []
    for name, shape in SHAPES.items():
        for bits in (16, 8, 4):
            layers = [layer(shape, bits) for _ in range(NUM_LAYERS if name == "8B" else 4 * NUM_LAYERS)]
            bytes_read = sum(part.nbytes for part in layers[0])
            for rows in ROWS:
                micros = timed(step(layers, shape, rows)) / len(layers)
                rate = bytes_read / micros / 1e6
                results.append({"shape": name, "bits": bits, "rows": rows, "us": micros, "terabytes_per_second": rate})
                print(f"{name:5} {bits:2} bits {rows:4} rows {micros:8.1f} us {rate:5.2f} TB/s", flush=True)
            del layers
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
