"""Times beam candidates in graphs, against reading the logits once, measured in the same run.

    python -m benchmarks.gpu_beams [--items 10000000] [--json FILE]

bfloat16 logits of 151,936 tokens. `items` are random ones of three tokens; with them, each beam stands at a node of the
tree's first level.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.catalogue import make_items
from benchmarks.gpu_ops import DEVICE, VOCAB, randn, time_graph
from bequest.engine.kernels.beams import BeamConstraint, BeamGroup, pack_groups
from bequest.engine.kernels.catalogue import CatalogueRule, PlacedCatalogue
from bequest.engine.kernels.cuda_beams import DeviceCandidates, DeviceGroups, beam_candidates, workspace
from bequest.engine.types.catalogue import Catalogue

# groups, rows of each, candidates of each
SHAPES = [(1, 1, 64), (1, 32, 64), (64, 1, 64), (8, 32, 64), (64, 32, 64), (1, 1024, 2048), (4, 512, 1024)]


@dataclass(frozen=True)
class Row:
    groups: int
    rows: int
    k: int
    read_us: float  # the logits, once
    free_us: float
    masked_us: float  # a bias and a token held back
    catalogue_us: float


def time_read(logits: Tensor) -> float:
    """The faster of two reductions by torch."""
    words = logits.view(torch.float32)
    out = torch.empty((), device=DEVICE)
    return min(
        time_graph([lambda: torch.sum(words, dim=(0, 1), out=out)]),
        time_graph([lambda: torch.amax(words, dim=(0, 1), out=out)]),
    )


def time_candidates(logits: Tensor, group: BeamGroup, num_groups: int, nodes: Tensor) -> float:
    packed = pack_groups([group] * num_groups)
    groups = DeviceGroups.copy(packed, DEVICE)
    num_rows = logits.shape[0]
    cumulative = torch.zeros(num_rows, device=DEVICE)
    memory = workspace(num_rows, packed.num_slots, DEVICE)
    out = DeviceCandidates.empty(num_rows, num_groups, packed.columns, DEVICE)
    return time_graph([lambda: beam_candidates(logits, cumulative, groups, memory, out, nodes)])


def measure(rule: CatalogueRule, num_groups: int, rows: int, k: int) -> Row:
    logits = randn(num_groups * rows, VOCAB) * 3
    masked = BeamConstraint(VOCAB, DEVICE, logit_bias=[(17, 1.0)], forbidden=[2])
    inside = BeamConstraint(VOCAB, DEVICE, rule=rule)
    tree = rule.catalogue
    first = [tree.child(0, int(token)) for token in tree.children(0)]
    at = [0] if rows == 1 else [first[i % len(first)] for i in range(rows)]
    nodes = torch.from_numpy(np.tile(np.array(at, np.int32), num_groups)).to(DEVICE)
    times = [
        time_read(logits),
        *(time_candidates(logits, BeamGroup(rows, k, c), num_groups, nodes) for c in (None, masked, inside)),
    ]
    return Row(num_groups, rows, k, *(1e6 * t for t in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--json")
    args = parser.parse_args()
    catalogue = Catalogue(make_items(args.items), VOCAB, os.cpu_count() or 1)
    rule = CatalogueRule(PlacedCatalogue(catalogue, DEVICE), [2])
    print("groups  rows     k   read us   free us masked us catalogue us ratio of free")
    table = []
    for shape in SHAPES:
        row = measure(rule, *shape)
        table.append(row)
        times = f"{row.read_us:9.1f} {row.free_us:9.1f} {row.masked_us:9.1f} {row.catalogue_us:12.1f}"
        print(f"{row.groups:6} {row.rows:5} {row.k:5} {times} {row.free_us / row.read_us:5.2f}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(row) for row in table], file, indent=2)


if __name__ == "__main__":
    main()
