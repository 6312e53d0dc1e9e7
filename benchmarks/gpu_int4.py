"""The whole engine on a GPU with weights in codes of 4 bits: random codes of a known shape, in groups of 128.

    python -m benchmarks.gpu_int4 [--shape llama-3.1-8b] [--json FILE]

A single stream, and decode steps of 1, 32 and 64 sequences at 1k tokens of context. Codes take the place of the random
matrices of a dummy checkpoint; embedding and head stay in bfloat16, as checkpoints of AWQ and GPTQ have them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_engine import decode_rate, replay_times, run_requests
from benchmarks.model_shapes import SHAPES, write_model
from bequest.engine.backends.cuda import backend
from bequest.engine.backends.cuda.weights import DenseWeight
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.layers.codes import IntegerRows
from bequest.engine.layers.weight import Weight

GROUP = 128


class CodesBackend(backend.CudaBackend):
    """Makes random codes of every matrix but the head's and the embedding's."""

    head: int  # rows

    def weight(self, matrices: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Weight:
        if any(len(matrix) == self.head for matrix in matrices):
            return super().weight(matrices, bias, dtype)
        made = self.quantised_weight([self._random(*matrix.shape) for matrix in matrices], bias)
        return DenseWeight(self._stacked(matrices, dtype), bias, self.ops) if made is None else made

    def _random(self, rows: int, depth: int) -> IntegerRows:
        codes = torch.randint(0, 16, (rows, depth), dtype=torch.uint8, device=self.device)
        scales = torch.full((rows, depth // GROUP), 0.2 * depth**-0.5, device=self.device)
        return IntegerRows(4, codes, scales, torch.full_like(scales, 8, dtype=torch.int16), GROUP)


async def measure(shape: str, folder: Path) -> dict[str, float]:
    config = EngineConfig(
        model=str(write_model(shape, folder / shape)),
        load_format="dummy",
        max_model_len=2560,
        max_num_seqs=64,
        device="cuda",
    )
    built = await build_engine(config)
    figures = await replay_times(built)
    await run_requests(built, [(512, 64)], "warm")
    seconds = await run_requests(built, [(512, 512)], "single")
    figures["single_stream_tokens_per_second"] = 512 / seconds
    for batch in (1, 32, 64):
        figures[f"decode_{batch}_ms"] = 1e3 * await decode_rate(built, batch, 1024, 64, f"decode{batch}")
    await built.engine.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s")
    CodesBackend.head = SHAPES[options.shape].config["vocab_size"]
    backend.CudaBackend = CodesBackend  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(options.shape, Path(folder)))
    for name, value in figures.items():
        print(f"  {name:36} {value:,.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
