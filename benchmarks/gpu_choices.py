"""Products of many bfloat16 rows: torch's algorithm beside the best of those that cuBLASLt offers, on a GPU.

    python -m benchmarks.gpu_choices [--rows 1440,1536,2048] [--models 7b,8b] [--rounds 12] [--json FILE]

All algorithms of a product take turns, so that a clock that changes under load is the same to all of them. Milliseconds
are those of all layers of a model; the line of a model has torch's, the best of 4, of 8 and of 16, and what the server
would choose (engine/kernels/cuda_products.py). --products prints each product as well.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine.kernels import cublas_lt
from bequest.engine.kernels.cuda_products import Chosen, measured_times

_OFFERED = 16
_GAIN = 0.97
# [N, K] of a layer, whether it has a bias, and how many layers there are.
_MODELS = {
    "7b": [(4608, 3584, True, 28), (3584, 3584, False, 28), (37888, 3584, False, 28), (3584, 18944, False, 28)],
    "8b": [(6144, 4096, False, 36), (4096, 4096, False, 36), (24576, 4096, False, 36), (4096, 12288, False, 36)],
    "tower": [(3840, 1280, True, 32), (1280, 1280, True, 32), (6912, 1280, True, 32), (1280, 3456, True, 32)],
    "merger": [(5120, 5120, True, 1), (3584, 5120, True, 1)],
}
_TOWER_ROWS = {"tower": [5476], "merger": [1369]}


def times_of(rows: int, shape: tuple[int, int, bool, int], rounds: int) -> list[float]:
    """Milliseconds: torch's, then those of the algorithms that are offered, in their order."""
    num_outputs, depth, has_bias, _ = shape
    x = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(num_outputs, depth, dtype=torch.bfloat16, device="cuda") * depth**-0.5
    bias: Tensor | None = torch.randn(num_outputs, dtype=torch.bfloat16, device="cuda") if has_bias else None
    product = cublas_lt.Product(rows, num_outputs, depth, has_bias=has_bias)
    offered = [Chosen(product, each) for each in product.candidates(_OFFERED)]
    expected = F.linear(x, weight, bias).float()
    for number, by in enumerate(offered):
        error = float((by(x, weight, bias).float() - expected).abs().max() / expected.abs().max())
        assert error < 0.02, (rows, shape, number, error)
    return measured_times(
        [lambda: F.linear(x, weight, bias), *(lambda by=by: by(x, weight, bias) for by in offered)], rounds
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [*map(int, text.split(","))], default=[1024, 1440, 1536, 2048])
    parser.add_argument("--models", type=lambda text: text.split(","), default=[*_MODELS])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    print(f"{'model':8}{'rows':>6}{'torch':>9}{'of 4':>9}{'of 8':>9}{'of 16':>9}{'chosen':>9}  ms of all layers")
    for model in options.models:
        for rows in _TOWER_ROWS.get(model, options.rows):
            sums = [0.0] * 5
            for shape in _MODELS[model]:
                torchs, *others = times_of(rows, shape, options.rounds)
                best = [min([torchs, *others[:count]]) for count in (4, 8, 16)]
                chosen = best[1] if best[1] < _GAIN * torchs else torchs
                sums = [sum_ + shape[3] * each for sum_, each in zip(sums, [torchs, *best, chosen], strict=True)]
                if options.products:
                    teraflops = 2e-9 * rows * shape[0] * shape[1] / best[2]
                    places = [1e3 * each for each in (torchs, others[0], *best)]
                    print(f"    {shape[0]:6}{shape[1]:6}", *(f"{each:8.1f}" for each in places), end="")
                    print(f"  µs, {others.index(min(others))}th of {len(others)}, {teraflops:.0f} TFLOP/s")
            print(f"{model:8}{rows:6}", *(f"{each:8.2f}" for each in sums), flush=True)
            found.append({"model": model, "rows": rows, "torch": sums[0], "chosen": sums[4]})
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
