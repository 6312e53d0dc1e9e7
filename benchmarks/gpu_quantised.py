"""Layers in bfloat16 and in codes, side by side, µs of a layer without its attention, in a graph.

    python -m benchmarks.gpu_quantised [--only chains|products|experts] [--json FILE]

Chains of up to four rows; the four products of a layer for more of them, one by one; and experts of the shape of
gpt-oss-20b, whose two products have their activation and their sum beside them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine.backends.cuda.experts import PlannedChoice
from bequest.engine.backends.cuda.fine import FineExperts
from bequest.engine.backends.cuda.ops import CudaOps
from bequest.engine.kernels import cuda_chain, cuda_coded, cuda_experts, cuda_fine, cuda_int4
from bequest.engine.kernels.cuda_chain import Head, Product, Tail
from bequest.engine.kernels.cuda_coded import GROUP, CodedRows
from bequest.engine.kernels.cuda_experts import ExpertChoice, ExpertMatrices, RoutingRule
from bequest.engine.kernels.cuda_fine import FineRows
from bequest.engine.kernels.cuda_linear import RowNorm
from bequest.engine.kernels.kv_format import FP8

SHAPES = {"8B": (4096, 4096, 14336, 6144), "0.6B": (2048, 1024, 3072, 4096)}
# Bits of a value, with what it is scaled by.
FORMATS = {"bfloat16": 16.0, "fp8": 8.0, "int4 / 128": 4.25, "int4 / 32": 5.0, "int8 / 16": 9.0}
NUM_LAYERS, REPEATS = 32, 20
DEVICE = torch.device("cuda")
EXPERTS, CHOSEN, HIDDEN, INNER = 32, 4, 2880, 2880
RULE = RoutingRule(
    top_k=CHOSEN,
    scoring="softmax",
    bias=None,
    num_groups=1,
    top_groups=1,
    group_best=1,
    renormalises=True,
    factor=1.0,
)


def int4(outputs: int, depth: int) -> CodedRows:
    codes = torch.randint(0, 16, (outputs, depth), dtype=torch.uint8, device=DEVICE)
    scales = torch.full((outputs, depth // GROUP), 0.2 * depth**-0.5, device=DEVICE)
    return cuda_int4.pack(codes, scales, torch.full_like(scales, 8))


def fine(outputs: int, depth: int, name: str) -> FineRows:
    codes = torch.randint(0, 16, (outputs, depth), dtype=torch.uint8, device=DEVICE)
    scales = torch.full((outputs, depth // 32), 0.2 * depth**-0.5, device=DEVICE)
    if name == "int4 / 32":
        return cuda_fine.pack_offset4(codes, scales, -8 * scales)
    if name == "int8 / 16":
        return cuda_fine.pack_scaled8(codes + 120, scales.repeat_interleave(2, dim=1))
    return cuda_fine.pack_float4(codes, torch.frexp(scales).exponent)


def numbers(outputs: int, depth: int) -> Tensor:
    return torch.randn(outputs, depth, device=DEVICE).mul_(depth**-0.5).bfloat16()


def product(outputs: int, depth: int, name: str) -> Product:
    if name == "bfloat16":
        return Product(numbers(outputs, depth))
    if name == "fp8":
        codes = torch.randint(0, 120, (outputs, depth), dtype=torch.uint8, device=DEVICE).view(FP8)
        return Product(codes, None, torch.full((outputs,), 1e-4, device=DEVICE))
    return cuda_int4.product(int4(outputs, depth)) if name == "int4 / 128" else fine(outputs, depth, name).product()


def layer(shape: tuple[int, int, int, int], name: str) -> tuple[Tail, Head]:
    attended, hidden, inner, outputs = shape
    norm = RowNorm(torch.ones(hidden, dtype=torch.bfloat16, device=DEVICE), 1e-5)
    tail = Tail(
        product(hidden, attended, name),
        norm,
        product(2 * inner, hidden, name),
        "silu",
        product(hidden, inner, name),
    )
    return tail, Head(norm, product(outputs, hidden, name))


def chain_time(shape: tuple[int, int, int, int], num_tokens: int, name: str) -> float:
    layers = [layer(shape, name) for _ in range(NUM_LAYERS)]
    scratch = cuda_chain.make_scratch(DEVICE)
    attended = torch.randn(num_tokens, shape[0], device=DEVICE).bfloat16()
    residual = torch.randn(num_tokens, shape[1], device=DEVICE).bfloat16()

    def run() -> None:
        for tail, head in layers:
            cuda_chain.run(attended, residual, tail, head, scratch)

    return timed(run) / NUM_LAYERS


def multiplier(outputs: int, depth: int, name: str) -> Callable[[Tensor], Tensor]:
    if name == "bfloat16":
        matrix = numbers(outputs, depth)
        return lambda x: F.linear(x, matrix)
    if name == "int4 / 128":
        coded = int4(outputs, depth)
        return lambda x: cuda_coded.linear(x, coded, None)
    rows = fine(outputs, depth, name)
    return lambda x: cuda_fine.linear(x, rows, None)


def products_time(num_tokens: int, name: str) -> float:
    """The four matrices of a layer of the 8B shape; several layers, so that no weight stays in the L2."""
    attended, hidden, inner, outputs = SHAPES["8B"]
    sizes = [(hidden, attended), (2 * inner, hidden), (hidden, inner), (outputs, hidden)]
    each = [multiplier(*size, name) for _ in range(4) for size in sizes]
    rows = [torch.randn(num_tokens, depth, device=DEVICE).bfloat16() for _, depth in sizes]

    def run() -> None:
        for i, multiply in enumerate(each):
            multiply(rows[i % 4])

    return timed(run) / 4


def expert_layer(x: Tensor, choice: ExpertChoice, name: str) -> Callable[[], Tensor]:
    sizes = [(EXPERTS * rows, depth) for rows, depth in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
    if name == "bfloat16":
        up, down = (ExpertMatrices(numbers(*size).view(EXPERTS, -1, size[1])) for size in sizes)
        return lambda: cuda_experts.summed(cuda_experts.gated(x, up, choice, "silu"), down, choice)
    of_gate, of_down = (FineExperts(_of_experts(fine(*size, name)), None, CudaOps()) for size in sizes)
    chosen = PlannedChoice(choice.ids, choice.weights, choice)
    return lambda: of_down.summed(of_gate.gated(x, chosen, "silu"), chosen)


def experts_time(num_tokens: int, name: str) -> float:
    """Gate and up, their activation, down and the sum of a token's experts, of several layers."""
    x = torch.randn(num_tokens, HIDDEN, device=DEVICE).bfloat16()
    choice = cuda_experts.route(torch.randn(num_tokens, EXPERTS, device=DEVICE), RULE)
    steps = [expert_layer(x, choice, name) for _ in range(3)]

    def run() -> None:
        for each in steps:
            each()

    return timed(run) / len(steps)


def _of_experts(rows: FineRows) -> FineRows:
    codes, words = (part.view(EXPERTS, -1, part.shape[1]) for part in (rows.codes, rows.words))
    return replace(rows, codes=codes, words=words, scales=rows.scales.view(EXPERTS, -1))


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


def show(what: str, num_tokens: int, times: dict[str, float], found: list[dict[str, object]]) -> None:
    for name, taken in times.items():
        print(f"{what:16} {num_tokens:5} {name:12} {taken:9.2f} {times['bfloat16'] / taken:12.2f}", flush=True)
        found.append({"what": what, "rows": num_tokens, "format": name, "us": taken})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["chains", "products", "experts"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[dict[str, object]] = []
    print(f"{'':16} {'rows':>5} {'format':12} {'µs':>9} {'of bfloat16':>12}")
    if args.only in (None, "chains"):
        for name, shape in SHAPES.items():
            for count in (1, 4):
                show(f"chain {name}", count, {form: chain_time(shape, count, form) for form in FORMATS}, found)
    if args.only in (None, "products"):
        forms = ("bfloat16", "int4 / 128", "int4 / 32", "int8 / 16")
        for count in (5, 8, 16, 32, 64, 128):
            show("products 8B", count, {form: products_time(count, form) for form in forms}, found)
    if args.only in (None, "experts"):
        for count in (1, 4, 16, 64, 256, 512, 1024, 2048, 4096):
            times = {form: experts_time(count, form) for form in ("bfloat16", "mxfp4", "int4 / 32")}
            show("experts 20b", count, times, found)
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
