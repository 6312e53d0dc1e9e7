"""What weights in fewer bits do to a model's predictions: teacher-forced on real text, on a CPU.

    python -m benchmarks.weight_accuracy [--model PATH] [--text FILE ...] [--tokens 512] [--only NAME ...] [--json FILE]

The matrices of all layers are rounded to the nearest values of a format and multiplied in float32; embedding and head
stay as they are. A tool that looks at activations (AWQ, GPTQ), or that tries several scales for a block (llama.cpp's K
types), rounds better than this. Reported against the values of the file: perplexity, mean and 99th percentile of
KL(file || rounded) of the next token's distribution, and how often the most likely token is the same. The embedded
model is quantised itself (Q4_1 and Q8_0).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from benchmarks.cache_accuracy import TEXTS, log_probabilities
from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.fetch import model_path
from bequest.engine.layers.codes import Codes, Float8Rows, IntegerRows
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.families import decoders
from bequest.engine.models.load import open_checkpoint
from bequest.engine.models.reader import Loader
from bequest.engine.models.weights import SourceOver, WeightSource
from bequest.engine.text import load_text
from tests.models.k_quants import quantise

Rounding = Callable[[Tensor], Tensor]


def float8_blocks(rows: int, columns: int) -> Rounding:
    """One scale for so many rows and columns."""

    def rounded(matrix: Tensor) -> Tensor:
        n, k = matrix.shape
        padded = torch.nn.functional.pad(matrix.abs(), (0, -k % columns, 0, -n % rows))
        blocks = padded.reshape(-(-n // rows), rows, -(-k // columns), columns).amax(dim=(1, 3)) / 448
        scales = blocks.clamp_min(1e-12).repeat_interleave(rows, 0)[:n]
        spread = scales.repeat_interleave(columns, 1)[:, :k]
        return Float8Rows((matrix / spread).to(torch.float8_e4m3fn), scales, columns).values()

    return rounded


def integers(bits: int, group: int, *, symmetric: bool) -> Rounding:
    """`group`: columns that share a scale; 0: all."""

    def rounded(matrix: Tensor) -> Tensor:
        size, most = group or matrix.shape[1], 2**bits - 1
        groups = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % size)).unflatten(1, (-1, size))
        if symmetric:
            scales = (groups.abs().amax(-1) / (most // 2)).clamp_min(1e-7)
            zeros = torch.full(scales.shape, (most + 1) // 2, dtype=torch.int16)
        else:
            low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
            scales = ((high - low) / most).clamp_min(1e-7)
            zeros = (-low / scales).round().clamp(0, most).to(torch.int16)
        codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most).to(torch.uint8)
        return IntegerRows(bits, codes.flatten(1)[:, : matrix.shape[1]], scales, zeros, size).values()

    return rounded


def in_any_order(rounding: Rounding) -> Rounding:
    """As act-order: columns of a group are no neighbours. Without activations any order is as good as another."""

    def rounded(matrix: Tensor) -> Tensor:
        order = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(matrix.shape[1]))
        return rounding(matrix[:, order])[:, order.argsort()]

    return rounded


def ggml(kind: GGMLQuantizationType) -> Rounding:
    """Rows are filled up with zeros to whole blocks."""

    def rounded(matrix: Tensor) -> Tensor:
        depth = matrix.shape[1]
        padded = torch.nn.functional.pad(matrix, (0, -depth % gguf.constants.GGML_QUANT_SIZES[kind][0]))
        codes = quantise(padded.contiguous().numpy(), kind)
        return torch.from_numpy(gguf.quants.dequantize(codes, kind))[:, :depth].contiguous()

    return rounded


FORMATS: dict[str, Rounding] = {
    "as the file": lambda matrix: matrix,
    "bfloat16": lambda matrix: matrix.bfloat16().float(),
    "fp8, a scale per row": lambda matrix: float8_blocks(1, matrix.shape[1])(matrix),
    "fp8, one scale": lambda matrix: float8_blocks(*matrix.shape)(matrix),
    "fp8, blocks of 128 × 128": float8_blocks(128, 128),
    "int8, a scale per row": integers(8, 0, symmetric=True),
    "int4, groups of 128": integers(4, 128, symmetric=True),
    "int4, groups of 128, act-order": in_any_order(integers(4, 128, symmetric=True)),
    "int4, groups of 64": integers(4, 64, symmetric=True),
    "int4, groups of 32": integers(4, 32, symmetric=True),
    "int4, groups of 128, zero points": integers(4, 128, symmetric=False),
    "int4, groups of 64, zero points": integers(4, 64, symmetric=False),
    "int4, groups of 32, zero points": integers(4, 32, symmetric=False),
    "int3, groups of 32, zero points": integers(3, 32, symmetric=False),
    "MXFP4": ggml(GGMLQuantizationType.MXFP4),
    "Q4_0": ggml(GGMLQuantizationType.Q4_0),
    "Q4_1": ggml(GGMLQuantizationType.Q4_1),
    "Q4_K": ggml(GGMLQuantizationType.Q4_K),
    "Q5_K": ggml(GGMLQuantizationType.Q5_K),
    "Q6_K": ggml(GGMLQuantizationType.Q6_K),
    "Q8_0": ggml(GGMLQuantizationType.Q8_0),
}


class Rounded(SourceOver):
    """A WeightSource over another: the matrices of layers are rounded."""

    def __init__(self, source: WeightSource, rounding: Rounding) -> None:
        super().__init__(source)
        self._rounding = rounding

    def load(self, name: str) -> Tensor:
        tensor = self._source.load(name)
        rounds = ".layers." in name and tensor.dim() == 2
        return self._rounding(tensor.float()) if rounds else tensor

    def load_codes(self, name: str) -> Codes | None:
        return None


@dataclass(frozen=True)
class Figures:
    weights: str
    perplexity: float
    mean_kl: float  # nats
    kl_99: float
    same_best: float  # share of positions


def model_of(path: Path, rounding: Rounding) -> Decoder:
    checkpoint, backend = open_checkpoint(path), CpuBackend()
    assert isinstance(checkpoint.config, DecoderConfig), "for decoders"
    loader = Loader(Rounded(checkpoint.source, rounding), backend, torch.float32)
    return Decoder(
        checkpoint.config, decoders.describe(checkpoint.config, loader, checkpoint.config.max_position), backend
    )


def compare(name: str, model: Decoder, texts: list[list[int]], expected: list[Tensor], chunk: int) -> Figures:
    losses, divergences, same = [], [], []
    for tokens, wanted in zip(texts, expected, strict=True):
        found, _ = log_probabilities(model, tokens, chunk, torch.float32)
        losses.append(-found[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
        divergences.append((wanted.exp() * (wanted - found)).sum(-1))
        same.append((found.argmax(-1) == wanted.argmax(-1)).double())
    return Figures(
        name,
        math.exp(float(torch.cat(losses).mean())),
        float(torch.cat(divergences).mean()),
        float(torch.cat(divergences).quantile(0.99)),
        float(torch.cat(same).mean()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--text", nargs="+", type=Path, default=TEXTS)
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--only", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = model_path(options.model)
    tokenizer = load_text(path).tokenizer
    texts = [list(tokenizer.encode(text.read_text())[: options.tokens]) for text in options.text]
    plain = model_of(path, FORMATS["as the file"])
    expected = [log_probabilities(plain, tokens, options.chunk, torch.float32)[0] for tokens in texts]
    print(f"{path.name}: {sum(map(len, texts))} tokens of {len(texts)} texts")
    print(f"{'weights':<34}{'perplexity':>12}{'mean KL':>12}{'99 % KL':>12}{'same best':>11}")
    figures = []
    for name in options.only:
        row = compare(name, model_of(path, FORMATS[name]), texts, expected, options.chunk)
        figures.append(row)
        print(
            f"{row.weights:<34}{row.perplexity:>12.4f}{row.mean_kl:>12.2e}{row.kl_99:>12.2e}{row.same_best:>11.4f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in figures], indent=1))


if __name__ == "__main__":
    main()
