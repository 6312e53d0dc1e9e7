"""What `--cpu-matmul fast` does to a model's predictions: teacher-forced on real text, on a CPU.

    python -m benchmarks.matmul_accuracy [--model PATH] [--text FILE ...] [--tokens 512] [--chunk 128] [--json FILE]

The matrices of the layers are as the file has them, or rounded to another type of GGUF files. Each is multiplied twice:
as float32 values (exact) and as integers (fast). Reported of fast against exact: perplexity, mean and 99th percentile
of KL(exact || fast) of the next token's distribution, and how often the most likely token is another.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf.quants
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from benchmarks.cache_accuracy import TEXTS, log_probabilities
from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.fetch import model_path
from bequest.engine.kernels.cpu_weights import QuantisedRows, StoredType
from bequest.engine.layers.codes import Codes
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.families import decoders
from bequest.engine.models.load import open_checkpoint
from bequest.engine.models.reader import Loader
from bequest.engine.models.weights import SourceOver, WeightSource
from bequest.engine.text import load_text

TYPES: tuple[StoredType | None, ...] = (None, "Q4_0", "Q4_1", "Q8_0")  # None: as the file


class Requantised(SourceOver):
    """A WeightSource over another: the matrices of layers are rounded to a type."""

    def __init__(self, source: WeightSource, kind: StoredType) -> None:
        super().__init__(source)
        self._kind: StoredType = kind

    def load_codes(self, name: str) -> Codes | None:
        if ".layers." not in name:
            return self._source.load_codes(name)
        values = self._source.load(name).float().contiguous().numpy()
        rows = gguf.quants.quantize(values, GGMLQuantizationType[self._kind])
        return QuantisedRows(self._kind, torch.from_numpy(rows))


@dataclass(frozen=True)
class Figures:
    weights: str
    exact: float  # perplexity
    fast: float
    mean_kl: float  # nats
    kl_99: float
    others: int  # positions whose most likely token is another
    positions: int


def model_of(path: Path, kind: StoredType | None, *, fast: bool) -> Decoder:
    checkpoint, backend = open_checkpoint(path), CpuBackend(fast=fast)
    config = checkpoint.config
    assert isinstance(config, DecoderConfig), "for decoders"
    source = checkpoint.source if kind is None else Requantised(checkpoint.source, kind)
    return Decoder(
        config, decoders.describe(config, Loader(source, backend, torch.float32), config.max_position), backend
    )


def perplexity(found: list[Tensor], texts: list[list[int]]) -> float:
    losses = [-f[:-1].gather(1, torch.tensor(t[1:])[:, None])[:, 0] for f, t in zip(found, texts, strict=True)]
    return math.exp(float(torch.cat(losses).mean()))


def compare(path: Path, kind: StoredType | None, texts: list[list[int]], chunk: int) -> Figures:
    exact, fast = (
        [log_probabilities(model_of(path, kind, fast=f), tokens, chunk, torch.float32)[0] for tokens in texts]
        for f in (False, True)
    )
    divergence = torch.cat([(e.exp() * (e - f)).sum(-1) for e, f in zip(exact, fast, strict=True)])
    others = sum(int((e.argmax(-1) != f.argmax(-1)).sum()) for e, f in zip(exact, fast, strict=True))
    return Figures(
        kind or "as the file",
        perplexity(exact, texts),
        perplexity(fast, texts),
        float(divergence.mean()),
        float(divergence.quantile(0.99)),
        others,
        len(divergence),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--text", nargs="+", type=Path, default=TEXTS)
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = model_path(options.model)
    tokenizer = load_text(path).tokenizer
    texts = [list(tokenizer.encode(text.read_text())[: options.tokens]) for text in options.text]
    print(f"{path.name}: {sum(map(len, texts))} tokens of {len(texts)} texts")
    print(f"{'weights':<14}{'exact':>12}{'fast':>12}{'mean KL':>12}{'99 % KL':>12}{'others':>8}")
    figures = []
    for kind in TYPES:
        row = compare(path, kind, texts, options.chunk)
        figures.append(row)
        print(
            f"{row.weights:<14}{row.exact:>12.4f}{row.fast:>12.4f}{row.mean_kl:>12.2e}{row.kl_99:>12.2e}"
            f"{row.others:>8}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in figures], indent=1))


if __name__ == "__main__":
    main()
