"""What a catalogue costs: building it, its memory, and a step of beams that is bound to it.

Items are random: 256 first tokens, 4,096 second ones, any third. Times are medians; the step's are of the candidates
alone, with and without the catalogue.

    python -m benchmarks.catalogue [--items 10000000] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from bequest.engine.kernels import cpu
from bequest.engine.kernels.beams import BeamConstraint, BeamGroup, PackedGroups, pack_groups
from bequest.engine.kernels.catalogue import CatalogueRule, PlacedCatalogue
from bequest.engine.kernels.cpu_beams import beam_candidates
from bequest.engine.types import IntArray
from bequest.engine.types.catalogue import Catalogue

VOCAB = 151_936
WIDTH = 32
ROUNDS = 9
CPU = torch.device("cpu")


def make_items(num_items: int) -> IntArray:
    """[N, 3]"""
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, limit, num_items, np.int32) for limit in (256, 4096, VOCAB)]
    return np.ascontiguousarray(np.stack(columns, 1))


def seconds(action: Callable[[], object]) -> float:
    begin = perf_counter()
    action()
    return perf_counter() - begin


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step_times(catalogue: Catalogue) -> dict[str, float]:
    """Seconds of the candidates of one group of WIDTH beams, free and at nodes of each level."""
    logits = torch.randn(WIDTH, VOCAB, generator=torch.Generator().manual_seed(0))
    cumulative = np.zeros(WIDTH, np.float32)
    rule = CatalogueRule(PlacedCatalogue(catalogue, CPU), [2])
    bound = BeamConstraint(VOCAB, CPU, rule=rule)
    first = [catalogue.child(0, int(token)) for token in catalogue.children(0)[:WIDTH]]
    second = [catalogue.child(node, int(catalogue.children(node)[0])) for node in first]

    def timed(groups: PackedGroups, nodes: list[int]) -> float:
        at = np.array(nodes, np.int32)
        return statistics.median(
            seconds(lambda: beam_candidates(logits, cumulative, groups, at)) for _ in range(ROUNDS)
        )

    free = pack_groups([BeamGroup(WIDTH, 2 * WIDTH)])
    inside = pack_groups([BeamGroup(WIDTH, 2 * WIDTH, bound)])
    return {
        "free": timed(free, [0] * WIDTH),
        "at the root": timed(inside, [0] * WIDTH),
        "after one token": timed(inside, first),
        "after two": timed(inside, second),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cpu.set_num_threads(args.threads)

    items = make_items(args.items)
    before = peak_bytes()
    begin = perf_counter()
    catalogue = Catalogue(items, VOCAB, args.threads)
    build = perf_counter() - begin
    result: dict[str, float] = {
        "items": args.items,
        "distinct": catalogue.num_items,
        "threads": args.threads,
        "build_s": build,
        "array_bytes": items.nbytes,
        "catalogue_bytes": catalogue.num_bytes,
        "build_peak_bytes": peak_bytes() - before,
    }
    result |= {f"step_ms, {name}": 1e3 * value for name, value in step_times(catalogue).items()}
    for name, value in result.items():
        print(f"{name:28} {value:,.3f}" if isinstance(value, float) else f"{name:28} {value:,}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
