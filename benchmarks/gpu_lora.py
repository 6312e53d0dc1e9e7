"""What adapters add to the products of a layer, kernel by kernel: µs in a graph, beside the bytes that are read.

    python -m benchmarks.gpu_lora [--rows 64] [--rank 16] [--most-rank 48] [--json FILE]

Products of the 8B shape in bfloat16; each layer has weights and slots of its own, so nothing is found in the L2. Rows
have a slot each, or all the same one. `floor` is the bytes of A and B over 4.0 TB/s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_quantised import timed
from bequest.engine.kernels import cuda, cuda_linear
from bequest.engine.kernels.cuda_lora import LoraTiles, SiteShape, SiteSlots, most_tiles, write_tiles

DEVICE = torch.device("cuda")
NUM_LAYERS = 6
RATE = 4.0e12  # bytes of a second
SITES = {  # the columns behind each part, and the depth
    "qkv": ((4096, 5120, 6144), 4096),
    "output": ((4096,), 4096),
    "gate_up": ((14336, 28672), 4096),
    "down": ((4096,), 14336),
}


@dataclass(frozen=True)
class Site:
    weight: Tensor  # [N, K]
    slots: SiteSlots
    x: Tensor  # [T, K]
    y: Tensor  # [T, N]
    rank: int

    @property
    def bytes_of_slot(self) -> int:
        parts, depth = len(self.slots.shape.ends), self.slots.shape.in_features
        return 2 * self.rank * (parts * depth + self.slots.shape.out_features)

    def base(self) -> Tensor:
        return cuda_linear.linear(self.x, self.weight)

    def begin_and_add_base(self, tiles: LoraTiles) -> Tensor:
        return self.slots.begun(self.x, tiles).addmm_(self.x, self.weight.t())


def make_site(name: str, num_rows: int, rank: int, most_rank: int) -> Site:
    ends, depth = SITES[name]
    slots = SiteSlots(SiteShape(ends, depth), num_rows, most_rank, DEVICE)
    for slot in range(num_rows):
        slots.describe(slot, [rank] * len(ends), [1.0] * len(ends))
    weight, x, y = (
        torch.randn(*shape, device=DEVICE).bfloat16()
        for shape in ((ends[-1], depth), (num_rows, depth), (num_rows, ends[-1]))
    )
    return Site(weight, slots, x, y, rank)


def make_tiles(slots: list[int]) -> LoraTiles:
    num_rows, own = len(slots), np.asarray(slots, np.int32)
    most = most_tiles(num_rows, num_rows)
    rows, tiles = np.zeros(num_rows, np.int32), np.zeros((1 + most, 3), np.int32)
    write_tiles(own, rows, tiles)
    return LoraTiles(torch.from_numpy(rows).to(DEVICE), torch.from_numpy(tiles).to(DEVICE), most)


def of_site(sites: list[Site], tiles: LoraTiles) -> dict[str, float]:
    """µs of one product of a layer, by what is done."""

    def all_of(call: Callable[[Site], object]) -> float:
        def run() -> None:
            for site in sites:
                call(site)

        return timed(run) / len(sites)

    return {
        "base": all_of(Site.base),
        "add": all_of(lambda site: site.slots.add(site.x, site.y, tiles)),
        "base and add": all_of(lambda site: site.slots.add(site.x, site.base(), tiles)),
        "begun": all_of(lambda site: site.slots.begun(site.x, tiles)),
        "begun and base": all_of(lambda site: site.begin_and_add_base(tiles)),
    }


def of_layer(layers: list[dict[str, Site]], tiles: LoraTiles | None, *, before: bool = False) -> float:
    """µs of a layer without its attention; `before`: adapters, and products are added to what they leave."""
    norm = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)

    def product(site: Site, x: Tensor) -> Tensor:
        if before and tiles is not None:
            return site.slots.begun(x, tiles).addmm_(x, site.weight.t())
        y = cuda_linear.linear(x, site.weight)
        if tiles is not None:
            site.slots.add(x, y, tiles)
        return y

    def run() -> None:
        total = layers[0]["output"].y
        for layer in layers:
            product(layer["qkv"], cuda.rms_norm(total, norm, 1e-5))
            output = product(layer["output"], layer["output"].x)
            gate_up = product(layer["gate_up"], cuda.rms_norm(output, norm, 1e-5, total))
            total.add_(product(layer["down"], cuda.gated_activation(gate_up, "silu")))

    return timed(run) / len(layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--most-rank", type=int, default=48)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    given = options.rows, options.rank, options.most_rank
    layers = [{name: make_site(name, *given) for name in SITES} for _ in range(NUM_LAYERS)]
    figures: dict[str, dict[str, float]] = {}
    crowds = {"each its own": list(range(options.rows)), "all the same": [0] * options.rows}
    for crowd, slots in crowds.items():
        tiles, num_slots = make_tiles(slots), len(set(slots))
        for name in SITES:
            sites = [layer[name] for layer in layers]
            floor = {"floor": 1e6 * num_slots * sites[0].bytes_of_slot / RATE}
            figures[f"{name}, {crowd}"] = floor | of_site(sites, tiles)
        figures[f"a layer, {crowd}"] = {
            "without": of_layer(layers, None),
            "behind products": of_layer(layers, tiles),
            "before products": of_layer(layers, tiles, before=True),
        }
    for what, values in figures.items():
        print(f"{what:24}" + "".join(f"  {name} {value:6.1f}" for name, value in values.items()), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
